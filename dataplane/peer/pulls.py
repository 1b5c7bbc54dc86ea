"""Bytes of other hosts, brought here once however many readers ask.

A pulled range becomes a cached copy in the local arena: budgeted in the pull class, evicted when
nobody pins it. Packs are pulled up to the last byte that was asked for; a later reader that needs
more of one pulls it again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import RowsGone, RowsLost, TransferFailed, Unavailable
from dataplane.memory.admission import Admission
from dataplane.memory.extents import padded
from dataplane.memory.placement import place
from dataplane.peer.host import Host
from dataplane.peer.mesh import Mesh
from dataplane.peer.room import Room
from dataplane.transport.bulk_frames import COPY, GONE
from dataplane.transport.engine import BulkEngine
from dataplane.transport.seam import Remote
from dataplane.wire.records import EXTENT, RANGE, U4, U8
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

PULLER = 0
"""The holder under which the peer itself reserves room for pulls and pins ranges for others."""
PULL_S = 30.0
Key = tuple[int, int]


class Pulls:
    def __init__(self, host: Host, mesh: Mesh, room: Room) -> None:
        self.host = host
        self.mesh = mesh
        self.room = room
        self.engine: BulkEngine | None = None
        self.pulled_bytes = 0
        self.hits = 0
        self._under_way: dict[Key, asyncio.Future[None]] = {}

    # reading from others

    async def bring(
        self, owner: Owner, remote: npt.NDArray[Any], needed: npt.NDArray[Any], holder: int
    ) -> tuple[npt.NDArray[Any], list[int]]:
        """Local RANGE for each remote one, of which `needed` bytes from its start are read.

        They are pinned for `holder`; the caller lets go of the pins. RowsGone, RowsLost.
        """
        local = np.zeros(len(remote), RANGE)
        pins: list[int] = []
        try:
            while True:
                self._pin_found(owner, remote, needed, holder, local, pins)
                rest = np.flatnonzero(local["generation"] == 0)
                if not len(rest):
                    return local, pins
                keys = self._keys(owner, remote[rest])
                waits = [self._under_way[k] for k in keys if k in self._under_way]
                if waits:
                    await asyncio.wait(waits)
                    continue
                await self._pull(owner, remote[rest], needed[rest], keys, holder, local, rest, pins)
        except BaseException:
            self.host.space.unpin(holder, pins)
            raise

    @staticmethod
    def _keys(owner: Owner, remote: npt.NDArray[Any]) -> list[Key]:
        return [(owner.incarnation, packed) for packed in remote.view(np.uint64).tolist()]

    def _pin_found(
        self,
        owner: Owner,
        remote: npt.NDArray[Any],
        needed: npt.NDArray[Any],
        holder: int,
        local: npt.NDArray[Any],
        pins: list[int],
    ) -> None:
        space = self.host.space
        rest = np.flatnonzero(local["generation"] == 0)
        found = space.copies.lookup(owner.incarnation, remote[rest])
        hit = np.flatnonzero(found["generation"] != 0)
        if len(hit):
            long_enough = space.ranges.extents(found[hit])["length"] >= needed[rest[hit]]
            hit = hit[long_enough]
        if len(hit):
            pins.append(space.pin(holder, found[hit]))
            local[rest[hit]] = found[hit]
            self.hits += len(hit)

    async def _pull(
        self,
        owner: Owner,
        remote: npt.NDArray[Any],
        needed: npt.NDArray[Any],
        keys: list[Key],
        holder: int,
        local: npt.NDArray[Any],
        rest: npt.NDArray[Any],
        pins: list[int],
    ) -> None:
        """One transfer for all that nobody else is bringing already."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way |= dict.fromkeys(keys, done)
        try:
            copies = await self._transfer(owner, remote, needed)
            pins.append(self.host.space.pin(holder, copies))
            local[rest] = copies
            self.host.space.copies.insert(owner.incarnation, remote, copies)
        finally:
            for key in keys:
                del self._under_way[key]
            done.set_result(None)

    async def _transfer(
        self, owner: Owner, remote: npt.NDArray[Any], needed: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        """Room, bytes, ranges of our own. Nothing is kept of a transfer that failed."""
        space = self.host.space
        sizes = np.maximum(padded(needed.astype(U8)), np.uint64(64))
        source = await self._remote(owner)
        _, extents = await self.room.reserve(PULLER, Admission.PULL, [sizes], PULL_S)
        try:
            dest = place(sizes, extents)
            copies = np.zeros(len(remote), COPY)
            copies["range"], copies["generation"] = remote["range"], remote["generation"]
            copies["nbytes"], copies["dest"] = needed, dest
            await self._read(source, copies)
            written = np.zeros(len(remote), EXTENT)
            written["offset"], written["length"] = dest, sizes
            fresh = space.commit(PULLER, written, np.ones(len(remote), U4), Admission.PULL)
        except BaseException:
            space.give_back(PULLER, extents)
            raise
        self._give_back_rest(written, extents)
        self.pulled_bytes += int(needed.sum())
        return fresh

    def _give_back_rest(self, written: npt.NDArray[Any], extents: npt.NDArray[Any]) -> None:
        """Pulls write all they reserve but the end of each page-rounded extent."""
        ends = written["offset"] + written["length"]
        left = []
        for extent in extents:
            start, end = int(extent["offset"]), int(extent["offset"] + extent["length"])
            inside = ends[(ends > start) & (ends <= end)]
            used = int(inside.max()) if len(inside) else start
            if used < end:
                left.append((used, end - used))
        if left:
            self.host.space.give_back(PULLER, np.array(left, EXTENT))

    async def _read(self, source: Remote, copies: npt.NDArray[Any]) -> None:
        assert self.engine is not None
        try:
            outcome = await self.engine.read(source, copies, PULL_S)
        except TransferFailed:
            outcome = await self.engine.read(source, copies, PULL_S)
        if outcome.gone.any():
            raise RowsGone(
                f"{int(outcome.gone.sum())} values were freed at {source.owner.peer} before they "
                "could be read"
            )

    async def _remote(self, owner: Owner) -> Remote:
        if self.engine is None:
            raise Unavailable("this peer has no others to pull from")
        hello = await self.mesh.hello(owner.peer)
        if hello.incarnation != owner.incarnation:
            raise RowsLost(
                f"the peer at {owner.peer} was started anew, and the bytes of these rows went with "
                "the one before: put them again",
                peer=owner.peer,
            )
        return Remote(owner, tuple(hello.bulk))

    # serving others

    def pin(self, ranges: npt.NDArray[Any]) -> tuple[int, npt.NDArray[Any]]:
        """For a transfer that reads here: hold what lives, say where it is."""
        space = self.host.space
        alive = space.alive(ranges)
        places = np.zeros(len(ranges), EXTENT)
        places["offset"] = GONE
        if alive.any():
            places[alive] = space.ranges.extents(ranges[alive])
        return space.pin(PULLER, ranges[alive]), places

    def unpin(self, pin: int) -> None:
        if self.host.space.unpin(PULLER, [pin]):
            self.room.pump()
