"""A dump tells its store as it stood when the dump began, whatever changes while it is told."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from dataplane.metadata.shard.before_images import BeforeImages
from dataplane.metadata.shard.journal import snapshot
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables.remembered import PART_KEYS, Tombstones
from dataplane.wire.journal import Remembered, encode
from dataplane.wire.messages import Finish, Want
from dataplane.wire.tables import Definition, Owner, Shape
from tests.chunk_numbers import chunk_numbers
from tests.metadata.stores import (
    OWNERS,
    Column,
    change,
    fill,
    finish,
    named,
    put,
    take,
    values,
    wrote,
)


def store(version: int) -> Store:
    """Rows and groups in every state, of which a stage has added a field and given back another."""
    s = Store("p", Definition(stages={"s1": ["a"], "s2": ["a", "b"]}, free="drop"), 1)
    s.advance(version)
    put(s, ["x"], ["x"], fields=("a", "b"))
    s.close("x", 1)
    for stage in s.stages:
        finish(s, take(s, stage, Want("rows", 1, 1)))
    put(s, ["u0", "u1"], ["u"] * 2, fields=("a", "b"), v=[1, 2])
    s.close("u", 2)
    lease = take(s, "s1", Want("rows", 2, 2))
    finish(s, lease, "keep", columns=[Column("c", values(2))])
    finish(s, lease, "release", columns=[Column("d", values(2))])
    fill(s)
    put(s, ["w0", "w1"], ["w"] * 2, fields=("a", "b"))
    s.close("w", 2)
    return s


def leased(s: Store, stage: str = "s1") -> int:
    return next(one.number for one in s.leases if one.stage.name == stage)


def replace(s: Store) -> None:
    rows, fields = named(["u0", "u1", "w0"]), [Column(name, values(3)) for name in "ac"]
    s.put(wrote(rows, fields, replace=True))


def ack_some(s: Store) -> None:
    index = np.array([0], "<u4").tobytes()
    s.finish(Finish(leased(s), "ack", index, change=change(9)))


def finish_groups(s: Store) -> None:
    s.release_holder(5)
    for stage in s.stages:
        finish(s, take(s, stage, Want("rows", 9, 1)))


def plan(s: Store) -> None:
    for lease in list(s.leases):
        s.finish(Finish(lease.number, "release"))
    s.put(wrote(named(["three"]), [Column("b", values(1))]))
    s.seal(True)
    s.join("s1", Shape(1), 0, 1, 0.0)


def relocate(s: Store) -> None:
    there = chunk_numbers([(number + 90, 0) for number in range(2)])
    s.relocate(OWNERS[0], chunk_numbers([(number, 0) for number in range(2)]), Owner("b", 8), there)


CHANGES: dict[str, Callable[[Store], object]] = {
    "new rows": lambda s: put(s, ["n0", "n1"], ["n"] * 2, fields=("a", "b")),
    "rows of an open group": lambda s: put(s, ["n0"], ["g"], fields=("a",)),
    "fields of rows that lacked them": lambda s: put(s, ["three"], fields=("b",)),
    "values in place of others": replace,
    "tags": lambda s: s.tag(named(["u0", "one"]), {"v": [7]}),
    "the size of a group": lambda s: s.close("g", 9),
    "a group that closes": lambda s: s.close("g", 1),
    "a seal": lambda s: s.seal(True),
    "a seal that drops short groups": lambda s: s.seal(False),
    "rows leased": lambda s: take(s, "s2", Want("rows", 9, 1)),
    "groups leased": lambda s: take(s, "s2", Want("groups", 9, 1)),
    "rows leased by a filter": lambda s: take(s, "s1", Want("rows", 2, 1, ["ge", "v", 2])),
    "rows acked": ack_some,
    "rows released": lambda s: s.finish(Finish(leased(s), "release")),
    "rows dropped with their lease": lambda s: s.finish(Finish(leased(s), "drop")),
    "a holder that is gone": lambda s: s.release_holder(5),
    "rows dropped": lambda s: s.drop(rows=named(["u0", "w1", "unknown"])),
    "groups dropped": lambda s: s.drop(groups=["u", "g"]),
    "rows dropped by a filter": lambda s: s.drop(where=["ge", "v", 1]),
    "dropped names used again": lambda s: s.put(
        wrote(named(["r2"]), [Column("a", values(1))], reuse=True)
    ),
    "a peer that is lost": lambda s: s.lost(OWNERS[0]),
    "values that moved": relocate,
    "a stage begun again": lambda s: s.reset("s2"),
    "one more stage": lambda s: s.declare_stage("s3", ["a"]),
    "groups that are finished": finish_groups,
    "the trainer's version": lambda s: s.advance(3),
    "a plan": plan,
    "the end of it all": lambda s: s.clear(change(9)),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("version", [0, 1])
def test_a_dump_tells_nothing_of_a_change_that_came_after_it_began(what: str, version: int) -> None:
    """Version 1: account is kept of groups by the trainer's version."""
    pieces = len(list(snapshot(store(version), 1)))
    for told in (1, pieces // 3, pieces // 2):
        s = store(version)
        expected = [encode(op) for op in snapshot(s, 1)]
        ops = snapshot(s, 1)
        found = [encode(next(ops)) for _ in range(told)]
        CHANGES[what](s)
        found += map(encode, ops)
        assert found == expected
        assert [encode(op) for op in snapshot(s, 1)] != expected, "it is no change"


@pytest.mark.parametrize("seed", range(5))
def test_names_that_are_added_used_again_or_forgotten_meanwhile_are_told_as_they_were(
    seed: int,
) -> None:
    chance = random.Random(seed)
    tombstones, images = Tombstones(limit=3 * PART_KEYS), BeforeImages(0)
    keys = [number.to_bytes(16, "little") for number in range(8 * PART_KEYS)]
    tombstones.add(keys[: 2 * PART_KEYS], freed=True)
    tombstones.add(keys[2 * PART_KEYS : 3 * PART_KEYS + 7])
    tombstones.remove(chance.sample(keys, PART_KEYS))
    expected = [one for part in tombstones.parts() for one in part.items()]
    tombstones.on_change, parts = images.keep_tombstones, tombstones.parts()
    told = list[tuple[bytes, bool]]()
    for part in images.tombstones(parts):
        told += part.items()
        tombstones.remove(chance.sample(keys, 50))
        tombstones.add(chance.sample(keys, chance.choice([50, PART_KEYS])))
    assert told == expected
    assert tombstones.forgotten and len(tombstones) <= 3 * PART_KEYS
    known = {key for part in tombstones.parts() for key in part}
    assert len(known) == len(tombstones)
    assert {key for key in keys if tombstones.freed(key) or tombstones.dropped(key)} == known


def test_a_dump_tells_names_part_by_part() -> None:
    """To list a million names at once would take a peer a third of a second."""
    s = store(0)
    s.tombstones.add(number.to_bytes(16, "little") for number in range(10 * PART_KEYS))
    names = [len(op.freed) for op in snapshot(s) if isinstance(op, Remembered)]
    assert sum(names) == len(s.tombstones) and max(names) <= PART_KEYS
