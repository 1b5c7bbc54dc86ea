"""Spans and metrics by OTLP, as a receiver on this host gets them from real processes."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="make test installs it")
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (  # noqa: E402
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: E402
    ExportTraceServiceRequest,
)

from tests.end_to_end.conftest import PLANE, Cluster  # noqa: E402

AGENT, OTHER = "0af7651916cd43dd8448eb211c80319c", "1af7651916cd43dd8448eb211c80319c"
TRAINS = f"""
    import dataplane
    parents = {{"g0": "00-{AGENT}-b7ad6b7169203331-01", "g1": "00-{OTHER}-b7ad6b7169203331-01"}}
    with dataplane.connect("a") as plane:
        part = plane.partition("step-12", {{"train": ["x"]}}, group_size=2)
        for group, parent in parents.items():
            part.put({{"x": [1, 2]}}, group=group, tags={{"traceparent": parent}})
        part.claim("train", groups=2).release()
        batch = part.claim("train", groups=2)
        batch.ack()
        try:
            part.claim("train", groups=1, timeout=0.2)
        except dataplane.ClaimTimeout:
            pass
"""


class Receiver(ThreadingHTTPServer):
    """What was posted to `/v1/traces` and `/v1/metrics`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.traces = ExportTraceServiceRequest()
        self.metrics = ExportMetricsServiceRequest()
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def resources(self) -> list[dict[str, Any]]:
        everything = [*self.traces.resource_spans, *self.metrics.resource_metrics]
        return [attributes(one.resource) for one in everything]

    def spans(self, name: str) -> list[Any]:
        found = [
            span
            for resource in self.traces.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.name == name
        ]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        server = self.server
        assert isinstance(server, Receiver)
        into = {"/v1/traces": server.traces, "/v1/metrics": server.metrics}[self.path]
        into.MergeFromString(body)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def attributes(of: Any) -> dict[str, Any]:
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value")
        for one in of.attributes
    }


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(cluster: Cluster, **variables: str) -> None:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRAINS)],
        env={**plain, "DATAPLANE_RUN": PLANE, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_claims_work_and_puts_are_spans_linked_to_the_agents_traces(
    cluster: Cluster, receiver: Receiver
) -> None:
    cluster.start("a")
    run(cluster, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, OTEL_RESOURCE_ATTRIBUTES="team=rl")
    assert receiver.resources
    for told in receiver.resources:
        assert (told["rl.run.id"], told["service.name"], told["team"]) == (PLANE, "dataplane", "rl")

    puts = receiver.spans("rl.dataplane.put")
    assert [span.trace_id.hex() for span in puts] == [AGENT, OTHER]
    assert {span.parent_span_id.hex() for span in puts} == {"b7ad6b7169203331"}

    released, acked, short = receiver.spans("rl.dataplane.claim")
    for span in (released, acked):
        assert sorted(link.trace_id.hex() for link in span.links) == [AGENT, OTHER]
        assert attributes(span)["rl.iteration"] == 12
    assert not short.links
    assert short.end_time_unix_nano - short.start_time_unix_nano > 0.2e9

    work = receiver.spans("rl.dataplane.work")
    ends = [(attributes(one)["rl.dataplane.outcome"], attributes(one)["rl.bucket"]) for one in work]
    assert ends == [("released", "wasted"), ("acked", "productive")]
    assert all(len(one.links) == 2 for one in work)

    buckets = {
        attributes(point)["rl.bucket"]: point.as_double
        for resource in receiver.metrics.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "rl.dataplane.seconds"
        for point in metric.sum.data_points
    }
    assert set(buckets) == {"productive", "overhead", "idle", "wasted"}
    assert buckets["idle"] >= 0.2


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"},
    ],
)
def test_nothing_is_sent_unless_the_variables_ask_for_it(
    cluster: Cluster, receiver: Receiver, variables: dict[str, str]
) -> None:
    cluster.start("a")
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url} if variables else {}
    run(cluster, **endpoint, **variables)
    assert not receiver.resources
