"""Several "hosts" in one process, each with an arena, and a bulk engine with a real worker."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.errors import TransferFailed
from dataplane.gpu.device import Device, Pool
from dataplane.transport import COPY, GONE, ReadOutcome, Remote, plane_key
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import TCP
from dataplane.transport.tickets import Identity, new_identity
from dataplane.wire.packed import EXTENT, U8
from dataplane.wire.tables import Owner

KEY = plane_key("test", (1, 1))
PATIENCE_S = 30.0
Records = npt.NDArray[Any]


class Host:
    """A host in a test: an arena with its chunks, and a bulk engine that serves them, but no
    peer."""

    def __init__(
        self,
        name: str,
        arena_bytes: int,
        key: bytes,
        transport: str,
        identity: Identity | None = None,
        device: Device | None = None,
    ) -> None:
        self.owner = Owner(name, 7)
        self.transport = transport
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, arena_bytes)
        self.map = mmap.mmap(self.fd, arena_bytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.map, np.uint8)
        self.device = device
        self.pool: Pool | None = None
        pools = []
        if device is not None:
            pool = self.pool = device.allocate(arena_bytes)
            self.bytes = _mapped(pool.address, arena_bytes)
            pools.append(pool.handle)
        self.extents: Records = np.zeros(1 << 17, EXTENT)
        self.numbers = np.zeros(1 << 17, U8)
        """numbers of the chunks; set one to 0 to free it"""
        self.held: set[int] = set()
        self.pins = 0
        self.on_pin: Callable[[], None] = lambda: None
        self.engine = BulkEngine(
            self.fd,
            arena_bytes,
            "127.0.0.1",
            owner=self.owner,
            key=key,
            pin=self._pin,
            unpin=self.held.remove,
            transports=[transport] if transport != TCP else [],
            identity=identity,
            pools=pools,
        )

    @property
    def remote(self) -> Remote:
        return Remote(self.owner, self.engine.address, self.engine.fingerprint)

    async def read(self, source: Host, copies: Records, timeout_s: float = 30.0) -> ReadOutcome:
        """Read ranges of `source` into this host's arena, over the transport under test."""
        return await self.engine.read(source.remote, copies, timeout_s, self.transport)

    async def read_with_retries(self, source: Host, copies: Records) -> ReadOutcome:
        """Call `read`, and retry up to four times if the transfer fails, as a peer does: a worker
        may be restarting."""
        for _ in range(4):
            try:
                return await self.read(source, copies)
            except TransferFailed:
                continue
        return await self.read(source, copies)

    def place(self, offsets: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Records:
        """Define chunks 0, 1, … at these offsets. Return COPY records that copy each whole chunk to
        the same offset."""
        count = len(offsets)
        self.extents["offset"][:count] = offsets
        self.extents["length"][:count] = lengths
        self.numbers[:count] = np.arange(count) + (1 << 32)
        copies: Records = np.zeros(count, COPY)
        copies["chunk"] = self.numbers[:count]
        copies["nbytes"] = lengths
        copies["dest"] = offsets
        return copies

    def fill(self, seed: int = 0) -> None:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(self.bytes), np.uint8)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this host's bulk worker."""
        os.kill(self.pid, number)

    @property
    def pid(self) -> int:
        """The process id of the bulk worker."""
        assert self.engine.pid is not None
        return self.engine.pid

    def close(self) -> None:
        del self.bytes
        self.pool = None
        if self.device is not None:
            self.device.close()
        self.map.close()
        os.close(self.fd)

    def _pin(self, chunks: npt.NDArray[np.uint64]) -> tuple[int, Records]:
        self.on_pin()
        index = chunks & np.uint64(0xFFFF_FFFF)
        places = self.extents[index]
        places["offset"][self.numbers[index] != chunks] = GONE
        self.pins += 1
        self.held.add(self.pins)
        return self.pins, places


class StartHost(Protocol):
    def __call__(
        self,
        name: str,
        arena_bytes: int = 1 << 20,
        key: bytes = KEY,
        tls: bool | None = None,
    ) -> Awaitable[Host]: ...


@asynccontextmanager
async def hosts(
    transport: str = TCP, tls: bool = False, device: type[Device] | None = None
) -> AsyncIterator[StartHost]:
    """Yield a function that starts a host. At the end, wait until every pin is released, then stop
    all hosts.

    `tls`: require TLS on every host that is started without its own `tls`. `device`: put each
    host's memory on a device of this kind.
    """
    every = tls
    started: list[Host] = []

    async def start(
        name: str,
        arena_bytes: int = 1 << 20,
        key: bytes = KEY,
        tls: bool | None = None,
    ) -> Host:
        identity = new_identity() if (every if tls is None else tls) else None
        own = None if device is None else device.numbered(len(started))
        host = Host(name, arena_bytes, key, transport, identity, own)
        started.append(host)
        await host.engine.start()
        return host

    try:
        yield start
        await until(lambda: not any(host.held for host in started))
    finally:
        for host in started:
            await host.engine.stop()
            host.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition()` is true. Raises TimeoutError after 30 s."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def _mapped(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory of a device that this process can read and write."""
    memory: npt.NDArray[np.uint8] = np.ctypeslib.as_array(
        (ctypes.c_uint8 * nbytes).from_address(address)
    )
    return memory
