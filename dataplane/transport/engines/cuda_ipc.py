"""CUDA IPC: device memory of another peer of this host, which the GPU itself copies.

Runs in a bulk worker of its own, whose region is the device arenas of its peer. The card names
the pools by their IPC handles. A reader opens its own pools and the owner's when it first needs
them, and its device copies from pool to pool, also between GPUs that can access each other.
Nothing here is specific to CUDA: any kind of device that can open pools is read the same way.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dataplane.errors import TransportMissing, mixed_releases
from dataplane.gpu.device import Copy, Device, Pool, PoolHandle
from dataplane.gpu.registry import device_of
from dataplane.transport.seam import (
    Capabilities,
    PlacedPool,
    ReadRequest,
    Region,
    RegionKey,
    Remote,
    Transport,
)
from dataplane.wire.frames import decoded
from dataplane.wire.tables import Owner

NAME = "cuda_ipc"
CHECK_S = 0.1
FINISH_S = 10.0
Opened = tuple[PlacedPool, Pool]


class Card(msgspec.Struct, array_like=True):
    """The card of a region. host: where these handles are valid. pools: where each starts in the
    region."""

    host: str
    pools: list[tuple[int, PoolHandle]]


_cards = msgspec.msgpack.Decoder(Card)


class _Theirs:
    """Pools of one owner, opened by a device of ours each; open for as long as a read uses them."""

    def __init__(self) -> None:
        self.pools: dict[tuple[bytes, str], Pool] = {}
        self.users = 0
        self.gone = False

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()


class CudaIpcTransport(Transport):
    capabilities = Capabilities(NAME, frozenset({"cuda"}), one_sided=True)

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._lock = threading.Lock()
        self._placed: tuple[PlacedPool, ...] = ()
        self._mine: list[tuple[PlacedPool, Device, Pool]] = []
        self._theirs: dict[Owner, _Theirs] = {}

    def register(self, region: Region) -> RegionKey:
        if not region.pools:
            raise TransportMissing(
                f"transport {NAME} moves only GPU memory, but this arena is in host memory: "
                "choose another --transport",
                transport=NAME,
            )
        self._placed = region.pools
        card = Card(this_host(), [(pool.start, pool.handle) for pool in region.pools])
        return RegionKey(secrets.randbits(48), msgspec.msgpack.encode(card))

    def read(self, request: ReadRequest) -> None:
        held = request.held
        assert held is not None
        card = _card(held.key)
        copies = request.copies
        places = zip(
            copies["dest"].tolist(), held.sources.tolist(), copies["nbytes"].tolist(), strict=True
        )
        asked: dict[Device, list[Copy]] = {}
        looked = time.monotonic()

        def look() -> None:
            nonlocal looked
            if time.monotonic() - looked > CHECK_S or request.cancelled.is_set():
                held.check()
                looked = time.monotonic()

        with self._using(request.remote.owner) as theirs:
            for dest, source, nbytes in places:
                device, target = self._target(dest, nbytes)
                address = self._source(theirs, card, device, source, nbytes)
                asked.setdefault(device, []).append((target, address, nbytes, 0))
            for device, some in asked.items():
                try:
                    device.carry_out(some, look)
                except BaseException:
                    # Until the device is done something may still be written.
                    while not device.finish(FINISH_S):
                        pass
                    raise

    def _target(self, dest: int, nbytes: int) -> tuple[Device, int]:
        """Which device writes there, and the address."""
        with self._lock:
            if not self._mine:
                self._mine = [_own(placed) for placed in self._placed]
        for placed, device, pool in self._mine:
            if placed.holds(dest, nbytes):
                return device, pool.address + dest - placed.start
        raise mixed_releases(
            f"the transfer would write {nbytes} bytes at offset {dest}, outside this peer's "
            "device arenas"
        )

    def _source(self, theirs: _Theirs, card: Card, device: Device, source: int, nbytes: int) -> int:
        """The address of these bytes of the owner as this device reaches them."""
        for start, handle in card.pools:
            if PlacedPool(start, handle).holds(source, nbytes):
                pool = self._open(theirs, handle, device)
                return pool.address + source - start
        raise mixed_releases(
            f"the transfer would read {nbytes} bytes at offset {source}, outside the owner's "
            "device arenas"
        )

    def _open(self, theirs: _Theirs, handle: PoolHandle, device: Device) -> Pool:
        with self._lock:
            key = handle.raw, device.identity
            if key not in theirs.pools:
                same = handle.device == device.identity
                theirs.pools[key] = device.open(handle) if same else device.reach(handle)
            return theirs.pools[key]

    @contextmanager
    def _using(self, owner: Owner) -> Iterator[_Theirs]:
        with self._lock:
            theirs = self._theirs.setdefault(owner, _Theirs())
            theirs.users += 1
        try:
            yield theirs
        finally:
            with self._lock:
                theirs.users -= 1
                if theirs.gone and not theirs.users:
                    theirs.close()

    def forget(self, remote: Remote) -> None:
        with self._lock:
            theirs = self._theirs.pop(remote.owner, None)
            if theirs is not None:
                theirs.gone = True
                if not theirs.users:
                    theirs.close()


def this_host() -> str:
    """The same text for processes that can open each other's handles: one kernel, one PID
    namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _card(key: RegionKey) -> Card:
    card = decoded(_cards, key.card, f"a {NAME} memory description")
    if card.host != this_host():
        raise TransportMissing(
            f"transport {NAME} cannot reach the owner of the values, which is on another host or "
            "in another PID namespace: run both peers in one PID namespace, or choose another "
            "--transport",
            transport=NAME,
        )
    return card


def _own(placed: PlacedPool) -> tuple[PlacedPool, Device, Pool]:
    device = device_of(placed.handle)
    return placed, device, device.open(placed.handle)
