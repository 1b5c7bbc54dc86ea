"""The device arenas of a peer, which loads this by name if it has any.

Clients reserve space there. Readers that cannot map a device (other clients, other hosts,
checkpoints) get copies in the host arena, cached like those of spilled values. Clients that map a
device get values on other peers' devices there. `Pulls` copies all other values: those in host
memory, and all if the device is full or no transport works. Failures are in the log and the stats.
Copies on a device are a cache of that device, so nothing waits for space for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import (
    DataplaneError,
    DeviceMissing,
    TransportMissing,
    Unavailable,
    ValueTooLarge,
)
from dataplane.gpu import registry
from dataplane.gpu.device import Device
from dataplane.gpu.host_memory import HostMemory
from dataplane.launch.values import MAX_DEVICES, DeviceMemory
from dataplane.memory.admission import Admission
from dataplane.memory.extents import padded
from dataplane.memory.space import PULLER, Space
from dataplane.peer.host import Host
from dataplane.peer.pull.paths import Path, Paths
from dataplane.peer.pull.pulls import Pulls, copies_of, pinned
from dataplane.peer.room.admission import Room, Units
from dataplane.peer.room.pools import Pools, Read
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import CUDA_IPC, NCCL, POOLS_ONLY, TCP
from dataplane.transport.seam import Remote
from dataplane.wire.packed import U8, Array
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

DEVICE_SHARES = (0.70, 0.30, 0.0)
"""By admission class: nothing is pulled into a device."""
STAGED = "host arena"
"""The plain path between devices: through the owner's host arena, then like any value."""
FIRST_S = 5.0
"""How long a first pull waits for the check of the transports. The plain path takes space in both
arenas."""
NEIGHBOURS = -1
"""The holder under which other peers' workers read the devices here."""


def devices_of(memory: DeviceMemory) -> list[Device]:
    """Return the devices for this memory. Raises DeviceMissing if there is none, or no library
    for it."""
    kind = registry.load(memory.kind)
    numbers = memory.numbers or range(min(kind.count(), MAX_DEVICES))
    if not numbers:
        raise DeviceMissing(
            "--device-arena (or DATAPLANE_DEVICE_ARENA) needs a GPU, but this process sees none: "
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or start the peer without a device arena"
        )
    return [kind.numbered(number) for number in numbers]


