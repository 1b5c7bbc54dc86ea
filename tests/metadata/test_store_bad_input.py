"""What a store refuses, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataplane.errors import (
    DataplaneError,
    FieldExists,
    GroupClosed,
    InvalidRows,
    LeaseExpired,
    LimitExceeded,
    ProtocolError,
    StageUndefined,
)
from dataplane.metadata.shard import inspection, rows_out
from dataplane.metadata.tables import names
from dataplane.wire.messages import Want
from dataplane.wire.records import VALUE
from dataplane.wire.tables import INLINE, Column, Owner, Rows
from tests.metadata.stores import (
    OWNERS,
    SPECS,
    finish,
    named,
    put,
    store,
    take,
    values,
    wrote,
)


def damaged(**changes: Any) -> tuple[Rows, list[Column], dict[str, Any]]:
    rows = changes.pop("rows", named([1, 2], ["p", "p"]))
    column = Column("tokens", changes.pop("values", values(2)), **changes.pop("column", {}))
    return rows, changes.pop("columns", [column]), changes.pop("tags", {})


def wrong_records(**parts: int) -> bytes:
    records = np.zeros(2, VALUE)
    for name, value in parts.items():
        records[name] = value
    return records.tobytes()


KEYS = names.hash_names([1, 2])
OF_MANY = wrong_records(owner=5_000)
PUTS: list[tuple[type[DataplaneError], dict[str, Any]]] = [
    (InvalidRows, {"rows": Rows(b"")}),
    (ProtocolError, {"rows": Rows(b"short")}),
    (InvalidRows, {"rows": Rows(KEYS[:16] * 2)}),
    (InvalidRows, {"rows": Rows(KEYS, [1])}),
    (ProtocolError, {"rows": Rows(KEYS, None, b"\x05\0\0\0" * 2, KEYS)}),
    (ProtocolError, {"rows": Rows(KEYS, None, b"\0", KEYS)}),
    (InvalidRows, {"rows": Rows(KEYS, None, bytes(8), KEYS[:16] * 2)}),
    (LimitExceeded, {"rows": Rows(names.mint_many(1, 0, 65_537))}),
    (InvalidRows, {"values": values(3)}),
    (ProtocolError, {"values": b"x"}),
    (ProtocolError, {"values": wrong_records(spec=2)}),
    (ProtocolError, {"values": wrong_records(owner=1)}),
    (ProtocolError, {"column": {"leaves": values(1)}}),
    (ProtocolError, {"column": {"leaves": values(1), "leaf_counts": b"\x02\0\0\0" + bytes(4)}}),
    (LimitExceeded, {"column": {"leaf_counts": b"\xff\xff\xff\xff" + bytes(4)}}),
    (ProtocolError, {"column": {"leaf_counts": b"\0"}}),
    (ProtocolError, {"owners": [Owner("x", n) for n in range(300)], "values": OF_MANY}),
    (ProtocolError, {"owners": OWNERS * 2}),
    (ProtocolError, {"owners": [INLINE], "values": wrong_records(nbytes=8), "inline": bytes(8)}),
    (InvalidRows, {"columns": [Column("f", values(2)), Column("f", values(2))]}),
    (ProtocolError, {"columns": [Column("f", values(2)), Column("g", wrong_records(spec=2))]}),
    (ProtocolError, {"columns": [Column("f", wrong_records(owner=1)), Column("g", values(2))]}),
    (ProtocolError, {"columns": [Column(name, values(2) + bytes(12)) for name in "fg"]}),
    (InvalidRows, {"columns": [Column("", values(2))]}),
    (InvalidRows, {"columns": [Column("f" * 513, values(2))]}),
    (LimitExceeded, {"tags": {"t" * 513: [1, 2]}}),
    (LimitExceeded, {"columns": [Column(f"f{i}", values(2)) for i in range(65)]}),
    (LimitExceeded, {"columns": [Column(f"f{i}", values(2)) for i in range(63)]}),
    (InvalidRows, {"tags": {"t": [1, 2, 3]}}),
    (
        FieldExists,
        {
            "rows": named([0, 9]),
            "columns": [Column("tokens", values(2)), Column("f", values(2))],
        },
    ),
    (InvalidRows, {"rows": named([0], ["other"]), "columns": []}),
    (GroupClosed, {"rows": named([5, 6, 7], ["p"] * 3), "values": values(3)}),
    (GroupClosed, {"rows": named([5], ["full"]), "values": values(1)}),
    (InvalidRows, {"rows": named([5, 6])}),
    (InvalidRows, {"rows": named([5, 6], ["p", None])}),
]


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (["full"], r"'full' already has all its 2 rows: a restarted producer should continue"),
        (["short", "short"], r"'short' has 1 of 2 rows, so this put cannot add 2 more\. "),
        (["new"] * 3, r"'new' has 0 of 2 rows, so this put cannot add 3 more\. "),
    ],
)
def test_a_group_without_room_says_what_it_has(groups: list[str], why: str) -> None:
    s = store(group_size=2)
    put(s, [0, 10, 11], ["short", "full", "full"])
    with pytest.raises(GroupClosed, match=why):
        put(s, [20 + n for n in range(len(groups))], groups)


@pytest.mark.parametrize(("error", "changes"), PUTS)
def test_a_bad_put_is_refused_and_changes_nothing(
    error: type[DataplaneError], changes: dict[str, Any]
) -> None:
    s = store(group_size=2)
    put(s, [0, 10, 11], ["short", "full", "full"])
    before = (inspection.stats(s), s.counts("reward"))
    owners, inline = changes.pop("owners", OWNERS), changes.pop("inline", b"")
    rows, columns, tags = damaged(**changes)
    with pytest.raises(error):
        s.put(wrote(rows, columns, SPECS, owners, tags, inline=inline))
    assert (inspection.stats(s), s.counts("reward")) == before
    assert s.freed() == []


def test_a_bad_finish_is_refused_and_the_lease_goes_on() -> None:
    s = store()
    put(s, [1, 2])
    taken = take(s, "reward", Want("rows", 2, 2))
    bad: list[tuple[type[DataplaneError], str, dict[str, Any]]] = [
        (ProtocolError, "explode", {}),
        (InvalidRows, "drop", {"columns": [Column("reward", values(2))]}),
        (InvalidRows, "ack", {"columns": [Column("reward", values(1))]}),
        (InvalidRows, "ack", {"index": np.array([2], "<u4").tobytes()}),
        (InvalidRows, "ack", {"index": np.array([0, 0], "<u4").tobytes()}),
        (InvalidRows, "ack", {"index": b"", "columns": [Column("reward", b"")]}),
        (ProtocolError, "ack", {"index": b"\0"}),
        (InvalidRows, "ack", {"tags": {"t": [1, 2, 3]}}),
    ]
    for error, outcome, options in bad:
        with pytest.raises(error):
            finish(s, taken, outcome, **options)
    finish(s, taken)
    assert s.stage("reward").acked_rows == 2


def test_calls_about_unknown_things_are_refused() -> None:
    s = store(group_size=2)
    with pytest.raises(StageUndefined, match="train"):
        take(s, "trian", Want("rows", 1, 1))
    with pytest.raises(ProtocolError):
        take(s, "train", Want("tables", 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        take(s, "train", Want("rows", 1, 1, ["nonsense"]))
    with pytest.raises(LeaseExpired):
        rows_out.table(s, 99)
    with pytest.raises(InvalidRows):
        s.drop()
    with pytest.raises(InvalidRows):
        s.drop(rows=Rows(b""))
    with pytest.raises(InvalidRows):
        s.close("p", 3)


def test_a_group_is_not_told_to_have_more_rows_than_can_be_counted() -> None:
    s = store(free="drop")
    with pytest.raises(InvalidRows, match="pass a number from 1 to"):
        s.close("g", 1 << 31)
    assert names.hash_name("g") not in s.groups
    s.close("g", (1 << 31) - 1)


def test_the_first_row_of_a_large_group_takes_little_memory() -> None:
    s = store(free="drop", group_size=1 << 26)
    put(s, ["a"], ["g"])
    assert inspection.stats(s)["metadata_bytes"] < 100_000
