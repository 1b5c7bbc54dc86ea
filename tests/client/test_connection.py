"""What the client does with frames, answers, and a peer that misbehaves or goes away."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from pathlib import Path

import msgspec
import pytest

import dataplane
from dataplane import Plane
from dataplane.client._async import backend
from dataplane.client.arguments import Deadline
from dataplane.client.session import connection, opening
from dataplane.client.session.connection import Connection
from dataplane.client.session.handshake import open_connection
from dataplane.client.session.opening import join
from dataplane.wire.frames import encode
from dataplane.wire.messages import (
    Body,
    Claim,
    Done,
    Failed,
    Hello,
    Notice,
    Reply,
    Request,
    Seal,
    Stats,
    StatsDone,
    Wait,
    Want,
)
from tests.client.scripted_peer import SILENCE, ScriptedPeer


def test_a_reply_that_arrives_byte_by_byte_is_one_reply() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection, replies = Connection(ours), []
        for byte in encode(Reply(3, Done())):
            theirs.sendall(bytes([byte]))
            connection.take()
            replies.append(connection.arrived())
    assert replies[:-1] == [None] * (len(replies) - 1)
    assert replies[-1] == Reply(3, Done())


def test_a_reply_larger_than_the_socket_buffer_is_received_whole() -> None:
    large = Reply(1, StatsDone({"text": "x" * (3 << 20)}))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(encode(large),))
        sender.start()
        assert Connection(ours).receive(Deadline(10)) == large
        sender.join(10)


def test_two_replies_in_one_read_are_two_replies() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode(Reply(1, Done())) + encode(Reply(2, Failed("RowsGone", "gone"))))
        connection = Connection(ours)
        assert connection.receive(Deadline(10)) == Reply(1, Done())
        assert connection.receive(Deadline(0)) == Reply(2, Failed("RowsGone", "gone"))
        assert connection.arrived() is None


def test_a_typed_error_is_raised_and_the_connection_goes_on(
    peer: ScriptedPeer, plane: Plane
) -> None:
    peer.scripts[Stats] = lambda r, b: Failed("BackPressure", "full", {"free_bytes": 7})
    for _ in range(2):
        with pytest.raises(dataplane.BackPressure, match="full") as caught:
            plane.stats()
        assert caught.value.details == {"free_bytes": 7}
    assert len(peer.connections) == 2  # the anchor, and one for both calls


def test_an_error_of_a_newer_protocol_is_a_dataplane_error(
    peer: ScriptedPeer, plane: Plane
) -> None:
    peer.scripts[Stats] = lambda r, b: Failed("NotInventedYet", "hm")
    with pytest.raises(dataplane.DataplaneError, match="NotInventedYet: hm"):
        plane.stats()


def test_a_peer_that_goes_away_is_peer_lost_and_named(peer: ScriptedPeer, plane: Plane) -> None:
    def gone(request: object, body: object) -> bytes:
        peer.connections[-1].close()
        return SILENCE

    peer.scripts[Stats] = gone
    with pytest.raises(dataplane.PeerLost, match=r"'scripted'.*dataplane\.connect") as caught:
        plane.stats()
    assert isinstance(caught.value, ConnectionError)


def test_a_call_without_answer_ends_after_its_deadline_and_closes_its_connection(
    peer: ScriptedPeer, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.client.session.connection.GRACE_S", 0.05)
    peer.scripts[Stats] = lambda r, b: SILENCE
    with pytest.raises(dataplane.DeadlineExceeded, match="'scripted'.*timeout="):
        plane.stats(timeout=0.05)
    peer.await_closed()
    assert peer.requests[-1].deadline_ms in range(1, 51)
    peer.scripts[Stats] = lambda r, b: StatsDone({})
    assert plane.stats() == {}


@pytest.mark.parametrize("stopped", [False, True])
def test_an_answer_that_arrived_before_the_wait_began_is_taken_after_the_deadline(
    stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that went along with a slow ack is waited for when its own time is long over. The
    peer may have been stopped since it answered."""
    monkeypatch.setattr(connection, "is_stopped", lambda sock: stopped)
    deadline = Deadline(0.0)
    deadline.until -= 10 * connection.GRACE_S
    notice = encode(Reply(0, Notice("3 of 4 ready")))
    large = StatsDone({"text": "x" * (100 << 10)})  # more than is received at once
    for rid, exchange in enumerate((Connection.exchange, awaited), 1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(notice + encode(Reply(rid, large)))
            assert exchange(Connection(ours), b"", rid, deadline) == large


def test_each_answer_that_has_arrived_of_a_stopped_peer_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "is_stopped", lambda sock: True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for rid in (1, 2):
            theirs.sendall(encode(Reply(rid, Done())))
        left = Connection(ours)
        assert [left.receive(Deadline(0.0)).rid for _ in range(2)] == [1, 2]
        for _ in range(2):
            with pytest.raises(dataplane.DeadlineExceeded):
                left.receive(Deadline(0.0))


def awaited(connection: Connection, frame: bytes, rid: int, deadline: Deadline) -> Body:
    return asyncio.run(backend.exchange(connection, frame, rid, deadline))


def test_a_frame_that_was_sent_in_part_is_finished_before_the_next() -> None:
    """As the housekeeper's, to a peer that reads nothing for a while."""
    first, second, third = (bytes([letter]) * (1 << 20) for letter in b"abc")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(ours)
        for frame in (first, second):  # nothing is sent of the second
            with pytest.raises(dataplane.DeadlineExceeded):
                connection.send(frame, Deadline(0.02))
        read = bytearray()

        def reads() -> None:
            while data := theirs.recv(1 << 20):
                read.extend(data)

        reader = threading.Thread(target=reads)
        reader.start()
        connection.send(third, Deadline(10.0))
        ours.shutdown(socket.SHUT_WR)
        reader.join(10)
    assert read == first + third


def test_an_interrupt_while_waiting_closes_the_connection(
    peer: ScriptedPeer, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(connection: Connection) -> None:
        raise KeyboardInterrupt

    plane.partition("x", stages={})
    monkeypatch.setattr(Connection, "arrived", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plane.stats()
    monkeypatch.undo()
    peer.await_closed()


def test_a_frame_over_the_limit_is_refused_before_it_is_read(
    peer: ScriptedPeer, plane: Plane
) -> None:
    peer.scripts[Stats] = lambda r, b: (1 << 31).to_bytes(4, "little")
    with pytest.raises(dataplane.FrameTooLarge, match="2147483648"):
        plane.stats()
    peer.await_closed()


@pytest.mark.parametrize("reply", [b"\x01\x00\x00\x00\xc1", bytes(encode(Reply(99, Done())))])
def test_what_is_no_answer_to_this_call_is_a_protocol_error(
    peer: ScriptedPeer, plane: Plane, reply: bytes
) -> None:
    peer.scripts[Stats] = lambda r, b: reply
    with pytest.raises(dataplane.ProtocolError):
        plane.stats()
    peer.await_closed()


def test_a_complaint_about_a_one_way_message_is_logged_not_raised(
    peer: ScriptedPeer, plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    complaint = bytes(encode(Reply(0, Failed("RowsGone", "that pin is gone"))))

    def complain(request: Request, body: object) -> bytes:
        return complaint + bytes(encode(Reply(request.rid, StatsDone({"a": 1}))))

    peer.scripts[Stats] = complain
    with caplog.at_level(logging.WARNING):
        assert plane.stats() == {"a": 1}
    assert "that pin is gone" in caplog.text


def test_a_version_that_nobody_shares_is_refused_with_both_ranges(peer: ScriptedPeer) -> None:
    peer.welcome.versions = (7, 9)
    with pytest.raises(dataplane.VersionMismatch, match="7 to 9.*1 to 1"):
        join(peer.open)
    peer.await_closed()


def test_a_refused_hello_is_raised_as_its_own_error(peer: ScriptedPeer) -> None:
    peer.scripts[Hello] = lambda r, b: Failed("ClientClosed", "no session 5")
    with pytest.raises(dataplane.ClientClosed, match="no session 5"):
        join(peer.open)


def test_a_further_connection_joins_the_session(peer: ScriptedPeer, plane: Plane) -> None:
    peer.scripts[Stats] = lambda r, b: StatsDone({})
    plane.stats()
    assert [hello.session for hello in peer.bodies(Hello)] == [0, 77]


def test_a_peer_that_was_restarted_is_peer_lost(peer: ScriptedPeer, plane: Plane) -> None:
    peer.welcome.incarnation += 1
    with pytest.raises(dataplane.PeerLost):
        plane.stats()


def test_a_closed_plane_raises_client_closed_and_its_connections_end(peer: ScriptedPeer) -> None:
    plane = Plane(peer.keeper())
    plane.close()
    plane.close()
    peer.await_closed()
    assert repr(plane) == "<Plane 'p' at peer 'scripted' closed>"
    with pytest.raises(dataplane.ClientClosed, match="connect"):
        plane.stats()


def test_a_plane_that_nobody_refers_to_closes_its_sockets(peer: ScriptedPeer) -> None:
    plane = Plane(peer.keeper())
    del plane
    peer.await_closed()


def test_operation_ids_rise_and_the_floor_follows_the_answers(
    peer: ScriptedPeer, plane: Plane
) -> None:
    peer.scripts[Stats] = lambda r, b: StatsDone({})
    for _ in range(3):
        plane.stats()
    ids = [(r.op, r.floor) for r in peer.requests if isinstance(r.body, Stats)]
    assert ids == [(1, 1), (2, 2), (3, 3)]


def test_a_call_that_waits_for_rows_holds_no_floor_up(peer: ScriptedPeer, plane: Plane) -> None:
    """Or the peer would have to remember all that it answered in the days that a claim may wait."""
    waiting = plane._session.request(Claim("p", 1, "s", Want("rows", 1, 1)), waits=True)
    peer.scripts[Stats] = lambda r, b: StatsDone({})
    plane.stats()
    (asked,) = [r for r in peer.requests if isinstance(r.body, Stats)]
    assert asked.floor == asked.op > waiting.op


def test_a_call_that_waits_for_a_stopped_peer_says_so(
    peer: ScriptedPeer,
    plane: Plane,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LOOK_S", 0.01)
    monkeypatch.setattr(connection, "is_stopped", lambda sock: True)

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.levelno == logging.WARNING
            if "'scripted' is stopped" in record.getMessage():
                peer.connections[-1].sendall(encode(Reply(peer.requests[-1].rid, Done())))

    peer.scripts[Wait] = lambda r, b: SILENCE
    part = plane.partition("x", stages={})
    handler = Said()
    logger = logging.getLogger("dataplane.client.session.connection")
    logger.addHandler(handler)
    try:
        part.wait("s", rows=3)
    finally:
        logger.removeHandler(handler)


def test_what_the_peer_says_of_a_waiting_call_is_a_warning(
    peer: ScriptedPeer, plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    def said(request: Request, body: Wait) -> bytes:
        return bytes(encode(Reply(0, Notice("3 of 4 ready"))) + encode(Reply(request.rid, Done())))

    peer.scripts[Wait] = said
    plane.partition("x", stages={}).wait("s", rows=3)
    (line,) = [r for r in caplog.records if r.message == "3 of 4 ready"]
    assert line.levelno == logging.WARNING


def test_seal_carries_name_and_generation(peer: ScriptedPeer, plane: Plane) -> None:
    plane.partition("x").seal()
    assert msgspec.structs.astuple(peer.bodies(Seal)[0]) == ("x", 4, False, None)


def test_a_process_without_file_descriptors_hears_that_it_cannot_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attach(*args: object, **more: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(opening, "attach", attach)
    with pytest.raises(dataplane.LimitExceeded, match="file descriptor.*ulimit -n"):
        dataplane.connect()


@pytest.mark.parametrize("goes", [False, True])
def test_a_door_that_lets_nobody_in_is_named(tmp_path: Path, goes: bool) -> None:
    """A peer that is stopped, or has no descriptors left, lets the kernel queue who comes."""
    door, path = socket.socket(socket.AF_UNIX), str(tmp_path / "a.sock")
    door.bind(path)
    door.listen()

    def knock(limit_s: float) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.connect(path)
        if goes:
            door.accept()[0].close()
        return client

    with door, pytest.raises(dataplane.DataplaneError, match=path) as told:
        open_connection(knock, limit_s=0.05)
    assert type(told.value) is (dataplane.PeerLost if goes else dataplane.ConnectError)
    assert "timeout=" not in str(told.value) and "call" not in str(told.value)
