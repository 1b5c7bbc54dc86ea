"""Sums of the reports of a run's processes, for the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

Said = Mapping[str, Mapping[str, Any]]  # by process: its last event


def worker_times(event: Mapping[str, Any], start: float) -> dict[str, Any]:
    """Seconds by activity, processor seconds of those, and the span of the work since `start`."""
    return {
        "seconds": event.get("seconds", {}),
        "cpu_seconds": event.get("cpu_seconds", {}),
        "span": [event[name] - start for name in ("start", "end") if name in event],
    }


def latency(done: Said) -> dict[str, dict[str, dict[str, float]]]:
    """By role and activity: how long one took at a time, over all workers of the role."""
    spans: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for worker, event in done.items():
        for activity, taken in event.get("spans_ms", {}).items():
            spans[worker.partition("-")[0]][activity] += taken
    return {
        role: {activity: _percentiles(taken) for activity, taken in activities.items()}
        for role, activities in spans.items()
    }


def own_cost(done: Said, memory_sampling_s: float) -> dict[str, float]:
    """Processor seconds of the bench's own work in the timed part, summed over the workers."""
    cost = {"generate": 0.0, "digest": 0.0, "check": 0.0}
    for event in done.values():
        for name in cost:
            cost[name] += event.get("cpu_seconds", {}).get(name, 0.0)
    cost["memory_sampling"] = memory_sampling_s
    return cost


def others_cores(run: Mapping[str, Any]) -> float:
    """The average number of cores that programs outside the run used in its timed part."""
    told = run["cpu_seconds"]
    ours = sum(sum(worker["cpu_seconds"].values()) for worker in run["workers"].values())
    ours += sum(seconds for name, seconds in told.items() if name != "machine")
    return float(max(0.0, (told["machine"] - ours) / run["cpu_counted_seconds"]))


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p90, p99, most = np.percentile(values, (50, 90, 99, 100)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": most, "times": len(values)}
