"""Load from threads: producers who know what was acknowledged, consumers who check every row."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dataplane import DataplaneError, Partition, RowsLost, StreamEnd

ROW_BYTES = 20_000
CALL_S = 20.0
"""A call of the load that takes longer than this hangs."""


def value(key: str) -> npt.NDArray[np.uint8]:
    """The bytes of a row, which follow from its key."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, ROW_BYTES, np.uint8)


@dataclass(slots=True)
class Producer:
    """Puts a row a time until it is stopped, or its peer is gone for good."""

    part: Partition
    prefix: str
    pause_s: float = 0.002
    acknowledged: set[str] = field(default_factory=set)
    errors: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    """from one acknowledged row to the next, failed attempts included"""
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        number, began = 0, time.monotonic()
        while not self.stopped.wait(self.pause_s):
            key = f"{self.prefix}-{number}"
            try:
                self.part.put({"x": [value(key)]}, key=[key], timeout=CALL_S)
            except DataplaneError as exc:
                _count(self.errors, exc)
                if isinstance(exc, ConnectionError):
                    return
                continue  # repeating the same put is safe
            self.acknowledged.add(key)
            now = time.monotonic()
            self.slowest_s = max(self.slowest_s, now - began)
            number, began = number + 1, now


@dataclass(slots=True)
class Consumer:
    """Claims a row a time, checks it and acks it, until the stage has had every row."""

    part: Partition
    seen: dict[str, int] = field(default_factory=dict)
    """how often each key was acked"""
    unsure: set[str] = field(default_factory=set)
    """keys whose ack failed, and may have been carried out"""
    at: list[float] = field(default_factory=list)
    """when each claim was answered"""
    wrong: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stopped.is_set():
            began, key = time.monotonic(), ""
            try:
                with self.part.claim("s", rows=1, timeout=CALL_S) as batch:
                    self.at.append(time.monotonic())
                    key = str(batch.keys[0])
                    if not np.array_equal(batch["x"][0], value(key)):
                        self.wrong.append(key)
                self.seen[key] = self.seen.get(key, 0) + 1
            except StreamEnd:
                return
            except DataplaneError as exc:
                _count(self.errors, exc)
                self.unsure |= {key} - {""}
                # lost rows are told at the end of the stage; a lost peer is not found again
                if isinstance(exc, RowsLost | ConnectionError):
                    return
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def longest_gap_s(self, since: float) -> float:
        """Between two claims, or that moment and the first one after it."""
        times = [since, *(at for at in self.at if at > since)]
        return max((b - a for a, b in zip(times, times[1:], strict=False)), default=float("inf"))


def start(*workers: Producer | Consumer) -> list[threading.Thread]:
    threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread], seconds: float) -> bool:
    """Whether all ended within so long together."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _count(errors: dict[str, int], exc: Exception) -> None:
    errors[type(exc).__name__] = errors.get(type(exc).__name__, 0) + 1
