"""The device arenas of this client's peer, as far as it has opened them.

A pool is opened once, when the client connects and reads in place, or when it first puts a value
that lies on that device. Pools of the host's other GPUs are opened for copies by the one that this
client works on, where that reaches them. Whoever reads a device in place may still be reading, on
streams of its own, when the last view of a value is gone: so what ends there is told behind
`finish`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Any

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

MAX_TOLD = 64
"""Fields that the log is told of."""
FINISH_S = 1.0
"""How long the housekeeper waits for a device before it looks again."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A pool that is mapped here: addresses from `base` are its bytes. number: 1 is the first.
    device: the pool's own, or where `reached` another one, which only copies from it."""

    number: int
    base: int
    device: Device
    pool: Pool
    reached: bool = False

    def place(self, address: int) -> int:
        """Where on the device an address of the peer's memory is."""
        return self.pool.address + address - self.base


class OpenPools:
    """Of one session, for its threads."""

    def __init__(self, wish: Wish) -> None:
        self.mode, self._gpu = wish
        self.in_place: list[int] = []
        """the pools whose values this session reads in place"""
        self.arena_bytes = 0
        self._handles: list[PoolHandle] = []
        self._kinds: list[type[Device] | None] = []
        """of each pool; None: no package here supports it"""
        self._bases: list[int] = []
        self._devices: dict[int, Device] = {}
        """devices that were looked at, which takes nothing of them"""
        self._opened: dict[int, Opened] = {}
        self._reached: list[Opened] = []
        self._refused: set[int] = set()
        self._told: set[str] = set()
        self._broken = False
        """a driver failed, which says no more of what it still does"""
        self._lock = threading.Lock()
        self._ended: SimpleQueue[tuple[list[int], Sequence[Extent], object]] = SimpleQueue()

    def __repr__(self) -> str:
        opened = ", ".join(self._handles[n - 1].device for n in sorted(self._opened)) or "none"
        return f"<OpenPools of {len(self._handles)} pools, open: {opened}>"

    def greet(self, welcome: Welcome) -> list[int]:
        """Told what there is: the pools that are read in place, opened now. DeviceMissing where
        that is required and cannot be."""
        self.arena_bytes = welcome.arena_bytes
        self._handles = list(welcome.pools)
        sizes = accumulate((pool.nbytes for pool in self._handles), initial=self.arena_bytes)
        self._bases = list(sizes)[:-1]
        self._kinds = [self._kind(n) for n in range(1, len(self._handles) + 1)]
        for number in range(1, len(self._handles) + 1):
            if self._is_used(number) and self._open(number) is not None:
                self.in_place.append(number)
        own = [self._opened[number] for number in self.in_place]
        if self.mode == "required" and not self.in_place:
            raise DeviceMissing(
                f"devices='required', but peer {welcome.peer!r} has no device arena on a GPU that "
                "this process uses (its device arenas: "
                f"{[pool.device for pool in self._handles] or 'none'}): start the peer with "
                "--device-arena, or connect with devices='auto'"
            )
        for number in range(1, len(self._handles) + 1):
            if own and number not in self.in_place and self._reach(number, own[0].device):
                self.in_place.append(number)
        return self.in_place

    def _reach(self, number: int, reader: Device) -> bool:
        """Opens the pool for copies by this device; what cannot be goes by way of the host."""
        handle = self._handles[number - 1]
        try:
            pool = reader.reach(handle)
        except DeviceMissing as exc:
            log.info(
                "device %s: copying values through the host arena, because %s", handle.device, exc
            )
            return False
        base = self._bases[number - 1]
        self._reached.append(Opened(number, base, reader, pool, reached=True))
        return True

    def _kind(self, number: int) -> type[Device] | None:
        try:
            return registry.load(self._handles[number - 1].kind)
        except DeviceMissing as exc:
            self._refuse(number, exc)
            return None

    def _is_used(self, number: int) -> bool:
        """Whether this process works on that device already; to open one takes GPU memory."""
        kind, device = self._kinds[number - 1], self._handles[number - 1].device
        try:
            return kind is not None and kind.is_used(device, self._gpu, self.mode == "required")
        except DeviceMissing as exc:
            self._refuse(number, exc)
            return False

    def _open(self, number: int) -> Opened | None:
        """Once; None, said in the log, where it cannot be and need not."""
        with self._lock:
            device = self._device(number)
            if device is not None and number not in self._opened:
                try:
                    pool = device.open(self._handles[number - 1])
                except DeviceMissing as exc:
                    self._refuse(number, exc)
                    return None
                self._opened[number] = Opened(number, self._bases[number - 1], device, pool)
            return self._opened.get(number)

    def _device(self, number: int) -> Device | None:
        """Called with the lock."""
        if number not in self._devices and number not in self._refused:
            try:
                self._devices[number] = registry.device_of(self._handles[number - 1])
            except DeviceMissing as exc:
                self._refuse(number, exc)
        return self._devices.get(number)

    def _refuse(self, number: int, why: DeviceMissing) -> None:
        if self.mode == "required":
            raise why
        self._refused.add(number)
        device = self._devices.pop(number, None)
        if device is not None:
            device.close()
        name = self._handles[number - 1].device
        log.warning("device %s: copying values through the host arena, because %s", name, why)

    def locate(self, values: Sequence[object]) -> tuple[Opened, list[Located]] | None:
        """Where these values lie, at least one, that are all arrays on one of these devices."""
        for number, kind in enumerate(self._kinds, 1):
            if kind is None or not kind.may_hold(values[0]):
                continue
            with self._lock:
                device = self._device(number)
            if device is None or (first := device.locate(values[0])) is None:
                continue
            others = [device.locate(value) for value in values[1:]]
            located = [first, *(one for one in others if one is not None)]
            opened = self._open(number) if len(located) == len(values) else None
            return None if opened is None else (opened, located)
        return None

    def reader(self, table: Table, pin: object) -> TableReader:
        """A reader of the table's chunks, some of which may be in a pool that is read in place."""
        return DeviceTableReader(table, pin, self) if self.in_place else TableReader(table, pin)

    def take(
        self, columns: Mapping[str, Any], n: int | None, dedup: Collection[str]
    ) -> tuple[list[OnDevice], dict[str, Any]]:
        """Return the fields of a put that go to device arenas, and the others, of which the log
        says it. Raise InvalidRows if a field does not have n values."""
        taken = fields_on_devices(self, columns, n, dedup)
        names = {column.field for one in taken for column in one.columns}
        rest = {name: column for name, column in columns.items() if name not in names}
        self.tell_of_host_copies(
            rest, "not all values of this field are arrays of one dtype and rank on one device"
        )
        return taken, rest

    def tell_of_host_copies(self, columns: Mapping[str, Any], why: str) -> None:
        """Says in the log, once a field, that values on a device are copied to the host arena.
        Looks at the first and the last value of each."""
        for name, values in columns.items():
            if name in self._told or len(self._told) == MAX_TOLD:
                continue
            ends = (
                [values[0], values[-1]]
                if isinstance(values, (list, tuple)) and values
                else [values]
            )
            kinds = [kind for kind in self._kinds if kind is not None]
            if any(kind.may_hold(value) for kind in kinds for value in ends):
                self._told.add(name)
                log.warning(
                    "field %r: copying device values to the host arena, because %s", name, why
                )

    def at(self, address: int) -> Opened:
        """The pool that an address behind the arena is in."""
        for opened in (*self._opened.values(), *self._reached):
            if opened.base <= address < opened.base + opened.pool.nbytes:
                return opened
        raise mixed_releases(
            f"the peer sent address {address}, which is outside the arenas that this process has "
            "mapped"
        )

    # what ends when the devices are done with what was asked of them

    def ends(
        self,
        pins: list[int],
        extents: Sequence[Extent] = (),
        keep: object = None,
    ) -> None:
        """Callable from a finalizer, so it takes no lock. keep: what is copied from and to."""
        self._ended.put((pins, extents, keep))

    @property
    def ending(self) -> bool:
        """Whether anything waits for `finished`."""
        return not self._ended.empty()

    def finished(self, timeout_s: float = FINISH_S) -> list[tuple[list[int], Sequence[Extent]]]:
        """Pins and extents that ended before this call, once no device works on them any more; none
        where one still does."""
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
        with self._lock:
            opened = list(self._opened.values())
        try:
            return all(one.device.finish(timeout_s) for one in opened)
        except DeviceMissing as exc:
            if not self._broken:
                self._broken = True
                log.warning(
                    "devices: cannot tell whether a GPU is still using released views, so the "
                    "views stay pinned until this process exits: %s",
                    exc,
                )
            return False

    def close(self) -> None:
        """No value on a device is looked at from here any more."""
        with self._lock:
            opened, self._opened = [*self._opened.values(), *self._reached], {}
            self._reached = []
            devices, self._devices = list(self._devices.values()), {}
            self._handles, self._kinds = [], []
        for one in opened:
            one.pool.close()
        for device in devices:
            device.close()
