"""A host is killed, stopped, or stopped for a moment, in the middle of calls on its rows.

With a second copy of the bytes each call of another host's client ends as if nothing had happened,
once, and within the time that it takes to notice.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Partition, Plane
from tests.end_to_end.conftest import Cluster, until

BOUND_S = 10.0
"""Noticing takes 3 s where a machine has nothing else to do."""
MOMENT_S = 0.7
"""Less than it takes to call a peer lost."""
X, Y = np.arange(100_000), np.arange(50_000)
OPERATIONS = ("put", "tag", "pull", "claim", "ack")


@pytest.fixture
def three(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Cluster, dict[str, Plane]]]:
    monkeypatch.setenv("DATAPLANE_LOST_AFTER", "4")
    cluster.start("a", "b", "c", arena="64MiB")
    planes = {name: cluster.connect(name) for name in "abc"}
    until(lambda: planes["a"].stats()["roster"]["unprotected"] == 0, "backups are in sync", 40)
    yield cluster, planes
    for process in cluster.peers.values():
        process.send_signal(signal.SIGCONT)
    for plane in planes.values():
        with contextlib.suppress(dataplane.ConnectError, dataplane.DeadlineExceeded):
            plane.close()


def kill(cluster: Cluster) -> None:
    cluster.peers["c"].kill()
    cluster.peers["c"].wait()


def stop(cluster: Cluster) -> None:
    cluster.peers["c"].send_signal(signal.SIGSTOP)


def pause(cluster: Cluster) -> None:
    """The clock is what is tested here: it wakes before anybody calls it lost."""
    stop(cluster)
    wake = threading.Timer(MOMENT_S, cluster.peers["c"].send_signal, [signal.SIGCONT])
    wake.start()


def prepare(operation: str, part: Partition) -> Callable[[], Any]:
    """The call on row "k", of which everything is at the host that will be damaged."""
    match operation:
        case "put":
            return lambda: part.put({"y": [Y]}, key=["k"], timeout=BOUND_S)
        case "tag":
            return lambda: part.tag(["k"], {"n": 1}, timeout=BOUND_S)
        case "pull":
            return lambda: np.testing.assert_array_equal(
                part.get(keys=["k"], fields=["x"], timeout=BOUND_S)["x"][0], X
            )
        case "claim":
            return lambda: part.claim("s", rows=1, timeout=BOUND_S).ack()
        case _:
            batch = part.claim("s", rows=1, timeout=BOUND_S)
            batch.add(y=[Y])
            return batch.ack


@pytest.mark.parametrize("damage", [kill, stop, pause])
def test_calls_go_on_when_the_host_of_their_rows_does_not(
    three: Any, damage: Callable[[Cluster], None]
) -> None:
    """All calls are made at once, each on a row of its own partition."""
    cluster, planes = three
    parts, calls = {}, {}
    for operation in OPERATIONS:
        part = planes["b"].partition(operation, {"s": ["x"]}, free="drop", replicas=2)
        planes["c"].partition(operation).put({"x": [X]}, key=["k"])
        parts[operation], calls[operation] = part, prepare(operation, part)

    def took_s(call: Callable[[], Any]) -> float:
        began = time.monotonic()
        call()
        return time.monotonic() - began

    with ThreadPoolExecutor(len(calls)) as pool:
        damage(cluster)
        under_way = {operation: pool.submit(took_s, call) for operation, call in calls.items()}
    took = {operation: call.result() for operation, call in under_way.items()}
    assert {operation for operation, seconds in took.items() if seconds > BOUND_S} == set(), took
    for operation, part in parts.items():
        check(operation, part)


def check(operation: str, part: Partition) -> None:
    """The call took effect once."""
    row = part.get(keys=["k"], timeout=BOUND_S)
    np.testing.assert_array_equal(row["x"][0], X)
    if operation in ("put", "ack"):
        np.testing.assert_array_equal(row["y"][0], Y)
    if operation == "tag":
        assert row.tags["n"] == [1]
    if operation in ("claim", "ack"):
        part.seal()
        with pytest.raises(dataplane.StreamEnd):
            part.claim("s", rows=1, timeout=BOUND_S)
