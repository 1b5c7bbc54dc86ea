"""Two "hosts" in one test: arenas of their own, and bulk engines with real worker processes."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from dataplane.transport import COPY, GONE, Remote, plane_key
from dataplane.transport.engine import BulkEngine
from dataplane.wire.records import EXTENT
from dataplane.wire.tables import Owner

KEY = plane_key("test", (1, 1))


class Host:
    """An arena, the ranges in it, and what a peer does for its engine."""

    def __init__(self, name: str, arena_bytes: int, workers: int, key: bytes) -> None:
        self.owner = Owner(name, 7)
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, arena_bytes)
        self.map = mmap.mmap(self.fd, arena_bytes)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.extents = np.zeros(1 << 17, EXTENT)
        self.generations = np.zeros(1 << 17, np.uint32)
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
            workers=workers,
        )

    @property
    def remote(self) -> Remote:
        return Remote(self.owner, self.engine.address)

    def place(self, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Ranges 0, 1, … at these offsets; COPY records of them, whole, to the same offsets."""
        count = len(offsets)
        self.extents["offset"][:count] = offsets
        self.extents["length"][:count] = lengths
        self.generations[:count] = 1
        copies = np.zeros(count, COPY)
        copies["range"] = np.arange(count)
        copies["generation"] = 1
        copies["nbytes"] = lengths
        copies["dest"] = offsets
        return copies

    def fill(self, seed: int = 0) -> None:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(self.bytes), np.uint8)

    def close(self) -> None:
        del self.bytes
        self.map.close()
        os.close(self.fd)

    def _pin(self, ranges: np.ndarray) -> tuple[int, np.ndarray]:
        self.on_pin()
        places = self.extents[ranges["range"]]
        places["offset"][self.generations[ranges["range"]] != ranges["generation"]] = GONE
        self.pins += 1
        self.held.add(self.pins)
        return self.pins, places


StartHost = Callable[..., Coroutine[Any, Any, Host]]


@pytest.fixture
async def start_host() -> AsyncIterator[StartHost]:
    hosts: list[Host] = []

    async def start(
        name: str, arena_bytes: int = 1 << 20, workers: int = 1, key: bytes = KEY
    ) -> Host:
        host = Host(name, arena_bytes, workers, key)
        hosts.append(host)
        await host.engine.start()
        return host

    yield start
    for host in hosts:
        async with asyncio.timeout(20):  # else a pin was never given back
            while host.held:
                await asyncio.sleep(0)
    for host in hosts:
        await host.engine.stop()
        host.close()
