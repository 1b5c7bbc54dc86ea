"""Device arenas behind a host arena, over the twin: one table of chunks, one address space."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dataplane.errors import ProtocolError, RowsGone, ValueTooLarge
from dataplane.gpu.host_memory import DeviceArena, HostMemory
from dataplane.memory.admission import Admission
from dataplane.memory.chunks import Chunks
from dataplane.memory.space import Space
from dataplane.memory.spill import DISK, Spilled
from dataplane.wire.packed import EXTENT
from dataplane_twin import TwinDevice
from tests.twin.conformance import MIB, Child

HOST, SIZE = 8 * MIB, 16 * MIB
A, B, PEER = 1, 2, 0
ALL_TO_ONE = (1.0, 0.0, 0.0)


def unit(*sizes: int) -> list[np.ndarray]:
    return [np.array(sizes, np.uint64)]


@pytest.fixture
def devices() -> Iterator[list[TwinDevice]]:
    devices = [TwinDevice("twin:0"), TwinDevice("twin:1")]
    yield devices
    for device in devices:
        device.close()


@pytest.fixture
def memory(devices: list[TwinDevice]) -> Iterator[HostMemory]:
    """A host with 8 MiB, and 16 on each of two devices."""
    memory = HostMemory(HOST, ALL_TO_ONE)
    for device in devices:
        memory.add_device(device, SIZE, ALL_TO_ONE)
    yield memory
    memory.close()


def put(memory: HostMemory, number: int, nbytes: int, holder: int = A) -> np.ndarray:
    """Return a chunk with one reference. number: of the device; 0: in the host arena."""
    space = memory.devices[number - 1].space if number else memory
    count, extents = space.reserve(holder, Admission.OPEN, unit(nbytes))
    assert count == 1
    return memory.commit(holder, extents.tolist(), Admission.OPEN)


def free_bytes(memory: HostMemory) -> list[int]:
    return [memory.figures()["free_bytes"], *(f["free_bytes"] for f in memory.device_figures())]


def test_addresses_of_the_devices_follow_the_arena_s(memory: HostMemory) -> None:
    places = [int(memory.chunks.extents(put(memory, n, MIB))["offset"][0]) for n in (0, 1, 2)]
    assert places == [0, HOST, HOST + SIZE]
    assert free_bytes(memory) == [HOST - MIB, SIZE - MIB, SIZE - MIB]


def test_what_lies_in_several_memories_is_committed_held_and_freed_together(
    memory: HostMemory,
) -> None:
    spaces = [memory, *(arena.space for arena in memory.devices)]
    extents = np.concatenate([s.reserve(A, Admission.OPEN, unit(MIB))[1] for s in spaces])
    mixed = extents[[2, 0, 1]]
    chunks = memory.commit(A, mixed.tolist(), Admission.OPEN)
    memory.hold(chunks[1:2])
    assert memory.on_device(chunks).tolist() == [2, 0, 1]
    assert np.array_equal(memory.chunks.extents(chunks), mixed)
    pin = memory.pin(B, chunks[1:2])
    assert memory.release(chunks) == 2 * MIB and free_bytes(memory)[0] == HOST - MIB
    memory.release(chunks[1:2])
    memory.unpin(B, [pin])
    assert free_bytes(memory) == [HOST, SIZE, SIZE]


def test_a_commit_that_fails_for_one_memory_changes_none(memory: HostMemory) -> None:
    granted = memory.devices[0].space.reserve(A, Admission.OPEN, unit(MIB))[1]
    for wrong in ((0, MIB), (HOST + SIZE, MIB), (HOST + 2 * SIZE, 64), (2**63, 64)):
        both = np.concatenate([granted, np.array([wrong], EXTENT)])
        with pytest.raises(ProtocolError):
            memory.commit(A, both.tolist(), Admission.OPEN)
        memory.forget(A)
        assert free_bytes(memory) == [HOST, SIZE, SIZE]
        granted = memory.devices[0].space.reserve(A, Admission.OPEN, unit(MIB))[1]


def test_only_who_opened_a_device_reads_it_in_place(memory: HostMemory) -> None:
    chunks = np.concatenate([put(memory, n, MIB) for n in (0, 1, 2)])
    assert memory.away(chunks).tolist() == [False, True, True]
    memory.reads_in_place(B, [2])
    assert memory.away(chunks, B).tolist() == [False, True, False]
    assert memory.away(chunks, A).tolist() == [False, True, True]
    memory.spill = Spilled(MIB, memory.chunks)
    assert memory.away(chunks, B).tolist() == [False, True, False]
    memory.forget(B)
    assert memory.away(chunks, B).all(where=[False, True, True])
    memory.release(chunks)
    assert not memory.away(chunks).any(), "the dead are nowhere"


def test_a_client_that_is_gone_leaves_every_memory_exact(memory: HostMemory) -> None:
    memory.reads_in_place(B, [1])
    chunks = put(memory, 1, MIB)
    memory.pin(B, chunks)
    memory.devices[0].space.reserve(B, Admission.OPEN, unit(2 * MIB))
    memory.devices[1].space.reserve(B, Admission.OPEN, unit(3 * MIB))
    memory.release(chunks)
    assert memory.holds(B)
    memory.disown(B)
    assert [f["quarantined_bytes"] for f in memory.device_figures()] == [2 * MIB, 3 * MIB]
    assert memory.device_figures()[0]["pinned_bytes"] == MIB
    assert memory.figures()["pinned_bytes"] == 0
    assert memory.forget(B) == 6 * MIB and not memory.holds(B)
    assert free_bytes(memory) == [HOST, SIZE, SIZE]
    with pytest.raises(RowsGone):
        memory.pin(A, chunks)


def test_grants_come_back_to_the_memory_that_they_are_of(memory: HostMemory) -> None:
    spaces = [memory, *(arena.space for arena in memory.devices)]
    extents = np.concatenate([s.reserve(A, Admission.OPEN, unit(MIB))[1] for s in spaces])
    memory.give_back(A, extents[1:2])
    assert free_bytes(memory) == [HOST - MIB, SIZE, SIZE - MIB]
    memory.forget(A)
    assert free_bytes(memory) == [HOST, SIZE, SIZE]


def test_room_ahead_is_granted_on_a_device_while_half_of_it_is_free(memory: HostMemory) -> None:
    space = memory.devices[1].space
    granted = [space.grant(A, Admission.OPEN, 4 * MIB).tolist() for _ in range(3)]
    assert granted == [[(HOST + SIZE, 4 * MIB)], [(HOST + SIZE + 4 * MIB, 4 * MIB)], []]
    assert not len(space.grant(A, Admission.OPEN, -MIB))
    memory.give_back(A, np.array(granted[0], EXTENT))
    assert memory.forget(A) == 4 * MIB and free_bytes(memory) == [HOST, SIZE, SIZE]


def test_classes_have_their_shares_of_a_device_too(devices: list[TwinDevice]) -> None:
    arena = DeviceArena(devices[0], Space(SIZE, (0.5, 0.5, 0.0), Chunks(), HOST, 1))
    assert arena.space.reserve(A, Admission.OPEN, unit(SIZE // 2))[0] == 1
    assert arena.space.reserve(A, Admission.OPEN, unit(MIB))[0] == 0
    assert arena.space.reserve(A, Admission.CONTINUE, unit(MIB))[0] == 1
    with pytest.raises(ValueTooLarge):
        arena.space.reserve(A, Admission.OPEN, unit(SIZE))
    arena.close()


def test_host_copies_of_a_value_that_was_freed_go_with_it(memory: HostMemory) -> None:
    chunks = put(memory, 1, MIB)
    copy = put(memory, 0, MIB, PEER)
    memory.copies.insert(DISK, chunks, copy)
    assert memory.figures()["cached_bytes"] == MIB
    assert memory.release(chunks) == 2 * MIB
    assert free_bytes(memory) == [HOST, SIZE, SIZE]


def test_values_that_another_process_wrote_are_fetched_to_host_memory(memory: HostMemory) -> None:
    arena = memory.devices[0]
    out = np.zeros(3 * MIB, np.uint8)
    with Child(arena.device) as child:
        extents = arena.space.reserve(A, Admission.OPEN, unit(MIB, 2 * MIB))[1]
        at, nbytes = (int(x) for x in extents[0].tolist())
        child.write(arena.handle, at - HOST, nbytes, value=9)
        child.finish()
    pieces = np.array([(at, MIB), (at + MIB, 2 * MIB)], EXTENT)
    chunks = memory.commit(A, pieces.tolist(), Admission.OPEN)
    first = out.ctypes.data
    found = memory.chunks.extents(chunks)
    targets = np.array([first + 2 * MIB, first], np.uint64)
    arena.fetch(found["offset"], found["length"], targets)
    assert (out == 9).all() and arena.figures()["staged_bytes"] == 3 * MIB
    assert found.dtype == EXTENT and chunks.dtype == np.uint64
