"""What is left of a call that a signal handler ends, and of a batch of a dropped partition."""

from __future__ import annotations

import signal

import pytest

import dataplane
from tests.end_to_end.conftest import Cluster, until


def test_an_error_of_a_signal_handler_is_not_taken_for_one_of_the_socket(cluster: Cluster) -> None:
    def late(*_: object) -> None:
        raise TimeoutError

    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})
        before = signal.signal(signal.SIGALRM, late)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(TimeoutError) as raised:
                part.claim("s", rows=1, timeout=20)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert not isinstance(raised.value, dataplane.DataplaneError)
        part.put({"x": [1]})
        part.claim("s", rows=1, timeout=20).ack()


def test_the_lease_of_a_dropped_partition_ends_with_its_batch(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})
        part.put({"x": [1, 2]})
        batch = part.claim("s", rows=1, timeout=20)
        part.drop()
        assert plane.stats()["leases"] == 1
        del batch
        until(lambda: not plane.stats()["leases"], "the lease ended")
    assert "garbage-collected" not in caplog.text  # its rows are gone, and nobody forgot them
