"""Tries the transports between this peer and another, on bytes that both know.

The owner lends a range of its own arena for a while; the reader brings it into room of its own, as
it brings values, and compares every byte. Nothing of it is kept.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError
from dataplane.launch.transport import TransportChoice
from dataplane.memory.admission import Admission
from dataplane.memory.placement import place
from dataplane.peer.host import Caller, Host
from dataplane.peer.mesh import Mesh
from dataplane.peer.room import Room
from dataplane.transport.bulk_frames import COPY
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import TCP
from dataplane.transport.seam import Remote
from dataplane.wire.messages import Body, Done
from dataplane.wire.records import EXTENT, U4, U8
from dataplane.wire.sampling import Sample, Sampled

log = logging.getLogger(__name__)

PULLER = 0
SAMPLE_BYTES = 4 << 20
SMALL_BYTES = 64
LENT_S = 30.0
ROUNDS = 3
REPEATS = 8
"""How often a sample is read at once for a rate: alone it would measure the exchanges before it."""
TRY_S = 5.0


@dataclass(slots=True)
class Trial:
    """What one transport did: the best of a few rounds. error: why it does not work."""

    GBps: float = 0.0
    latency_us: float = float("inf")
    exact: bool = False
    error: str = ""

    def shown(self) -> dict[str, Any]:
        if self.error:
            return {"exact": False, "error": self.error}
        latency_us = round(self.latency_us, 1)
        return {"exact": self.exact, "GBps": round(self.GBps, 3), "latency_us": latency_us}


def pattern(seed: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of a sample, see `Sampled`."""
    index = np.arange(nbytes, dtype=np.uint32)
    mixed = index * np.uint32(167) + np.uint32(seed)
    mixed ^= index >> np.uint32(8)
    mixed ^= index >> np.uint32(16)
    return mixed.astype(np.uint8)


def own_version() -> str:
    try:
        return version_of("dataplane")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


