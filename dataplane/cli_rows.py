"""`dataplane rows` and `dataplane get`: show rows in a shell.

Both commands only read: they lease nothing, change nothing and start no peer. Their output is
bounded.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dataplane.client._sync.plane import Plane
from dataplane.client._sync.reads import overview
from dataplane.client.session.opening import visit
from dataplane.client.session.session import Handle
from dataplane.client.write.rows import row_groups, row_names, tag_values
from dataplane.errors import (
    InvalidCall,
    PartitionUndefined,
    RowsGone,
    StageUndefined,
    counted,
    did_you_mean,
    few,
    nearest,
    sized,
)
from dataplane.launch.rundir import Find
from dataplane.metadata.tables.where import Where, tag
from dataplane.wire.arrays import preview, shortened
from dataplane.wire.tables import Name

MAX_ROWS = 1000
"""The most rows that one command lists."""
STATES = ("pending", "ready", "leased", "acked")
"""States of a row for a stage, by number."""
_PREVIEW = 8
_MAX_LETTERS = 60
_NAMED = 8
_TIMEOUT_S = 30.0

Report = dict[str, Any]


def rows(arguments: argparse.Namespace, find: Find) -> int:
    """List the first `--limit` rows of a partition that match `--where`."""
    partition, limit = arguments.partition, arguments.limit
    if not 0 < limit <= MAX_ROWS:
        raise InvalidCall(f"--limit {limit} is out of range: use a value from 1 to {MAX_ROWS}")
    where = parsed_where(arguments.where)
    with Plane(visit(find()[1])) as plane:
        stats = _attached(plane, partition)
        handle = Handle(plane._session, partition)
        found = overview(handle, where, limit, _TIMEOUT_S)
    names = row_names(found.table.rows)
    groups = row_groups(found.table.rows)
    tags = {name: tag_values(found.table, name, len(names)) for name in found.table.tags}
    report = {
        "partition": partition,
        "phase": stats["phase"],
        "rows": stats["rows"],
        "groups": stats["groups"],
        "bytes": stats["bytes"],
        "more": bool(found.cursor),
        "unknown_tags": found.unknown_tags,
        "shown": [
            {
                "key": key,
                "group": groups[at],
                "tags": {name: all[at] for name, all in tags.items() if all[at] is not None},
                "fields": sorted(field for field, has in found.has.items() if has[at]),
                "states": {stage: STATES[all[at]] for stage, all in found.states.items()},
            }
            for at, key in enumerate(names)
        ],
    }
    return show_rows(report, arguments.stage, arguments.json)


def get(arguments: argparse.Namespace, find: Find) -> int:
    """Print one row, with the type, shape, size and first values of each field."""
    report = _row(find, arguments.partition, arguments.key, arguments.field)
    shown = json.dumps(report, default=str) if arguments.json else "\n".join(row_lines(report))
    print(shown, flush=True)
    return 0


def _row(find: Find, partition: str, key: str, fields: Sequence[str] | None) -> Report:
    with Plane(visit(find()[1])) as plane:
        _attached(plane, partition)
        part = plane.partition(partition)
        for name in _as_names(key):
            try:
                found = part.get([name], fields, timeout=_TIMEOUT_S)
            except RowsGone:
                continue
            values = {field: found.get(field)[0] for field in found.fields}
            return {
                "partition": partition,
                "key": name,
                "group": found.group_ids[0],
                "tags": {tag: all[0] for tag, all in found.tags.items() if all[0] is not None},
                "fields": {field: described(values[field]) for field in sorted(values)},
            }
        handle = Handle(plane._session, partition)
        known = overview(handle, None, MAX_ROWS, _TIMEOUT_S)
    names = [_shown(one) for one in row_names(known.table.rows)]
    near = difflib.get_close_matches(key, names, 3, 0.5)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    raise RowsGone(
        f"partition {partition!r} has no row with key {key!r}: the row was never put, or "
        f"has been freed, dropped or lost.{meant} To list the rows, run `dataplane rows "
        f"{partition}`",
        keys=[key],
    )


def described(value: Any) -> Report:
    """Describe a value in less than a line."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = np.asarray(value)
        return {
            "type": "array",
            "dtype": value.dtype.name,
            "shape": list(value.shape),
            "bytes": value.nbytes,
            "preview": preview(value, _PREVIEW),
        }
    told: Report = {"type": type(value).__name__}
    if isinstance(value, (str, bytes)):
        told["bytes"] = len(value.encode() if isinstance(value, str) else value)
        more = "…" if len(value) > _MAX_LETTERS else ""
        return told | {"preview": f"{value[:_MAX_LETTERS]!r}{more}"}
    if isinstance(value, (Mapping, Sequence)):
        told["length"] = len(value)
    return told | {"preview": shortened(value, 2 * _MAX_LETTERS)}


