"""The device arenas of this client's peer that the client has opened.

A pool is opened once, when the client connects and reads in place, or when it first puts a value
on that device. Pools of the host's other GPUs are opened for copies by the GPU that this client
works on, if it can reach them. A caller that reads a device in place may still be reading, on
streams of its own, after the last view of a value was freed. So the client releases pins and
extents there only after `finish`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from dataplane.client.read.table import TableReader
from dataplane.errors import DeviceMissing, mixed_releases
from dataplane.gpu import registry
from dataplane.gpu.client.columns import DeviceTableReader
from dataplane.gpu.client.puts import OnDevice, fields_on_devices
from dataplane.gpu.device import Device, Located, Pool, PoolHandle
from dataplane.gpu.registry import Wish
from dataplane.memory.extents import Extent
from dataplane.wire.messages import Welcome
from dataplane.wire.tables import Table

log = logging.getLogger(__name__)

MAX_WARNED = 64
"""The most fields that the log names."""
T = TypeVar("T")
FINISH_S = 1.0
"""How long the housekeeper waits for a device before it looks again."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A pool that this process has mapped: addresses from `base` are its bytes. number: 1 is the
    first. device: the pool's own; if `reached`, another one, which only copies from the pool."""

    number: int
    base: int
    device: Device
    pool: Pool
    reached: bool = False

    def place(self, address: int) -> int:
        """Return the device's address of an address in the peer's memory."""
        return self.pool.address + address - self.base


@dataclass(slots=True, eq=False)
class Offered:
    """A pool of the peer, and what this client has opened of it. number: 1 is the first. base: its
    first address. kind: None if no installed package supports its device. device: set once this
    client has looked at it, which takes no device memory. opened: the pool as mapped by its own
    device. reached: the pool as mapped by the device that this client works on."""

    number: int
    base: int
    handle: PoolHandle
    kind: type[Device] | None = None
    device: Device | None = None
    opened: Opened | None = None
    reached: Opened | None = None
    is_refused: bool = False


