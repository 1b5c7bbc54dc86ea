"""What is left of a call that a signal handler ends, and of a batch of a dropped partition."""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane.client._sync import put, space
from dataplane.client._sync.calls import Call
from dataplane.wire.messages import Put
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


@pytest.mark.parametrize(
    ("owner", "name", "before"),
    [
        (threading.Thread, "start", True),  # of the housekeeper
        (threading.Thread, "start", False),
        (space, "ask", True),
        (Call, "answered", True),
        (space, "column", True),
        (space, "placed", True),
        (space, "placed", False),
        (space, "copy_chunks", True),
        (space, "copy_chunks", False),
        (put, "pieces_of", True),
        (put, "pieces_of", False),
        (put, "chunks_of", False),
    ],
)
def test_an_interrupted_put_loses_no_space(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, before: bool
) -> None:
    cluster.start("a")
    values = [np.zeros(3 << 20, np.uint8)] * 2
    called = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, called)
        if not before:
            called(*args, **kwargs)
        raise KeyboardInterrupt

    with cluster.connect("a") as watching, cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})
        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            part.put({"x": values}, timeout=20)

        def arena() -> tuple[int, int]:
            figures = watching.stats()["arena"]
            return figures["granted_bytes"], figures["used_bytes"] - figures["cached_bytes"]

        until(lambda: arena() == (0, 0), "the space is back")
        part.put({"x": values}, timeout=20)
        assert part.stats()["rows"] == 2


def test_an_interrupt_before_its_message_is_sent_loses_no_space(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start("a")
    begin = Call.begin

    def interrupted(call: Call, *args: Any, **kwargs: Any) -> bytes:
        if isinstance(call.body, Put):  # its space is reserved, on the same connection
            raise KeyboardInterrupt
        return begin(call, *args, **kwargs)

    with cluster.connect("a") as watching, cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})
        monkeypatch.setattr(Call, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            part.put({"x": [np.zeros(3 << 20, np.uint8)]}, timeout=20)
        until(lambda: not watching.stats()["arena"]["granted_bytes"], "the space is back")
