"""Values on devices of other peers of this host, copied from device to device for clients that read
a device in place.

What it cannot bring (values in host memory, no room on the device, no access) is left to `Pulls`.
What does not work is in the log and the stats. Copies on a device are a cache of that device: room
for them is never waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, TransportMissing, Unavailable, ValueTooLarge
from dataplane.launch.transport import TransportChoice
from dataplane.memory.admission import Admission
from dataplane.memory.extents import padded
from dataplane.memory.host_memory import HostMemory
from dataplane.memory.placement import place
from dataplane.peer.host import Host, call_stage
from dataplane.peer.mesh import Mesh
from dataplane.peer.pulls import PULLER, Pulls
from dataplane.transport.bulk_frames import COPY, GONE
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import CUDA_IPC
from dataplane.transport.seam import Remote
from dataplane.wire.records import EXTENT, RANGE, U4, U8
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

NEIGHBOURS = -1
"""The holder under which other peers' workers read the devices here."""
FAILURES = 3
"""In a row, before a peer's devices are read by way of the host until it starts anew."""

Records = npt.NDArray[Any]


class DevicePulls:
    """Of one peer, which may have no devices."""

    def __init__(self, host: Host, mesh: Mesh, pulls: Pulls, choice: TransportChoice) -> None:
        self.host, self.mesh, self.pulls = host, mesh, pulls
        self.engine: BulkEngine | None = None
        self._choice = choice
        self._memory = host.space if isinstance(host.space, HostMemory) else None
        self._refused: dict[Owner, str] = {}
        self._failures: dict[Owner, int] = {}
        self._remotes: dict[Owner, Remote] = {}
        mesh.others.on_away.append(self._gone)

    @property
    def addresses(self) -> list[str]:
        """Where other peers ask for what is on the devices here."""
        return list(self.engine.address) if self.engine is not None else []

    def stats(self) -> dict[str, Any]:
        """Whether it runs, and from whom values come by way of the host, with the reason."""
        refused = {owner.peer: why for owner, why in self._refused.items()}
        return {"runs": CUDA_IPC if self.engine is not None else "", "refused": refused}

    async def start(self, made: Callable[..., BulkEngine]) -> None:
        """Starts the worker, where there are devices and the choice allows it."""
        if self._memory is None or not self._choice.allows(CUDA_IPC):
            return
        devices = self._memory.devices
        self._memory.reads_in_place(NEIGHBOURS, range(1, len(devices) + 1))
        self.host.label(NEIGHBOURS, "device workers of other peers")
        last = devices[-1].space
        engine = made(
            arena_bytes=last.base + last.size_bytes,
            pin=self._pin,
            unpin=self._unpin,
            transport=CUDA_IPC,
            pools=self.host.pools,
        )
        try:
            await engine.start()
        except Unavailable as exc:
            log.warning("devices of other peers are read by way of the host: %s", exc.message)
            return
        if engine.transport == CUDA_IPC:
            self.engine = engine
        else:
            log.warning("devices of other peers are read by way of the host: %s", engine.missing)
            await engine.stop()

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.stop()

    # reading from others

    async def bring(
        self, owner: Owner, remote: Records, needed: Records, holder: int
    ) -> tuple[Records, list[int]]:
        """Local RANGE on the holder's device for each remote one, generation 0 for those that are
        to come another way. They are pinned for `holder`; the caller lets go of the pins."""
        local = np.zeros(len(remote), RANGE)
        pins: list[int] = []
        memory = self._memory
        number = memory.first_read(holder) if memory is not None else 0
        if memory is None or not number or self.engine is None or owner in self._refused:
            return local, pins
        self._pin_found(memory, number, owner, remote, needed, holder, local, pins)
        rest = np.flatnonzero(local["generation"] == 0)
        try:
            source = await self._remote(owner) if len(rest) else None
            if source is not None:
                fresh = await self._transfer(memory, number, source, remote[rest], needed[rest])
                here = fresh["generation"] != 0
                if here.any():
                    pins.append(memory.pin(holder, fresh[here]))
                    local[rest] = fresh
                    copies = memory.devices[number - 1].space.copies
                    copies.insert(owner.incarnation, remote[rest][here], fresh[here])
                self._failures.pop(owner, None)
        except DataplaneError as exc:
            self._failed(owner, exc)
        except BaseException:
            memory.unpin(holder, pins)
            raise
        return local, pins

    def _pin_found(
        self,
        memory: HostMemory,
        number: int,
        owner: Owner,
        remote: Records,
        needed: Records,
        holder: int,
        local: Records,
        pins: list[int],
    ) -> None:
        found = memory.devices[number - 1].space.copies.lookup(owner.incarnation, remote)
        hit = np.flatnonzero(found["generation"] != 0)
        if len(hit):
            hit = hit[memory.ranges.extents(found[hit])["length"] >= needed[hit]]
        if len(hit):
            pins.append(memory.pin(holder, found[hit]))
            local[hit] = found[hit]
            self.pulls.hits += len(hit)

    async def _remote(self, owner: Owner) -> Remote | None:
        """Where the owner's device worker listens; None where it has none."""
        hello = await self.mesh.hello(owner.peer)
        if hello.incarnation != owner.incarnation or not hello.device_bulk:
            return None
        remote = self._remotes[owner] = Remote(owner, tuple(hello.device_bulk))
        return remote

    async def _transfer(
        self, memory: HostMemory, number: int, source: Remote, remote: Records, needed: Records
    ) -> Records:
        """Copies of those that are on a device there, generation 0 for the others; one reference
        to each."""
        assert self.engine is not None
        nothing = np.zeros(len(remote), RANGE)
        sizes = padded(needed.astype(U8))
        try:
            granted = self.pulls.room.beside[number - 1].at_once(PULLER, Admission.PULL, [sizes])
        except ValueTooLarge:
            granted = None
        if granted is None:
            return nothing
        extents = granted[1]
        try:
            dest = place(sizes, extents)
            copies = np.zeros(len(remote), COPY)
            copies["range"], copies["generation"] = remote["range"], remote["generation"]
            copies["nbytes"], copies["dest"] = sizes, dest
            outcome = await self.engine.read(source, copies, self.pulls.left_s(), CUDA_IPC)
            written = np.zeros(len(sizes), EXTENT)
            written["offset"], written["length"] = dest, sizes
            fresh = memory.commit(PULLER, written, np.ones(len(sizes), U4), Admission.PULL)
        except BaseException:
            memory.give_back(PULLER, extents)
            raise
        self.pulls.give_back_rest(written, extents)
        if outcome.gone.any():
            memory.release(fresh[outcome.gone])
            fresh[outcome.gone] = nothing[outcome.gone]
        nbytes = int(needed[~outcome.gone].sum())
        self.pulls.brought[CUDA_IPC].add(call_stage.get(), nbytes)
        self.pulls.pulled_bytes += nbytes
        return fresh

    def _failed(self, owner: Owner, exc: DataplaneError) -> None:
        """What does not work at all is not tried again; what broke off, a few times."""
        self._failures[owner] = self._failures.get(owner, 0) + 1
        log.warning("a device of %s is read by way of the host: %s", owner.peer, exc.message)
        if isinstance(exc, TransportMissing) or self._failures[owner] >= FAILURES:
            self._refused[owner] = exc.message

    def _gone(self, owner: Owner) -> None:
        self._refused.pop(owner, None)
        self._failures.pop(owner, None)
        if self._memory is not None:
            for arena in self._memory.devices:
                arena.space.copies.drop_owner(owner.incarnation)
        remote = self._remotes.pop(owner, None)
        if remote is not None and self.engine is not None:
            self.engine.forget(remote)

    # serving others

    def _pin(self, ranges: Records) -> tuple[int, Records]:
        """For a worker that reads here: hold what is on a device, say where; the rest is gone."""
        memory = self._memory
        assert memory is not None
        there = memory.alive(ranges)
        there[there] = memory.on_device(ranges[there]) > 0
        places = np.zeros(len(ranges), EXTENT)
        places["offset"] = GONE
        if there.any():
            places[there] = memory.ranges.extents(ranges[there])
        return memory.pin(NEIGHBOURS, ranges[there]), places

    def _unpin(self, pin: int) -> None:
        assert self._memory is not None
        if self._memory.unpin(NEIGHBOURS, [pin]):
            self.pulls.room.pump()
