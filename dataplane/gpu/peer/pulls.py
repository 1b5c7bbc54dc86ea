"""Copying values from devices of other peers to devices here, for clients that map a device.

`Pulls` copies what this module cannot: values in host memory, or if the device is full or no
transport works. Failures are in the log and the stats. Copies on a device are a cache of that
device, so nothing waits for space for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import DataplaneError, TransportMissing, Unavailable
from dataplane.memory.admission import Admission
from dataplane.memory.extents import padded
from dataplane.memory.space import PULLER
from dataplane.metadata.tables.references import Array
from dataplane.peer.pull.in_place import PullsInPlace
from dataplane.peer.pull.paths import STAGED, Path, Paths
from dataplane.peer.pull.pulls import Pulls, copies_of, pinned
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import CUDA_IPC, DEVICE_ONLY, NCCL, TCP
from dataplane.transport.seam import Remote
from dataplane.wire.records import RANGE, U4
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

FIRST_S = 5.0
"""How long a first pull waits to know the way: the plain one takes room in both arenas."""
NEIGHBOURS = -1
"""The holder under which other peers' workers read the devices here."""


class DevicePulls(PullsInPlace):
    """The device pulls of one peer."""

    def __init__(self, pulls: Pulls) -> None:
        super().__init__(pulls)
        self.host, self.mesh = pulls.host, pulls.mesh
        self.engine: BulkEngine | None = None
        self._choice = pulls.transport
        self.paths = Paths(pulls.sampling, STAGED, "device values")
        self._missing: dict[str, str] = {}

    @property
    def address(self) -> str:
        return self.engine.address if self.engine is not None else ""

    def stats(self) -> dict[str, Any]:
        return {
            "requested": str(self._choice),
            "runs": self.paths.runs,
            "missing": self._missing,
            "peers": self.paths.shown(),
        }

    def check(self) -> None:
        """Nothing is missing: the device arenas are there."""

    async def start(self, made: Callable[..., BulkEngine], between_hosts: str) -> None:
        """Start the worker with those of CUDA IPC, the engine between hosts and NCCL that the
        settings allow. Raises TransportMissing."""
        devices = self.host.space.devices
        names = [CUDA_IPC, *([between_hosts] if between_hosts != TCP else []), NCCL]
        names = [name for name in names if self._choice.allows(name)]
        if not names:
            return
        self.host.space.reads_in_place(NEIGHBOURS, range(1, len(devices) + 1))
        self.host.label(NEIGHBOURS, "device workers of other peers")
        last = devices[-1].space
        engine = made(
            arena_bytes=last.base + last.size_bytes,
            pin=self._pin,
            unpin=self._unpin,
            transports=names,
            pools=self.host.pools,
        )
        try:
            await engine.start()
        except Unavailable as exc:
            self._missing = dict.fromkeys(names, exc.message)
        else:
            self._missing = engine.reasons
        runs = [name for name in names if name not in self._missing]
        for name, why in self._missing.items():
            log.warning("transport %s: not used for device values: %s", name, why)
        if runs:
            self.engine = engine
            self.paths.use(engine, runs)
            return
        await engine.stop()
        if self._choice.required in DEVICE_ONLY:
            why = self._missing[self._choice.required]
            raise TransportMissing(
                f"--transport {self._choice} does not work for device values: {why}. "
                "Install what is missing, or choose another --transport",
                transport=self._choice.required,
            )

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.stop()

    # reading from others

    async def bring(
        self, owner: Owner, remote: Array, nbytes: Array, holder: int
    ) -> tuple[Array, list[int]]:
        """As `Pulls.bring`, but copy values on a device to the first device that the holder
        reads in place."""
        memory = self.host.space
        number = 0 if self.engine is None else memory.first_read(holder)
        if not number:
            return await super().bring(owner, remote, nbytes, holder)
        copies = memory.devices[number - 1].space.copies
        local, pins = copies.lookup(owner.incarnation, remote), list[int]()
        try:
            here = local["generation"] != 0
            self.pulls.hits += int(np.count_nonzero(here))
            pins.append(memory.pin(holder, local[here]))
            rest = (~here).nonzero()[0]
            if len(rest):
                fresh = await self._from_device(number, owner, remote[rest], nbytes[rest])
                here = fresh["generation"] != 0
                pins.append(memory.pin(holder, fresh[here]))
                copies.insert(owner.incarnation, remote[rest][here], fresh[here])
                local[rest], rest = fresh, rest[~here]
            if len(rest):
                local[rest], more = await self.pulls.bring(
                    owner, remote[rest], nbytes[rest], holder
                )
                pins += more
        except BaseException:
            self.pulls.room.unpin(holder, pins)
            raise
        return local, pins

    async def _from_device(self, number: int, owner: Owner, remote: Array, nbytes: Array) -> Array:
        """Copies of those that are on a device there, generation 0 for what is to come another
        way."""
        way = STAGED
        try:
            source, staged = await self._remotes_of(owner)
            if source is not None:
                way = await self.paths.take(source, staged, number, FIRST_S)
            if source is not None and way != STAGED:
                return await self._transfer(number, source, way, remote, nbytes)
        except DataplaneError as exc:
            if self.paths.required:
                raise
            self.paths.failed(owner, way, exc)
        return np.zeros(len(remote), RANGE)

    async def ways(self, owner: Owner) -> Path | None:
        source, staged = await self._remotes_of(owner)
        if source is None or self.engine is None:
            return None
        return (await self.paths.tried(source, staged, 1))[0]

    async def _remotes_of(self, owner: Owner) -> tuple[Remote | None, Remote]:
        """The owner's device worker, where it has one, and the one for its host arena."""
        hello = await self.mesh.hello(owner.peer)
        there = hello.incarnation == owner.incarnation and bool(hello.device_bulk)
        source = Remote(owner, hello.device_bulk) if there else None
        return source, Remote(owner, hello.bulk, hello.bulk_fingerprint)

    async def _transfer(
        self, number: int, source: Remote, way: str, remote: Array, nbytes: Array
    ) -> Array:
        """With one reference to each."""
        engine = self.engine
        assert engine is not None
        sizes = padded(nbytes)
        room = self.pulls.devices.at_once(number, PULLER, Admission.PULL, [sizes])
        if room is None:
            return np.zeros(len(remote), RANGE)

        began = self.host.now()

        async def read(dest: Array) -> npt.NDArray[np.bool_]:
            nonlocal began
            began, copies = self.host.now(), copies_of(remote, sizes, dest)
            return (await engine.read(source, copies, self.pulls.left_s(), way)).gone

        ones = np.ones(len(sizes), U4)
        fresh = await self.pulls.room.write(sizes, room[1], read, ones, Admission.PULL)
        here = fresh["generation"] != 0
        self.pulls.note(source.owner, way, int(nbytes[here].sum()), began)
        return fresh

    def gone(self, owner: Owner) -> None:
        self.paths.gone(owner)
        for arena in self.host.space.devices:
            arena.space.copies.drop_owner(owner.incarnation)

    # serving others

    def _pin(self, ranges: Array) -> tuple[int, Array]:
        """For a worker that reads here: hold what is on a device, say where; the rest is gone."""
        memory = self.host.space
        there = memory.alive(ranges)
        there[there] = memory.on_device(ranges[there]) > 0
        return pinned(memory, NEIGHBOURS, ranges, there)

    def _unpin(self, pin: int) -> None:
        self.pulls.room.unpin(NEIGHBOURS, [pin])
