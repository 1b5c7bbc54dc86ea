"""The storage underneath: each structure against a plain Python one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dataplane.metadata.shard.units import ACKED, LEASED, PENDING, READY, Units
from dataplane.metadata.tables.columns import Ids, Ragged
from dataplane.metadata.tables.key_index import KeyIndex, pairs, repeated
from dataplane.metadata.tables.names import hash_names, mint_many
from dataplane.metadata.tables.tombstones import Tombstones

SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
def test_the_index_knows_what_a_dict_knows(seed: int) -> None:
    rng = random.Random(seed)
    index, known, ids = KeyIndex(), {}, Ids()
    universe = np.concatenate([pairs(mint_many(9, 0, 1_500)), pairs(hash_names(range(1_500)))])
    names = [key.tobytes() for key in universe]
    for _ in range(60):
        picked = rng.sample(range(3_000), rng.choice([1, 2, 50, 600]))
        new = [i for i in picked if names[i] not in known]
        if new:
            slots = ids.take(len(new))
            index.reserve(ids.top)
            index.insert(universe[new], slots)
            known |= dict(zip((names[i] for i in new), slots.tolist(), strict=True))
        gone = rng.sample(sorted(known), min(len(known), rng.choice([0, 1, 30, 500])))
        if gone:
            slots = np.array([known.pop(name) for name in gone])
            index.remove(slots)
            ids.give_back(slots)
        for some in (universe, universe[rng.randrange(3_000)][None, :]):
            expected = [known.get(key.tobytes(), -1) for key in some]
            assert index.find(some).tolist() == expected
        assert len(index) == len(known) == len(set(known.values()))


def test_an_id_is_used_again_only_after_it_came_back() -> None:
    ids = Ids()
    first = ids.take(5).tolist()
    ids.give_back(np.array([1, 3]))
    assert sorted(ids.take(4).tolist()) == [1, 3, 5, 6]
    assert first == [0, 1, 2, 3, 4]
    assert ids.top == 7


def test_a_key_that_occurs_twice_is_found() -> None:
    keys = pairs(hash_names(["a", "b", "a", "c", "b"]))
    assert repeated(keys).tolist() == [2, 4]
    assert not len(repeated(keys[:2]))


@SEEDS
def test_ragged_lists_behave_as_lists(seed: int) -> None:
    rng = random.Random(seed)
    ragged = Ragged(np.dtype(np.int64), 100, usual=rng.choice([1, 6]))
    lists: list[list[int]] = [[] for _ in range(100)]
    for step in range(200):
        picked = rng.sample(range(100), rng.choice([1, 1, 7, 60]))
        ids = np.array(picked)
        counts = [rng.choice([0, 1, 1, 3, 20]) for _ in picked]
        if rng.random() < 0.2:
            counts = [1] * len(picked)
        records = np.arange(sum(counts)) + 1_000 * step
        ends = np.cumsum(counts)
        parts = [p.tolist() for p in np.split(records, ends[:-1])]
        action = rng.choice(["append", "append", "set", "clear", "keep"])
        if action == "append":
            ragged.append(ids, np.array(counts), records)
        elif action == "set":
            ragged.set(ids, np.array(counts), records)
        elif action == "clear":
            ragged.clear(ids)
        else:
            _, held = ragged.gather(ids)
            ragged.keep(ids, held % 3 != 0)
        for i, part in zip(picked, parts, strict=True):
            kept = [one for one in lists[i] if one % 3]
            lists[i] = {"append": lists[i] + part, "set": part, "clear": [], "keep": kept}[action]
        counts_now, everything = ragged.gather(np.arange(100))
        assert counts_now.tolist() == list(map(len, lists))
        assert everything.tolist() == [one for part in lists for one in part]


def test_the_oldest_tombstones_go_first_and_are_counted() -> None:
    tombstones = Tombstones(limit=10)
    keys = pairs(hash_names(range(40)))
    for start in range(0, 40, 4):
        tombstones.add(keys[start : start + 4])
        tombstones.add(keys[start : start + 4])
    assert tombstones.among(keys).tolist() == [False] * 30 + [True] * 10
    assert (len(tombstones), tombstones.forgotten) == (10, 30)
    tombstones.add(keys[:3])
    assert (tombstones.all()[0] == np.concatenate([keys[33:], keys[:3]])).all()
    tombstones.add(keys[:25])
    assert len(tombstones) == 10


def test_names_that_are_used_again_are_no_tombstones_and_leave_their_place() -> None:
    tombstones = Tombstones(limit=10)
    keys = pairs(hash_names(range(40)))
    tombstones.add(keys[:4], freed=True)
    tombstones.add(keys[4:8])
    tombstones.add(keys[3:5], freed=True)  # what was dropped stays so
    tombstones.remove(keys[[1, 5, 30]])
    assert tombstones.freed(keys[:9]).tolist() == [True, False, True, True] + [False] * 5
    assert tombstones.among(keys[:9]).tolist() == [False] * 4 + [True, False, True, True, False]
    tombstones.add(keys[:1])  # freed, and now dropped
    there, freed = tombstones.all()
    assert (there == keys[[0, 2, 3, 4, 6, 7]]).all()
    assert freed.tolist() == [False, True, True, False, False, False]
    tombstones.add(keys[10:20])
    assert (len(tombstones), tombstones.forgotten) == (10, 6)


@SEEDS
def test_lanes_hand_out_what_is_ready_oldest_first(seed: int) -> None:
    """The plain lane and a filtered one, over thousands of changes, against two lists."""
    rng = random.Random(seed)
    count = 400
    even = np.arange(count) % 2 == 0
    units = Units(count, lambda where, ids: even[ids])
    units.add(count)
    where = ["exists", "even"]
    order: list[int] = []
    units.lane(where if seed % 2 else None)  # made early, or late

    def matching() -> list[int]:
        return [one for one in order if even[one]]

    for _ in range(400):
        idle = [i for i in range(count) if units.state[i] in (PENDING, LEASED, ACKED)]
        some = rng.sample(idle, min(len(idle), rng.choice([0, 1, 5, 90])))
        front = rng.random() < 0.3
        units.move(np.array(some, int), READY, front)
        order = some + order if front else order + some
        if rng.random() < 0.3:
            flips = np.array(rng.sample(range(count), 20))
            even[flips] ^= True
            units.retest(flips)
        assert units.ready(None) == len(order)
        assert units.ready(where) == len(matching())
        wanted = rng.choice([1, 1, 4, 120])
        for asked in (None, where):
            expected = order if asked is None else matching()
            lane = units.lane(asked)
            ids, positions = lane.first(wanted)
            if asked is None:
                assert ids.tolist() == expected[:wanted]
            assert len(set(ids.tolist())) == min(wanted, len(expected))
            assert set(ids.tolist()) <= set(expected)
            if len(ids) and rng.random() < 0.6:
                lane.consume(int(positions[-1]))
                units.move(ids, rng.choice([LEASED, ACKED]))
                order = [one for one in order if one not in set(ids.tolist())]
        assert len(units.lane(None)) < 2_000


def test_a_lane_that_nobody_claims_from_stays_small() -> None:
    units = Units(64, lambda where, ids: np.ones(len(ids), bool))
    units.add(64)
    lane = units.lane(None)
    for _ in range(5_000):
        units.move(np.arange(8), READY)
        units.move(np.arange(8), LEASED)
    assert len(lane) < 200
    assert lane.nbytes < 4_096


def test_only_so_many_filtered_lanes_are_kept_and_an_evicted_one_is_rebuilt() -> None:
    units = Units(64, lambda where, ids: ids == where.values[0])
    units.add(64)
    units.move(np.arange(64), READY)
    for value in range(50):
        assert units.ready(["eq", "n", value]) == 1
    assert units.ready(["eq", "n", 0]) == 1
    assert len(units._filtered) == 32
