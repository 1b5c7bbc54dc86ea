"""One row's way between hosts: the messages that peers send each other from its put to its end.

Producer, consumer, the primary of the partition and its backup are different hosts, and so is the
one that keeps the roster: nothing is near by luck.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.cluster import clients as clients_of

BY_THE_CLOCK = {"Beat", "Rostered", "Stats", "StatsDone"}
"""Sent whether or not there are rows."""
TIMES = 5
ARENA = "64MiB"
VALUE = 20_000
STEP_S = 30.0


def measure() -> dict[str, Any]:
    """`row`: requests, their answers, and two for a bulk read. `by_kind`: of them, by name. The
    middle one of several ways; those before it made the links."""
    with clients_of("abcde", ARENA) as clients:
        producer, consumer, name = _apart(clients)
        near = producer.partition(name, stages={"train": ["x"]})
        far = consumer.partition(name)
        ways = []
        for _ in range(TIMES + 1):
            sent = _sent(clients)
            _one_row(near, far, producer, consumer)
            ways.append(_sent(clients) - sent)
    way = sorted(ways[1:], key=Counter.total)[TIMES // 2]
    return {"row": way.total(), "by_kind": dict(way.most_common())}


def _apart(clients: list[Any]) -> tuple[Any, Any, str]:
    """Two clients whose peers are neither primary nor backup of a partition of this name."""
    from dataplane.metadata.roster.roster import Roster

    members = {client.stats()["address"]: client for client in clients}
    roster, name = Roster.from_seeds(list(members)), "row"
    primary = roster.home(name)
    used = {primary, roster.backup_of(primary)[0], clients[0].stats()["address"]}
    _until(lambda: not any(c.stats()["roster"]["unprotected"] for c in clients))
    producer, consumer = (c for address, c in members.items() if address not in used)
    return producer, consumer, name


def _one_row(near: Any, far: Any, producer: Any, consumer: Any) -> None:
    with ThreadPoolExecutor(1) as waiting:
        claim = waiting.submit(far.claim, "train", rows=1, timeout=STEP_S)
        _until(lambda: consumer.stats()["waiting_claims"] == 1)
        near.put({"x": [np.arange(VALUE)]})
        batch = claim.result()
    batch.add(score=[0.5])
    batch.ack()
    del batch
    _until(lambda: not producer.stats()["arena"]["used_bytes"])


def _sent(clients: list[Any]) -> Counter[str]:
    sent: Counter[str] = Counter()
    for client in clients:
        stats = client.stats()
        sent.update(stats["messages"]["between"])
        sent["bulk read"] += 2 * stats["bulk"]["pins_served"]
    return Counter({kind: n for kind, n in sent.items() if kind not in BY_THE_CLOCK})


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + STEP_S
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("the peers of one row's way did not get on")
        time.sleep(0.005)
