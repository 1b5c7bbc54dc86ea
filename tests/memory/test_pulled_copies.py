"""Copies of other hosts' chunks: found, pinned, evicted, and never in the way of writers."""

from __future__ import annotations

import numpy as np

from dataplane.memory.admission import Admission
from dataplane.memory.extents import Records
from dataplane.memory.space import Space
from dataplane.wire.packed import EXTENT, U8
from tests.chunk_numbers import chunk_numbers
from tests.placing import place

PAGE = 4096
PEER, READER, WRITER = 0, 1, 2


def remote(*numbers: int, generation: int = 5) -> np.ndarray:
    return chunk_numbers([(n, generation) for n in numbers])


def pull(
    space: Space, incarnation: int, *numbers: int, pages: int = 1, generation: int = 5
) -> np.ndarray:
    sizes = np.full(len(numbers), pages * PAGE, U8)
    count, extents = space.reserve(PEER, Admission.PULL, [sizes])
    assert count == 1
    column: Records = np.empty(len(sizes), EXTENT)
    column["offset"], column["length"] = place(sizes, extents), sizes
    local = space.commit(PEER, column.tolist(), Admission.PULL)
    space.copies.insert(incarnation, remote(*numbers, generation=generation), local)
    return local


def found(space: Space, incarnation: int, *numbers: int) -> list[bool]:
    there: list[bool] = (space.copies.lookup(incarnation, remote(*numbers)) > 0).tolist()
    return there


def test_a_copy_is_found_by_owner_incarnation_range_and_generation() -> None:
    space = Space(64 * PAGE)
    local = pull(space, 11, 3, 4)
    assert space.copies.lookup(11, remote(4, 9, 3, 3)).tolist() == [
        local[1].item(),
        0,
        local[0].item(),
        local[0].item(),
    ]
    assert found(space, 12, 3) == [False]
    assert not space.copies.lookup(11, chunk_numbers([(3, 6)])).any()
    assert space.stats()["cached_bytes"] == 2 * PAGE


def test_the_least_recently_used_copies_go_first() -> None:
    space = Space(64 * PAGE)
    for number in (1, 2, 3, 4):
        pull(space, 11, number)
    assert found(space, 11, 1)
    assert space.copies.evict(2 * PAGE) == 2 * PAGE
    assert found(space, 11, 1, 2, 3, 4) == [True, False, False, True]
    assert space.copies.evict(100 * PAGE) == 2 * PAGE
    assert len(space.copies) == 0
    assert space.stats()["free_bytes"] == 64 * PAGE
    assert space.copies.evict(1) == 0


def test_a_pinned_copy_stays() -> None:
    space = Space(64 * PAGE)
    local = pull(space, 11, 1, 2)
    pin = space.pin(READER, local[:1])
    assert space.copies.evict(100 * PAGE) == PAGE
    assert found(space, 11, 1, 2) == [True, False]
    space.unpin(READER, [pin])
    assert space.copies.evict(1) == PAGE


def test_copies_of_a_lost_peer_go_and_pinned_bytes_stay_readable() -> None:
    space = Space(64 * PAGE)
    local = pull(space, 11, 1, 2)
    pull(space, 12, 1)
    pin = space.pin(READER, local[:1])
    assert space.copies.drop_owner(11) == PAGE
    assert space.copies.drop_owner(11) == 0
    assert found(space, 11, 1, 2) == [False, False]
    assert found(space, 12, 1) == [True]
    assert space.alive(local).tolist() == [True, False]
    assert space.unpin(READER, [pin]) == PAGE


def test_copies_are_told_of_in_turn_and_those_of_one_generation_let_go() -> None:
    space = Space(64 * PAGE)
    pull(space, 11, 1, 2, 3)
    assert space.copies.some_of(11, 2).tolist() == remote(1, 2).tolist()
    assert space.copies.some_of(11, 2).tolist() == remote(3, 1).tolist()
    assert space.copies.some_of(12, 2).tolist() == []
    assert len(space.copies.some_of(11, 9)) == 3
    assert space.copies.drop(12, remote(1)) == 0
    gone = np.concatenate((remote(1, 9), remote(2, generation=4)))
    assert space.copies.drop(11, gone) == PAGE
    assert found(space, 11, 1, 2, 3) == [False, True, True]


def test_a_copy_that_is_here_already_stays_and_the_newcomer_goes() -> None:
    space = Space(64 * PAGE)
    first = pull(space, 11, 1)
    second = pull(space, 11, 1, 2, 2)
    assert space.copies.lookup(11, remote(1)).tolist() == first.tolist()
    assert space.alive(second).tolist() == [False, True, False]
    assert space.stats()["cached_bytes"] == 2 * PAGE


