"""Serve TransferQueue's gauges `tq_*`, which Grafana panels of verl and RL-Insight query.

The process that started the queue serves the gauges of all hosts, because verl registers one
address. Each scrape reads the current figures. The plane has no controller and no storage unit:
each peer counts as a storage unit, and the controller's figures are sums over all peers.
docs/verl.md explains each gauge. This module needs prometheus_client, so it is imported only if
metrics are enabled.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dataplane_transfer_queue.store import REGISTRY, Row, Store

F = TypeVar("F", bound=Callable[..., Any])

BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
REST = 9
"""After a scrape that took t seconds, the figures are reused for this many times t, because
listing many rows takes time."""
KEPT = 1_000
"""The quantiles are computed from this many recent durations."""
ALL = "all"
"""TransferQueue's name for all tasks together."""

_CALLS = {
    "put": "NOTIFY_DATA_UPDATE",
    "values": "GET_DATA",
    "rows": "GET_META",
    "find": "KV_RETRIEVE_META",
    "consume": "GET_CONSUMPTION",
    "claim": "GET_META",
    "clear": "CLEAR_META",
    "clear_partition": "CLEAR_PARTITION",
}
"""Methods of `Store`, and TransferQueue's names of the corresponding requests."""
_ANSWERS = {"PutDone": "PUT_DATA", "ReadDone": "GET_DATA", "Dropped": "CLEAR_DATA"}
"""Replies of peers, and TransferQueue's names of the corresponding storage requests."""
_STORED = {"NOTIFY_DATA_UPDATE": "PUT_DATA", "GET_DATA": "GET_DATA", "CLEAR_META": "CLEAR_DATA"}
"""Controller requests, and the storage requests that the same call includes."""


