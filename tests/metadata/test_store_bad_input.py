"""What a store refuses, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import msgspec
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
from dataplane.metadata.shard.puts import SHOWN_NAMES
from dataplane.metadata.tables.keys import hash_name, hash_names, mint_many
from dataplane.wire.messages import Finish, Put, Want
from dataplane.wire.tables import INLINE, Rows, Values
from tests.metadata.stores import (
    OWNERS,
    Column,
    brought,
    finish,
    named,
    put,
    store,
    take,
    values,
    whole,
)


def of(*fields: str) -> Values:
    """Two rows of these fields."""
    return brought([Column(field, values(2)) for field in fields])


def damaged(**parts: Any) -> Values:
    """Two rows of a field in one chunk, and what is wrong with it. chunk, piece: their parts."""
    told = whole(["tokens"], 2, 7, 9)
    chunk = msgspec.structs.replace(told.chunks[0], **parts.pop("chunk", {}))
    piece = msgspec.structs.replace(told.pieces[0], **parts.pop("piece", {}))
    given = {"chunks": [chunk], "pieces": [piece], **parts}
    return msgspec.structs.replace(told, **given)


KEYS = hash_names([1, 2])
ONE = damaged().pieces[0]
CHUNK = damaged().chunks[0]
PUTS: list[tuple[type[DataplaneError], dict[str, Any]]] = [
    (InvalidRows, {"rows": Rows(b"")}),
    (ProtocolError, {"rows": Rows(b"short")}),
    (InvalidRows, {"rows": Rows(KEYS[:16] * 2)}),
    (InvalidRows, {"rows": Rows(KEYS, [1])}),
    (ProtocolError, {"rows": Rows(KEYS, None, b"\x05\0\0\0" * 2, KEYS)}),
    (ProtocolError, {"rows": Rows(KEYS, None, b"\0", KEYS)}),
    (InvalidRows, {"rows": Rows(KEYS, None, bytes(8), KEYS[:16] * 2)}),
    (LimitExceeded, {"rows": Rows(mint_many(1, 0, 65_537))}),
    (ProtocolError, {"values": brought([Column("tokens", values(3))])}),
    *[
        (ProtocolError, {"values": damaged(chunk=part)})
        for part in (
            {"owner": 1},
            {"owner": -1},
            {"layout": 1},
            {"layout": -1},
            {"rows": -1},
            {"rows": 1},
            {"rows": 65_537},
            {"nbytes": -1},
            {"number": 0},
            {"number": -7},
        )
    ],
    *[
        (ProtocolError, {"values": damaged(piece=part)})
        for part in (
            {"chunk": 1},
            {"chunk": -1},
            {"fields": ()},
            {"fields": (1,)},
            {"fields": (-1,)},
            {"fields": (-2,)},
            {"fields": (0, 0)},
            {"fields": (0,) + (-1,) * 64},
            {"base": -1},
            {"base": 1},
            {"given": b""},
            {"given": b"\7"},
            {"given": b"\3" + bytes(9_000) + b"\1"},
            {"first": 1},
            {"first": -1},
            {"at": b"\0"},
            {"at": bytes(4)},
            {"at": b"\2\0\0\0" + bytes(4)},
        )
    ],
    (ProtocolError, {"values": damaged(chunks=[CHUNK, CHUNK])}),
    (ProtocolError, {"values": damaged(owners=[INLINE])}),
    (ProtocolError, {"values": damaged(owners=[INLINE], chunk={"number": 0})}),
    (ProtocolError, {"values": damaged(owners=OWNERS * 2, chunks=[CHUNK] * 2)}),
    (InvalidRows, {"values": damaged(pieces=[ONE, ONE])}),
    (LimitExceeded, {"values": damaged(chunks=[CHUNK] * 4_097)}),
    (LimitExceeded, {"values": damaged(pieces=[ONE] * 65_537)}),
    (LimitExceeded, {"values": damaged(owners=OWNERS * 4_097)}),
    (LimitExceeded, {"values": damaged(layouts=[b"x"] * 4_097)}),
    (LimitExceeded, {"values": damaged(layouts=[b"x" * 4_097])}),
    (InvalidRows, {"values": damaged(fields=["f", "f"])}),
    (InvalidRows, {"values": of("")}),
    (InvalidRows, {"values": of("f" * 513)}),
    (InvalidRows, {"values": of("train~tokens")}),
    (LimitExceeded, {"tags": {"t" * 513: [1, 2]}}),
    (LimitExceeded, {"values": of(*[f"f{i}" for i in range(65)])}),
    (LimitExceeded, {"values": of(*[f"f{i}" for i in range(63)])}),
    (InvalidRows, {"tags": {"t": [1, 2, 3]}}),
    (FieldExists, {"rows": named([0, 9]), "values": of("tokens", "f")}),
    (InvalidRows, {"rows": named([0], ["other"]), "values": Values()}),
    (GroupClosed, {"rows": named([5, 6, 7], ["p"] * 3), "values": Values()}),
    (GroupClosed, {"rows": named([5], ["full"]), "values": Values()}),
    (InvalidRows, {"rows": named([5, 6])}),
    (InvalidRows, {"rows": named([5, 6], ["p", None])}),
]


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (
            ["full"],
            r"'full' already has all its 2 rows and accepts no more: a restarted producer should",
        ),
        (
            ["short", "short"],
            r"'short' has 1 of 2 rows, so this put cannot add 2 more: use another",
        ),
        (["new"] * 3, r"'new' has 0 of 2 rows, so this put cannot add 3 more: use another"),
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
    given: dict[str, Any] = {
        "rows": named([1, 2], ["p", "p"]),
        "values": of("tokens"),
        "tags": {},
    } | changes
    with pytest.raises(error):
        s.put(Put("p", 1, **given))
    assert (inspection.stats(s), s.counts("reward")) == before
    assert s.freed() == []


def test_a_bad_finish_is_refused_and_the_lease_goes_on() -> None:
    s = store()
    put(s, [1, 2])
    taken = take(s, "reward", Want("rows", 2, 2))
    bad: list[tuple[type[DataplaneError], str, dict[str, Any]]] = [
        (ProtocolError, "explode", {}),
        (InvalidRows, "drop", {"columns": [Column("reward", values(2))]}),
        (ProtocolError, "ack", {"columns": [Column("reward", values(3))]}),
        (InvalidRows, "ack", {"columns": [Column("reward~x", values(2))]}),
        (InvalidRows, "release", {"columns": [Column("reward~x", values(2))]}),
        (InvalidRows, "ack", {"index": np.array([2], "<u4").tobytes()}),
        (InvalidRows, "ack", {"index": np.array([0, 0], "<u4").tobytes()}),
        (InvalidRows, "ack", {"index": b"", "columns": [Column("reward", [])]}),
        (ProtocolError, "ack", {"index": b"\0"}),
        (InvalidRows, "ack", {"tags": {"t": [1, 2, 3]}}),
    ]
    for error, outcome, options in bad:
        with pytest.raises(error):
            finish(s, taken, outcome, **options)
    nothing = Finish(taken.lease or 0, "ack", b"", Values(chunks=[CHUNK]))
    with pytest.raises(InvalidRows, match="selects no rows"):
        s.finish(nothing)
    finish(s, taken)
    assert s.stage("reward").acked_rows == 2


def test_calls_about_unknown_things_are_refused() -> None:
    s = store(group_size=2)
    with pytest.raises(StageUndefined, match="train"):
        take(s, "trian", Want("rows", 1, 1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(["tables", 1, 1], Want)
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
    with pytest.raises(InvalidRows, match="pass a value from 1 to"):
        s.close("g", 1 << 31)
    assert hash_name("g") not in s.groups
    s.close("g", (1 << 31) - 1)


def test_the_first_row_of_a_large_group_takes_little_memory() -> None:
    s = store(free="drop", group_size=1 << 26)
    put(s, ["a"], ["g"])
    assert inspection.stats(s)["metadata_bytes"] < 100_000


def test_an_ack_counts_all_rows_that_have_the_field_and_names_the_first_ones() -> None:
    one = store(stages={"s": ["tokens"]})
    keys = [f"row {n}" for n in range(300)]  # of more than one block
    put(one, list(keys))
    lease = take(one, "s", Want("rows", 300, 300))
    put(one, keys[:290], fields=("score",))
    with pytest.raises(
        FieldExists, match="^290 rows already have a value for field 'score'"
    ) as told:
        finish(one, lease, columns=[Column("score", values(300))])
    assert told.value.details["keys"] == keys[:SHOWN_NAMES]
    finish(one, lease, columns=[Column("reward", values(300))])
