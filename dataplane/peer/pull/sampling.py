"""Tries the transports between this peer and another, on bytes that both know.

The owner lends a range of its own arena for a while; the reader brings it into room of its own, as
it brings values, and compares every byte. Nothing of it is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError
from dataplane.launch.values import TransportChoice
from dataplane.memory.admission import Admission
from dataplane.memory.placement import place
from dataplane.peer.host import Caller, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.pull.lent import Lent, pattern
from dataplane.peer.room.admission import Room
from dataplane.transport.bulk_frames import COPY
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import TCP
from dataplane.transport.seam import Remote
from dataplane.version import __version__
from dataplane.wire.messages import Body, Done
from dataplane.wire.records import EXTENT, U4, U8
from dataplane.wire.sampling import Sample, Sampled

if TYPE_CHECKING:
    from dataplane.peer.pull.device_sampling import DeviceSampling

log = logging.getLogger(__name__)

PULLER = 0
SAMPLE_BYTES = 4 << 20
SMALL_BYTES = 64
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
    def __init__(self, host: Host, mesh: Mesh, room: Room, choice: TransportChoice) -> None:
        self.host = host
        self.mesh = mesh
        self.room = room
        self.choice = choice
        self.engine: BulkEngine | None = None
        self.of_devices: DeviceSampling | None = None
        """lends what lies on a device"""
        self._lent = Lent(self._release)
        mesh.handlers[Sample] = self._asked

    @property
    def size_bytes(self) -> int:
        """A small part of the arena, so that lending it is not felt."""
        return min(SAMPLE_BYTES, self.host.space.size_bytes // 64 & ~0xFFF)

    # the owner

    def _asked(self, caller: Caller, body: Sample) -> Body | Awaitable[Body]:
        if not body.device:
            lent: Lent | None = self._lent
        else:
            lent = self.of_devices.lent if self.of_devices is not None else None
        if body.done:
            if lent is not None:
                lent.done(caller.address)
            return Done()
        if lent is None:
            return self._sampled(None, 0, 0)
        return self._lend_on_device(caller) if body.device else self._lend(caller)

    def _lend(self, caller: Caller) -> Sampled:
        if self._lent.range is None:
            self._lent.range = self._written()
        self._lent.to(caller.address)
        return self._sampled(self._lent.range, self._lent.seed, self.size_bytes)

    async def _lend_on_device(self, caller: Caller) -> Sampled:
        assert self.of_devices is not None
        nbytes = await self.of_devices.lend(caller.address)
        lent = self.of_devices.lent
        return self._sampled(lent.range, lent.seed, nbytes)

    def _sampled(self, lent: npt.NDArray[Any] | None, seed: int, nbytes: int) -> Sampled:
        engine = self.engine
        return Sampled(
            range=0 if lent is None else int(lent[0]["range"]),
            generation=0 if lent is None else int(lent[0]["generation"]),
            nbytes=0 if lent is None else nbytes,
            seed=seed,
            transport=engine.transport if engine else TCP,
            missing=engine.missing if engine else "",
            requested=str(self.choice),
            version=__version__,
            arena_bytes=self.host.space.size_bytes,
            wall_ns=time.time_ns(),
        )

    def _written(self) -> npt.NDArray[Any] | None:
        """A range of known bytes with one reference, ours; None where there is no room at once."""
        place_at = self.reserved()
        if place_at is None:
            return None
        dest, extents = place_at
        size = self.size_bytes
        self.host.arena.view[dest : dest + size] = pattern(self._lent.new_seed(), size).data
        written = np.array([(dest, size)], EXTENT)
        lent = self.host.space.commit(PULLER, written, np.ones(1, U4), Admission.PULL)
        self._give_back_rest(dest + size, extents)
        return lent

    def reserved(self) -> tuple[int, npt.NDArray[Any]] | None:
        """Where a sample has room now, and the extents to give back."""
        sizes = np.array([self.size_bytes], U8)
        granted = self.room.at_once(PULLER, Admission.PULL, [sizes])
        if granted is None:
            return None
        return int(place(sizes, granted[1])[0]), granted[1]

    def _give_back_rest(self, used: int, extents: npt.NDArray[Any]) -> None:
        end = int(extents[-1]["offset"] + extents[-1]["length"])
        if used < end:
            self.host.space.give_back(PULLER, np.array([(used, end - used)], EXTENT))

    def _release(self, lent: npt.NDArray[Any]) -> None:
        if self.host.space.release(lent):
            self.room.pump()

    def close(self) -> None:
        self._lent.close()

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
        reserved = self.reserved() if sampled.nbytes else None
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
        trial.note(small, REPEATS * len(expected), whole)

    async def _timed(
        self, source: Remote, sampled: Sampled, name: str, dest: int, nbytes: int, times: int
    ) -> float:
        assert self.engine is not None
        return await timed(self.engine, source, sampled, name, dest, nbytes, times)


async def timed(
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
