"""Small stores and calls on them, as the tests of the store use them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataplane.metadata.shard import rows_out
from dataplane.metadata.shard.claim_queue import WaitingClaim
from dataplane.metadata.shard.store import Store
from dataplane.metadata.shard.takes import Taken
from dataplane.metadata.tables import names
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.messages import Claim, Claimed, Finish, Put, Want
from dataplane.wire.records import VALUE
from dataplane.wire.tables import Change, Column, Definition, Name, Owner, Rows, Spec

SPECS = [Spec("array", "float32", (-1,)), Spec("object")]
OWNERS = [Owner("a", 7)]
STAGES = {"reward": ["tokens"], "train": ["tokens", "reward"]}


def change(number: int, floor: int = 1, caller: Owner = OWNERS[0]) -> Change:
    """A change of a peer, none of whose changes from `floor` on is over."""
    return Change(caller, number, floor)


def store(**definition: Any) -> Store:
    return Store("step-1", Definition(**{"stages": STAGES, **definition}), 1)


def wrote(
    rows: Rows,
    columns: list[Column],
    specs: list[Spec] = SPECS,
    owners: list[Owner] = OWNERS,
    tags: dict[str, list[Any]] | None = None,
    **how: Any,
) -> Put:
    """A put as it comes to a shard, and as its backup is told of it."""
    return Put("p", 1, rows, columns, specs, tags or {}, owners=owners, **how)


def values(count: int, nbytes: int = 8_192, first: int = 0) -> bytes:
    records = np.zeros(count, VALUE)
    records["range"] = np.arange(first, first + count)
    records["nbytes"] = nbytes
    return records.tobytes()


def named(keys: list[Name], groups: list[Name | None] | None = None) -> Rows:
    if groups is None:
        return Rows(names.hash_names(keys), keys)
    table = list(dict.fromkeys(group for group in groups if group is not None))
    index = [NO_GROUP if group is None else table.index(group) for group in groups]
    return Rows(
        names.hash_names(keys),
        keys,
        np.array(index, "<u4").tobytes(),
        names.hash_names(table),
        table,
    )


def put(
    to: Store,
    keys: list[Name],
    groups: list[Name | None] | None = None,
    fields: tuple[str, ...] = ("tokens",),
    nbytes: int = 8_192,
    **tags: Any,
) -> None:
    columns = [Column(name, values(len(keys), nbytes)) for name in fields]
    to.put(wrote(named(keys, groups), columns, SPECS, OWNERS, tags))


def take(from_: Store, stage: str, want: Want, **options: Any) -> Taken:
    return from_.take(stage, want, 1, 0.0, **options)


def keys_of(from_: Store, taken: Taken | Claimed) -> list[Name]:
    assert taken.lease is not None
    found = rows_out.table(from_, taken.lease).rows.names
    assert found is not None
    return found


def finish(at: Store, taken: Taken | Claimed, outcome: str = "ack", **options: Any) -> Any:
    assert taken.lease is not None
    given = {"specs": SPECS, "owners": OWNERS} | options
    return at.finish(Finish(taken.lease, outcome, **given))


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
