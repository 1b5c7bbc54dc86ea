"""What is left of a call that a signal handler ends, and of a batch of a dropped partition."""

from __future__ import annotations

import dis
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane.client._sync import put, space
from dataplane.client._sync.calls import Call
from dataplane.client.session.connection import Connection, Connections
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


class Interrupted:
    """Raises KeyboardInterrupt at the n-th point at which Python would run a signal handler: at the
    start of a function, after a call and at a jump back. Counts the client's code only. At the
    points of `lost`, an interrupt still loses what the peer has granted, or a connection."""

    lost = ("take", "add", "_send", "idle", "give_back")

    def __init__(self, at: int) -> None:
        self.left = at
        self._called: FrameType | None = None

    def _point(self) -> None:
        self.left -= 1
        if not self.left:
            sys.settrace(None)
            raise KeyboardInterrupt

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        self._called, code = None, frame.f_code
        if not code.co_filename.startswith(CLIENT) or code.co_name in self.lost:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._point()
        return self._step

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            called, self._called = self._called, None
            if called is frame:
                self._point()
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if name.startswith(("CALL", "JUMP_BACKWARD")):
                self._called = frame
        return self._step

    def __enter__(self) -> Interrupted:
        sys.settrace(self._call)
        return self

    def __exit__(self, *args: object) -> None:
        sys.settrace(None)


CLIENT = str(Path(dataplane.__file__).parent / "client")


def test_a_put_that_is_interrupted_anywhere_loses_no_space(cluster: Cluster) -> None:
    cluster.start("a")
    values = [np.zeros(300_000, np.uint8)] * 2
    with cluster.connect("a") as watching, cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]}, free="drop")
        part.put({"x": values})  # the housekeeper runs now
        points = 0
        for at in range(1, 5000):
            try:
                with Interrupted(at):
                    part.put({"x": values}, timeout=20)
            except KeyboardInterrupt:
                points = at
                part.drop(keys=part.rows().keys)
            else:
                break
        assert 100 < points < 4999
        part.drop()

        def arena() -> tuple[int, int]:
            figures = watching.stats()["arena"]
            return figures["granted_bytes"], figures["used_bytes"] - figures["cached_bytes"]

        until(lambda: arena() == (0, 0), "the space is back")


def test_an_interrupted_call_leaves_the_connection_that_another_thread_has_taken(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start("a")
    give_back, taken, shut = Connections.give_back, list[Any](), list[Any]()
    with cluster.connect("a") as watching, cluster.connect("a") as plane:
        part = plane.partition("p", {"s": ["x"]})

        def claim() -> None:
            batch = part.claim("s", rows=1, timeout=20)
            taken.extend(batch["x"])
            batch.ack()

        other = threading.Thread(target=claim)

        def interrupted(connections: Connections, connection: Connection) -> None:
            monkeypatch.undo()
            monkeypatch.setattr(Connection, "leave", lambda connection: shut.append(connection))
            give_back(connections, connection)
            other.start()
            until(lambda: watching.stats()["waiting_claims"] == 1, "the other thread waits")
            raise KeyboardInterrupt

        part.stats()
        monkeypatch.setattr(Connections, "give_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            part.stats()
        monkeypatch.undo()
        part.put({"x": [1]})
        other.join(20)
    assert taken == [1] and not shut