class Sampling:
    def __init__(self, host: Host, mesh: Mesh, room: Room, choice: TransportChoice) -> None:
        self.host = host
        self.mesh = mesh
        self.room = room
        self.choice = choice
        self.engine: BulkEngine | None = None
        self._lent: npt.NDArray[Any] | None = None
        self._seed = 0
        self._readers: set[str] = set()
        self._ends: asyncio.TimerHandle | None = None
        mesh.handlers[Sample] = self._lend

    @property
    def size_bytes(self) -> int:
        """A small part of the arena, so that lending it is not felt."""
        return min(SAMPLE_BYTES, self.host.space.size_bytes // 64 & ~0xFFF)

    # the owner

    def _lend(self, caller: Caller, body: Sample) -> Body:
        if body.done:
            self._readers.discard(caller.address)
            if not self._readers:
                self._take_back()
            return Done()
        self._readers.add(caller.address)
        if self._lent is None:
            self._lent = self._written()
        lent, engine, size = self._lent, self.engine, self.size_bytes
        if self._ends is not None:
            self._ends.cancel()
        self._ends = asyncio.get_running_loop().call_later(LENT_S, self._take_back)
        return Sampled(
            range=0 if lent is None else int(lent[0]["range"]),
            generation=0 if lent is None else int(lent[0]["generation"]),
            nbytes=0 if lent is None else size,
            seed=self._seed,
            transport=engine.transport if engine else TCP,
            missing=engine.missing if engine else "",
            requested=str(self.choice),
            version=own_version(),
            arena_bytes=self.host.space.size_bytes,
            wall_ns=time.time_ns(),
        )

    def _written(self) -> npt.NDArray[Any] | None:
        """A range of known bytes with one reference, ours; None where there is no room at once."""
        place_at = self._reserved()
        if place_at is None:
            return None
        dest, extents = place_at
        size, self._seed = self.size_bytes, secrets.randbits(31)
        self.host.arena.view[dest : dest + size] = pattern(self._seed, size).data
        written = np.array([(dest, size)], EXTENT)
        lent = self.host.space.commit(PULLER, written, np.ones(1, U4), Admission.PULL)
        self._give_back_rest(dest + size, extents)
        return lent

    def _reserved(self) -> tuple[int, npt.NDArray[Any]] | None:
        sizes = np.array([self.size_bytes], U8)
        granted = self.room.at_once(PULLER, Admission.PULL, [sizes])
        if granted is None:
            return None
        return int(place(sizes, granted[1])[0]), granted[1]

    def _give_back_rest(self, used: int, extents: npt.NDArray[Any]) -> None:
        end = int(extents[-1]["offset"] + extents[-1]["length"])
        if used < end:
            self.host.space.give_back(PULLER, np.array([(used, end - used)], EXTENT))

    def _take_back(self) -> None:
        self._readers.clear()
        self.close()
        lent, self._lent = self._lent, None
        if lent is not None and self.host.space.release(lent):
            self.room.pump()

    def close(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None

    # the reader

    async def done(self, address: str) -> None:
        """The peer there may have its bytes back; at the latest it has them in LENT_S."""
        with suppress(DataplaneError):
            await self.mesh.call(address, Sample(done=True), timeout_s=TRY_S)

    async def ask(self, address: str) -> tuple[Sampled, float]:
        """What the peer there lends, and how far its clock is ahead of this one's, in seconds."""
        await self.mesh.call(address, Sample(), timeout_s=TRY_S)  # which may take its time
        before = time.time_ns()
        sampled: Sampled = await self.mesh.call(address, Sample(), timeout_s=TRY_S)
        middle = (before + time.time_ns()) / 2
        return sampled, (sampled.wall_ns - middle) / 1e9

    async def try_all(
        self, source: Remote, sampled: Sampled, transports: list[str]
    ) -> dict[str, Trial]:
        """Each transport in turn, a few rounds. Empty where there is no room for it."""
        reserved = self._reserved() if sampled.nbytes else None
        if reserved is None:
            return {}
        dest, extents = reserved
        expected = pattern(sampled.seed, min(sampled.nbytes, self.size_bytes))
        trials = {name: Trial() for name in transports}
        try:
            for _ in range(ROUNDS):
                for name, trial in trials.items():
                    if not trial.error:
                        await self._try(source, sampled, name, trial, dest, expected)
        finally:
            self.host.space.give_back(PULLER, extents)
        return trials

    async def _try(
        self,
        source: Remote,
        sampled: Sampled,
        name: str,
        trial: Trial,
        dest: int,
        expected: npt.NDArray[np.uint8],
    ) -> None:
        view = self.host.arena.view[dest : dest + len(expected)]
        view[:] = bytes(len(expected))
        try:
            small = await self._timed(source, sampled, name, dest, SMALL_BYTES, 1)
            whole = await self._timed(source, sampled, name, dest, len(expected), REPEATS)
        except DataplaneError as exc:
            trial.error = exc.message
            return
        if not np.array_equal(np.frombuffer(view, np.uint8), expected):
            trial.error = "the bytes that arrived are not those that were sent"
            log.error("transport %s from %s: %s", name, source.owner.peer, trial.error)
            return
        trial.exact = True
        trial.latency_us = min(trial.latency_us, small * 1e6)
        trial.GBps = max(trial.GBps, REPEATS * len(expected) / whole / 1e9)

    async def _timed(
        self, source: Remote, sampled: Sampled, name: str, dest: int, nbytes: int, times: int
    ) -> float:
        assert self.engine is not None
        copies = np.zeros(times, COPY)
        copies["range"], copies["generation"] = sampled.range, sampled.generation
        copies["nbytes"], copies["dest"] = nbytes, dest
        began = time.perf_counter()
        outcome = await self.engine.read(source, copies, TRY_S, name)
        if outcome.gone.any():
            raise DataplaneError("the sample was gone before it could be read: try again")
        return time.perf_counter() - began
