"""Claims of several hosts wait in one place: who comes first, and who waits no more."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dataplane
from dataplane import Partition, Plane, tag
from dataplane.metadata.shard.claim_queue import KEEP_AFTER_S
from tests.end_to_end.conftest import PLANE, Cluster, until

Hosts = tuple[Plane, Plane]

WAITS = f"""
import dataplane
part = dataplane.connect("b", run={PLANE!r}).partition("p")
print("claims", flush=True)
part.claim("train", rows=64)
"""


@pytest.fixture
def hosts(pair: Cluster) -> Iterator[Hosts]:
    with pair.connect("a") as here, pair.connect("b") as there:
        yield here, there


def halves(hosts: Hosts, name: str = "p") -> tuple[Partition, Partition]:
    here, there = hosts
    return here.partition(name, stages={"train": ["x"]}), there.partition(name)


def put(part: Partition, rows: int, **tags: int) -> None:
    part.put({"x": [np.zeros(8)] * rows}, tags=tags)


def claimed_at_once(part: Partition) -> dataplane.Batch:
    """A peer that got no processor time meanwhile says so, and has kept the row."""
    while True:
        try:
            return part.claim("train", rows=1, timeout=0)
        except dataplane.ClaimTimeout as exc:
            assert (
                "the local peer was suspended or busy when the rows became ready" in exc.message
            ), exc


def test_a_claim_that_does_not_wait_gets_what_is_there_on_whichever_host(hosts: Hosts) -> None:
    for name in "pqrs":  # some have their shard here, some there
        for part in halves(hosts, name):
            with pytest.raises(dataplane.ClaimTimeout):
                part.claim("train", rows=1, timeout=0)
            put(part, 1)
            with claimed_at_once(part) as batch:
                assert len(batch) == 1


def are_kept(part: Partition) -> bool:
    """Whether a claim of one row gets none, although there are some."""
    try:
        part.claim("train", rows=1, timeout=0).release()
    except dataplane.ClaimTimeout:
        return True
    return False


def claim_beside(near: Partition, claim: Callable[[], dataplane.Batch], **tags: int) -> int:
    """Put groups of two rows and claim all of them singly, until another host's claim is met.
    Return how many rows that got."""
    got: list[dataplane.Batch] = []
    thread = threading.Thread(target=lambda: got.append(claim()))
    thread.start()
    group, give_up = 0, time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < give_up:
        for _ in range(2):
            near.put({"x": [np.zeros(8)]}, group=group, tags=tags)
            with contextlib.suppress(dataplane.ClaimTimeout):
                near.claim("train", rows=1, timeout=0).ack()
        group += 1
    near.seal()
    thread.join(20)
    with got[0] as batch:
        return len(batch)


def test_claims_of_one_row_do_not_starve_another_hosts_claim_of_many_groups(hosts: Hosts) -> None:
    here, there = hosts
    for name in "pq":  # of one the shard is here, of the other there, or not
        near = here.partition(name, stages={"train": ["x"]}, group_size=2)
        far = there.partition(name)
        assert claim_beside(near, functools.partial(far.claim, "train", groups=64)) == 128


def test_claims_of_one_row_do_not_starve_another_hosts_claim_with_a_filter(hosts: Hosts) -> None:
    near, far = halves(hosts)
    fresh = tag("version") >= 7
    put(near, 9, version=6)
    assert claim_beside(near, lambda: far.claim("train", rows=32, where=fresh), version=7) == 32


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_rows_are_not_kept_for_a_worker_that_ended_while_it_waited(
    hosts: Hosts, how: signal.Signals
) -> None:
    near, far = halves(hosts)
    worker = subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert worker.stdout is not None and worker.stdout.readline()
        until(lambda: hosts[1].stats()["waiting_claims"] == 1, "it waits")
        put(near, 63)
        until(lambda: are_kept(near), "they are kept for it")
        worker.send_signal(how)
        worker.wait(20)
        put(near, 1)
        for part in (near, far):
            with part.claim("train", rows=32, timeout=20) as batch:
                assert len(batch) == 32
    finally:
        worker.kill()
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()


def test_what_a_claim_keeps_goes_to_others_while_a_producer_of_another_host_waits_for_room(
    cluster: Cluster,
) -> None:
    """The shard is at b, and at a a batch is being worked on, which could free something some
    time: a has no need to ask b for a standstill."""
    cluster.start("a", "b", arena="16MiB")
    with cluster.connect("a") as here, cluster.connect("b") as there:
        owned = next(name for name in map(str, range(64)) if _is_at(there, here, name))
        mine = next(name for name in map(str, range(64, 128)) if _is_at(here, here, name))
        put(here.partition(mine), 1)
        works = here.partition(mine).claim("train", rows=1, timeout=20)
        near, far = here.partition(owned), there.partition(owned)
        with ThreadPoolExecutor(2) as pool:
            large = pool.submit(far.claim, "train", rows=10_000)
            puts = pool.submit(_put_until_dropped, near)
            try:
                until(lambda: here.stats()["waiting_puts"] > 0, "the producer waits")
                time.sleep(2 * KEEP_AFTER_S)
                for _ in range(2):
                    far.claim("train", rows=1, timeout=20).ack()
            finally:
                far.drop()
            for one in (large, puts):
                with pytest.raises(dataplane.PartitionGone):
                    one.result(30)
        works.ack()


def _is_at(home: Plane, by: Plane, name: str) -> bool:
    by.partition(name, stages={"train": ["x"]})
    return name in home.stats()["partitions"]


def _put_until_dropped(part: Partition) -> None:
    while True:
        part.put({"x": [np.zeros(1 << 17)]}, timeout=60)


def test_who_waits_hears_of_the_producers_of_all_hosts_and_whether_they_live(hosts: Hosts) -> None:
    for name in "pq":  # of one the shard is here, of the other there, or not
        near, far = halves(hosts, name)
        put(near, 1)
        put(far, 1)
        far.claim("train", rows=2, timeout=20).ack()
        for part in (near, far):
            with pytest.raises(dataplane.ClaimTimeout) as caught:
                part.claim("train", rows=1, timeout=0.3)
            said = caught.value.message
            assert "2 rows have been put so far" in said and said.count("(connected)") == 2
            assert "on host a, `" in said and "on host b, `" in said
