"""A peer's metrics over HTTP, for Prometheus, and whether it is well, for whoever restarts it.

`/metrics`, `/healthz` (its loop answers), `/readyz` (it serves clients). Runs in threads of the
peer: the figures are read on the peer's loop, everything else happens beside it. Anybody who
reaches the address may ask, so requests are few at a time and short.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dataplane.errors import AddressInUse, InvalidConfig
from dataplane.peer.meters import BOUNDS_S, Meters
from dataplane.peer.watch.figures import Family, families_of, serves

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

log = logging.getLogger(__name__)

MAX_REQUESTS = 8
"""under way at once; more are turned away"""
READ_S = 2.0
REQUEST_S = 10.0
"""A connection is closed after so long, whatever it still sends."""
ANSWER_S = 5.0
"""How long the peer's loop may take to say how it is."""

Environ = dict[str, Any]
Start = Callable[..., Any]
Answer = TypeVar("Answer")


class Metrics:
    """Listens from the start, also while the peer waits to be let in. AddressInUse."""

    def __init__(self, host: str, port: int) -> None:
        self._meters = Meters()
        self._peer: Peer | None = None
        self._loop = asyncio.get_running_loop()
        self._server = _listen(host, port, self._application)
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.5}, daemon=True
        ).start()
        log.info("metrics at http://%s:%d/metrics", *self.address)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def show(self, peer: Peer) -> None:
        """From now on these are the peer's. What calls added up to stays, it is the process's."""
        peer.door.observe = self._meters.observe
        self._peer = peer

    def hide(self) -> None:
        """The peer ends. The address stays taken: another life may follow."""
        self._peer = None

    # in the threads

    def _application(self, environ: Environ, start: Start) -> Iterable[bytes]:
        match environ.get("PATH_INFO"):
            case "/metrics":
                families = self._ask(lambda peer: families_of(peer, self._meters))
                if families is not None:
                    return _show(families, environ, start)
            case "/healthz":
                if self._ask(lambda peer: True):
                    return _say(start, "200 OK", "ok")
            case "/readyz":
                if self._ask(serves):
                    return _say(start, "200 OK", "ok")
            case _:
                return _say(start, "404 Not Found", "/metrics, /healthz or /readyz")
        return _say(start, "503 Service Unavailable", "the peer does not serve")

    def _ask(self, question: Callable[[Peer], Answer]) -> Answer | None:
        """What the peer answers on its loop; None where it does not within ANSWER_S."""

        async def ask() -> Answer | None:
            return None if self._peer is None else question(self._peer)

        if self._loop.is_closed():
            return None
        answer = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            answer.cancel()
            return None


class _Families(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            match family.kind:
                case "histogram":
                    yield _histogram(family)
                case "counter":
                    yield _filled(CounterMetricFamily, family)
                case "gauge":
                    yield _filled(GaugeMetricFamily, family)


def _filled(kind: type[CounterMetricFamily] | type[GaugeMetricFamily], family: Family) -> Metric:
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in family.values.items():
        metric.add_metric(labels, value)
    return metric


def _histogram(family: Family) -> Metric:
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for label, histogram in (family.histograms or {}).items():
        below, buckets = 0, []
        ends = [*map(str, BOUNDS_S), "+Inf"]
        for end, count in zip(ends, histogram.counts, strict=True):
            below += count
            buckets.append((end, below))
        metric.add_metric([label], buckets, histogram.sum_s)
    return metric


def _show(families: list[Family], environ: Environ, start: Start) -> Iterable[bytes]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    ProcessCollector(registry=registry)
    shown: Iterable[bytes] = make_wsgi_app(registry)(environ, start)
    return shown


def _say(start: Start, status: str, text: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a connection, MAX_REQUESTS of them, each ended after REQUEST_S."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[Any, ...], family: int) -> None:
        self.address_family = family
        self._since: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the look-up of the host's full name: it may take long where DNS is away."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._since) >= MAX_REQUESTS
            if not full:
                self._since[request] = time.monotonic()
        if full:
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        with self._lock:
            old = [r for r, since in self._since.items() if time.monotonic() - since > REQUEST_S]
            for request in old:
                # its thread sees the end, and closes it
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)
                self._since[request] = time.monotonic()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke off, or asked nonsense."""
        log.debug("a request for metrics from %s failed", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = READ_S

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _listen(host: str, port: int, application: Callable[..., Iterable[bytes]]) -> _Server:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as exc:
        raise InvalidConfig(f"metrics cannot be shown at {host}: {exc}", address=host) from exc
    try:
        server = _Server(found[4], found[0])
    except OSError as exc:
        raise AddressInUse(
            f"metrics cannot be shown at {host}:{port}: {exc}; choose another --metrics address "
            "(DATAPLANE_METRICS), or stop the process that has it",
            address=f"{host}:{port}",
        ) from exc
    server.set_app(application)
    return server
