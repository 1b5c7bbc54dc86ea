"""Threads that move spilled bytes: nobody lets go of the memory under them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import RowsGone, TransferFailed
from dataplane.memory.space import Space
from dataplane.memory.spill import Move
from dataplane.peer.room.admission import Room
from dataplane.peer.room.spilling import Spilling
from dataplane.peer.tasks import Threads
from dataplane.transport.bulk_frames import PinAsked, Unpin, encode
from dataplane.transport.link import Traffic, WorkerLink
from dataplane.wire.packed import U8
from tests.memory.test_spilled import PAGE, put


class SlowFile:
    """Reads when it is told to."""

    path = Path("slow")

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.failure: OSError | None = None

    def read(self, *args: Any) -> None:
        self.begun.set()
        assert self.go_on.wait(20)
        if self.failure is not None:
            raise self.failure

    def write(self, *args: Any) -> None:
        if self.failure is not None:
            raise self.failure

    def clear(self, *args: Any) -> None:
        """It keeps nothing."""

    def empty(self) -> None:
        """Likewise."""


def spilled(file: SlowFile) -> tuple[Spilling, np.ndarray]:
    """A peer's part that spills, and a chunk that is in the file."""
    host: Any = SimpleNamespace(space=Space(64 * PAGE), threads=Threads())
    mesh: Any = SimpleNamespace(spawn=lambda work: asyncio.ensure_future(work))
    part: Any = file
    room = Room(host, mesh)
    made = Spilling(host, mesh, room, part, 64 * PAGE)
    chunks = put(host.space, PAGE)
    move = host.space.choose_spill(PAGE)
    assert isinstance(move, Move) and host.space.settle_spill(move) == PAGE
    return made, chunks


async def test_a_cancelled_read_ends_with_its_thread_and_frees_what_died_meanwhile() -> None:
    file = SlowFile()
    spilling, chunks = spilled(file)
    space = spilling.host.space
    reading = asyncio.ensure_future(spilling.read(chunks, np.zeros(1, U8)))
    await asyncio.to_thread(file.begun.wait, 20)
    space.release(chunks)
    reading.cancel()
    await asyncio.wait([reading], timeout=0.05)
    reading.cancel()
    await asyncio.wait([reading], timeout=0.05)
    assert not reading.done() and space.alive(chunks).all()
    file.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not space.alive(chunks).any()
    with pytest.raises(RowsGone):
        await spilling.read(chunks, np.zeros(1, U8))


async def test_a_disk_that_fails_is_told_and_nothing_is_lost() -> None:
    file = SlowFile()
    spilling, chunks = spilled(file)
    file.failure = OSError(5, "Input/output error")
    file.go_on.set()
    with pytest.raises(TransferFailed, match="from the spill file slow: .*Input/output"):
        await spilling.read(chunks, np.zeros(1, U8))
    file.failure = None
    await spilling.read(chunks, np.zeros(1, U8))
    assert spilling.host.space.chunks.refs(chunks).tolist() == [1]


async def test_a_disk_that_was_full_for_a_while_takes_as_much_as_before() -> None:
    file = SlowFile()
    spilling, _ = spilled(file)
    spilling.spill.on_left = lambda: None  # cleared here, and not beside
    put(spilling.host.space, *[PAGE] * 16)
    file.failure = OSError(28, "No space left on device")
    for _ in range(64):
        assert not await spilling._spill()
        if spilling.spill.has_left:
            await spilling._clear()
    file.failure = None
    assert await spilling._spill()


class Pins:
    """What a worker asks to pin, answered when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.held: set[int] = set()
        self.sent: list[bytes] = []

    def pin(self, chunks: np.ndarray) -> Awaitable[tuple[int, np.ndarray]]:
        return self._pin(chunks)

    async def _pin(self, chunks: np.ndarray) -> tuple[int, np.ndarray]:
        await self.go_on.wait()
        self.held.add(7)
        return 7, np.zeros(len(chunks), [("offset", "<u8"), ("length", "<u8")])

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def is_closing(self) -> bool:
        return False


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_bulk_worker_that_gives_up_while_values_are_read_back_holds_nothing(
    gives_up: bool,
) -> None:
    pins: Any = Pins()
    link = WorkerLink("a", pins.pin, pins.held.discard, Traffic())
    link.connection_made(pins)
    link.data_received(bytes(encode(PinAsked(1, np.zeros(2, U8).tobytes()))))
    await settled()
    assert not pins.sent
    if gives_up:
        link.data_received(bytes(encode(Unpin(1, 0))))
        await settled()
    pins.go_on.set()
    await settled()
    assert len(pins.sent) == link.pins == len(pins.held) == (0 if gives_up else 1)
    link.data_received(bytes(encode(Unpin(1, 0))))
    assert not pins.held and link.pins == 0
