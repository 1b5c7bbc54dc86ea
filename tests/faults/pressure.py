"""A producer that is ten times faster than its consumer."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from dataplane import BackPressure, DeadlineExceeded, Partition, PartitionGone
from tests.faults.peers import OTHER, peers

ROW = np.zeros(1 << 20, np.uint8)
PACE_S = 0.05
"""The consumer takes so long for a row."""
FASTER = 10
LOOK_S = 0.5
GROWTH_BYTES = 32 << 20
"""What a peer's own memory, without its arena, may vary by."""
FULL = 0.5
"""Of the arena, that rows must have taken, or nothing was shown: new groups get 60 % at least."""
SHARE = 0.8
"""Of the consumer's pace, that it must reach on a busy machine."""


@dataclass(slots=True)
class _Memory:
    """Of the peer between the two, arena and all, and of this process, in which both are."""

    process: psutil.Process
    own_bytes: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    clients_bytes: list[int] = field(default_factory=list)

    def look(self) -> None:
        peer, here = self.process.memory_info(), psutil.Process().memory_info()
        self.own_bytes.append(peer.rss - peer.shared)
        self.resident_bytes.append(peer.rss)
        self.clients_bytes.append(here.rss - here.shared)

    @staticmethod
    def grown(seen: list[int]) -> int:
        return max(seen) - seen[0]


def slow_consumer(seconds: float) -> dict[str, Any]:
    """Memory stays at the arena's size, and the throughput is the consumer's."""
    stop = threading.Event()
    with (
        peers() as cluster,
        cluster.connect(OTHER) as producing,
        cluster.connect(OTHER) as taking,
    ):
        part = producing.partition("p", {"s": ["x"]})
        arena = producing.stats()["arena"]["size_bytes"]
        load = _Load(part, stop)
        producer = threading.Thread(target=load.run)
        memory = _Memory(psutil.Process(cluster.peers[OTHER].pid))
        memory.look()
        producer.start()
        taken, used = 0, 0
        consumed, waited_s = taking.partition("p"), 0.0
        due = look_at = time.monotonic()
        end = due + seconds
        while (began := time.monotonic()) < end:
            with consumed.claim("s", rows=1, timeout=20):
                taken += 1
                waited_s += time.monotonic() - began
            if began >= look_at:  # seldom: asking is load as well
                used = max(used, producing.stats()["arena"]["used_bytes"])
                memory.look()
                look_at = began + LOOK_S
            due += PACE_S  # by the clock: a moment in which the machine was busy is made up for
            time.sleep(max(0.0, due - time.monotonic()))
        stop.set()
        part.drop()
        producer.join(30)
    rate = taken / seconds
    flat = max(memory.resident_bytes) <= arena + memory.own_bytes[0] + GROWTH_BYTES
    flat &= memory.grown(memory.own_bytes) < GROWTH_BYTES
    flat &= memory.grown(memory.clients_bytes) < GROWTH_BYTES
    ok = flat and FULL * arena < used <= arena and rate > SHARE / PACE_S
    return {
        "ok": ok and not producer.is_alive(),
        "seconds": seconds,
        "arena_bytes": arena,
        "most_used_bytes": used,
        "most_resident_bytes": max(memory.resident_bytes),
        "grown_bytes": memory.grown(memory.own_bytes),
        "clients_grown_bytes": memory.grown(memory.clients_bytes),
        "rows_put": load.rows,
        "puts_told_to_wait": load.told,
        "waited_for_rows_s": round(waited_s, 2),
        "rows_per_s": round(rate, 1),
        "rows_per_s_of_the_consumer": 1 / PACE_S,
    }


@dataclass(slots=True)
class _Load:
    """Puts rows as fast as it may. told: how often it was told in time that there is no room."""

    part: Partition
    stop: threading.Event
    rows: int = 0
    told: int = 0

    def run(self) -> None:
        while not self.stop.wait(PACE_S / FASTER):
            try:
                self.part.put({"x": [ROW]}, timeout=5)
            except (BackPressure, DeadlineExceeded):
                self.told += 1
                continue
            except PartitionGone:
                return
            self.rows += 1
