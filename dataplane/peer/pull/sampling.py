"""Tries the transports between this peer and another, on bytes that both know.

The owner lends a range of its arena, or of its first device, for a while; the reader brings it into
room of its own, there or on a device, as it brings values, and compares every byte. Nothing of it
is kept.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError
from dataplane.launch.values import TransportChoice
from dataplane.memory.admission import Admission
from dataplane.memory.host_memory import DeviceArena, HostMemory
from dataplane.memory.placement import place, remainder
from dataplane.peer.host import Caller, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.room.admission import Room
from dataplane.peer.threads import Threads
from dataplane.transport.bulk_frames import COPY
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import TCP
from dataplane.transport.seam import Remote
from dataplane.version import __version__
from dataplane.wire.messages import Body, Done
from dataplane.wire.peering import Sample, Sampled
from dataplane.wire.records import EXTENT, U4, U8

log = logging.getLogger(__name__)

PULLER = 0
ARENA, DEVICE = 0, 1
"""The memories that lend: the host arena, and the first device."""
SAMPLE_BYTES = 4 << 20
SMALL_BYTES = 64
ROUNDS = 3
REPEATS = 8
"""How often a sample is read at once for a rate: alone it would measure the exchanges before it."""
TRY_S = 5.0
LENT_S = 30.0

Bytes = npt.NDArray[np.uint8]
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


class _Lent:
    """One range of known bytes that others read, or none. release: of one that nobody reads."""

    def __init__(self, release: Callable[[Records], object]) -> None:
        self.range: Records | None = None
        self.seed = 0
        self._release = release
        self._readers: set[str] = set()
        self._ends: asyncio.TimerHandle | None = None

    def to(self, reader: str) -> None:
        """This peer reads it, for LENT_S at most."""
        self._readers.add(reader)
        if self._ends is not None:
            self._ends.cancel()
        self._ends = asyncio.get_running_loop().call_later(LENT_S, self._take_back)

    def done(self, reader: str) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self._take_back()

    def _take_back(self) -> None:
        self._readers.clear()
        self.close()
        lent, self.range = self.range, None
        if lent is not None:
            self._release(lent)

    def close(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None


class Sampling:
    """Memories go by number: 0 is the host arena, 1 the first device."""

    def __init__(self, host: Host, mesh: Mesh, room: Room, choice: TransportChoice) -> None:
        self.host = host
        self.mesh = mesh
        self.room = room
        self.choice = choice
        self.engine: BulkEngine | None = None
        self._lent = {number: _Lent(self._release) for number in (ARENA, DEVICE)}
        self._writing = asyncio.Lock()
        self._threads = Threads()
        mesh.handlers[Sample] = self._asked

    def _size_bytes(self, number: int) -> int:
        """A small part of that memory, so that lending it is not felt; 0 where there is none."""
        if number >= len(self._rooms):
            return 0
        return min(SAMPLE_BYTES, self._rooms[number].space.size_bytes // 64 & ~0xFFF)

    @property
    def _rooms(self) -> list[Room]:
        return [self.room, *self.room.beside]

    # the owner

    async def _asked(self, caller: Caller, body: Sample) -> Body:
        number = DEVICE if body.device else ARENA
        lent, engine = self._lent[number], self.engine
        if body.done:
            lent.done(caller.address)
            return Done()
        nbytes = self._size_bytes(number)
        async with self._writing:
            if lent.range is None and nbytes:
                lent.seed = secrets.randbits(31)
                lent.range = await self._written(number, pattern(lent.seed, nbytes))
        lent.to(caller.address)
        known = lent.range
        return Sampled(
            range=0 if known is None else int(known[0]["range"]),
            generation=0 if known is None else int(known[0]["generation"]),
            nbytes=0 if known is None else nbytes,
            seed=lent.seed,
            transport=engine.transport if engine else TCP,
            missing=engine.missing if engine else "",
            requested=str(self.choice),
            version=__version__,
            arena_bytes=self.host.space.size_bytes,
            wall_ns=time.time_ns(),
        )

    async def _written(self, number: int, known: Bytes) -> Records | None:
        """A range of these bytes with one reference, ours; None where there is no room at once."""
        reserved = self._reserved(number, len(known))
        if reserved is None:
            return None
        dest, extents = reserved
        space = self.host.space
        try:
            await self._write(number, dest, known)
            written = np.array([(dest, len(known))], EXTENT)
            lent = space.commit(PULLER, written, np.ones(1, U4), Admission.PULL)
        except BaseException:
            space.give_back(PULLER, extents)
            raise
        space.give_back(PULLER, remainder(written["length"], written["offset"], extents))
        return lent

    def _reserved(self, number: int, nbytes: int) -> tuple[int, Records] | None:
        """Where a sample has room now, and the extents to give back."""
        sizes = np.array([nbytes], U8)
        granted = self._rooms[number].at_once(PULLER, Admission.PULL, [sizes])
        return None if granted is None else (int(place(sizes, granted[1])[0]), granted[1])

    async def _write(self, number: int, dest: int, data: Bytes) -> None:
        if number:
            await self._threads.run(self._device(number).write, dest, data)
        else:
            self.host.arena.view[dest : dest + len(data)] = data.data

    async def _read(self, number: int, dest: int, into: Bytes) -> None:
        if number:
            await self._threads.run(self._device(number).read, dest, into)
        else:
            into[:] = np.frombuffer(self.host.arena.view[dest : dest + len(into)], np.uint8)

    def _device(self, number: int) -> DeviceArena:
        assert isinstance(self.host.space, HostMemory)
        return self.host.space.devices[number - 1]

    def _release(self, lent: Records) -> None:
        if self.host.space.release(lent):
            self.room.pump()

    async def close(self) -> None:
        """When nothing is asked of it any more: its copies have ended."""
        for lent in self._lent.values():
            lent.close()
        await self._threads.ended()

    # the reader

    async def done(self, address: str, device: bool = False) -> None:
        """The peer there may have its bytes back; at the latest it has them in LENT_S."""
        with suppress(DataplaneError):
            await self.mesh.call(address, Sample(done=True, device=device), timeout_s=TRY_S)

    async def ask(self, address: str) -> tuple[Sampled, float]:
        """What the peer there lends, and how far its clock is ahead of this one's, in seconds."""
        await self.mesh.call(address, Sample(), timeout_s=TRY_S)  # which may take its time
        before = time.time_ns()
        sampled: Sampled = await self.mesh.call(address, Sample(), timeout_s=TRY_S)
        middle = (before + time.time_ns()) / 2
        return sampled, (sampled.wall_ns - middle) / 1e9

    async def try_all(
        self,
        engine: BulkEngine,
        source: Remote,
        sampled: Sampled,
        transports: Iterable[str],
        number: int = ARENA,
        rounds: int = ROUNDS,
    ) -> dict[str, Trial]:
        """Each transport in turn, a few rounds, to the memory of this number. Empty where there is
        no room for it."""
        nbytes = min(sampled.nbytes, self._size_bytes(number))
        reserved = self._reserved(number, nbytes) if nbytes else None
        if reserved is None:
            return {}
        dest, extents = reserved
        expected = pattern(sampled.seed, nbytes)
        trials = {name: Trial() for name in transports}
        found = np.empty(nbytes, np.uint8)

        async def timed(name: str, nbytes: int, times: int) -> float:
            return await _timed(engine, source, sampled, name, dest, nbytes, times)

        try:
            for _ in range(rounds):
                for name, trial in trials.items():
                    if trial.error:
                        continue
                    try:
                        await self._write(number, dest, np.zeros(nbytes, np.uint8))
                        small_s = await timed(name, SMALL_BYTES, 1)
                        whole_s = await timed(name, nbytes, REPEATS)
                        await self._read(number, dest, found)
                    except DataplaneError as exc:
                        trial.error = exc.message
                        continue
                    if np.array_equal(found, expected):
                        trial.note(small_s, REPEATS * nbytes, whole_s)
                    else:
                        trial.error = "the bytes that arrived are not those that were sent"
                        log.error("transport %s from %s: %s", name, source.owner.peer, trial.error)
        finally:
            self.host.space.give_back(PULLER, extents)
        return trials


async def _timed(
    engine: BulkEngine,
    source: Remote,
    sampled: Sampled,
    name: str,
    dest: int,
    nbytes: int,
    times: int,
) -> float:
    """Seconds that so many bytes of a sample take, read so many times at once. DataplaneError."""
    copies = np.zeros(times, COPY)
    copies["range"], copies["generation"] = sampled.range, sampled.generation
    copies["nbytes"], copies["dest"] = nbytes, dest
    began = time.perf_counter()
    outcome = await engine.read(source, copies, TRY_S, name)
    if outcome.gone.any():
        raise DataplaneError("the sample was gone before it could be read: try again")
    return time.perf_counter() - began


def pattern(seed: int, nbytes: int) -> Bytes:
    """The bytes of a sample, see `Sampled`."""
    index = np.arange(nbytes, dtype=np.uint32)
    mixed = index * np.uint32(167) + np.uint32(seed)
    mixed ^= index >> np.uint32(8)
    mixed ^= index >> np.uint32(16)
    return mixed.astype(np.uint8)
