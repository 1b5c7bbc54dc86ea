"""The arena's space: reservations, commits, pins, and what a lost holder keeps."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import LimitExceeded, ProtocolError, RowsGone, ValueTooLarge
from dataplane.memory.admission import Admission
from dataplane.memory.extents import placed
from dataplane.memory.space import PULLER, Space
from dataplane.wire.limits import MAX_EXTENTS_PER_SESSION
from dataplane.wire.packed import EXTENT, U8
from tests.placing import fitting, place

PAGE = 4096
OPEN, CONTINUE, PULL = Admission
ALICE, BOB = 7, 8


def sizes(*values: int) -> np.ndarray:
    return np.array(values, U8)


def written(offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    column = np.empty(len(offsets), EXTENT)
    column["offset"], column["length"] = offsets, lengths
    return column


def write(space: Space, holder: int, *values: int, admission: int = OPEN) -> np.ndarray:
    """Commit one unit of chunks of these sizes, and give back the rest of its extents."""
    count, extents = space.reserve(holder, admission, [sizes(*values)])
    assert count == 1
    offsets, left = placed(list(values), extents.tolist())
    column = written(np.array(offsets), sizes(*values))
    chunks = space.commit(holder, column.tolist(), admission)
    space.give_back(holder, np.array(left, EXTENT))
    return chunks


def test_a_whole_round_returns_every_byte() -> None:
    space = Space(64 * PAGE)
    chunks = write(space, ALICE, 5000, 100, 70_000)
    stats = space.stats()
    assert stats["used_bytes"] == 5056 + 128 + 70_016
    assert stats["granted_bytes"] == 0
    assert stats["free_bytes"] == 64 * PAGE - stats["used_bytes"]
    assert stats["chunks"] == 3
    assert space.chunks.extents(chunks)["offset"].tolist() == [0, 5056, 5184]
    assert space.release(chunks) == stats["used_bytes"]
    assert space.stats()["largest_free_bytes"] == 64 * PAGE
    assert space.release(chunks) == 0


def test_dropping_seven_of_eight_rows_frees_seven_eighths() -> None:
    space = Space(64 * PAGE)
    chunks = write(space, ALICE, *[8192] * 8)
    before = space.stats()["used_bytes"]
    space.release(chunks[1:])
    assert space.stats()["used_bytes"] * 8 == before


def test_units_are_granted_whole_as_far_as_they_fit() -> None:
    space = Space(100 * PAGE)
    count, extents = space.reserve(ALICE, OPEN, [sizes(9 * PAGE, PAGE)] * 10)
    assert count == 6
    assert extents.tolist() == [(0, 60 * PAGE)]
    count, extents = space.reserve(ALICE, OPEN, [sizes(1)])
    assert count == 0 and len(extents) == 0
    assert space.reserve(ALICE, CONTINUE, [sizes(20 * PAGE)])[0] == 1


def test_a_unit_above_its_share_fails_at_once_with_figures() -> None:
    space = Space(100 * PAGE)
    assert space.quota_bytes == (60 * PAGE, 85 * PAGE, 100 * PAGE)
    with pytest.raises(
        ValueTooLarge, match="244 KiB at once, but new groups may use at most 240 KiB of"
    ) as caught:
        space.reserve(ALICE, OPEN, [sizes(5), sizes(59 * PAGE, 2 * PAGE)])
    assert caught.value.details == {
        "needed_bytes": 61 * PAGE,
        "cap_bytes": 60 * PAGE,
        "arena_bytes": 100 * PAGE,
        "admission": "open",
    }
    assert space.stats()["granted_bytes"] == 0
    with pytest.raises(ValueTooLarge):
        space.reserve(ALICE, OPEN, [sizes(2**64 - 1, 2**64 - 1)])
    with pytest.raises(ValueTooLarge):
        space.check_units(CONTINUE, [sizes(PAGE), sizes(86 * PAGE)])
    space.check_units(PULL, [sizes(100 * PAGE)])


def test_a_class_borrows_what_is_free_but_never_what_a_higher_one_is_guaranteed() -> None:
    space = Space(100 * PAGE)

    def room() -> list[int]:
        return [space.quotas.room(admission) // PAGE for admission in Admission]

    assert room() == [60, 85, 100]
    write(space, BOB, *[PAGE] * 30, admission=PULL)
    assert room() == [45, 70, 70]
    write(space, ALICE, *[PAGE] * 45, admission=OPEN)
    assert room() == [0, 25, 25]
    write(space, ALICE, *[PAGE] * 25, admission=CONTINUE)
    assert room() == [0, 0, 0]


def test_extents_of_a_fragmented_arena_still_hold_the_chunks_in_order() -> None:
    space = Space(64 * PAGE, shares=(1.0, 0.0, 0.0))
    chunks = write(space, ALICE, *[PAGE] * 64)
    space.release(chunks[[1, 2, 3, 10, 11, 20, 40, 41]])
    units = [sizes(2 * PAGE), sizes(PAGE, 2 * PAGE, 100), sizes(PAGE), sizes(PAGE, PAGE)]
    count, extents = space.reserve(BOB, OPEN, units)
    assert count == 3
    flat = np.concatenate(units[:count])
    column = written(place(flat, extents), flat)
    space.commit(BOB, column.tolist(), OPEN)


def test_a_unit_that_finds_no_place_leaves_nothing_behind() -> None:
    space = Space(64 * PAGE, shares=(1.0, 0.0, 0.0))
    chunks = write(space, ALICE, *[PAGE] * 64)
    space.release(chunks[::2])
    before = space.stats()
    assert space.reserve(BOB, OPEN, [sizes(PAGE, 2 * PAGE)])[0] == 0
    assert space.reserve(BOB, OPEN, [sizes(*[PAGE] * 33)])[0] == 0
    assert space.stats() == before
    assert space.reserve(BOB, OPEN, [sizes(*[PAGE] * 32)])[0] == 1


def test_units_without_chunks_need_no_space() -> None:
    space = Space(4 * PAGE)
    assert space.reserve(ALICE, OPEN, [])[0] == 0
    assert space.reserve(ALICE, OPEN, [sizes(), sizes()])[0] == 2
    write(space, BOB, *[PAGE] * 2)
    assert space.reserve(ALICE, OPEN, [sizes(), sizes(2 * PAGE), sizes()])[0] == 1


def test_space_ahead_of_need_stops_at_half_of_the_room() -> None:
    space = Space(100 * PAGE)
    assert space.grant(ALICE, OPEN, 30 * PAGE).tolist() == [(0, 30 * PAGE)]
    assert len(space.grant(ALICE, OPEN, 1)) == 0
    assert len(space.grant(ALICE, OPEN, 0)) == 0
    assert space.reserve(ALICE, OPEN, [sizes(30 * PAGE)])[0] == 1


def test_a_writer_gets_the_extents_again_that_it_has_mapped() -> None:
    space = Space(100 * PAGE)
    first = space.reserve(ALICE, OPEN, [sizes(10 * PAGE)])[1]
    second = space.reserve(BOB, OPEN, [sizes(10 * PAGE)])[1]
    space.give_back(ALICE, first)
    space.give_back(BOB, second)
    assert space.reserve(BOB, OPEN, [sizes(8 * PAGE)])[1]["offset"].tolist() == [10 * PAGE]
    assert space.reserve(ALICE, OPEN, [sizes(8 * PAGE)])[1]["offset"].tolist() == [0]


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ([(0, PAGE), (8 * PAGE, 64)], "not reserved"),
        ([(0, PAGE), (PAGE - 64, 64)], "overlap"),
        ([(64, 64), (64, 64)], "overlap"),
        ([(8 * PAGE - 64, 65)], "not reserved"),
        ([(32, 64)], "not a multiple of 64"),
        ([(2**64 - 64, 128)], "outside the arena"),
        ([(0, 2**64 - 1)], "outside the arena"),
    ],
)
def test_a_commit_outside_the_grants_takes_nothing(
    pieces: list[tuple[int, int]], match: str
) -> None:
    space = Space(64 * PAGE)
    space.reserve(ALICE, OPEN, [sizes(8 * PAGE)])
    space.reserve(BOB, OPEN, [sizes(8 * PAGE)])
    before = space.stats()
    with pytest.raises(ProtocolError, match=match):
        space.commit(ALICE, pieces, OPEN)
    with pytest.raises(ProtocolError, match=match):
        space.give_back(ALICE, np.array(pieces, EXTENT))
    assert space.stats() == before


def test_an_empty_value_still_has_a_place_of_its_own() -> None:
    space = Space(64 * PAGE)
    chunks = write(space, ALICE, 0, 0)
    assert space.chunks.extents(chunks)["offset"].tolist() == [0, 64]
    assert space.stats()["used_bytes"] == 128


def test_the_rest_of_a_grant_stays_with_its_holder() -> None:
    space = Space(64 * PAGE)
    space.reserve(ALICE, OPEN, [sizes(2 * PAGE)])
    space.commit(ALICE, [(128, 64)], OPEN)
    assert space.stats()["granted_bytes"] == 2 * PAGE - 64
    space.commit(ALICE, [(0, 128)], CONTINUE)
    space.commit(ALICE, [(192, 2 * PAGE - 192)], OPEN)
    assert space.stats()["granted_bytes"] == 0
    assert space.stats()["classes"]["continue"]["used_bytes"] == 128


def test_touching_extents_of_one_holder_may_be_given_back_as_one() -> None:
    space = Space(64 * PAGE)
    space.reserve(ALICE, OPEN, [sizes(2 * PAGE)])
    space.reserve(ALICE, CONTINUE, [sizes(2 * PAGE)])
    space.give_back(ALICE, np.array([(PAGE, 3 * PAGE), (0, 0)], EXTENT))
    assert space.holders() == [(ALICE, PAGE, 0)]
    space.forget(ALICE)
    assert space.stats()["free_bytes"] == 64 * PAGE


def test_a_pin_keeps_bytes_until_it_goes_and_goes_once() -> None:
    space = Space(64 * PAGE)
    chunks = write(space, ALICE, PAGE, PAGE)
    first, second = space.pin(BOB, chunks[[0, 0, 1]]), space.pin(BOB, chunks[:1])
    assert second != first != 0
    assert space.release(chunks) == 0
    assert space.stats()["pinned_bytes"] == 2 * PAGE
    assert space.unpin(BOB, [first, first, 99]) == PAGE
    assert space.unpin(BOB, [first]) == 0
    assert list(space.pinned(BOB)) == [second]
    assert space.unpin(ALICE, [second]) == 0
    assert space.unpin(BOB, [second]) == PAGE
    assert space.pin(BOB, chunks[:0]) == 0
    with pytest.raises(RowsGone):
        space.pin(BOB, chunks)


def test_a_lost_holder_keeps_what_it_had_until_its_processes_are_gone() -> None:
    space = Space(64 * PAGE)
    chunks = write(space, BOB, PAGE)
    space.reserve(ALICE, OPEN, [sizes(3 * PAGE)])
    space.pin(ALICE, chunks)
    space.release(chunks)
    space.disown(ALICE)
    stats = space.stats()
    assert stats["quarantined_bytes"] == 4 * PAGE
    assert stats["granted_bytes"] == 3 * PAGE
    assert space.alive(chunks).all()
    assert space.holders() == [(ALICE, 3 * PAGE, PAGE)]
    assert space.forget(ALICE) == 4 * PAGE
    assert space.forget(ALICE) == 0
    assert space.stats()["free_bytes"] == 64 * PAGE
    assert space.holders() == []
    space.give_back(ALICE, np.array([(0, PAGE)], EXTENT))


def test_shared_chunks_live_as_long_as_any_row_that_names_them() -> None:
    space = Space(64 * PAGE)
    image = write(space, ALICE, 10 * PAGE)
    space.hold(image[[0] * 7])
    assert space.release(image[[0] * 7]) == 0
    assert space.release(image) == 10 * PAGE


def test_stats_say_what_waste_the_metadata_knows_of() -> None:
    space = Space(4 * PAGE)
    space.waste_bytes = lambda: 12
    assert space.stats()["waste_bytes"] == 12
    assert "free" in repr(space)
    assert np.zeros(0, U8).dtype == space.pinned(ALICE).get(1, np.zeros(0, U8)).dtype


def test_a_long_put_goes_to_pages_that_were_used_before_though_in_pieces() -> None:
    space = Space(256 << 20, shares=(1.0, 0.0, 0.0))
    hole, rows = 40 << 20, [sizes(1 << 20)] * 60
    for chunks in [write(space, ALICE, hole), write(space, BOB, PAGE), write(space, ALICE, hole)]:
        if space.chunks.extents(chunks)["length"][0] == hole:
            space.release(chunks)
    touched = space.high_water
    count, extents = space.reserve(ALICE, OPEN, rows)
    assert (count, len(extents), space.high_water) == (60, 2, touched)
    assert space.reserve(ALICE, OPEN, rows)[0] == 60  # what is left of them is too little for these
    assert space.high_water > touched


def test_a_value_longer_than_any_stretch_used_before_stays_whole() -> None:
    space = Space(256 << 20, shares=(1.0, 0.0, 0.0))
    chunks = write(space, ALICE, 40 << 20)
    write(space, BOB, PAGE)
    space.release(chunks)
    count, extents = space.reserve(ALICE, OPEN, [sizes(60 << 20), sizes(1 << 20)])
    assert (count, extents["length"].tolist()) == (2, [60 << 20, 1 << 20])


def test_a_group_of_some_mebibytes_and_what_is_granted_ahead_go_to_such_pages_too() -> None:
    """Each put took one stretch for its group, and its answer one for the next: where all that were
    used before were a little shorter, the arena was touched up to its end."""
    space = Space(256 << 20)
    holes = [write(space, ALICE, 3 << 20, *[1 << 20] * 2)[:1] for _ in range(8)]
    touched = space.high_water
    for hole in holes:
        space.release(hole)
    group = sizes(*[500 << 10] * 16)
    count, extents = space.reserve(BOB, OPEN, [group])
    assert (count, len(extents), space.high_water) == (1, 3, touched)
    assert fitting(group, extents) == 16
    for _ in range(5):
        ahead = space.grant(BOB, OPEN, 8 << 20)
        assert (ahead["length"].tolist(), space.high_water) == ([3 << 20], touched)
    space.grant(BOB, OPEN, 1 << 20)
    ahead = space.grant(BOB, OPEN, 8 << 20)
    assert ahead["length"].tolist() == [8 << 20]
    assert space.high_water > touched, "there are no more"


def test_a_client_has_a_bounded_number_of_separate_stretches() -> None:
    space, most = Space(8192 * PAGE), MAX_EXTENTS_PER_SESSION
    (start,) = space.reserve(ALICE, OPEN, [sizes(128 * (most + 1))])[1]["offset"].tolist()
    every_other = start + 128 * np.arange(most + 1)
    pieces = written(every_other, np.full(most + 1, 64))
    before = space.stats()
    with pytest.raises(LimitExceeded, match=f"the limit of {most}"):
        space.commit(ALICE, pieces.tolist(), OPEN)
    with pytest.raises(LimitExceeded, match=f"the limit of {most}"):
        space.give_back(ALICE, pieces)
    assert space.stats() == before
    space.commit(ALICE, pieces[:-1].tolist(), OPEN)
    with pytest.raises(LimitExceeded):
        space.check_extents(ALICE)
    space.commit(ALICE, written(every_other[:2048] + 64, np.full(2048, 64)).tolist(), OPEN)
    space.check_extents(ALICE)  # whole extents were committed


def test_the_peer_itself_may_have_more_stretches_than_a_client() -> None:
    space, most = Space(8192 * PAGE), MAX_EXTENTS_PER_SESSION
    (start,) = space.reserve(PULLER, PULL, [sizes(128 * (most + 1))])[1]["offset"].tolist()
    pieces = written(start + 128 * np.arange(most + 1), np.full(most + 1, 64))
    space.commit(PULLER, pieces.tolist(), PULL)
    space.check_extents(PULLER)
