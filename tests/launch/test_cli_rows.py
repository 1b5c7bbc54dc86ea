"""`dataplane rows` and `dataplane get` as people read them: bounded, whatever the values are."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dataplane import cli_rows, tag
from dataplane.errors import InvalidCall, StageUndefined

ROW = {
    "key": "prompt-7-0",
    "group": "prompt-7",
    "tags": {"version": 3},
    "fields": ["tokens", "video"],
    "states": {"reward": "acked", "train": "ready"},
}
REPORT: dict[str, Any] = {
    "partition": "step-12",
    "phase": "open",
    "rows": 3,
    "groups": 1,
    "bytes": 5 << 20,
    "more": True,
    "unknown_tags": {},
    "shown": [ROW, {**ROW, "key": "x" * 300, "group": None, "tags": {}, "states": {}}],
}
REPORT["shown"][1]["states"] = {"reward": "pending", "train": "leased"}


def test_rows_are_a_table_with_a_state_for_each_stage() -> None:
    head, names, first, second, more = cli_rows.lines(REPORT)
    assert head == "partition step-12: open, 3 rows, 1 group, 5.0 MiB"
    assert names.split() == ["key", "group", "tags", "fields", "reward", "train"]
    assert first.split() == [
        *("prompt-7-0", "prompt-7", "version=3", "tokens,", "video", "acked", "ready")
    ]
    assert second.split()[1:3] == ["–", "–"] and len(second) < 140
    assert (
        more
        == "  showing the first 2 rows: use --limit to show more, or --where TAG=VALUE to filter"
    )


def test_rows_that_no_filter_leaves_are_said_to_be_none() -> None:
    assert list(cli_rows.lines({**REPORT, "shown": []}))[1:] == ["  no rows match"]
    unknown = {**REPORT, "shown": [], "unknown_tags": {"versoin": ["version"]}}
    assert list(cli_rows.lines(unknown))[1:] == [
        "  no rows match; no row has a tag 'versoin' (existing tags: version)"
    ]


def test_one_stage_is_shown_and_an_unknown_one_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = json.loads(json.dumps(REPORT))
    cli_rows.show_rows(report, "train", as_json=True)
    shown = json.loads(capsys.readouterr().out)["shown"]
    assert [row["states"] for row in shown] == [{"train": "ready"}, {"train": "leased"}]
    with pytest.raises(StageUndefined, match="no stage 'trian' .did you mean 'train'"):
        cli_rows.show_rows(json.loads(json.dumps(REPORT)), "trian", as_json=False)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            np.arange(1000, dtype=np.int32).reshape(10, 100),
            {"type": "array", "dtype": "int32", "shape": [10, 100], "bytes": 4000},
        ),
        (np.float64(0.5).reshape(()), {"dtype": "float64", "shape": [], "preview": "0.5"}),
        ("é" * 500, {"type": "str", "bytes": 1000}),
        (b"\0" * 500, {"type": "bytes", "bytes": 500}),
        ({"a": ["b"] * 1000}, {"type": "dict", "length": 1}),
        (None, {"type": "NoneType", "preview": "None"}),
    ],
)
def test_a_value_takes_a_line_however_large_it_is(value: object, told: dict[str, Any]) -> None:
    described = cli_rows.described(value)
    assert described.items() >= told.items()
    assert 0 < len(described["preview"]) < 260 and "\n" not in described["preview"]
    json.dumps(described)


def test_a_row_is_shown_field_by_field() -> None:
    report = {
        "partition": "p",
        "key": 7,
        "group": None,
        "tags": {"version": 3},
        "fields": {"x": cli_rows.described(np.zeros(9, np.float32)), "yy": cli_rows.described(1)},
    }
    assert list(cli_rows.row_lines(report)) == [
        "row 7 of partition p",
        "  tag version = 3",
        "  x   float32[9], 36 B: 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, …",
        "  yy  int: 1",
    ]


def test_a_filter_is_json_or_text() -> None:
    where = cli_rows.parsed_where(["version=7", "kind=math", "done=true"])
    wanted = (tag("version") == 7) & (tag("kind") == "math") & (tag("done") == True)  # noqa: E712
    assert repr(where) == repr(wanted)
    assert cli_rows.parsed_where([]) is None
    with pytest.raises(InvalidCall, match="--where version is not valid: use TAG=VALUE"):
        cli_rows.parsed_where(["version"])
