"""A peer's metrics over HTTP, for Prometheus, and whether it is well, for whoever restarts it.

`/metrics`, `/healthz` (its loop answers), `/readyz` (it serves clients), on the peer's own loop:
one that stands still answers nothing. Anybody who reaches the address may ask, so requests are few
at a time and short.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dataplane.errors import AddressInUse, InvalidConfig
from dataplane.peer.watch.figures import Meters, families_of, serves

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

log = logging.getLogger(__name__)

MAX_REQUESTS = 8
"""under way at once; more are turned away"""
MAX_HEAD_BYTES = 16 << 10
READ_S = 2.0
"""Who has not asked by then is turned away."""
REQUEST_S = 10.0
"""A connection is closed after so long, however slowly it is read."""
TEXT = "text/plain; charset=utf-8"


class Metrics:
    """Listens from the start, also while the peer waits to be let in."""

    def __init__(self) -> None:
        self._meters = Meters()
        self._peer: Peer | None = None
        self._under_way = 0
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> None:
        """InvalidConfig, AddressInUse."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as exc:
            raise InvalidConfig(f"metrics cannot be shown at {host}: {exc}", address=host) from exc
        try:
            where = found[4][:2]
            self._server = await asyncio.start_server(self._serve, *where, limit=MAX_HEAD_BYTES)
        except OSError as exc:
            raise AddressInUse(
                f"metrics cannot be shown at {host}:{port}: {exc}; choose another --metrics "
                "address (DATAPLANE_METRICS), or stop the process that has it",
                address=f"{host}:{port}",
            ) from exc
        log.info("metrics at http://%s:%d/metrics", host, port)

    def show(self, peer: Peer) -> None:
        """From now on these are the peer's. What calls added up to stays, it is the process's."""
        peer.door.observe = self._meters.observe
        self._peer = peer

    def hide(self) -> None:
        """The peer ends. The address stays taken: another life may follow."""
        self._peer = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._under_way += 1
        try:
            if self._under_way <= MAX_REQUESTS:
                async with asyncio.timeout(REQUEST_S):
                    await self._answer(reader, writer)
        except (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError) as exc:
            log.debug("a request for metrics broke off, or was none: %s", exc)
        finally:
            self._under_way -= 1
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(READ_S):
            head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        status, kind, page = await self._page(path.partition("?")[0])
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(page)}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        writer.write(b"" if method == "HEAD" else page)
        writer.write_eof()
        await writer.drain()
        await reader.read(1)  # until who asked has it all

    async def _page(self, path: str) -> tuple[str, str, bytes]:
        """Status, content type, text."""
        peer = self._peer
        if path not in ("/metrics", "/healthz", "/readyz"):
            return "404 Not Found", TEXT, b"/metrics, /healthz or /readyz\n"
        if peer is None or (path == "/readyz" and not serves(peer)):
            return "503 Service Unavailable", TEXT, b"the peer does not serve\n"
        if path != "/metrics":
            return "200 OK", TEXT, b"ok\n"
        text = await asyncio.to_thread(_text, families_of(peer, self._meters))
        return "200 OK", CONTENT_TYPE_LATEST, text


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _text(families: list[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
