"""What every worker uses: its connection to the plane, its clocks, its orders."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.media import digest
from bench.pace import Pace
from bench.planes.base import Array, Batch, Endpoint, Job, Worker


class Clock:
    """Seconds by activity, elapsed and of processors.

    Time that no other activity claims belongs to the plane: putting, waiting, acking.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu_seconds: dict[str, float] = defaultdict(float)  # of all threads meanwhile
        self.spans_ms: dict[str, list[float]] = defaultdict(list)  # one a time; a few a group

    @contextmanager
    def timing(self, activity: str) -> Iterator[None]:
        start, cpu_start = time.monotonic(), time.process_time()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self.seconds[activity] += seconds
            self.cpu_seconds[activity] += time.process_time() - cpu_start
            self.spans_ms[activity].append(round(seconds * 1e3, 3))


class Orders:
    """What the runner tells a worker, a line at a time on stdin: `policy N` when the trainers have
    finished N steps, `rolled N` when rollout has finished step N."""

    def __init__(self) -> None:
        self._version = self._rolled = -1

    def wait_for_policy(self, version: int) -> None:
        """Wait until the trainers have finished `version` steps; 0 is the start of the run."""
        while self._version < version:
            self._hear()

    def wait_for_rollout(self, step: int) -> None:
        """Wait until all rollout workers have finished the step."""
        while self._rolled < step:
            self._hear()

    def _hear(self) -> None:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit("the runner has ended")
        match line.split():
            case ["policy", version]:
                self._version = int(version)
            case ["rolled", step]:
                self._rolled = int(step)


@dataclass(frozen=True, slots=True)
class Work:
    """A worker and its tools."""

    worker: Worker
    endpoint: Endpoint
    pace: Pace
    clock: Clock = field(default_factory=Clock)
    orders: Orders = field(default_factory=Orders)

    @property
    def job(self) -> Job:
        return self.worker.job

    def spend(self, recorded: float, came: float) -> None:
        """Work on a batch that takes so much recorded time. Where a job was recorded, that is from
        the lease to the ack: what the bench did since the batch came is part of it."""
        self.pace.spend(recorded, came if self.job.is_recorded else None)

    def batches(self, step: int) -> Iterator[Batch]:
        """The stage's batches. The wait for each counts as `claim`."""
        if self.job.phased:
            with self.clock.timing("phase"):
                self.orders.wait_for_rollout(step)
        batches = self.endpoint.batches(step, self.worker.role)
        while True:
            with self.clock.timing("claim"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            del batch  # a plane may hold its bytes for as long as anybody has it


def digests(values: Sequence[Array]) -> list[int]:
    """One digest per row. Rows that share their memory (address, shape, dtype) are read once."""
    read: dict[tuple[int, tuple[int, ...], str], int] = {}
    found = []
    for value in values:
        place = (value.ctypes.data, value.shape, value.dtype.str)
        if place not in read:
            read[place] = digest(value)
        found.append(read[place])
    return found
