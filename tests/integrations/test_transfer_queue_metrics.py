"""verl's and RL-Insight's Grafana panels find what they ask for where the queue has metrics."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict", reason="make test installs it")
pytest.importorskip("omegaconf", reason="make test installs it")
pytest.importorskip("dataplane_transfer_queue", reason="make test installs it")

import dataplane_transfer_queue as tq  # noqa: E402
from tests.end_to_end.scrape import Scrape, page, scrape  # noqa: E402

UNIT, KIND, TASK = "storage_unit_id", "op_type", "task_name"
PANELS: dict[str, set[str]] = {
    "tq_controller_uptime_seconds": set(),
    "tq_controller_memory_rss_bytes": set(),
    "tq_partitions_total": set(),
    "tq_global_index_allocated_total": set(),
    "tq_global_index_reusable_total": set(),
    "tq_controller_request_total": {KIND},
    "tq_controller_request_errors_total": {KIND},
    "tq_controller_request_samples_total": {KIND},
    "tq_controller_request_duration_seconds_bucket": {KIND, "le"},
    "tq_controller_request_duration_seconds_sum": {KIND},
    "tq_controller_request_duration_seconds_count": {KIND},
    "tq_partition_samples_total": {"partition_id"},
    "tq_partition_production_progress": {"partition_id", TASK},
    "tq_partition_consumption_progress": {"partition_id", TASK},
    "tq_storage_capacity_total": {UNIT},
    "tq_storage_active_keys_total": {UNIT},
    "tq_storage_utilization_ratio": {UNIT},
    "tq_storage_memory_rss_bytes": {UNIT},
    "tq_storage_request_ops": {UNIT, KIND},
    "tq_storage_request_latency_p50": {UNIT, KIND},
    "tq_storage_request_latency_p99": {UNIT, KIND},
}
"""What the panels of TransferQueue 0.1.11 and of RL-Insight query, with the labels that they select
or group by."""
CHOICES = {
    "tq_controller_request_total": {"GET_META", "CLEAR_META", "NOTIFY_DATA_UPDATE"},
    "tq_controller_request_duration_seconds_bucket": {
        "GET_META", "CLEAR_META", "NOTIFY_DATA_UPDATE",
    },
    "tq_storage_request_ops": {"PUT_DATA", "GET_DATA", "CLEAR_DATA"},
    "tq_storage_request_latency_p99": {"PUT_DATA", "GET_DATA", "CLEAR_DATA"},
}  # fmt: skip
"""The six values of `op_type` that a reader of RL-Insight's panels can choose."""


@pytest.fixture
def endpoint(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("DATAPLANE_ARENA", "64MiB")
    monkeypatch.setenv("DATAPLANE_LINGER", "0.5")
    conf: Any = tq.init({"metrics": {"enabled": True}, "controller": {"polling_mode": True}})
    yield conf.metrics.endpoint
    tq.close()
    assert page(conf.metrics.endpoint, "/metrics")[0] == 0  # closed with the queue


def put(keys: list[str]) -> None:
    tq.kv_batch_put(
        keys, "train", tensordict.TensorDict({"x": torch.ones(len(keys), 9)}, len(keys))
    )


def test_every_panel_finds_its_metric_with_its_labels(endpoint: str) -> None:
    assert tq.get_metrics_endpoint() == endpoint
    put(["a", "b", "c", "d"])
    tq.kv_put("e", "train", tag={"status": "running"})  # no value yet
    tq.kv_batch_get(["a"], "train")
    tq.get_client().get_meta(["x"], 2, "train", task_name="reward")
    tq.kv_clear(["a"], "train")
    with pytest.raises(tq.StorageKeyNotFoundError):
        tq.kv_batch_get(["a"], "train", ["x"])
    shown = scrape(endpoint)
    labels: dict[str, set[str]] = {}
    for name, pairs in shown.values:
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    assert {name: labels.get(name) for name in PANELS} == PANELS
    kinds: dict[str, set[str]] = {}
    for name, pairs in shown.values:
        kinds.setdefault(name, set()).update(value for label, value in pairs if label == KIND)
    assert {name: kinds[name] & chosen for name, chosen in CHOICES.items()} == CHOICES
    _tells_what_is_there(shown)


def _tells_what_is_there(shown: Scrape) -> None:
    train = {"partition_id": "train"}
    assert shown.value("tq_partitions_total") == 1
    assert shown.value("tq_partition_samples_total", **train) == 4
    assert shown.value("tq_partition_production_progress", **train, task_name="all") == 3 / 4
    consumed = shown.value("tq_partition_consumption_progress", **train, task_name="reward")
    assert consumed in (1 / 4, 2 / 4)  # the sampler may have chosen the row that was cleared
    rows = shown.value("tq_controller_request_samples_total", op_type="NOTIFY_DATA_UPDATE")
    assert rows >= 5
    assert shown.value("tq_controller_request_samples_total", op_type="CLEAR_META") == 1
    assert shown.value("tq_controller_request_errors_total", op_type="GET_DATA") >= 1
    unit = {"storage_unit_id": "embedded"}
    assert shown.value("tq_storage_active_keys_total", **unit) == 4
    used = shown.value("tq_storage_utilization_ratio", **unit)
    capacity = shown.value("tq_storage_capacity_total", **unit)
    assert capacity == pytest.approx(4 / used if used else 0)
    assert shown.value("tq_storage_memory_rss_bytes", **unit) > 1e6
    for kind in ("PUT_DATA", "GET_DATA", "CLEAR_DATA"):
        assert shown.value("tq_storage_request_ops", **unit, op_type=kind) >= 1
        assert shown.value("tq_storage_request_latency_p99", **unit, op_type=kind) > 0


def test_a_queue_without_metrics_says_so(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_ARENA", "64MiB")
    monkeypatch.setenv("DATAPLANE_LINGER", "0.5")
    tq.init()
    try:
        assert tq.get_metrics_endpoint() is None
    finally:
        tq.close()


@pytest.mark.compare
def test_the_panels_ask_for_names_that_transfer_queue_has() -> None:
    try:
        importlib.metadata.version("TransferQueue")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("TransferQueue is not installed: `make test-compare` installs it")
    from transfer_queue.metrics import TQMetricsExporter

    theirs = TQMetricsExporter()
    names = {family.name for family in theirs.registry.collect()}
    for name in PANELS:
        plain = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        assert {plain, plain.removesuffix("_total")} & names, name
