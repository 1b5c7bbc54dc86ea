"""Tries the transports between this peer and another, on bytes that both know.

The owner keeps some in its arena, or on its first device, as it keeps copies of others' values:
they go when room is needed. The reader brings them into room of its own, there or on a device, as
it brings values, and compares every byte. It keeps nothing of them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, Unavailable
from dataplane.launch.values import TransportChoice
from dataplane.memory.admission import Admission
from dataplane.memory.extents import Bytes
from dataplane.memory.host_memory import DeviceArena, HostMemory
from dataplane.memory.space import Space
from dataplane.peer.host import Caller, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.room.admission import PULLER, Room
from dataplane.peer.tasks import Threads
from dataplane.transport.bulk_frames import COPY
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import TCP
from dataplane.transport.seam import Remote
from dataplane.version import __version__
from dataplane.wire.messages import Body
from dataplane.wire.peering import Sample, Sampled
from dataplane.wire.records import RANGE, U4, U8

log = logging.getLogger(__name__)

ARENA, DEVICE = 0, 1
"""The memories that lend: the host arena, and the first device."""
SAMPLE_BYTES = 4 << 20
SMALL_BYTES = 64
ROUNDS = 3
REPEATS = 8
"""How often a sample is read at once for a rate: alone it would measure the exchanges before it."""
TRY_S = 5.0
KNOWN = 1 << 60
"""Stands for the incarnation of the owner of such copies; no process has it."""

Records = npt.NDArray[Any]


@dataclass(slots=True)
class Trial:
    """What one transport did: the best of a few rounds. error: why it does not work."""

    GBps: float = 0.0
    latency_us: float = float("inf")
    exact: bool = False
    error: str = ""

    def note(self, latency_s: float, nbytes: int, seconds: float) -> None:
        """A round whose bytes arrived as they were sent."""
        self.exact = True
        self.latency_us = min(self.latency_us, latency_s * 1e6)
        self.GBps = max(self.GBps, nbytes / seconds / 1e9)

    def shown(self) -> dict[str, Any]:
        if self.error:
            return {"exact": False, "error": self.error}
        latency_us = round(self.latency_us, 1)
        return {"exact": self.exact, "GBps": round(self.GBps, 3), "latency_us": latency_us}


class Sampling:
    """Memories go by number: 0 is the host arena, 1 the first device."""

    def __init__(self, host: Host, mesh: Mesh, room: Room, choice: TransportChoice) -> None:
        self.host = host
        self.mesh = mesh
        self.room = room
        self.choice = choice
        self.engine: BulkEngine | None = None
        self._seed = secrets.randbits(31)
        self._writing = asyncio.Lock()
        self._trying = asyncio.Lock()
        self._threads = Threads()
        mesh.handlers[Sample] = self._asked

    def _spaces(self) -> list[Space]:
        space = self.host.space
        devices = space.devices if isinstance(space, HostMemory) else []
        return [space, *(device.space for device in devices)]

    def _size_bytes(self, number: int) -> int:
        """A small part of that memory, so that lending it is not felt; 0 where there is none."""
        spaces = self._spaces()
        if number >= len(spaces):
            return 0
        return min(SAMPLE_BYTES, spaces[number].size_bytes // 64 & ~0xFFF)

    # the owner

    async def _asked(self, caller: Caller, body: Sample) -> Body:
        number, engine = DEVICE if body.device else ARENA, self.engine
        nbytes = self._size_bytes(number)
        async with self._writing:
            known = (await self._known(number, nbytes))[0]
        return Sampled(
            range=int(known["range"]),
            generation=int(known["generation"]),
            nbytes=nbytes if known["generation"] else 0,
            seed=self._seed,
            transport=engine.transport if engine else TCP,
            missing=engine.missing if engine else "",
            requested=str(self.choice),
            version=__version__,
            arena_bytes=self.host.space.size_bytes,
        )

    async def _known(self, number: int, nbytes: int) -> Records:
        """The RANGE of the known bytes, generation 0 where there is no room for them at once."""
        if not nbytes:
            return np.zeros(1, RANGE)
        copies, name = self._spaces()[number].copies, np.ones(1, RANGE)
        found = copies.lookup(KNOWN, name)
        extents = None if found[0]["generation"] else self._reserved(number, nbytes)
        if extents is not None:

            async def write(dest: Bytes) -> None:
                await self._write(number, dest.item(), pattern(self._seed, nbytes))

            sizes, once = np.array([nbytes], U8), np.ones(1, U4)
            found = await self.room.write(sizes, extents, write, once, Admission.PULL)
            copies.insert(KNOWN, name, found)
        return found

    def _reserved(self, number: int, nbytes: int) -> Records | None:
        """Where a sample has room now."""
        if number == ARENA and self.room.waiting(Admission.PULL):
            return None
        sizes = [np.array([nbytes], U8)]
        count, extents = self._spaces()[number].reserve(PULLER, Admission.PULL, sizes)
        return extents if count else None

    async def _write(self, number: int, dest: int, data: npt.NDArray[np.uint8]) -> None:
        if number:
            await self._threads.run(self._device(number).write, dest, data)
        else:
            self.host.arena.view[dest : dest + len(data)] = data.data

    async def _read(self, number: int, dest: int, into: npt.NDArray[np.uint8]) -> None:
        if number:
            await self._threads.run(self._device(number).read, dest, into)
        else:
            into[:] = np.frombuffer(self.host.arena.view[dest : dest + len(into)], np.uint8)

    def _device(self, number: int) -> DeviceArena:
        assert isinstance(self.host.space, HostMemory)
        return self.host.space.devices[number - 1]

    async def close(self) -> None:
        """When nothing is asked of it any more: its copies have ended."""
        await self._threads.ended()

    # the reader

    async def ask(self, address: str, device: bool) -> Sampled:
        """What the peer there keeps, and what it runs."""
        sampled: Sampled = await self.mesh.call(address, Sample(device), timeout_s=TRY_S)
        return sampled

    async def tried(
        self, sampled: Sampled, engine: BulkEngine, source: Remote, transport: str, number: int
    ) -> Trial | None:
        """One transport, a few rounds, to the memory of this number; never beside another trial.
        None where there is no room for it."""
        nbytes = min(sampled.nbytes, self._size_bytes(number))
        expected, found = pattern(sampled.seed, nbytes), np.empty(nbytes, np.uint8)
        trial = Trial()
        async with self._trying:
            extents = self._reserved(number, nbytes) if nbytes else None
            if extents is None:
                return None
            dest = int(extents["offset"][0])

            async def timed(nbytes: int, times: int) -> float:
                """Seconds that so many bytes of the sample take, read so many times at once."""
                copies = np.zeros(times, COPY)
                copies["range"], copies["generation"] = sampled.range, sampled.generation
                copies["nbytes"], copies["dest"] = nbytes, dest
                began = time.perf_counter()
                outcome = await engine.read(source, copies, TRY_S, transport)
                if outcome.gone.any():
                    raise Unavailable("the sample was gone before it could be read: try again")
                return time.perf_counter() - began

            try:
                for _ in range(ROUNDS):
                    await self._write(number, dest, np.zeros(nbytes, np.uint8))
                    small_s, whole_s = await timed(SMALL_BYTES, 1), await timed(nbytes, REPEATS)
                    await self._read(number, dest, found)
                    if not np.array_equal(found, expected):
                        trial.error = "the bytes that arrived are not those that were sent"
                        log.error("%s from %s: %s", transport, source.owner.peer, trial.error)
                        break
                    trial.note(small_s, REPEATS * nbytes, whole_s)
            except DataplaneError as exc:
                trial.error = exc.message
            finally:
                self.host.space.give_back(PULLER, extents)
        return trial


def pattern(seed: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of a sample, see `Sampled`."""
    index = np.arange(nbytes, dtype=np.uint32)
    mixed = index * np.uint32(167) + np.uint32(seed)
    mixed ^= index >> np.uint32(8)
    mixed ^= index >> np.uint32(16)
    return mixed.astype(np.uint8)