def test_a_writer_evicts_copies_beyond_their_guarantee_and_no_more() -> None:
    space = Space(100 * PAGE)
    pull(space, 11, *range(80))
    size = np.array([PAGE], U8)
    assert space.reserve(WRITER, Admission.OPEN, [size] * 60)[0] == 60
    assert space.stats()["cached_bytes"] == 15 * PAGE
    assert space.reserve(WRITER, Admission.OPEN, [size])[0] == 0
    assert space.stats()["cached_bytes"] == 15 * PAGE


def test_a_pull_evicts_older_pulls() -> None:
    space = Space(100 * PAGE)
    pull(space, 11, *range(20))
    pull(space, 11, *range(20, 90))
    pull(space, 11, *range(90, 120))
    assert found(space, 11, 0, 19, 20, 119) == [False, False, True, True]


def test_copies_that_lie_in_the_way_of_a_large_unit_are_evicted() -> None:
    space = Space(100 * PAGE, shares=(0.0, 0.0, 1.0))
    pull(space, 11, *range(50), pages=2)
    local = space.copies.lookup(11, remote(*range(50)))
    space.release(local[:0])
    pins = [space.pin(READER, local[n : n + 1]) for n in range(0, 50, 10)]
    assert space.copies.evict(60 * PAGE) == 60 * PAGE
    count, extents = space.reserve(PEER, Admission.PULL, [np.array([18 * PAGE], U8)] * 2)
    assert count == 2
    space.unpin(READER, pins)
    space.give_back(PEER, extents)
    space.copies.evict(100 * PAGE)
    assert space.stats()["free_bytes"] == 100 * PAGE


def test_many_copies_grow_the_columns() -> None:
    space = Space(2000 * PAGE)
    pull(space, 11, *range(1000))
    assert all(found(space, 11, *range(1000)))
    assert "1000 chunks" in repr(space.copies)
    assert space.copies.drop_owner(11) == 1000 * PAGE


def test_copies_of_several_peers_are_evicted_in_one_go() -> None:
    space = Space(64 * PAGE)
    for incarnation, number in ((11, 1), (12, 1), (11, 2), (12, 2)):
        pull(space, incarnation, number)
    assert space.copies.evict(3 * PAGE) == 3 * PAGE
    assert found(space, 11, 1, 2) == [False, False]
    assert found(space, 12, 1, 2) == [False, True]
    assert space.copies.evictable_bytes == PAGE
    assert space.stats()["cached_bytes"] == PAGE


def test_copies_come_in_any_order_and_one_that_comes_twice_is_kept_once() -> None:
    space = Space(64 * PAGE)
    local = pull(space, 11, 9, 2, 9)
    assert space.copies.lookup(11, remote(2, 9)).tolist() == [local[1].item(), local[0].item()]
    assert space.chunks.alive(local).tolist() == [True, True, False]
    assert space.stats()["cached_bytes"] == 2 * PAGE


def test_a_copy_goes_when_its_owner_has_used_the_range_again() -> None:
    space = Space(64 * PAGE)
    dead = pull(space, 11, 1, 2, 3)
    pin = space.pin(READER, dead[:1])
    new = pull(space, 11, 1, 2, generation=6)
    assert space.alive(dead).tolist() == [True, False, True], "a reader still has the first"
    assert space.copies.lookup(11, remote(1, 2, generation=6)).tolist() == new.tolist()
    assert found(space, 11, 1, 2, 3) == [False, False, True]
    assert space.stats()["cached_bytes"] == 3 * PAGE
    assert space.unpin(READER, [pin]) == PAGE


def test_a_copy_of_an_earlier_life_of_a_range_takes_no_place() -> None:
    space = Space(64 * PAGE)
    last, first = 2**32 - 1, 1  # 0 is no generation
    dead = pull(space, 11, 1, generation=last)
    new = pull(space, 11, 1, 2, generation=first)
    late = pull(space, 11, 1, 2, generation=last)
    assert not space.alive(dead).any() and not space.alive(late).any()
    found = space.copies.lookup(11, remote(1, 2, generation=first))
    assert found.tolist() == new.tolist() and space.stats()["cached_bytes"] == 2 * PAGE


def test_a_copy_found_pinned_was_used_then() -> None:
    space = Space(64 * PAGE)
    local = pull(space, 11, 1, 2, 3)
    pin = space.pin(READER, local[:1])
    assert space.copies.evict(PAGE) == PAGE
    assert found(space, 11, 2) == [False]
    space.unpin(READER, [pin])
    assert space.copies.evict(PAGE) == PAGE
    assert space.alive(local).tolist() == [True, False, False], "3 was used before 1"
