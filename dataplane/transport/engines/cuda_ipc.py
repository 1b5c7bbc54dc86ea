"""CUDA IPC: device memory of another peer of this host, which the GPU itself copies.

Runs in a bulk worker of its own, whose region is the device arenas of its peer. The card names
the pools by their IPC handles. A reader opens its own pools and the owner's when it first needs
them, and its device copies from pool to pool, also between GPUs that can access each other.
Nothing here is specific to CUDA: any kind of device that can open pools is read the same way.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from dataplane.errors import TransportMissing
from dataplane.gpu.device import Device, Pool, PoolHandle
from dataplane.transport.engines.region import AddressRange, AddressRanges, OpenRegion, mapped
from dataplane.transport.seam import (
    PlacedPool,
    ReadRequest,
    Region,
    Transport,
)
from dataplane.wire.frames import decoded
from dataplane.wire.tables import Owner

NAME = "cuda_ipc"
CHECK_S = 0.1
FINISH_S = 10.0


class Card(msgspec.Struct, array_like=True):
    """The card of a region. host: where these handles are valid."""

    host: str
    pools: list[PlacedPool]


_cards = msgspec.msgpack.Decoder(Card)


class _OwnersPools:
    """Pools of one owner, mapped by devices of this peer. They are unmapped with the last reference
    to this object: when the owner is forgotten and the last read that uses them has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[tuple[bytes, str], Pool] = {}
        weakref.finalize(self, _close, self._pools)

    def open(self, handle: PoolHandle, device: Device) -> Pool:
        with self._lock:
            key = handle.raw, device.identity
            if key not in self._pools:
                self._pools[key] = mapped(device, handle)
            return self._pools[key]


def _close(pools: dict[tuple[bytes, str], Pool]) -> None:
    for pool in pools.values():
        pool.close()


class CudaIpcTransport(Transport):
    name = NAME
    memory = frozenset({"cuda"})

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._lock = threading.Lock()
        self._opened: OpenRegion | None = None
        self._theirs: dict[Owner, _OwnersPools] = {}

    def register(self, region: Region) -> bytes:
        """Return the card. Pools are opened only for a read, because that takes device memory."""
        self._region = region
        return msgspec.msgpack.encode(Card(this_host(), list(region.pools)))

    def read(self, request: ReadRequest) -> None:
        placed = _pools_in(request.card)
        with self._lock:
            self._opened = self._opened or OpenRegion(self._region)
            own = self._opened
            pools = self._theirs.get(request.remote.owner)
            if pools is None:
                pools = self._theirs[request.remote.owner] = _OwnersPools()
        theirs = AddressRanges([AddressRange(pool.start, 0, pool.handle.nbytes) for pool in placed])
        dest, nbytes = request.copies["dest"], request.copies["nbytes"]
        targets = own.ranges.descriptors(dest, nbytes)[:, 0].tolist()
        inside = theirs.descriptors(request.sources, nbytes)[:, 0].tolist()
        sources, sizes = theirs.which(request.sources).tolist(), nbytes.tolist()
        readers = own.ranges.which(dest)
        for reader in np.unique(readers).tolist():
            device, asked = own.devices[reader], []
            for at in np.flatnonzero(readers == reader).tolist():
                pool = pools.open(placed[sources[at]].handle, device)
                asked.append((targets[at], pool.address + inside[at], sizes[at], 0))
            try:
                device.carry_out(asked, _rate_limited(request.check))
            except BaseException:
                # The device may still write until it is done.
                while not device.finish(FINISH_S):
                    pass
                raise

    def forget(self, owner: Owner) -> None:
        with self._lock:
            self._theirs.pop(owner, None)


def _rate_limited(check: Callable[[], None]) -> Callable[[], None]:
    """Return a check that runs at most every CHECK_S, because it costs a system call."""
    checked_at = time.monotonic()

    def limited() -> None:
        nonlocal checked_at
        if time.monotonic() - checked_at > CHECK_S:
            check()
            checked_at = time.monotonic()

    return limited


def this_host() -> str:
    """The same text for processes that can open each other's handles: one kernel, one PID
    namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _pools_in(data: bytes) -> list[PlacedPool]:
    """Return the pools of an owner's card, in the order of their offsets."""
    card = decoded(_cards, data, f"a {NAME} memory description")
    if card.host != this_host():
        raise TransportMissing(
            f"transport {NAME} cannot reach the owner of the values, which is on another host or "
            "in another PID namespace: run both peers in one PID namespace, or choose another "
            "--transport",
            transport=NAME,
        )
    return sorted(card.pools, key=lambda pool: pool.start)
