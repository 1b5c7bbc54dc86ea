"""A peer's metrics for Prometheus, and its health for a supervisor.

One table has their names. Their values are read together on the peer's own loop, so a stalled
peer does not answer. Figures are summed over partitions: a partition's name is never a label,
because a long run would create a series per step. The cost grows with partitions, clients and
pins, never with rows. Over HTTP: `/metrics`, `/healthz` (the loop answers), `/readyz` (the peer
serves clients). Any process that reaches the address may ask, so requests are short, and few run
at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dataplane.errors import AddressInUse, InvalidConfig
from dataplane.memory.admission import Admission
from dataplane.metadata.shard.blocks import ACKED, LEASED, PENDING, READY
from dataplane.peer.host import OTHER, ByLabel
from dataplane.transport.registry import TCP
from dataplane.version import __version__
from dataplane.wire import messages as m
from dataplane.wire import tables

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

log = logging.getLogger(__name__)

MAX_REQUESTS = 8
"""Requests in flight at once; more are refused."""
MAX_HEAD_BYTES = 16 << 10
READ_S = 2.0
"""A connection without a request after this time is closed."""
REQUEST_S = 10.0
"""A connection is closed after this time, however slowly it is read."""
TEXT = "text/plain; charset=utf-8"

MAX_CLIENTS = 20
"""Clients with their own series: those that hold most. The others share one."""
MAX_LETTERS = 64
"""The length limit of a label that a user chose."""
BOUNDS_S: tuple[float, ...] = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1)
BOUNDS_S += (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0, 300.0)
"""Upper ends of the histogram's buckets: a local claim takes under a millisecond, one that waits
for rows may take minutes."""
CALLS: dict[type[m.Body], str] = {
    m.Put: "put",
    m.Reserve: "reserve",
    m.Claim: "claim",
    m.Finish: "finish",
    m.Fetch: "fetch",
    m.Read: "read",
}
_STATES = {"pending": PENDING, "ready": READY, "leased": LEASED, "acked": ACKED}

GROUPS = {
    "calls": {
        "put_rows_total": "Rows put by clients of this host.",
        "put_bytes_total": "Bytes put by clients of this host.",
        "stage_rows_total{stage}": "Rows granted to claims of this host.",
        "stage_bytes_total{stage}": "Bytes of rows granted to claims of this host.",
        "stage_claim_seconds_total{stage}": "Duration of finished claims, including waits.",
        "stage_acked_rows_total{stage}": "Rows acked by clients of this host.",
        "call_failures_total{error}": "Calls that ended in an error.",
        "waiting_claims": "Claims waiting for rows.",
        "waits_total{kind,reason}": "Waits of 1 ms or more that have ended.",
        "wait_seconds_total{kind,reason}": (
            "Total seconds of waits of 1 ms or more that have ended."
        ),
    },
    "peer": {
        "info{plane,peer,address,version}": "Identity of the peer; always 1.",
        "ready": "1 if the peer answers client calls, else 0.",
        "clients": "Attached client processes.",
        "connections": "Client connections.",
        "client_held_bytes{client,how}": "Bytes reserved or pinned by each of the top 20 clients.",
        "refused_total{door}": "Connections and frames that the peer refused.",
    },
    "arena": {
        "arena_size_bytes": "Size of the arena.",
        "arena_used_bytes": "Bytes of rows and of cached copies.",
        "arena_granted_bytes": "Bytes reserved by clients for the rows they write.",
        "arena_free_bytes": "Free bytes of the arena.",
        "arena_largest_free_bytes": "Bytes of the largest free range.",
        "arena_touched_bytes": "Resident memory of the arena.",
        "arena_pinned_bytes": "Bytes in client views, or being read by other peers.",
        "arena_quarantined_bytes": (
            "Bytes still mapped by client processes that disconnected without exiting."
        ),
        "arena_room_bytes{class}": "Bytes that an admission class can still reserve.",
        "cached_bytes": "Bytes of cached copies of other hosts' values.",
        "second_copies": ("Bytes of other peers' values stored here as replicas (replicas=2)."),
    },
    "spill": {
        "spill_bytes": "Bytes of rows in the spill file.",
        "spill_size_bytes": "Size limit of the spill file.",
        "spill_written_bytes_total": "Bytes written to the spill file.",
        "spill_read_bytes_total": "Bytes read from the spill file.",
    },
    "devices": {
        "device_size_bytes{device}": "Size of a device arena.",
        "device_used_bytes{device}": "Bytes of rows on a device.",
        "device_granted_bytes{device}": "Bytes reserved by clients on a device.",
        "device_free_bytes{device}": "Free bytes of a device arena.",
        "device_pinned_bytes{device}": "Bytes of a device in client views.",
        "device_staged_bytes_total{device}": "Bytes copied to host memory for other readers.",
        "device_overflowed_bytes_total{device}": "Bytes put on the host because a device was full.",
    },
    "waiting for space": {
        "backpressure_waiting{class}": "Calls waiting for space.",
        "backpressure_waits_total{class}": "Calls that had to wait for space.",
        "backpressure_wait_seconds_total{class}": "Total seconds of finished waits for space.",
        "backpressure_refused_total{class}": "Waits for space that ended in BackPressure.",
        "starved_claims": "Claims waiting for arena space to pull values into.",
    },
    "leases and stages": {
        "leases": "Leases held by clients of this host.",
        "leases_abandoned_total": (
            "Leases whose client closed or exited; their rows were returned."
        ),
        "leases_expired_total": "Leases that exceeded lease=; their rows were returned.",
        "rows_by_stage{stage,state}": "Rows of this peer's shards, by their state for a stage.",
        "stage_released_rows_total{stage}": "Rows that returned to a stage without an ack.",
        "stage_redelivered_rows_total{stage}": "Returned rows that were claimed again.",
        "lost_rows_total": "Rows whose only bytes were on a peer that died.",
    },
    "shards": {
        "shards": "Shards served by this peer.",
        "partitions": "Partitions in this peer's shards.",
        "rows": "Rows in this peer's shards.",
        "groups": "Groups in this peer's shards.",
        "metadata_bytes": "Memory used by metadata of rows.",
        "inline_bytes": "Bytes of small values stored in this peer's shards.",
        "tombstones": "Remembered names of dropped or freed rows and groups.",
        "admission_version": (
            "Version set by the last advance(); the maximum over all partitions."
        ),
        "admission_lag": "How many versions the slowest open group or permit is behind.",
    },
    "roster and backup": {
        "roster_epoch": "Epoch of the current roster.",
        "roster_members": "Members of the roster.",
        "roster_leaving": "Members that are leaving the run.",
        "roster_unprotected": "Members whose shards have no backup in sync.",
        "backup_in_sync": "1 if another peer can take over this peer's shards.",
        "backup_behind": "Operations that the backup has not confirmed.",
    },
    "between hosts": {
        "pulled_bytes_total": "Bytes of values pulled from other hosts.",
        "pull_hits_total": ("Chunks found in the cache of pulled copies, so they needed no pull."),
        "stage_remote_bytes_total{stage}": "Bytes of claimed rows from other hosts.",
        "stage_transport_bytes_total{stage,transport}": (
            "Bytes pulled for claims, by the transport that moved them."
        ),
        "transport_bytes_total{transport,direction}": "Bytes moved between arenas.",
        "transport_jobs_total{transport,outcome}": ("Transfers into this arena, by outcome."),
        "transport_restarts_total{transport}": "Restarts of bulk workers.",
        "transport_peers{requested,transport}": (
            "Peers whose values this peer reads, by transport."
        ),
        "device_transport_peers{requested,transport}": (
            "Peers whose device values this peer reads, by transport."
        ),
    },
}
"""By subject. Names are without the prefix `dataplane_`, with their labels. A name that ends in
`_total` is a counter, any other a gauge. docs/observe.md lists the names, `/metrics` the texts."""

TABLE = {name: help for group in GROUPS.values() for name, help in group.items()}

CALL_SECONDS = "Duration of clients' calls in the peer, including waits for rows."

Values = Mapping[Any, float]
"""by the values of the labels, a tuple"""


class Meters:
    """Counters of clients' calls, if metrics are enabled. `observe` is called for each answered
    call, and takes a few microseconds."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        took = Histogram(
            "dataplane_call_seconds",
            CALL_SECONDS,
            ["call"],
            registry=self.registry,
            buckets=BOUNDS_S,
        )
        self.calls = {kind: took.labels(name) for kind, name in CALLS.items()}
        self.failures = ByLabel()
        """by the class of the error"""
        self.put_rows = 0
        self.put_bytes = 0
        self.claimed_rows = ByLabel()
        self.claimed_bytes = ByLabel()
        self.claim_us = ByLabel()
        """by stage: durations of claims in microseconds"""

    def observe(self, request: m.Body, answer: m.Body, began: float) -> None:
        """Count an answered call. began: when the request arrived (monotonic)."""
        call = self.calls.get(type(request))
        if call is None:
            return
        took_s = time.monotonic() - began
        call.observe(took_s)
        if isinstance(request, m.Claim):
            self.claim_us.add(request.stage, int(1e6 * took_s))
        if isinstance(answer, m.Failed):
            if not answer.details.get("values"):  # the client stores them in the arena instead
                self.failures.add(answer.code, 1)
        elif isinstance(request, m.Put):
            self.put_rows += request.rows.count
            self.put_bytes += request.values.nbytes
        elif isinstance(request, m.Claim) and isinstance(answer, m.Claimed):
            self.claimed_rows.add(request.stage, answer.table.rows.count)
            self.claimed_bytes.add(request.stage, _bytes_of_rows(answer.table.values))


