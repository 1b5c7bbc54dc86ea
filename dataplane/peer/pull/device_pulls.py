"""Values on devices of other peers, brought from device to device for clients that read a device in
place.

What it cannot bring (values in host memory, no room on the device, no way) is left to `Pulls`.
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
from dataplane.launch.values import TransportChoice
from dataplane.memory.admission import Admission
from dataplane.memory.extents import padded
from dataplane.memory.host_memory import HostMemory
from dataplane.memory.placement import place
from dataplane.peer.host import Host, call_stage
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.pull.device_paths import STAGED, DevicePath, DevicePaths
from dataplane.peer.pull.device_sampling import DeviceSampling
from dataplane.peer.pull.pulls import PULLER, Pulls
from dataplane.transport.bulk_frames import COPY, GONE
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import CUDA_IPC, DEVICE_ONLY, NCCL, TCP
from dataplane.transport.seam import Remote
from dataplane.wire.records import EXTENT, RANGE, U4, U8
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

NEIGHBOURS = -1
"""The holder under which other peers' workers read the devices here."""
Records = npt.NDArray[Any]


class DevicePulls:
    """Of one peer, which may have no devices."""

    def __init__(self, host: Host, mesh: Mesh, pulls: Pulls, choice: TransportChoice) -> None:
        self.host, self.mesh, self.pulls = host, mesh, pulls
        self.engine: BulkEngine | None = None
        self._choice = choice
        self._memory = host.space if isinstance(host.space, HostMemory) else None
        self.paths: DevicePaths | None = None
        """None: without devices"""
        if self._memory is not None:
            sampling = DeviceSampling(self._memory, lambda: pulls.room.beside)
            pulls.sampling.of_devices = sampling
            self.paths = DevicePaths(mesh, sampling, pulls.sampling, choice)
        self._missing: dict[str, str] = {}
        self._remotes: dict[Owner, Remote] = {}
        mesh.others.on_away.append(self._gone)

    @property
    def addresses(self) -> list[str]:
        """Where other peers ask for what is on the devices here."""
        return list(self.engine.address) if self.engine is not None else []

    def stats(self) -> dict[str, Any]:
        """What was asked for, what the worker runs, why not more, and by peer what is used."""
        return {
            "requested": str(self._choice),
            "runs": self.paths.runs if self.paths is not None else [],
            "missing": self._missing,
            "peers": self.paths.stats() if self.paths is not None else {},
        }

    def check(self) -> None:
        """TransportMissing where a transport is required that moves what this peer has not."""
        if self._choice.required in DEVICE_ONLY and self._memory is None:
            raise TransportMissing(
                f"--transport {self._choice}: it moves device memory, and this peer has no device "
                "arena: give it one with --device-arena",
                transport=self._choice.required,
            )

    async def start(self, made: Callable[..., BulkEngine], between_hosts: str) -> None:
        """Starts the worker, where there are devices, with what the choice allows of CUDA IPC, the
        engine that moves host memory between hosts, and NCCL. TransportMissing."""
        if self._memory is None or self.paths is None:
            return
        names = [CUDA_IPC, *([between_hosts] if between_hosts != TCP else []), NCCL]
        names = [name for name in names if self._choice.allows(name)]
        if not names:
            return
        devices = self._memory.devices
        self._memory.reads_in_place(NEIGHBOURS, range(1, len(devices) + 1))
        self.host.label(NEIGHBOURS, "device workers of other peers")
        last = devices[-1].space
        engine = made(
            arena_bytes=last.base + last.size_bytes,
            pin=self._pin,
            unpin=self._unpin,
            beside=names,
            pools=self.host.pools,
        )
        try:
            await engine.start()
        except Unavailable as exc:
            self._missing = dict.fromkeys(names, exc.message)
        else:
            self._missing = {name: why for name, why in engine.beside.items() if why}
        self.paths.runs = [name for name in names if name not in self._missing]
        for name, why in self._missing.items():
            log.warning("transport %s does not bring values from devices: %s", name, why)
        if self.paths.runs:
            self.engine = self.paths.engine = engine
            return
        await engine.stop()
        if self._choice.required in DEVICE_ONLY:
            why = self._missing[self._choice.required]
            raise TransportMissing(
                f"--transport {self._choice}: {why}", transport=self._choice.required
            )

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.stop()
        if self.paths is not None:
            await self.paths.sampling.close()

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
        if memory is None or self.paths is None or not number or self.engine is None:
            return local, pins
        self._pin_found(memory, number, owner, remote, needed, holder, local, pins)
        rest = np.flatnonzero(local["generation"] == 0)
        way = STAGED
        try:
            if len(rest):
                source, way = await self._way(owner, number)
            if way != STAGED:
                fresh = await self._transfer(
                    memory, number, source, way, remote[rest], needed[rest]
                )
                here = fresh["generation"] != 0
                if here.any():
                    pins.append(memory.pin(holder, fresh[here]))
                    local[rest] = fresh
                    copies = memory.devices[number - 1].space.copies
                    copies.insert(owner.incarnation, remote[rest][here], fresh[here])
                self.paths.worked(owner)
        except BaseException as exc:
            if isinstance(exc, DataplaneError) and not self.paths.requires:
                self.paths.failed(owner, exc)
                return local, pins
            memory.unpin(holder, pins)
            raise
        return local, pins

    async def ways(self, owner: Owner) -> DevicePath | None:
        """The ways to the first device here, tried anew; None where one of the two has none."""
        source, staged = await self._remotes_of(owner)
        if source is None or self.paths is None or self.engine is None:
            return None
        return await self.paths.tried(source, staged, 1)

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

    async def _way(self, owner: Owner, number: int) -> tuple[Remote, str]:
        """Where the owner's device worker listens, and what brings values from there."""
        source, staged = await self._remotes_of(owner)
        if source is None or self.paths is None:
            return staged, STAGED
        self._remotes[owner] = source
        return source, await self.paths.take(source, staged, number)

    async def _remotes_of(self, owner: Owner) -> tuple[Remote | None, Remote]:
        """The owner's device worker, where it has one, and the one for its host arena."""
        hello = await self.mesh.hello(owner.peer)
        there = hello.incarnation == owner.incarnation and bool(hello.device_bulk)
        source = Remote(owner, tuple(hello.device_bulk)) if there else None
        return source, Remote(owner, tuple(hello.bulk), hello.bulk_fingerprint)

    async def _transfer(
        self,
        memory: HostMemory,
        number: int,
        source: Remote,
        way: str,
        remote: Records,
        needed: Records,
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
            outcome = await self.engine.read(source, copies, self.pulls.left_s(), way)
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
        self.pulls.brought[way].add(call_stage.get(), nbytes)
        self.pulls.pulled_bytes += nbytes
        return fresh

    def _gone(self, owner: Owner) -> None:
        if self.paths is not None:
            self.paths.gone(owner)
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