def show_rows(report: Report, stage: str | None, as_json: bool) -> int:
    """Print the result of `rows`, and return the exit code."""
    if stage is not None and report["shown"]:
        known = list(report["shown"][0]["states"])
        if stage not in known:
            raise StageUndefined(
                f"partition {report['partition']!r} has no stage "
                f"{stage!r}{did_you_mean(stage, known)}: use one of its stages "
                f"({few([repr(one) for one in known], _NAMED)})"
            )
        for row in report["shown"]:
            row["states"] = {stage: row["states"][stage]}
    print(json.dumps(report) if as_json else "\n".join(lines(report)), flush=True)
    return 0


def lines(report: Report) -> Iterator[str]:
    """Yield the lines that show the result of `rows`."""
    groups = f", {counted(report['groups'], 'group')}" if report["groups"] else ""
    yield (
        f"partition {report['partition']}: {report['phase']}, {counted(report['rows'], 'row')}"
        f"{groups}, {sized(report['bytes'])}"
    )
    shown, told = report["shown"], report["unknown_tags"]
    if not shown:
        unknown = [
            f"no row has a tag {a!r} (existing tags: {few(b, _NAMED)})" for a, b in told.items()
        ]
        yield f"  {'; '.join(['no rows match', *unknown])}"
        return
    stages = list(shown[0]["states"])
    table = [["key", "group", "tags", "fields", *stages]]
    for row in shown:
        group = "–" if row["group"] is None else _shown(row["group"])
        tags = " ".join(f"{name}={_shown(value)}" for name, value in row["tags"].items())
        fields = few(row["fields"], _NAMED)
        table.append([_shown(row["key"]), group, tags or "–", fields, *row["states"].values()])
    table = [[_short(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()
    if report["more"]:
        yield (
            f"  showing the first {counted(len(shown), 'row')}: use --limit to show more, or "
            "--where TAG=VALUE to filter"
        )


def row_lines(report: Report) -> Iterator[str]:
    """Yield the lines that show the result of `get`."""
    group = "" if report["group"] is None else f", group {_shown(report['group'])}"
    yield f"row {_shown(report['key'])} of partition {report['partition']}{group}"
    for name, value in report["tags"].items():
        yield f"  tag {_short(name)} = {_short(_shown(value))}"
    width = max(map(len, report["fields"]), default=0)
    for field, told in report["fields"].items():
        what = told["type"]
        if what == "array":
            what = f"{told['dtype']}{told['shape']}"
        size = f", {sized(told['bytes'])}" if "bytes" in told else ""
        yield f"  {field:<{width}}  {what}{size}: {told['preview']}"


def parsed_where(texts: Sequence[str]) -> Where | None:
    """Return a filter for `TAG=VALUE` texts. A value that is not JSON is a str."""
    where = None
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidCall(
                f"--where {text} is not valid: use TAG=VALUE, for example --where version=7"
            )
        one = tag(name) == _scalar(value)
        where = one if where is None else where & one
    return where


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _attached(plane: Plane, partition: str) -> Report:
    """Return the stats of a partition. Raise PartitionUndefined, at once, if it is not declared."""
    known = plane.partitions()
    if partition in known:
        return plane.partition(partition).stats()
    near = nearest(partition, known) or next(iter(difflib.get_close_matches(partition, known)), "")
    meant = f" (did you mean {near!r}?)" if near else ""
    raise PartitionUndefined(
        f"run {plane.name!r} has no partition {partition!r}{meant}: "
        + (
            f"choose one of {few(known, _NAMED)}"
            if known
            else "no partition is declared yet; call plane.partition(…) first"
        )
    )


def _as_names(key: str) -> list[Name]:
    """Return what a key typed in a shell may be: a number, or a text, with or without quotes."""
    said = _scalar(key)
    known = type(said) is str or (type(said) is int and -(1 << 63) <= said < 1 << 64)
    return [said, key] if known and said != key else [key]


def _shown(value: object) -> str:
    """Show a key, group or tag. A text that would read as a number has quotes: 7 and "7" differ."""
    text = str(value)
    return json.dumps(value) if isinstance(value, str) and _scalar(text) != text else text


def _short(text: str) -> str:
    return text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 1]}…"
