"""A producer that is ten times faster than its consumer."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import psutil

from bench.faults.peers import OTHER, Peers, three_peers
from dataplane import BackPressure, DeadlineExceeded, Partition

ROW = np.zeros(1 << 20, np.uint8)
PACE_S = 0.05
"""The consumer takes so long for a row."""
FASTER = 10
LOOK_S = 0.5
GROWTH_BYTES = 32 << 20
"""What a peer's own memory, without its arena, may vary by."""
SHARE = 0.8
"""Of the consumer's pace, that it must reach on a busy machine."""


def slow_consumer(seconds: float) -> dict[str, Any]:
    """Memory stays at the arena's size, and the throughput is the consumer's."""
    stop = threading.Event()
    with three_peers() as peers, peers.connect(OTHER) as producing, peers.connect(OTHER) as taking:
        part = producing.partition("p", {"s": ["x"]})
        arena = producing.stats()["arena"]["size_bytes"]
        put: list[int] = []
        producer = threading.Thread(target=_produce, args=(part, stop, put))
        before = _own_bytes(peers)
        producer.start()
        taken, used, most = 0, 0, before
        consumed, waited_s = taking.partition("p"), 0.0
        due = look_at = time.monotonic()
        end = due + seconds
        while (began := time.monotonic()) < end:
            with consumed.claim("s", rows=1, timeout=20):
                taken += 1
                waited_s += time.monotonic() - began
            if began >= look_at:  # seldom: asking is load as well
                used = max(used, producing.stats()["arena"]["used_bytes"])
                most = max(most, _own_bytes(peers))
                look_at = began + LOOK_S
            due += PACE_S  # by the clock: a moment in which the machine was busy is made up for
            time.sleep(max(0.0, due - time.monotonic()))
        stop.set()
        part.drop()
        producer.join(30)
    rate = taken / seconds
    ok = used <= arena and most - before < GROWTH_BYTES and rate > SHARE / PACE_S
    return {
        "ok": ok and not producer.is_alive(),
        "seconds": seconds,
        "arena_bytes": arena,
        "most_used_bytes": used,
        "grown_bytes": most - before,
        "rows_put": len(put),
        "waited_for_rows_s": round(waited_s, 2),
        "rows_per_s": round(rate, 1),
        "rows_per_s_of_the_consumer": 1 / PACE_S,
    }


def _produce(part: Partition, stop: threading.Event, put: list[int]) -> None:
    from dataplane import PartitionGone

    while not stop.wait(PACE_S / FASTER):
        try:
            part.put({"x": [ROW]}, timeout=5)
        except (BackPressure, DeadlineExceeded):
            continue  # it was told so in time, and tries again
        except PartitionGone:
            return
        put.append(1)


def _own_bytes(peers: Peers) -> int:
    memory = psutil.Process(peers.processes[OTHER].pid).memory_info()
    return int(memory.rss - memory.shared)
