"""Bulk workers and readers that stop or die in the middle: others go on, nothing is stuck."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import dataplane
from dataplane import Plane
from tests.end_to_end.attacks import no_leaks, used_bytes
from tests.end_to_end.conftest import Cluster, line, until

MIB = 1 << 20


@pytest.fixture
def planes(cluster: Cluster) -> Iterator[tuple[Plane, Plane]]:
    cluster.start("a", "b")
    a, b = cluster.connect("a"), cluster.connect("b")
    yield a, b
    a.close()
    b.close()


def bulk_worker(cluster: Cluster, name: str) -> int:
    """The pid of a peer's bulk worker."""
    found: list[str] = []
    pid = cluster.peers[name].pid

    def runs() -> bool:
        found[:] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return len(found) == 1

    until(runs, "the bulk worker runs")
    return int(found[0])


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_bulk_worker_that_dies_is_replaced_during_the_claim(
    cluster: Cluster, planes: tuple[Plane, Plane], side: str
) -> None:
    a, b = planes
    part = a.partition("p", stages={"s": ["x"]})
    far = b.partition("p")
    for i in range(24):
        part.put({"x": [np.full(4 * MIB, i, np.uint8)]}, key=[i], tags={"n": i})
    part.seal()
    got: list[int] = []

    def consume() -> None:
        for batch in far.stream("s", rows=2, timeout=20):
            for key, x in zip(batch.keys, batch["x"], strict=True):
                assert (x == key).all()
                got.append(int(key))

    thread = threading.Thread(target=consume)
    thread.start()

    def come(many: int) -> bool:
        return len(got) >= many

    for many in (4, 12):
        until(partial(come, many), "rows come")
        os.kill(bulk_worker(cluster, side), signal.SIGKILL)
    thread.join(30)
    assert not thread.is_alive()
    assert sorted(got) == list(range(24))
    no_leaks(a, b)
    until(lambda: used_bytes(a) == 0, "every byte came back")


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_stopped_bulk_worker_ends_the_read_in_time(
    cluster: Cluster, planes: tuple[Plane, Plane], side: str
) -> None:
    a, b = planes
    part = a.partition("p", stages={"s": ["x"]}, free="drop")
    far = b.partition("p")
    part.put({"x": [np.full(8 * MIB, i, np.uint8) for i in range(3)]}, key=["k0", "k1", "k2"])
    assert far.get(keys=["k0"]).keys == ["k0"]
    worker = bulk_worker(cluster, side)
    os.kill(worker, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(dataplane.DataplaneError) as caught:
            far.get(keys=["k1"], timeout=1)
        assert not isinstance(caught.value, dataplane.InternalError), caught.value
        assert time.monotonic() - began < 9
        assert far.rows().keys, "others go on"
    finally:
        with contextlib.suppress(ProcessLookupError):  # killed, because it ignored a deadline
            os.kill(worker, signal.SIGCONT)
    assert (far.get(keys=["k1"])["x"][0] == 1).all()
    batch = far.claim("s", rows=3, timeout=10)
    assert [x[0] for x in batch["x"]] == [0, 1, 2]
    batch.ack()
    del batch
    no_leaks(a, b)


READER = """
    import dataplane, sys
    part = dataplane.connect().partition("p")
    print("reading", flush=True)
    {call}
    print("read", flush=True)
"""


@pytest.mark.parametrize("call", ['part.claim("s", rows=2)', 'part.get(keys=["k0", "k1"])'])
def test_a_reader_killed_in_the_middle_of_a_pull_leaves_nothing(
    cluster: Cluster, planes: tuple[Plane, Plane], call: str
) -> None:
    a, b = planes
    part = a.partition("p", stages={"s": ["x"]}, free="drop")
    far = b.partition("p")
    part.put({"x": [np.full(8 * MIB, i, np.uint8) for i in range(2)]}, key=["k0", "k1"])
    worker = bulk_worker(cluster, "a")
    os.kill(worker, signal.SIGSTOP)
    try:
        reader = cluster.worker(READER.format(call=call), DATAPLANE_PEER="b")
        assert line(reader) == "reading"
        until(lambda: b.stats()["bulk"]["jobs_under_way"] > 0, "the pull is under way")
        reader.kill()
        reader.wait()
    finally:
        os.kill(worker, signal.SIGCONT)
    batch = far.claim("s", rows=2, timeout=10)
    assert [x[0] for x in batch["x"]] == [0, 1]
    batch.ack()
    del batch
    no_leaks(a, b)