class Server:
    """An HTTP server of `/metrics`. `endpoint`: its `host:port`."""

    def __init__(self, store: Store, port: int) -> None:
        host = _host(store.plane.stats())
        registry = CollectorRegistry()
        calls = Calls(registry)
        registry.register(Queue(store, calls))
        calls.measure(store)
        self._server, self._thread = start_http_server(port, host, registry)
        self.endpoint = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Calls:
    """Counts and durations of this process's calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.latest = {kind: deque[float](maxlen=KEPT) for kind in _CALLS.values()}
        self._seconds = Histogram(
            "tq_controller_request_duration_seconds",
            "Duration of this process's calls, in seconds",
            ["op_type"],
            registry=registry,
            buckets=BUCKETS_S,
        )

    def measure(self, store: Store) -> None:
        for name, kind in _CALLS.items():
            setattr(store, name, self._measured(getattr(store, name), kind))

    def _measured(self, call: F, kind: str) -> F:
        @functools.wraps(call)
        def measured(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            self.requests[kind] += 1
            try:
                return call(*args, **named)
            except Exception:
                self.errors[kind] += 1
                raise
            finally:
                took = time.perf_counter() - began
                self._seconds.labels(kind).observe(took)
                self.latest[kind].append(took)

        return measured  # type: ignore[return-value]


class Queue(Collector):
    """The gauges of the queue, read from the plane."""

    def __init__(self, store: Store, calls: Calls) -> None:
        self._store = store
        self._rows = store.rows  # not a measured call: it is nobody's request
        self._calls = calls
        self._began = time.monotonic()
        self._reading = threading.Lock()
        self._read: list[Metric] = []
        self._until = 0.0

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        with self._reading:
            began = time.monotonic()
            if began >= self._until:
                self._read = list(self._families())
                now = time.monotonic()
                self._until = now + REST * (now - began)
            return self._read

    def _families(self) -> Iterator[Metric]:
        stats = self._store.plane.stats()
        partitions = {name: self._rows(name) for name in self._store.partitions()}
        there = stats["everywhere"]["partitions"]
        yield _gauge(
            "tq_controller_uptime_seconds",
            "Seconds since the queue started",
            time.monotonic() - self._began,
        )
        yield _gauge(
            "tq_controller_memory_rss_bytes",
            "Bytes of the rows' metadata, on all hosts",
            sum(one["metadata_bytes"] for one in there.values()),
        )
        yield _gauge("tq_partitions_total", "Number of partitions", len(partitions))
        yield from self._of_partitions(partitions, there)
        yield from self._of_requests(stats)
        yield from self._of_peers(stats, there)

    def _of_partitions(
        self, partitions: dict[str, list[Row]], there: dict[str, Any]
    ) -> Iterator[Metric]:
        numbers = sum(row.number is not None for rows in partitions.values() for row in rows)
        yield _gauge(
            "tq_global_index_allocated_total", "Number of rows with a global index", numbers
        )
        yield _gauge(
            "tq_global_index_reusable_total", "Always 0, because no global index is reused", 0
        )
        samples = _gauge("tq_partition_samples_total", "Number of rows", of=["partition_id"])
        labels = ["partition_id", "task_name"]
        produced = _gauge(
            "tq_partition_production_progress", "Share of the rows that have values", of=labels
        )
        consumed = _gauge(
            "tq_partition_consumption_progress",
            "Share of the rows that the task has fetched",
            of=labels,
        )
        for name, rows in partitions.items():
            samples.add_metric([name], len(rows))
            share = sum(bool(row.told) for row in rows) / len(rows) if rows else 0.0
            had = {
                task: sum(row.consumed(task) for row in rows) for task in self._store.tasks(rows)
            }
            for task, stage in there.get(name, {"stages": {}})["stages"].items():
                had[task] = max(0, len(rows) - stage["ready_rows"])
            for task in (ALL, *had):
                produced.add_metric([name, task], share)
            for task, count in had.items():
                consumed.add_metric([name, task], count / len(rows) if rows else 0.0)
        yield from (samples, produced, consumed)

    def _of_requests(self, stats: dict[str, Any]) -> Iterator[Metric]:
        peers = _peers(stats)
        moved = {
            "NOTIFY_DATA_UPDATE": sum(peer["put_rows"] for peer in peers.values()),
            "CLEAR_META": sum(peer["dropped_rows"] for peer in peers.values()),
        }
        for name, help, counts in (
            ("request", "Number of calls of this process", self._calls.requests),
            ("request_errors", "Number of failed calls of this process", self._calls.errors),
            ("request_samples", "Number of rows written or freed, on all hosts", moved),
        ):
            family = CounterMetricFamily(f"tq_controller_{name}", help, labels=["op_type"])
            for kind, count in list(counts.items()):
                family.add_metric([kind], count)
            yield family

    def _of_peers(self, stats: dict[str, Any], there: dict[str, Any]) -> Iterator[Metric]:
        unit = ["storage_unit_id"]
        capacity = _gauge(
            "tq_storage_capacity_total",
            "Number of rows of average size that the arena holds",
            of=unit,
        )
        keys = _gauge(
            "tq_storage_active_keys_total", "Number of rows in the peer's shards", of=unit
        )
        used = _gauge("tq_storage_utilization_ratio", "Share of the arena that is used", of=unit)
        memory = _gauge(
            "tq_storage_memory_rss_bytes", "Resident memory of the peer, in bytes", of=unit
        )
        spills = _gauge(
            "tq_storage_ssd_offload_enabled",
            "1 if the peer may spill values to disk, else 0",
            of=unit,
        )
        spilled = _gauge(
            "tq_storage_ssd_active_bytes", "Bytes of values in the spill file", of=unit
        )
        done = _gauge(
            "tq_storage_request_ops",
            "Number of requests that the peer answered",
            of=[*unit, "op_type"],
        )
        rows: Counter[str] = Counter()
        for partition, one in there.items():
            rows[one["peer"]] += one["rows"] if partition != REGISTRY else 0
        peers = _peers(stats)
        # A peer's shards have rows whose values are in other arenas: the average is of all hosts.
        row_bytes = sum(peer["used_bytes"] for peer in peers.values()) / max(1, rows.total())
        for name, peer in peers.items():
            keys.add_metric([name], rows[name])
            capacity.add_metric([name], peer["size_bytes"] / row_bytes if row_bytes else 0)
            used.add_metric([name], peer["used_bytes"] / max(1, peer["size_bytes"]))
            memory.add_metric([name], peer["rss_bytes"])
            spills.add_metric([name], bool(peer["spill_bytes"]))
            spilled.add_metric([name], peer["spilled_bytes"])
            for kind, count in peer["answers"].items():
                if kind in _ANSWERS:
                    done.add_metric([name, _ANSWERS[kind]], count)
        yield from (capacity, keys, used, memory, spills, spilled, done)
        for what, of in (("avg", statistics.fmean), ("p50", _quantile(50)), ("p99", _quantile(99))):
            took = _gauge(
                f"tq_storage_request_latency_{what}",
                "Duration of recent calls of this process at its peer, in seconds",
                of=[*unit, "op_type"],
            )
            for kind, stored in _STORED.items():
                if seconds := list(self._calls.latest[kind]):
                    took.add_metric([stats["peer"], stored], of(seconds))
            yield took


def _gauge(
    name: str, help: str, value: float | None = None, of: Sequence[str] = ()
) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help, value=value, labels=of or None)


def _quantile(percent: int) -> Callable[[Sequence[float]], float]:
    def of(values: Sequence[float]) -> float:
        return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]

    return of


def _peers(stats: dict[str, Any]) -> dict[str, Any]:
    """Those that answered."""
    return {name: one for name, one in stats["peers"].items() if "error" not in one}


def _host(stats: dict[str, Any]) -> str:
    """Where others reach this host; loopback where the plane has no other host."""
    if len(stats["peers"]) > 1 and stats["address"]:
        return urlsplit(stats["address"]).hostname or "127.0.0.1"
    return "127.0.0.1"
