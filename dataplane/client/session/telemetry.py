"""Telemetry of a client's claims, work and puts: sums for `plane.metrics()`, and OpenTelemetry's
spans and metrics, sent by OTLP.

Sums are counted where operations end, without I/O: a few additions a call. The `OTEL_*` variables
alone decide whether and where spans go; without them nothing is imported. Names are those of
NeMo-RL's instrumentation: `rl.run.id`, `rl.iteration`, and `rl.bucket`, one of productive,
overhead, idle and wasted. A span that may overlap another of the same worker has no bucket.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dataplane import plugins

log = logging.getLogger(__name__)

MAX_STAGES = 64
OTHER = "other"
"""The first MAX_STAGES stages have figures of their own. The others are summed as OTHER."""
_OF_ARENA = ("size", "used", "pinned", "cached", "spilled")
_OF_STAGE = {
    "behind_rows": "outstanding_rows",
    "released_rows": "released_rows",
    "redelivered_rows": "redelivered_rows",
}
_OF_PEER = ("pulled_bytes", "carried_bytes")
PARENT = "traceparent"
"""The tag of a row or group that continues an agent's trace (W3C Trace Context)."""
MAX_LINKS = 128
"""The most links of a span, as in OpenTelemetry's own limit."""
SCOPE = "dataplane"
_BUCKETS = {"acked": "productive", "dropped": "productive", "finished": "productive"}
"""Bucket by the outcome of a lease. All other outcomes are wasted: the rows are claimed again."""
_STEP = re.compile(r"\d+$")


@dataclass(slots=True)
class _Sums:
    """Sums of all puts, of all gets, or of one stage."""

    rows: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    claims: int = 0
    added_bytes: int = 0


class Tally:
    """Sums of what one client did since `take` was last called. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._put, self._get = _Sums(), _Sums()
        self._copied_bytes = 0
        self._stages: dict[str, _Sums] = {}
        self._before: dict[str, float] = {}
        self._since = time.monotonic()

    def put(self, rows: int, nbytes: int, copied_bytes: int, wait_s: float) -> None:
        """Count one message of a put. wait_s: the time since the call began, or since its
        previous message."""
        with self._lock:
            sums = self._put
            sums.rows += rows
            sums.bytes += nbytes
            sums.wait_s += wait_s
            self._copied_bytes += copied_bytes

    def got(self, rows: int, nbytes: int) -> None:
        with self._lock:
            self._get.rows += rows
            self._get.bytes += nbytes

    def claimed(self, stage: str, rows: int, nbytes: int, wait_s: float = 0.0) -> None:
        """Count a claim of a stage that returned rows."""
        with self._lock:
            sums = self._stages.get(stage) or self._another(stage)
            sums.claims += 1
            sums.rows += rows
            sums.bytes += nbytes
            sums.wait_s += wait_s

    def claim_waited(self, stage: str, wait_s: float) -> None:
        """Count the wait of a claim that has returned no rows yet."""
        with self._lock:
            (self._stages.get(stage) or self._another(stage)).wait_s += wait_s

    def added(self, stage: str, nbytes: int) -> None:
        """Count values that were copied into the arena for rows of a stage."""
        with self._lock:
            (self._stages.get(stage) or self._another(stage)).added_bytes += nbytes
            self._copied_bytes += nbytes

    def _another(self, stage: str) -> _Sums:
        if len(self._stages) >= MAX_STAGES:
            stage = OTHER
        return self._stages.setdefault(stage, _Sums())

    def take(self, stats: dict[str, Any]) -> dict[str, float]:
        """Return the sums since the last call, rates, and figures of the peer's `stats`, flat."""
        with self._lock:
            now = time.monotonic()
            seconds, self._since = max(now - self._since, 1e-9), now
            sums = {"put": self._put, "get": self._get, "copy": _Sums(bytes=self._copied_bytes)}
            self._put, self._get, self._copied_bytes = _Sums(), _Sums(), 0
            stages = sorted(self._stages)
            for stage in stages:
                sums[f"stage/{stage}"], self._stages[stage] = self._stages[stage], _Sums()
            moved_at_peer = {name: float(stats[name]) for name in _OF_PEER}
            moved = sum(moved_at_peer.values()) - sum(self._before.values())
            first, self._before = not self._before, moved_at_peer
        taken: dict[str, float] = {"seconds": seconds}
        for what, names in {
            "put": ("rows", "bytes", "wait_s"),
            "get": ("rows", "bytes"),
            "copy": ("bytes",),
            **{f"stage/{s}": ("claims", "rows", "bytes", "added_bytes", "wait_s") for s in stages},
        }.items():
            taken |= {f"{what}/{name}": float(getattr(sums[what], name)) for name in names}
            if "rows" in names:
                taken[f"{what}/rows_per_s"] = sums[what].rows / seconds
        for stage in stages:
            waited_s = sums[f"stage/{stage}"].wait_s
            taken[f"stage/{stage}/idle_share"] = min(1.0, waited_s / seconds)
            for name, figure in _OF_STAGE.items():
                taken[f"stage/{stage}/{name}"] = _of_stage(stats, stage, figure)
        taken |= _admission(stats)
        taken["peer/pulled_bytes"] = 0.0 if first else moved
        arena = stats["arena"]
        taken |= {f"arena/{name}_bytes": float(arena[f"{name}_bytes"]) for name in _OF_ARENA}
        taken["arena/used"] = arena["used_bytes"] / max(1, arena["size_bytes"])
        return taken