def _bytes_of_rows(values: tables.Values) -> int:
    """Return about how many bytes belong to the message's rows: each row of a chunk counts
    alike."""
    rows: Counter[int] = Counter()
    for piece in values.pieces:
        rows[piece.chunk] += int.from_bytes(piece.given).bit_count()
    chunks = enumerate(values.chunks)
    return sum([one.nbytes * min(rows[n], one.rows) // max(1, one.rows) for n, one in chunks])


def serves(peer: Peer) -> bool:
    """Whether this peer answers client calls now, as `/readyz` reports."""
    return peer.door.is_open and peer.host.serving.is_sure()


def families_of(peer: Peer, meters: Meters) -> list[Metric]:
    """Return the current metrics. Call it on the peer's loop."""
    now: dict[str, float | Values] = {}
    for part in (_calls(meters), _memory(peer), _shards(peer), _roster(peer), _moved(peer)):
        now |= part
    return [*meters.registry.collect(), *_families(now)]


def _families(now: Mapping[str, float | Values]) -> Iterator[Metric]:
    for title, help in TABLE.items():
        name, _, labels = title.rstrip("}").partition("{")
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        metric = kind(f"dataplane_{name}", help, labels=labels.split(",") if labels else [])
        value = now[name]
        for of, number in value.items() if isinstance(value, Mapping) else [((), value)]:
            metric.add_metric(of, number)
        yield metric


def _by(sums: ByLabel) -> Values:
    values: Counter[tuple[str, ...]] = Counter()
    for label, amount in sums.sums.items():
        values[_short(label),] += amount
    return values


def _short(label: str) -> str:
    return label if len(label) <= MAX_LETTERS else label[: MAX_LETTERS - 1] + "…"


def _calls(meters: Meters) -> dict[str, float | Values]:
    return {
        "call_failures_total": _by(meters.failures),
        "put_rows_total": meters.put_rows,
        "put_bytes_total": meters.put_bytes,
        "stage_rows_total": _by(meters.claimed_rows),
        "stage_bytes_total": _by(meters.claimed_bytes),
        "stage_claim_seconds_total": {k: us / 1e6 for k, us in _by(meters.claim_us).items()},
    }


def _memory(peer: Peer) -> dict[str, float | Values]:
    host, room, spilling = peer.host, peer.room, peer.spilling
    space = host.space.figures()
    devices = peer.pools.figures()
    classes = [((admission.name.lower(),), admission) for admission in Admission]
    held: Counter[tuple[str, ...]] = Counter()
    for nth, (holder, granted, pinned) in enumerate(host.space.holders()):
        known = "transfers" if holder == 0 else host.labels.get(holder, "a client that left")
        label = _short(known) if nth < MAX_CLIENTS else OTHER
        held[label, "granted"] += granted
        held[label, "pinned"] += pinned
    now: dict[str, float | Values] = {
        "arena_room_bytes": {(n,): one["room_bytes"] for n, one in space["classes"].items()},
        "cached_bytes": space["cached_bytes"],
        "spill_bytes": space["spilled_bytes"],
        "spill_size_bytes": space["spill_bytes"],
        "spill_written_bytes_total": spilling.written_bytes if spilling else 0,
        "spill_read_bytes_total": spilling.read_bytes if spilling else 0,
        "client_held_bytes": held,
        "backpressure_waiting": {name: room.waiting(at) for name, at in classes},
        "backpressure_waits_total": {name: room.waited[at] for name, at in classes},
        "backpressure_wait_seconds_total": {name: room.waited_s[at] for name, at in classes},
        "backpressure_refused_total": {name: room.refused[at] for name, at in classes},
    }
    plain = ("size", "used", "granted", "free", "pinned")
    for name in (*plain, "largest_free", "touched", "quarantined"):
        now[f"arena_{name}_bytes"] = space[f"{name}_bytes"]
    for name in (*plain, "staged", "overflowed"):
        of_each = {(one["device"],): one[f"{name}_bytes"] for one in devices}
        now[f"device_{name}_bytes{'' if name in plain else '_total'}"] = of_each
    return now


def _shards(peer: Peer) -> dict[str, float | Values]:
    stages: Counter[tuple[str, ...]] = Counter()
    names = ByLabel()
    peer.host.meter()
    entries = peer.host.entries.values()
    stores = [entry.store for entry in entries]
    acked: Counter[tuple[str, ...]] = Counter()
    for name, rows in peer.host.acked_by_clients.sums.items():
        acked[_short(name),] += rows
    for store in stores:
        for name, stage in store.stages.items():
            names.add(name, 0)
            label = _short(name) if name in names.sums else OTHER
            for state, kind in _STATES.items():
                stages[label, state] += stage.rows.counts[kind]
    return {
        "leases": len(peer.claims.leases),
        "leases_abandoned_total": peer.finishing.abandoned_leases,
        "leases_expired_total": peer.janitor.expired_leases,
        "rows_by_stage": stages,
        "stage_acked_rows_total": acked,
        "stage_released_rows_total": _by(peer.host.released),
        "stage_redelivered_rows_total": _by(peer.host.redelivered),
        "partitions": len(stores),
        "rows": sum(len(store) for store in stores),
        "groups": sum(len(store.groups) for store in stores),
        "metadata_bytes": sum(store.nbytes for store in stores),
        "inline_bytes": peer.metadata_quota.figures()["values_bytes"],
        "tombstones": sum(len(store.tombstones) for store in stores),
        "admission_version": max((store.permits.version for store in stores), default=0),
        "admission_lag": max((store.permits.lag(store) for store in stores), default=0),
        "lost_rows_total": peer.host.lost_rows,
        "waiting_claims": peer.claims.waiting,
        "waits_total": {kind: many for kind, (many, _) in peer.host.events.waits.items()},
        "wait_seconds_total": {kind: took for kind, (_, took) in peer.host.events.waits.items()},
        "starved_claims": peer.room.starved,
        "second_copies": sum(len(e.replicas) for e in entries if e.replicas is not None),
    }


def _roster(peer: Peer) -> dict[str, float | Values]:
    host, roster = peer.host, peer.host.roster
    unprotected = sum(not roster.backup_of(member)[1] for member in roster.hosts)
    who = (*map(_short, (host.plane, host.name, host.address)), __version__)
    return {
        "info": {who: 1},
        "ready": serves(peer),
        "clients": len(peer.sessions),
        "connections": len(peer.door.connections),
        "refused_total": {("local",): peer.door.refusals.total, ("peer",): peer.mesh.refused},
        "roster_epoch": roster.epoch[1],
        "roster_members": len(roster.members),
        "roster_leaving": len(roster.leaving),
        "roster_unprotected": 0 if host.solo else unprotected,
        "shards": len(roster.shards_of(host.address)),
        "backup_in_sync": roster.backup_of(host.address)[1],
        "backup_behind": host.progress.done - host.progress.confirmed,
    }


def _moved(peer: Peer) -> dict[str, float | Values]:
    pulls = peer.pulls
    bulk = [pulls.engine.stats()] if pulls.engine is not None else []
    moved = {(name, "in"): count for b in bulk for name, count in b["bytes_in_over"].items()}
    for b in bulk:
        # Readers with another engine do not say so: then `out` counts both together.
        moved[TCP if b["transport"] == TCP else "any", "out"] = b["bytes_out"]
    brought: Counter[tuple[str, ...]] = Counter()
    for carrier, by_stage in pulls.brought.items():
        for stage, nbytes in by_stage.sums.items():
            brought[_short(stage), carrier] += nbytes
    jobs = {(b["transport"], how): b[f"jobs_{how}"] for b in bulk for how in ("done", "failed")}
    return {
        "stage_remote_bytes_total": _by(peer.claims.far_bytes),
        "pulled_bytes_total": pulls.pulled_bytes,
        "pull_hits_total": pulls.hits,
        "transport_bytes_total": moved,
        "transport_jobs_total": jobs,
        "transport_restarts_total": {(b["transport"],): b["restarts"] for b in bulk},
        "stage_transport_bytes_total": brought,
        "transport_peers": _used(pulls.stats()),
        "device_transport_peers": _used(peer.pools.transports()),
    }


def _used(ways: dict[str, Any]) -> Values:
    return Counter((ways["requested"], way["transport"]) for way in ways["peers"].values())


class Metrics:
    """Serves metrics from the start, also while the peer waits to join."""

    def __init__(self) -> None:
        self._meters = Meters()
        self._peer: Peer | None = None
        self._under_way = 0
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> None:
        """Start to listen. Raises InvalidConfig or AddressInUse."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as exc:
            raise InvalidConfig(
                f"cannot serve metrics at {host}: {exc}; correct the --metrics address "
                "(DATAPLANE_METRICS)",
                address=host,
            ) from exc
        try:
            where = found[4][:2]
            self._server = await asyncio.start_server(self._serve, *where, limit=MAX_HEAD_BYTES)
        except OSError as exc:
            raise AddressInUse(
                f"cannot serve metrics at {host}:{port}: {exc}; choose another --metrics address "
                "(DATAPLANE_METRICS), or stop the process that is using this address",
                address=f"{host}:{port}",
            ) from exc
        log.info("metrics: serving at http://%s:%d/metrics", host, port)

    def show(self, peer: Peer) -> None:
        """Show the metrics of this peer. Counters of calls belong to the process and continue."""
        peer.door.observe = self._meters.observe
        self._peer = peer

    def hide(self) -> None:
        """Stop showing the peer's metrics, because it ends. The address stays in use for its
        successor."""
        self._peer = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._under_way += 1
        try:
            if self._under_way <= MAX_REQUESTS:
                async with asyncio.timeout(REQUEST_S):
                    await self._answer(reader, writer)
        except (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError) as exc:
            log.debug("metrics: invalid or aborted request: %s", exc)
        finally:
            self._under_way -= 1
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(READ_S):
            head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        status, kind, page = await self._page(path.partition("?")[0])
        if writer.is_closing():  # the caller has hung up, and uvloop accepts no more bytes
            return
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(page)}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        writer.write(b"" if method == "HEAD" else page)
        writer.write_eof()
        await writer.drain()
        await reader.read(1)  # until the caller has everything

    async def _page(self, path: str) -> tuple[str, str, bytes]:
        """Return status, content type and text."""
        peer = self._peer
        if path not in ("/metrics", "/healthz", "/readyz"):
            return "404 Not Found", TEXT, b"not found: use /metrics, /healthz or /readyz\n"
        if peer is None or (path == "/readyz" and not serves(peer)):
            return "503 Service Unavailable", TEXT, b"the peer is not serving calls\n"
        if path != "/metrics":
            return "200 OK", TEXT, b"ok\n"
        text = await asyncio.to_thread(generate_latest, _Families(families_of(peer, self._meters)))
        return "200 OK", CONTENT_TYPE_LATEST, text


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
