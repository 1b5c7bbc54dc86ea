"""The storage underneath: each structure against a plain Python one."""

from __future__ import annotations

import random

import pytest

from dataplane.metadata.shard.blocks import PENDING, READY, first_parts
from dataplane.metadata.shard.stages import ReadyQueue, Units
from dataplane.metadata.tables.bits import bits_of, first_of, of_mask, picked, rows_of
from dataplane.metadata.tables.keys import hash_names, keys_in
from dataplane.metadata.tables.remembered import Tombstones

SEEDS = pytest.mark.parametrize("seed", range(5))


def known(tombstones: Tombstones) -> list[tuple[bytes, bool]]:
    return [one for part in tombstones.parts() for one in part.items()]


def test_the_oldest_tombstones_go_first_and_are_counted() -> None:
    tombstones = Tombstones(limit=10)
    keys = keys_in(hash_names(range(40)))
    for start in range(0, 40, 4):
        tombstones.add(keys[start : start + 4])
        tombstones.add(keys[start : start + 4])
    assert [tombstones.dropped(key) for key in keys] == [False] * 30 + [True] * 10
    assert (len(tombstones), tombstones.forgotten) == (10, 30)
    tombstones.add(keys[:3])
    assert known(tombstones) == [(key, False) for key in [*keys[33:], *keys[:3]]]
    tombstones.add(keys[:25])
    assert len(tombstones) == 10


def test_names_that_are_used_again_are_no_tombstones_and_leave_their_place() -> None:
    tombstones = Tombstones(limit=10)
    keys = keys_in(hash_names(range(40)))
    tombstones.add(keys[:4], freed=True)
    tombstones.add(keys[4:8])
    tombstones.add(keys[3:5], freed=True)  # what was dropped stays so
    tombstones.remove(keys[at] for at in (1, 5, 30))
    was = [(tombstones.freed(key), tombstones.dropped(key)) for key in keys[:9]]
    freed, dropped, unknown = (True, False), (False, True), (False, False)
    assert was == [freed, unknown, freed, freed, dropped, unknown, dropped, dropped, unknown]
    tombstones.add(keys[:1])  # freed, and now dropped
    ages = zip((0, 2, 3, 4, 6, 7), (False, True, True, False, False, False), strict=True)
    assert known(tombstones) == [(keys[at], freed) for at, freed in ages]
    tombstones.add(keys[10:20])
    assert (len(tombstones), tombstones.forgotten) == (10, 6)


class Unit(int):
    @property
    def number(self) -> int:
        return int(self)


@SEEDS
def test_queues_hand_out_what_is_ready_oldest_first(seed: int) -> None:
    """The plain queue and a filtered one, over thousands of changes, against two lists."""
    rng = random.Random(seed)
    count, wide = 40, 10
    every = [Unit(number) for number in range(count)]
    even: dict[int, int] = {unit: 0x155 for unit in every}
    units = Units(lambda where, unit, bits: bits & even[unit])
    units.add(count * wide)
    where = ["exists", "even"]
    order: list[tuple[int, int]] = []
    back: set[tuple[int, int]] = set()  # what came back: in order of arrival, before the rest
    units.queue(where if seed % 2 else None)  # made early, or late

    def single(picked: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(unit, row) for unit, bits in picked for row in rows_of(bits)]

    def matching() -> list[tuple[int, int]]:
        return [(unit, row) for unit, row in order if even[unit] >> row & 1]

    for _ in range(400):
        unit = rng.choice(every)
        idle = [row for row in range(wide) if (unit, row) not in order]
        some = sorted(rng.sample(idle, min(len(idle), rng.choice([0, 1, 3, 10]))))
        returned = rng.random() < 0.3
        if some:
            units.move(unit, bits_of(some), PENDING, READY, returned)
        came = [(unit, row) for row in some]
        back |= set(came) if returned else set()
        order = sorted(back) + [one for one in order + came if one not in back]
        if rng.random() < 0.3:
            other = rng.choice(every)
            even[other] ^= 1 << rng.randrange(wide)
            units.retest(other, bits_of(row for one, row in order if one == other))
        assert units.ready(None) == len(order)
        assert units.ready(where) == len(matching())
        wanted = rng.choice([1, 1, 4, 120])
        for asked in (None, where):
            expected = order if asked is None else matching()
            found = single(first_parts(units.queue(asked), wanted))
            if asked is None:
                assert found == expected[:wanted]
            assert len(set(found)) == min(wanted, len(expected))
            assert set(found) <= set(expected)
            if found and rng.random() < 0.6:
                for one, row in found:
                    units.move(one, 1 << row, READY, PENDING)
                order = [one for one in order if one not in set(found)]
                back -= set(found)
        assert len(units.queue(None)) < 2_000


def test_a_queue_that_nobody_claims_from_stays_small() -> None:
    queue = ReadyQueue()
    queue.enter("oldest", 1)
    for _ in range(5_000):
        queue.enter("unit", 255)
        queue.leave("unit", 255)
    assert len(queue) < 200


def test_only_so_many_filtered_queues_are_kept_and_an_evicted_one_is_rebuilt() -> None:
    units = Units(lambda where, unit, bits: bits if unit == where[2] else 0)
    units.add(64)
    for unit in range(64):
        units.move(unit, 1, PENDING, READY)
    for value in range(50):
        assert units.ready(["eq", "n", value]) == 1
    assert units.ready(["eq", "n", 0]) == 1
    assert len(units._filtered) == 32


@SEEDS
def test_sets_of_rows_are_what_python_has_as_sets(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        count = rng.choice([1, 5, 64, 300])
        rows = sorted(rng.sample(range(count), rng.randint(0, count)))
        bits = bits_of(rows)
        assert list(rows_of(bits)) == rows
        assert list(rows_of(first_of(bits, 3))) == rows[:3]
        assert of_mask([bits >> row & 1 for row in range(count)]) == bits
        order = rng.sample(range(count), count)
        assert [order[i] for i in rows_of(picked(bits, order))] == [o for o in order if o in rows]
