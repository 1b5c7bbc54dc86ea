"""What one client did since it was last asked: `plane.metrics()`. Sums, without I/O.

Counted where operations end, so that both shells count alike: a few additions a call.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Sums:
    """Of puts, of gets, or of one stage."""

    rows: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    claims: int = 0
    added_bytes: int = 0


class Tally:
    """For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._put, self._get = _Sums(), _Sums()
        self._copied_bytes = 0
        self._stages: dict[str, _Sums] = {}
        self._before: dict[str, float] = {}
        self._since = time.monotonic()

    def put(self, rows: int, nbytes: int, copied_bytes: int) -> None:
        """One message of a put."""
        with self._lock:
            sums = self._put
            sums.rows += rows
            sums.bytes += nbytes
            self._copied_bytes += copied_bytes

    def put_waited(self, wait_s: float) -> None:
        with self._lock:
            self._put.wait_s += wait_s

    def got(self, rows: int, nbytes: int) -> None:
        with self._lock:
            self._get.rows += rows
            self._get.bytes += nbytes

    def claimed(self, stage: str, rows: int, nbytes: int, wait_s: float = 0.0) -> None:
        """One claim of a stage, of which this client got rows."""
        with self._lock:
            sums = self._stages.get(stage) or self._another(stage)
            sums.claims += 1
            sums.rows += rows
            sums.bytes += nbytes
            sums.wait_s += wait_s

    def claim_waited(self, stage: str, wait_s: float) -> None:
        """A claim of a stage that got nothing yet."""
        with self._lock:
            (self._stages.get(stage) or self._another(stage)).wait_s += wait_s

    def added(self, stage: str, nbytes: int) -> None:
        """Values that were copied into the arena for rows of a stage."""
        with self._lock:
            (self._stages.get(stage) or self._another(stage)).added_bytes += nbytes
            self._copied_bytes += nbytes

    def _another(self, stage: str) -> _Sums:
        if len(self._stages) >= MAX_STAGES:
            stage = OTHER
        return self._stages.setdefault(stage, _Sums())

    def take(self, stats: dict[str, Any]) -> dict[str, float]:
        """The sums since the last call, rates, and figures of the peer's `stats`, flat."""
        with self._lock:
            now = time.monotonic()
            seconds, self._since = max(now - self._since, 1e-9), now
            sums = {"put": self._put, "get": self._get, "copy": _Sums(bytes=self._copied_bytes)}
            self._put, self._get, self._copied_bytes = _Sums(), _Sums(), 0
            stages = sorted(self._stages)
            for stage in stages:
                sums[f"stage/{stage}"], self._stages[stage] = self._stages[stage], _Sums()
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
