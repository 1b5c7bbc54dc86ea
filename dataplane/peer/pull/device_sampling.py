"""Tries the ways between a device here and one of another peer, on bytes that both know.

As `sampling` does for host memory: the owner lends a range of its first device, and the reader
brings it to a device of its own, as it brings values, and compares every byte.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError
from dataplane.memory.admission import Admission
from dataplane.memory.device_arena import DeviceArena
from dataplane.memory.host_memory import HostMemory
from dataplane.memory.placement import place
from dataplane.peer.pull.lent import Lent, pattern
from dataplane.peer.pull.sampling import PULLER, REPEATS, SAMPLE_BYTES, SMALL_BYTES, Trial, timed
from dataplane.peer.room.admission import Room
from dataplane.peer.threads import Threads
from dataplane.transport.engine import BulkEngine
from dataplane.transport.seam import Remote
from dataplane.wire.records import EXTENT, U4, U8
from dataplane.wire.sampling import Sampled

log = logging.getLogger(__name__)

FIRST = 1
"""The device that lends."""
Records = npt.NDArray[Any]


class DeviceSampling:
    """Of a peer with devices. rooms: theirs, in order."""

    def __init__(self, memory: HostMemory, rooms: Callable[[], list[Room]]) -> None:
        self._memory = memory
        self._rooms = rooms
        self._writing = asyncio.Lock()
        self._threads = Threads()
        self.lent = Lent(self._release)

    def _size_bytes(self, number: int) -> int:
        """A small part of the device arena, so that lending it is not felt."""
        return min(SAMPLE_BYTES, self._arena(number).space.size_bytes // 64 & ~0xFFF)

    def _arena(self, number: int) -> DeviceArena:
        return self._memory.devices[number - 1]

    # the owner

    async def lend(self, reader: str) -> int:
        """The range is in `lent`; its bytes, if there was room."""
        nbytes = self._size_bytes(FIRST)
        async with self._writing:
            if self.lent.range is None:
                self.lent.range = await self._written(nbytes)
        self.lent.to(reader)
        return nbytes

    async def _written(self, nbytes: int) -> Records | None:
        reserved = self._reserved(FIRST, nbytes)
        if reserved is None:
            return None
        dest, extents = reserved
        known = pattern(self.lent.new_seed(), nbytes)
        try:
            await self._threads.run(self._arena(FIRST).write, dest, known)
            written = np.array([(dest, nbytes)], EXTENT)
            lent = self._memory.commit(PULLER, written, np.ones(1, U4), Admission.PULL)
        except BaseException:
            self._memory.give_back(PULLER, extents)
            raise
        end = int(extents[-1]["offset"] + extents[-1]["length"])
        if dest + nbytes < end:
            rest = np.array([(dest + nbytes, end - dest - nbytes)], EXTENT)
            self._memory.give_back(PULLER, rest)
        return lent

    async def close(self) -> None:
        """When nothing is asked of it any more: its copies have ended."""
        self.lent.close()
        await self._threads.ended()

    def _release(self, lent: Records) -> None:
        if self._memory.release(lent):
            for room in self._rooms():
                room.pump()

    def _reserved(self, number: int, nbytes: int) -> tuple[int, Records] | None:
        sizes = np.array([nbytes], U8)
        granted = self._rooms()[number - 1].at_once(PULLER, Admission.PULL, [sizes])
        return None if granted is None else (int(place(sizes, granted[1])[0]), granted[1])

    # the reader

    async def try_all(
        self,
        engine: BulkEngine,
        source: Remote,
        sampled: Sampled,
        number: int,
        trials: dict[str, Trial],
        rounds: int,
    ) -> bool:
        """Each transport in turn, to the device of this number. False where it has no room."""
        nbytes = min(sampled.nbytes, self._size_bytes(number))
        reserved = self._reserved(number, nbytes) if nbytes else None
        if reserved is None:
            return False
        expected = pattern(sampled.seed, nbytes)
        try:
            for _ in range(rounds):
                for name, trial in trials.items():
                    if not trial.error:
                        at = number, reserved[0]
                        await self._try(engine, source, sampled, name, trial, at, expected)
        finally:
            self._memory.give_back(PULLER, reserved[1])
        return True

    async def _try(
        self,
        engine: BulkEngine,
        source: Remote,
        sampled: Sampled,
        name: str,
        trial: Trial,
        at: tuple[int, int],
        expected: npt.NDArray[np.uint8],
    ) -> None:
        arena, dest, nbytes = self._arena(at[0]), at[1], len(expected)
        found = np.zeros(nbytes, np.uint8)
        try:
            await self._threads.run(arena.write, dest, found)
            small = await timed(engine, source, sampled, name, dest, SMALL_BYTES, 1)
            whole = await timed(engine, source, sampled, name, dest, nbytes, REPEATS)
            await self._threads.run(arena.read, dest, found)
        except DataplaneError as exc:
            trial.error = exc.message
            return
        if not np.array_equal(found, expected):
            trial.error = "the bytes that arrived are not those that were sent"
            log.error("transport %s between devices, %s: %s", name, source.owner.peer, trial.error)
            return
        trial.note(small, REPEATS * nbytes, whole)
