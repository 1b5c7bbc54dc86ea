"""One row's way between hosts, from put to free: which messages peers send each other for it.

Producer, consumer, the partition's primary and its backup are different hosts, and so is the one
that keeps the roster: nothing is near by luck.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dataplane import Plane
from dataplane.metadata.roster.roster import Roster
from tests.end_to_end.conftest import Cluster, until

BY_THE_CLOCK = {"Beat", "Rostered", "Stats", "StatsDone"}
"""Sent whether or not there are rows."""
MESSAGES = 14
"""Requests and their answers, and two for a bulk read."""


def messages(planes: list[Plane]) -> Counter[str]:
    """What all peers sent each other so far, but for what they send anyway."""
    sent: Counter[str] = Counter()
    for plane in planes:
        stats = plane.stats()
        sent.update(stats["messages"]["between"])
        sent["bulk read"] += 2 * stats["bulk"]["pins_served"]
    sent["Done"] -= sent.pop("Confirm", 0)  # which each answers, by the clock as well
    return Counter({kind: n for kind, n in sent.items() if kind not in BY_THE_CLOCK})


def test_a_row_between_three_hosts_takes_few_messages(cluster: Cluster) -> None:
    cluster.start("keeper", "a", "b", "c", "d")
    planes = [cluster.connect(name) for name in cluster.peers]
    try:
        members = {plane.stats()["address"]: plane for plane in planes}
        roster = Roster.from_seeds(list(members))
        name = "p"
        primary = members[roster.home(name)]
        backup = members[str(roster.backup_of(roster.home(name))[0])]
        hosts = [p for p in planes[1:] if p not in (primary, backup)]
        producer, consumer = hosts[0], hosts[1]
        until(
            lambda: all(not plane.stats()["roster"]["unprotected"] for plane in planes),
            "every backup is in sync",
        )
        near = producer.partition(name, stages={"train": ["x"]})
        far = consumer.partition(name)
        value = np.arange(20_000)
        fewest = None
        for _ in range(4):  # at first links are made, and a confirmation may be counted by half
            sent = messages(planes)
            with ThreadPoolExecutor(1) as waiting:
                claim = waiting.submit(far.claim, "train", rows=1, timeout=20)
                until(lambda: consumer.stats()["waiting_claims"] == 1, "the claim waits")
                near.put({"x": [value]})
                batch = claim.result()
            assert np.array_equal(batch["x"][0], value)
            batch.add(score=[0.5])
            batch.ack()
            del batch
            until(lambda: not producer.stats()["arena"]["used_bytes"], "the value is free")
            for_one_row = messages(planes) - sent
            if fewest is None or for_one_row.total() < fewest.total():
                fewest = for_one_row
        assert fewest is not None and fewest.total() <= MESSAGES, fewest
    finally:
        for plane in planes:
            plane.close()
