"""What one client did since it was last asked: `plane.metrics()`. Sums, without I/O.

Counted where operations end, so that both shells count alike: a few additions a call.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

MAX_STAGES = 64
OTHER = "other"
"""Stages have figures of their own, up to so many; the others are counted together."""
_OF_ARENA = ("size", "used", "pinned", "cached", "spilled")
_OF_STAGE = {
    "behind_rows": "outstanding_rows",
    "released_rows": "released_rows",
    "redelivered_rows": "redelivered_rows",
}
_OF_PEER = ("pulled_bytes", "carried_bytes")


class Tally:
    """For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._stages: set[str] = set()
        self._before: dict[str, float] = {}
        self._since = time.monotonic()

    def add(self, what: str, **amounts: float) -> None:
        """what: "put", "get" or "copy"."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[what, name] += amount

    def put(self, rows: int, nbytes: int, copied_bytes: int) -> None:
        """One message of a put."""
        with self._lock:
            self._sums["put", "rows"] += rows
            self._sums["put", "bytes"] += nbytes
            self._sums["copy", "bytes"] += copied_bytes

    def of_stage(self, stage: str, **amounts: float) -> None:
        """As `add`, of what this client does for a stage."""
        if stage not in self._stages:
            if len(self._stages) >= MAX_STAGES:
                stage = OTHER
            self._stages.add(stage)
        self.add(f"stage/{stage}", **amounts)

    def take(self, stats: dict[str, Any]) -> dict[str, float]:
        """The sums since the last call, rates, and figures of the peer's `stats`, flat."""
        with self._lock:
            now = time.monotonic()
            seconds, self._since = max(now - self._since, 1e-9), now
            sums, self._sums = self._sums, defaultdict(float)
            stages = sorted(self._stages)
            told = {name: float(stats[name]) for name in _OF_PEER}
            moved = sum(told.values()) - sum(self._before.get(name, 0.0) for name in told)
            first, self._before = not self._before, told
        taken: dict[str, float] = {"seconds": seconds}
        for what, names in {
            "put": ("rows", "bytes", "wait_s"),
            "get": ("rows", "bytes"),
            "copy": ("bytes",),
            **{f"stage/{s}": ("claims", "rows", "bytes", "added_bytes", "wait_s") for s in stages},
        }.items():
            taken |= {f"{what}/{name}": float(sums[what, name]) for name in names}
            if "rows" in names:
                taken[f"{what}/rows_per_s"] = sums[what, "rows"] / seconds
        for stage in stages:
            waited = sums[f"stage/{stage}", "wait_s"]
            taken[f"stage/{stage}/idle_share"] = min(1.0, waited / seconds)
            for name, figure in _OF_STAGE.items():
                taken[f"stage/{stage}/{name}"] = _of_stage(stats, stage, figure)
        taken |= _admission(stats)
        taken["peer/pulled_bytes"] = 0.0 if first else moved
        arena = stats["arena"]
        taken |= {f"arena/{name}_bytes": float(arena[f"{name}_bytes"]) for name in _OF_ARENA}
        taken["arena/used"] = arena["used_bytes"] / max(1, arena["size_bytes"])
        return taken


def _admission(stats: dict[str, Any]) -> dict[str, float]:
    """Of partitions whose groups are begun with permits; nothing where there are none."""
    partitions = stats["everywhere"]["partitions"].values()
    told = [one["admission"] for one in partitions if one.get("admission")]
    names = ("version", "lag") if told else ()
    return {f"admission/{name}": float(max(one[name] for one in told)) for name in names}


def _of_stage(stats: dict[str, Any], stage: str, figure: str) -> float:
    """The sum over all partitions."""
    partitions = stats["everywhere"]["partitions"].values()
    stages = (partition["stages"].get(stage) for partition in partitions)
    return float(sum(figures[figure] for figures in stages if figures))
