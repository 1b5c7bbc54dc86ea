"""Small stores and calls on them, as the tests of the store use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dataplane.metadata.shard import rows_out
from dataplane.metadata.shard.claim_queue import WaitingClaim
from dataplane.metadata.shard.store import Store
from dataplane.metadata.shard.takes import Taken
from dataplane.metadata.tables.bits import all_of, bytes_of, in_bytes, rows_of
from dataplane.metadata.tables.keys import hash_names
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.messages import Claim, Claimed, Finish, Put, Want
from dataplane.wire.tables import (
    INLINE,
    Change,
    Chunk,
    Definition,
    Name,
    Owner,
    Piece,
    Rows,
    Values,
)

OWNERS = [Owner("a", 7)]
INLINE_AT = -1
"""In `Value.owner`: its bytes come with the message."""
STAGES = {"reward": ["tokens"], "train": ["tokens", "reward"]}


def change(number: int, floor: int = 1, caller: Owner = OWNERS[0]) -> Change:
    """A change of a peer, none of whose changes from `floor` on is over."""
    return Change(caller, number, floor)


def store(**definition: Any) -> Store:
    return Store("step-1", Definition(**{"stages": STAGES, **definition}), 1)


class Value(NamedTuple):
    """One value, in a chunk of its own. number: its chunk's. owner: a place among the owners."""

    number: int
    nbytes: int
    owner: int = 0
    inline: bytes = b""


class Column(NamedTuple):
    """A field, and the value of each row; None where a row lacks it."""

    field: str
    values: Sequence[Value | None]


def brought(columns: Sequence[Column], owners: Sequence[Owner] = OWNERS) -> Values:
    """What a message says of these columns."""
    fields = [column.field for column in columns]
    chunks: dict[Value, int] = {}
    found: list[Chunk] = []
    pieces = []
    for number, column in enumerate(columns):
        for row, value in enumerate(column.values):
            if value is None:
                continue
            if value not in chunks or value.owner == INLINE_AT:
                chunks[value] = len(found)
                inline = value.owner == INLINE_AT
                at = len(owners) if inline else value.owner
                name = 0 if inline else value.number
                found.append(Chunk(at, name, 1, value.nbytes, 0, value.inline))
            pieces.append(Piece(chunks[value], (number,), row, b"\x01"))
    return Values(fields, [*owners, INLINE], [b"layout"], found, pieces)


def whole(fields: Sequence[str], rows: int, number: int, nbytes: int, **more: Any) -> Values:
    """What a message says of one chunk that has these fields of all its rows. number 0: inline."""
    at, inline = ([OWNERS[0]], b"") if number else ([INLINE], bytes(nbytes))
    chunk = Chunk(0, number, rows, nbytes, 0, inline)
    piece = Piece(0, tuple(range(len(fields))), 0, bytes_of(all_of(rows)))
    return Values(list(fields), more.get("owners", at), [b"layout"], [chunk], [piece])


def wrote(
    rows: Rows,
    columns: Sequence[Column],
    owners: Sequence[Owner] = OWNERS,
    tags: dict[str, list[Any]] | None = None,
    **how: Any,
) -> Put:
    """A put as it comes to a shard, and as its backup is told of it."""
    return Put("p", 1, rows, brought(columns, owners), tags or {}, **how)


def values(count: int, nbytes: int = 8_192, first: int = 0) -> list[Value]:
    """Values whose chunks are numbered from `first` + 1 on."""
    return [Value(first + at + 1, nbytes) for at in range(count)]


def numbers(values: Values, rows: int) -> dict[str, list[int | bytes | None]]:
    """Of each field, per row the number of the chunk that has its value, or its inline bytes."""
    found: dict[str, list[int | bytes | None]] = {f: [None] * rows for f in values.fields}
    for piece in values.pieces:
        chunk = values.chunks[piece.chunk]
        for field in piece.fields:
            for row in rows_of(in_bytes(piece.given)) if field >= 0 else ():
                assert found[values.fields[field]][piece.base + row] is None
                found[values.fields[field]][piece.base + row] = chunk.number or chunk.inline
    return found


def named(keys: Sequence[Name], groups: Sequence[Name | None] | None = None) -> Rows:
    keys = list(keys)
    if groups is None:
        return Rows(hash_names(keys), keys)
    table = list(dict.fromkeys(group for group in groups if group is not None))
    index = [NO_GROUP if group is None else table.index(group) for group in groups]
    return Rows(
        hash_names(keys),
        keys,
        np.array(index, "<u4").tobytes(),
        hash_names(table),
        table,
    )


def put(
    to: Store,
    keys: Sequence[Name],
    groups: Sequence[Name | None] | None = None,
    fields: tuple[str, ...] = ("tokens",),
    nbytes: int = 8_192,
    **tags: Any,
) -> None:
    columns = [Column(name, values(len(keys), nbytes)) for name in fields]
    to.put(wrote(named(keys, groups), columns, OWNERS, tags))


def take(from_: Store, stage: str, want: Want, **options: Any) -> Taken:
    return from_.take(stage, want, 1, 0.0, **options)


def keys_of(from_: Store, taken: Taken | Claimed) -> list[Name]:
    assert taken.lease is not None
    found = rows_out.table(from_, taken.lease).rows.names
    assert found is not None
    return found


def finish(
    at: Store,
    taken: Taken | Claimed,
    outcome: Any = "ack",
    columns: Sequence[Column] = (),
    owners: Sequence[Owner] = OWNERS,
    **options: Any,
) -> Any:
    assert taken.lease is not None
    return at.finish(Finish(taken.lease, outcome, values=brought(columns, owners), **options))


def fill(store: Store) -> None:
    """Rows in all states: pending, ready, leased, split, acked, dropped, and those of a group."""
    fields = ("a", "b")
    alone: list[Name | None] | None = None if store.definition.group_size is None else ["i", "j"]
    put(store, ["one", "two"], alone, fields=fields, v=[3])
    put(store, ["three", 4], ["g", 5], fields=("a",), v=[1, 2.5])
    put(store, [f"r{i}" for i in range(3)], ["h"] * 3, fields=fields)
    if store.definition.group_size is None:
        store.close("h", 3)
    store.take("s1", Want("rows", 1, 1), 5, 0.0, 1_500)
    taken = store.take("s2", Want("groups", 1, 1), 6, 0.0)
    finish(store, taken, index=b"\x01\0\0\0")
    store.drop(rows=named(["r2", "never"]))


def waiting(
    number: int, want: Want, holder: int = 1, peer: str = "a", since: float = 0.0, **more: Any
) -> WaitingClaim:
    """A claim that waits for rows of stage `s`, or as `more` says."""
    return WaitingClaim(Claim("p", 1, "s", want, number=number, **more), holder, peer, since)
