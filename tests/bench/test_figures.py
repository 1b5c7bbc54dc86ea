"""The figures that are quoted, each against numbers small enough to check by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import run as runs
from bench.page.document import write
from tests.bench.test_page import report, run
from tests.perf.compare.measure import lines_of
from tests.perf.compare.tree import SINGLE, Figure


def test_percentiles_are_those_of_all_workers_of_a_role() -> None:
    done = {
        "train-0": {"spans_ms": {"claim": [float(n) for n in range(51)]}},
        "train-1": {"spans_ms": {"claim": [float(n) for n in range(51, 101)]}},
        "reward-0": {"spans_ms": {"claim": [7.0]}},
    }
    told = runs.latency(done)
    assert told["train"]["claim"] == {"p50": 50, "p90": 90, "p99": 99, "max": 100, "times": 101}
    assert told["reward"]["claim"]["p99"] == 7


def test_the_benchs_own_work_is_added_up_over_workers() -> None:
    done = {
        "rollout-0": {"cpu_seconds": {"generate": 1.0, "digest": 2.0, "put": 9.0}},
        "train-0": {"cpu_seconds": {"check": 4.0, "digest": 8.0}},
    }
    assert runs.own_cost(done, 0.5) == {
        "generate": 1.0, "digest": 10.0, "check": 4.0, "memory_sampling": 0.5,
    }  # fmt: skip


def test_a_comparison_tells_medians_rates_and_processor_time_a_gigabyte() -> None:
    read = Figure(2_000_000_000, [1.0, 4.0, 10.0], {"reader": 6.0, "idle": 0.0})
    floor = Figure(2_000_000_000, [0.5, 2.0, 3.0])
    one = Figure(4096, [0.25, 0.5, 0.5], {"writer": 3.0})
    lines = lines_of("x", 2, {("b", "read"): read, ("b", "floor"): floor, (SINGLE, "put"): one})
    told = {line["operation"]: line for line in lines}
    assert told["read"]["seconds"] == {"median": 4.0, "min": 1.0, "max": 10.0, "samples": 3}
    assert told["read"]["GBps"] == 0.5 and told["read"]["floors"] == 2.0
    assert told["read"]["cpu_s_per_GB"] == {"reader": pytest.approx(1.0)}
    assert told["put"]["per_s"] == 2.0 and told["put"]["cpu_ms"] == {"writer": 1000.0}


def test_the_page_tells_steps_and_binary_units(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write(page, [report(runs=[run("dataplane", rows=128, step_seconds=[9.0, 4.0])])])
    told = page.read_text()
    assert "<td>4.00 (4.00–4.00)</td><td>9.00</td>" in told  # steady and cold
    assert "at most 1 GiB" in told and "limit of a host, 3 GiB" in told
