"""`python -m tests.faults.soak`: three peers under steady load for as long as one likes.

Rows flow through one partition after another while clients come and go; every few seconds it is
noted what each peer has and how long calls took. At the end memory, descriptors and latency must be
where they were when the load had settled: the exit code is 1 where one of them grew.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from bench import machine, outputs
from bench.options import positive
from dataplane import StreamEnd
from tests.cluster import Cluster
from tests.faults.peers import KEEPER, OTHER, VICTIM, peers

STEP_ROWS = 200
GROUP = 4
ROW_BYTES = 20_000
CALL_S = 60.0
LINES = 10
"""So many lines are printed at most each minute of a long run, and at least so many in all."""
GROWTH_BYTES = 24 << 20
GROWTH_DESCRIPTORS = 12
SLOWER = 2.5
"""A machine that others use too is not always as fast; a leak that costs time grows without end."""


@dataclass(frozen=True, slots=True)
class Sample:
    """own_bytes: a peer's memory without its arena, the most of the three, as descriptors and
    threads are. Latencies in ms, of the calls since the sample before."""

    at_s: float
    own_bytes: int
    descriptors: int
    threads: int
    rows: int
    p50_ms: float
    p99_ms: float


@dataclass(slots=True)
class Load:
    """One producer and one consumer of each step, in threads, with clients of their own."""

    cluster: Cluster
    stopped: threading.Event = field(default_factory=threading.Event)
    rows: int = 0
    took_s: list[float] = field(default_factory=list)
    failure: Exception | None = None

    def run(self) -> None:
        try:
            number = 0
            while not self.stopped.is_set():
                self._step(f"step-{number}", number)
                number += 1
        except Exception as exc:
            self.failure = exc

    def _step(self, name: str, number: int) -> None:
        near, far = ((OTHER, VICTIM), (VICTIM, OTHER))[number % 2]
        with self.cluster.connect(near) as putting, self.cluster.connect(far) as taking:
            part = putting.partition(name, {"s": ["x"]}, group_size=GROUP)
            producer = threading.Thread(target=self._produce, args=(part,))
            producer.start()
            self._consume(taking.partition(name))
            producer.join()
            part.drop()
        with self.cluster.connect(KEEPER) as third:  # its loop is looked at as well
            self._timed(third.stats)

    def _produce(self, part: Any) -> None:
        for group in range(STEP_ROWS // GROUP):
            values = [np.full(ROW_BYTES, group % 251, np.uint8) for _ in range(GROUP)]
            columns = {"x": values, "t": [f"{group}-{n}" for n in range(GROUP)]}
            self._timed(functools.partial(part.put, columns, group=[group] * GROUP))
        part.seal()

    def _consume(self, part: Any) -> None:
        while True:
            try:
                batch = self._timed(lambda: part.claim("s", groups=1, timeout=CALL_S))
            except StreamEnd:
                return
            same = batch.numpy("x", view=True) == batch["x"][0][0]
            assert same.all(), "rows of a group got mixed up"
            batch.add(y=[1.0] * len(batch))
            self._timed(batch.ack)
            self.rows += len(batch)

    def _timed(self, call: Any) -> Any:
        began = time.monotonic()
        result = call()
        self.took_s.append(time.monotonic() - began)
        return result


def verdict(samples: list[Sample]) -> dict[str, Any]:
    """What grew between the settled beginning and the end: medians of the second fifth and of the
    last one. `ok` where nothing did."""
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth] or samples[:1], samples[-fifth:]

    def grown(name: str) -> float:
        return _median(late, name) - _median(early, name)

    slower = _median(late, "p50_ms") / max(_median(early, "p50_ms"), 0.01)
    told: dict[str, Any] = {
        "grown_bytes": int(grown("own_bytes")),
        "grown_descriptors": int(grown("descriptors")),
        "grown_threads": int(grown("threads")),
        "p50_ms": [round(_median(early, "p50_ms"), 2), round(_median(late, "p50_ms"), 2)],
        "p99_ms": [round(_median(early, "p99_ms"), 2), round(_median(late, "p99_ms"), 2)],
    }
    ok = told["grown_bytes"] < GROWTH_BYTES and slower < SLOWER
    ok &= max(told["grown_descriptors"], told["grown_threads"]) < GROWTH_DESCRIPTORS
    return {"ok": ok, **told}


def _median(samples: list[Sample], name: str) -> float:
    return float(statistics.median(getattr(one, name) for one in samples))


def _sample(cluster: Cluster, load: Load, began: float) -> Sample:
    took_ms, load.took_s = sorted(1000 * s for s in load.took_s), []
    processes = [psutil.Process(one.pid) for one in cluster.peers.values()]
    memories = [process.memory_info() for process in processes]
    return Sample(
        round(time.monotonic() - began, 1),
        max(int(memory.rss - memory.shared) for memory in memories),
        max(process.num_fds() for process in processes),
        max(process.num_threads() for process in processes),
        load.rows,
        took_ms[len(took_ms) // 2] if took_ms else 0.0,
        took_ms[len(took_ms) * 99 // 100] if took_ms else 0.0,
    )


def soak(minutes: float, console: Console) -> dict[str, Any]:
    every_s = min(60.0 / LINES, minutes * 60 / (2 * LINES))
    with peers() as cluster:
        load, samples = Load(cluster), list[Sample]()
        thread = threading.Thread(target=load.run)
        began = time.monotonic()
        thread.start()
        try:
            while time.monotonic() - began < minutes * 60 and thread.is_alive():
                load.stopped.wait(every_s)
                samples.append(_sample(cluster, load, began))
                console.print(_line(samples[-1]), highlight=False)
        finally:
            load.stopped.set()
            thread.join(2 * CALL_S)
    outcome = {"minutes": minutes, "rows": load.rows, **verdict(samples)}
    if load.failure is not None or thread.is_alive():
        outcome |= {"ok": False, "error": repr(load.failure or "a call hangs")}
    return outcome


def _line(one: Sample) -> str:
    return (
        f"{one.at_s:8.1f} s  {one.own_bytes / 2**20:6.1f} MiB  {one.descriptors:4} fds  "
        f"{one.threads:3} threads  {one.rows:8} rows  p50 {one.p50_ms:6.2f} ms  "
        f"p99 {one.p99_ms:7.2f} ms"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0 when nothing grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=positive, default=5.0)
    parser.add_argument("--json", type=outputs.output, default=None, help="write the outcome here")
    options = parser.parse_args(argv)
    console = Console()
    outcome = soak(options.minutes, console)
    console.print(json.dumps(outcome), markup=False, soft_wrap=True)
    if options.json:
        told = {"outcome": outcome, "machine": machine.describe()}
        outputs.write_json(options.json, told)
    return 0 if outcome["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