def _admission(stats: dict[str, Any]) -> dict[str, float]:
    """Return the figures of partitions whose groups need permits; nothing if there are none."""
    partitions = stats["everywhere"]["partitions"].values()
    told = [one["admission"] for one in partitions if one.get("admission")]
    names = ("version", "lag") if told else ()
    return {f"admission/{name}": float(max(one[name] for one in told)) for name in names}


def _of_stage(stats: dict[str, Any], stage: str, figure: str) -> float:
    """Return the sum of a figure over all partitions."""
    partitions = stats["everywhere"]["partitions"].values()
    stages = (partition["stages"].get(stage) for partition in partitions)
    return float(sum(figures[figure] for figures in stages if figures))


class Spans:
    """The spans of one session. Threads share it."""

    def __init__(self, run: str, tracer: Any, seconds: Any) -> None:
        """tracer, seconds: OpenTelemetry's; None where that signal is off."""
        self._run, self._tracer, self._seconds = run, tracer, seconds
        self._work: dict[int, tuple[Any, float, dict[str, Any]]] = {}
        """by lease; without a lock, because a finalizer may call `end`"""

    def claim(
        self,
        partition: str,
        stage: str,
        began: float,
        lease: int | None = None,
        tags: Mapping[str, Any] | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        """Record the span of a claim. began: on the monotonic clock. lease: None if the claim got
        no rows. ahead: the worker did other work during the claim, so neither this span nor its
        work has a bucket."""
        about = self._about(partition, stage)
        links = _links((tags or {}).get(PARENT, ()))
        self._span("rl.dataplane.claim", began, about, "" if ahead else "idle", links)
        if lease is None:
            return
        span = None
        if self._tracer is not None:
            span = self._tracer.start_span("rl.dataplane.work", attributes=about, links=links)
        self._work[lease] = span, 0.0 if ahead else time.monotonic(), about

    def end(self, lease: int, state: str) -> None:
        """Record the end of a lease."""
        span, began, about = self._work.pop(lease, (None, 0.0, {}))
        bucket = _BUCKETS.get(state, "wasted") if began else ""
        if bucket:
            self._count(began, about, bucket)
        if span is not None:
            span.set_attribute("rl.dataplane.outcome", state)
            if bucket:
                span.set_attribute("rl.bucket", bucket)
            span.end()

    def put(self, partition: str, began: float, rows: int, tags: Mapping[str, Any]) -> None:
        """Record the span of a put. If all its rows have one parent, the span belongs to that
        trace."""
        links = _links(tags.get(PARENT, ()))
        about = self._about(partition) | {"rl.dataplane.rows": rows}
        parent = links[0].context if len(links) == 1 else None
        self._span("rl.dataplane.put", began, about, "overhead", links, parent)

    def close(self) -> None:
        """Record the end of all remaining leases, whose rows return to their stages."""
        for lease in list(self._work):
            self.end(lease, "released")

    def _about(self, partition: str, stage: str = "") -> dict[str, Any]:
        about: dict[str, Any] = {"rl.run.id": self._run, "rl.dataplane.partition": partition}
        if step := _STEP.search(partition):
            about["rl.iteration"] = int(step[0])
        return about | ({"rl.dataplane.stage": stage} if stage else {})

    def _span(
        self,
        name: str,
        began: float,
        about: dict[str, Any],
        bucket: str,
        links: list[Any],
        parent: Any = None,
    ) -> None:
        tagged = about | ({"rl.bucket": bucket} if bucket else {})
        if bucket:
            self._count(began, about, bucket)
        if self._tracer is None:
            return
        start = time.time_ns() - int(1e9 * (time.monotonic() - began))
        within = {}
        if parent is not None:
            from opentelemetry import trace

            within = {"context": trace.set_span_in_context(trace.NonRecordingSpan(parent))}
        span = self._tracer.start_span(
            name, start_time=start, attributes=tagged, links=links, **within
        )
        span.end()

    def _count(self, began: float, about: dict[str, Any], bucket: str) -> None:
        """Count seconds. Partitions and steps are not attributes of the metric, because their
        number grows without limit."""
        if self._seconds is not None:
            kept = {k: about[k] for k in ("rl.run.id", "rl.dataplane.stage") if k in about}
            self._seconds.add(time.monotonic() - began, kept | {"rl.bucket": bucket})


def spans_of(run: str) -> Spans | None:
    """Return the spans of a new session; None unless the variables ask for them."""
    tracer, seconds = _providers(run)
    return None if tracer is None and seconds is None else Spans(run, tracer, seconds)


@functools.cache
def _providers(run: str) -> tuple[Any, Any]:
    """Return a tracer and the counter of seconds; None for a signal that is off. Use the providers
    that the program has set up, if it has."""
    wanted = [signal for signal in ("traces", "metrics") if _wanted(signal)]
    if not wanted:
        return None, None
    try:
        return _made(run, wanted)
    except ImportError as exc:
        extra = "opentelemetry-exporter-otlp-proto-grpc"
        log.warning(
            "OTEL_* environment variables select OTLP, but %s is not installed, so no telemetry "
            "is sent: run pip install %s",
            exc.name,
            extra if "grpc" in (exc.name or "") else "'dataplane-rl[otel]'",
        )
        return None, None


def _wanted(signal: str) -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = os.environ.get(f"OTEL_{signal.upper()}_EXPORTER")
    if exporter is not None:
        return "otlp" in exporter.split(",")
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    return any(os.environ.get(name) for name in names)


def _made(run: str, wanted: list[str]) -> tuple[Any, Any]:
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    about = {"rl.run.id": run}
    if "OTEL_SERVICE_NAME" not in os.environ:
        about["service.name"] = SCOPE
    resource = Resource.create(about)
    tracer = seconds = None
    if "traces" in wanted:
        tracers: Any = trace.get_tracer_provider()
        if not isinstance(tracers, TracerProvider):
            tracers = TracerProvider(resource=resource)
            tracers.add_span_processor(BatchSpanProcessor(_exporter("TRACES", "OTLPSpanExporter")))
        tracer = tracers.get_tracer(SCOPE)
    if "metrics" in wanted:
        meters: Any = metrics.get_meter_provider()
        if not isinstance(meters, MeterProvider):
            reader = PeriodicExportingMetricReader(_exporter("METRICS", "OTLPMetricExporter"))
            meters = MeterProvider([reader], resource=resource)
        seconds = meters.get_meter(SCOPE).create_counter(
            "rl.dataplane.seconds",
            unit="s",
            description="Worker seconds by bucket: productive, overhead, idle or "
            "wasted. Workers run in parallel, so the sum can exceed wall-clock time.",
        )
    return tracer, seconds


def _exporter(signal: str, name: str) -> Any:
    """Return the exporter of a signal: over gRPC if the variables say so, else over HTTP."""
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", general)
    package = f"opentelemetry.exporter.otlp.proto.{'grpc' if protocol == 'grpc' else 'http'}"
    module = "trace_exporter" if signal == "TRACES" else "metric_exporter"
    return plugins.own(f"{package}.{module}:{name}")()


def _links(parents: Iterable[object]) -> list[Any]:
    """Return a link to each span that `traceparent` tags name. Tags of another form are skipped."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    named = list(dict.fromkeys(one for one in parents if isinstance(one, str)))[:MAX_LINKS]
    read = [TraceContextTextMapPropagator().extract({PARENT: one}) for one in named]
    contexts = [trace.get_current_span(one).get_span_context() for one in read]
    return [trace.Link(context) for context in contexts if context.is_valid]