class DevicePools(Pools):
    """The device arenas of one peer."""

    def __init__(self, wanted: DeviceMemory) -> None:
        """wanted: the memory of each device. Raises DeviceMissing if there is no device, or no
        library for it."""
        self._nbytes = wanted.nbytes
        self._devices = devices_of(wanted)
        self.engine: BulkEngine | None = None
        self._missing: dict[str, str] = {}

    def memory(self, arena_bytes: int) -> HostMemory:
        """See `Pools.memory`."""
        self._memory = HostMemory(arena_bytes)
        return self._memory

    def open(self, host: Host, room: Room, from_disk: Read | None) -> None:
        """See `Pools.open`. Raises DeviceMissing if a device has too little memory."""
        super().open(host, room, from_disk)
        self.host, self.room = host, room
        for device in self._devices:
            self._memory.add_device(device, self._nbytes, DEVICE_SHARES)
        host.pools = [arena.handle for arena in self._memory.devices]

    def free(self) -> None:
        """See `Pools.free`."""
        self._memory.close()

    def use(self, pulls: Pulls) -> None:
        """See `Pools.use`."""
        super().use(pulls)
        required = pulls.transport.required in POOLS_ONLY
        self.paths = Paths(pulls.sampling, STAGED, "device values", required)

    # space

    @property
    def spaces(self) -> Sequence[Space]:
        return [arena.space for arena in self._memory.devices]

    def at_once(
        self, number: int, holder: int, admission: Admission, units: Units
    ) -> tuple[int, Array] | None:
        """See `Pools.at_once`."""
        arenas = self._memory.devices
        if not 0 < number <= len(arenas):
            return super().at_once(number, holder, admission, units)
        try:
            count, extents = arenas[number - 1].space.reserve(holder, admission, units)
        except ValueTooLarge:
            return None
        return (count, extents) if count else None

    def overflowed(self, number: int, nbytes: int) -> None:
        """See `Pools.overflowed`."""
        self._memory.devices[number - 1].overflowed_bytes += nbytes

    def ahead(self, holder: int, wanted: Sequence[int]) -> bytes:
        """See `Pools.ahead`."""
        pairs = zip(self.spaces, wanted, strict=False)
        grants = [space.grant(holder, Admission.OPEN, nbytes) for space, nbytes in pairs]
        return b"".join([grant.tobytes() for grant in grants])

    def figures(self) -> list[dict[str, Any]]:
        """See `Pools.figures`. Without a path between devices, values go through the host
        arenas."""
        engine = self.pulls.engine
        staged = STAGED if engine is None else f"{STAGED}, then {engine.transport}"
        between = {**self.transports(), "else": staged}
        return [{**figures, "to_others": between} for figures in self._memory.device_figures()]

    # bytes

    async def read(self, chunks: Array, dest: Array) -> None:
        """See `Pools.read`."""
        memory = self._memory
        memory.hold(chunks)
        try:
            numbers = memory.on_device(chunks)
            for number in np.unique(numbers).tolist():
                some = numbers == number
                if number:
                    await self._fetch(number, chunks[some], dest[some])
                else:
                    await super().read(chunks[some], dest[some])
        finally:
            self.room.release(chunks)

    async def _fetch(self, number: int, chunks: Array, dest: Array) -> None:
        extents = self._memory.chunks.extents(chunks)
        targets = dest + np.uint64(self.host.arena.address)
        fetch = self._memory.devices[number - 1].fetch
        await self.host.threads.run(fetch, extents["offset"], extents["length"], targets)

    async def write_at(self, number: int, dest: int, data: npt.NDArray[np.uint8]) -> None:
        """See `Pools.write_at`."""
        await self.host.threads.run(self._memory.devices[number - 1].write, dest, data)

    async def read_at(self, number: int, start: int, into: npt.NDArray[np.uint8]) -> None:
        """See `Pools.read_at`."""
        await self.host.threads.run(self._memory.devices[number - 1].read, start, into)

    # the worker

    @property
    def address(self) -> str:
        return self.engine.address if self.engine is not None else ""

    def transports(self) -> dict[str, Any]:
        """See `Pools.transports`."""
        return {
            "requested": str(self.pulls.transport),
            "runs": self.paths.runs,
            "missing": self._missing,
            "peers": self.paths.shown(),
        }

    def check(self) -> None:
        """Do nothing: this peer has device arenas."""

    async def start(self, made: Callable[..., BulkEngine], between_hosts: str) -> None:
        """Start the worker with the transports that the settings allow, of CUDA IPC, the engine
        between hosts and NCCL. See `Pools.start`."""
        devices = self._memory.devices
        choice = self.pulls.transport
        names = [CUDA_IPC, *([between_hosts] if between_hosts != TCP else []), NCCL]
        names = [name for name in names if choice.allows(name)]
        if not names:
            return
        self._memory.reads_in_place(NEIGHBOURS, range(1, len(devices) + 1))
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
            log.warning("not using transport %s for device values: %s", name, why)
        if runs:
            self.engine = engine
            self.paths.use(engine, runs)
            return
        await engine.stop()
        if choice.required in POOLS_ONLY:
            why = self._missing[choice.required]
            raise TransportMissing(
                f"--transport {choice} does not work for device values: {why}. "
                "Install what is missing, or choose another --transport",
                transport=choice.required,
            )

    async def stop(self) -> None:
        """See `Pools.stop`."""
        if self.engine is not None:
            await self.engine.stop()

    # reading from others

    async def bring(
        self, owner: Owner, remote: Array, nbytes: Array, holder: int
    ) -> tuple[Array, list[int]]:
        """See `Pools.bring`: copy values on a device to the first device that the holder
        reads in place."""
        memory = self._memory
        number = 0 if self.engine is None else memory.first_read(holder)
        if not number:
            return await super().bring(owner, remote, nbytes, holder)
        copies = memory.devices[number - 1].space.copies
        local = copies.lookup(owner.incarnation, remote)
        pins: list[int] = []
        try:
            here = local != 0
            self.pulls.hits += int(np.count_nonzero(here))
            pins.append(memory.pin(holder, local[here]))
            rest = (~here).nonzero()[0]
            if len(rest):
                fresh = await self._from_device(number, owner, remote[rest], nbytes[rest])
                here = fresh != 0
                pins.append(memory.pin(holder, fresh[here]))
                copies.insert(owner.incarnation, remote[rest][here], fresh[here])
                local[rest], rest = fresh, rest[~here]
            if len(rest):
                local[rest], more = await self.pulls.bring(
                    owner, remote[rest], nbytes[rest], holder
                )
                pins += more
        except BaseException:
            self.room.unpin(holder, pins)
            raise
        return local, pins

    async def _from_device(self, number: int, owner: Owner, remote: Array, nbytes: Array) -> Array:
        """Copy the chunks that are on a device there. Return 0 for each chunk that must be copied
        another way."""
        way = STAGED
        try:
            source = await self._remote_of(owner)
            if source is not None:
                way = await self.paths.take(source, number, FIRST_S)
            if source is not None and way != STAGED:
                return await self._transfer(number, source, way, remote, nbytes)
        except DataplaneError as exc:
            if self.paths.required:
                raise
            self.paths.failed(owner, way, exc)
        return np.zeros(len(remote), U8)

    async def ways(self, owner: Owner) -> Path | None:
        """See `Pools.ways`."""
        source = await self._remote_of(owner)
        if source is None or self.engine is None:
            return None
        return await self.paths.tried(source, 1, measures=True)

    async def _remote_of(self, owner: Owner) -> Remote | None:
        """Return the owner's device worker, or None if it has none."""
        hello = await self.pulls.mesh.hello(owner.peer)
        there = hello.incarnation == owner.incarnation and bool(hello.pool_bulk)
        return Remote(owner, hello.pool_bulk) if there else None

    async def _transfer(
        self, number: int, source: Remote, way: str, remote: Array, nbytes: Array
    ) -> Array:
        """Return the copies, each with one reference."""
        engine = self.engine
        assert engine is not None
        sizes = padded(nbytes)
        room = self.at_once(number, PULLER, Admission.PULL, [sizes])
        if room is None:
            return np.zeros(len(remote), U8)

        began = self.host.now()

        async def read(dest: Array) -> npt.NDArray[np.bool_]:
            nonlocal began
            began, copies = self.host.now(), copies_of(remote, sizes, dest)
            return (await engine.read(source, copies, self.pulls.left_s(), way)).gone

        fresh = await self.room.write(sizes, room[1], read, Admission.PULL)
        here = fresh != 0
        self.pulls.note(source.owner, way, int(nbytes[here].sum()), began)
        return fresh

    def gone(self, owner: Owner) -> None:
        """See `Pools.gone`."""
        self.paths.gone(owner)
        for arena in self._memory.devices:
            arena.space.copies.drop_owner(owner.incarnation)

    # serving others

    def _pin(self, chunks: Array) -> tuple[int, Array]:
        """Pin the chunks that are on a device, for a worker that reads here. The other chunks count
        as gone."""
        memory = self._memory
        there = memory.alive(chunks)
        there[there] = memory.on_device(chunks[there]) > 0
        return pinned(memory, NEIGHBOURS, chunks, there)

    def _unpin(self, pin: int) -> None:
        self.room.unpin(NEIGHBOURS, [pin])