class OpenPools:
    """The pools of one session. Shared by its threads."""

    def __init__(self, wish: Wish) -> None:
        self.mode, self._gpu = wish
        self.in_place: list[int] = []
        """the pools whose values this session reads in place"""
        self.arena_bytes = 0
        self.pools: list[Offered] = []
        self._warned: set[str] = set()
        self._broken = False
        """a driver failed, so the state of its work is unknown"""
        self._lock = threading.Lock()
        self._ended: SimpleQueue[tuple[list[int], Sequence[Extent], object]] = SimpleQueue()

    def __repr__(self) -> str:
        opened = ", ".join(one.handle.device for one in self.pools if one.opened) or "none"
        return f"<OpenPools of {len(self.pools)} pools, open: {opened}>"

    def greet(self, welcome: Welcome) -> list[int]:
        """Open the pools that this client reads in place, and return their numbers. Raise
        DeviceMissing if devices are required and none can be opened."""
        base = self.arena_bytes = welcome.arena_bytes
        for number, handle in enumerate(welcome.pools, 1):
            self.pools.append(Offered(number, base, handle))
            base += handle.nbytes
        for pool in self.pools:
            pool.kind = self._attempt(pool, partial(registry.load, pool.handle.kind))
        used = [pool for pool in self.pools if self._is_used(pool)]
        own = [opened for pool in used if (opened := self._open(pool)) is not None]
        if self.mode == "required" and not own:
            raise DeviceMissing(
                f"devices='required', but peer {welcome.peer!r} has no device arena on a GPU that "
                "this process uses (the peer's device arenas: "
                f"{[pool.handle.device for pool in self.pools] or 'none'}): start the peer with "
                "--device-arena, or connect with devices='auto'"
            )
        self.in_place = [opened.number for opened in own]
        for pool in self.pools:
            if own and pool.opened is None:
                self._reach(pool, own[0].device)
        return self.in_place

    def _reach(self, pool: Offered, reader: Device) -> None:
        """Open the pool for copies by this device. If that fails, values go through the host."""
        try:
            mapped = reader.reach(pool.handle)
        except DeviceMissing as exc:
            name = pool.handle.device
            log.info("device %s: copying values through the host arena, because %s", name, exc)
            return
        pool.reached = Opened(pool.number, pool.base, reader, mapped, reached=True)
        self.in_place.append(pool.number)

    def _attempt(self, pool: Offered, work: Callable[[], T]) -> T | None:
        """Do the work. Return None, and log why, if the device fails and is not required."""
        try:
            return work()
        except DeviceMissing as exc:
            if self.mode == "required":
                raise
            pool.is_refused = True
            device, pool.device = pool.device, None
            if device is not None:
                device.close()
            log.warning(
                "device %s: copying values through the host arena, because %s",
                pool.handle.device,
                exc,
            )
            return None

    def _is_used(self, pool: Offered) -> bool:
        """Return whether this process already uses that device. Opening one takes GPU memory."""
        kind, device, required = pool.kind, pool.handle.device, self.mode == "required"
        if kind is None:
            return False
        return bool(self._attempt(pool, lambda: kind.is_used(device, self._gpu, required)))

    def _open(self, pool: Offered) -> Opened | None:
        with self._lock:
            device = self._device(pool)
            if device is not None and pool.opened is None:
                mapped = self._attempt(pool, lambda: device.open(pool.handle))
                if mapped is not None:
                    pool.opened = Opened(pool.number, pool.base, device, mapped)
            return pool.opened

    def _device(self, pool: Offered) -> Device | None:
        """Return the pool's device, opened if needed. Called with the lock."""
        if pool.device is None and not pool.is_refused:
            pool.device = self._attempt(pool, lambda: registry.device_of(pool.handle))
        return pool.device

    def locate(self, values: Sequence[object]) -> tuple[Opened, list[Located]] | None:
        """Return the pool and the addresses of these values (at least one) if all are arrays on its
        device."""
        for pool in self.pools:
            if pool.kind is None or not pool.kind.may_hold(values[0]):
                continue
            with self._lock:
                device = self._device(pool)
            if device is None or (first := device.locate(values[0])) is None:
                continue
            others = [device.locate(value) for value in values[1:]]
            located = [first, *(one for one in others if one is not None)]
            opened = self._open(pool) if len(located) == len(values) else None
            return None if opened is None else (opened, located)
        return None

    def reader(self, table: Table, pin: object) -> TableReader:
        """Return a reader of the table's chunks. Some may be in a pool that is read in place."""
        return DeviceTableReader(table, pin, self) if self.in_place else TableReader(table, pin)

    def take(
        self, columns: Mapping[str, Any], n: int | None, dedup: Collection[str]
    ) -> tuple[list[OnDevice], dict[str, Any]]:
        """Return the fields of a put that go to device arenas, and the other fields, which are
        logged. Raise InvalidRows if a field does not have n values."""
        taken = fields_on_devices(self, columns, n, dedup)
        names = {column.field for one in taken for column in one.columns}
        rest = {name: column for name, column in columns.items() if name not in names}
        self.log_host_copies(
            rest, "its values are not all arrays of one dtype and rank on one device"
        )
        return taken, rest

    def log_host_copies(self, columns: Mapping[str, Any], why: str) -> None:
        """Log, once per field, that its values on a device are copied to the host arena. Checks the
        first and the last value of each field."""
        for name, values in columns.items():
            if name in self._warned or len(self._warned) == MAX_WARNED:
                continue
            ends = (
                [values[0], values[-1]]
                if isinstance(values, (list, tuple)) and values
                else [values]
            )
            kinds = [pool.kind for pool in self.pools if pool.kind is not None]
            if any(kind.may_hold(value) for kind in kinds for value in ends):
                self._warned.add(name)
                log.warning(
                    "field %r: copying device values to the host arena, because %s", name, why
                )

    def at(self, address: int) -> Opened:
        """Return the pool of an address behind the arena."""
        for pool in self.pools:
            opened = pool.opened or pool.reached
            if opened and opened.base <= address < opened.base + opened.pool.nbytes:
                return opened
        raise mixed_releases(
            f"the peer sent address {address}, which is outside the arenas that this process has "
            "mapped"
        )

    # pins and extents that are released when the devices have finished

    def ends(
        self,
        pins: list[int],
        extents: Sequence[Extent] = (),
        keep: object = None,
    ) -> None:
        """Release pins and extents once the devices have finished. Finalizers call this, so it
        takes no lock. keep: the memory that is copied from and to."""
        self._ended.put((pins, extents, keep))

    @property
    def ending(self) -> bool:
        """Whether pins or extents wait for `finished`."""
        return not self._ended.empty()

    def finished(self, timeout_s: float = FINISH_S) -> list[tuple[list[int], Sequence[Extent]]]:
        """Return the pins and extents that ended before this call; none if a device may still use
        one of them."""
        ended = []
        while True:
            try:
                ended.append(self._ended.get_nowait())
            except Empty:
                break
        if ended and not self._finish(timeout_s):
            for one in ended:
                self._ended.put(one)
            return []
        return [(pins, extents) for pins, extents, _ in ended]

    def _finish(self, timeout_s: float) -> bool:
        opened = [pool.opened for pool in self.pools if pool.opened is not None]
        try:
            return all(one.device.finish(timeout_s) for one in opened)
        except DeviceMissing as exc:
            if not self._broken:
                self._broken = True
                log.warning(
                    "devices: cannot tell whether a GPU is still using released views (%s), so the "
                    "views stay pinned until this process exits",
                    exc,
                )
            return False

    def close(self) -> None:
        """Unmap all pools. The caller must have no views of them."""
        with self._lock:
            pools, self.pools = self.pools, []
        for pool in pools:
            for opened in (pool.opened, pool.reached):
                if opened is not None:
                    opened.pool.close()
        for pool in pools:
            if pool.device is not None:
                pool.device.close()
