"""A real peer, spoken to in raw bytes: nothing of `dataplane` runs on this side of the sockets."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import xxhash
import zmq

from bench.peers import peer_command
from tests.processes import ending
from tests.protocol.make_vectors import Layout, pack

SECONDS = 20.0
HELLO = {"@": "Hello", "version": 1, "label": "raw"}
WELCOME, HELLO_DONE, DONE, FAILED, PEER_HELLO = 1, 3, 60, 61, 100
STATS_DONE, ROSTERED = 51, 141
DEFINED, PUT_DONE, DROPPED, SETTLED = 11, 31, 34, 153
LOCAL, PEERS = Layout("local"), Layout("peers")


@pytest.fixture(scope="module")
def addresses() -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        return [f"tcp://127.0.0.1:{listener.getsockname()[1]}" for listener in (a, b)]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory, addresses: list[str]) -> Iterator[Path]:
    """The socket of a peer with two seeds; the other one is this test."""
    run_dir = Path(tmp_path_factory.mktemp("run"))
    run_dir.chmod(0o700)
    options = ("--arena", "16MiB", "--listen", addresses[0], "--seeds", ",".join(addresses))
    environment = os.environ | {"DATAPLANE_RUN_DIR": str(run_dir)}
    path = run_dir / "raw" / "a.sock"
    with ending(subprocess.Popen(peer_command("a", "raw", *options), env=environment)) as process:
        end = time.monotonic() + SECONDS
        while True:
            try:
                Door(path).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, "the peer did not start"
                select.select([], [], [], 0.02)
        yield path
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)


class Door:
    """A connection to the local door."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SECONDS)
        try:
            self.sock.connect(os.fspath(path))
        except OSError:
            self.sock.close()
            raise
        header, self.descriptors, _, _ = socket.recv_fds(self.sock, 4, 2)
        self.welcome = self._body(header)

    def close(self) -> None:
        self.sock.close()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def send(self, body: dict[str, Any], rid: int, session: int = 0) -> None:
        self.sock.sendall(self.frame(body, rid, session))

    def frame(self, body: dict[str, Any], rid: int, session: int = 0) -> bytes:
        fields = {"rid": rid, "session": session, "op": 0, "floor": 0, "deadline_ms": 5000}
        packed = pack(LOCAL.array("Request", fields | {"body": body}))
        return len(packed).to_bytes(4, "little") + packed

    def reply(self) -> Any:
        return self._body(self._exactly(4))

    def ended(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def _body(self, header: bytes) -> Any:
        return msgpack.unpackb(self._exactly(int.from_bytes(header, "little")))

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self.sock.recv(count - len(data))
            assert part, "the peer closed the connection"
            data += part
        return bytes(data)


@pytest.fixture
def door(peer: Path) -> Iterator[Door]:
    door = Door(peer)
    yield door
    door.close()


def test_the_peer_speaks_first_and_hands_over_its_arena(door: Door) -> None:
    rid, (tag, versions, plane, name, _, arena_bytes, *_) = door.welcome
    assert (rid, tag, versions, plane, name) == (0, WELCOME, [1, 1], "raw", "a")
    read_only, read_write = door.descriptors
    assert os.fstat(read_only).st_size == os.fstat(read_write).st_size == arena_bytes
    with pytest.raises(OSError):
        os.pwrite(read_only, b"x", 0)


def test_a_session_opens_and_answers_byte_by_byte(door: Door) -> None:
    for byte in door.frame(HELLO, 1):
        door.sock.sendall(bytes([byte]))
    rid, (tag, session, shares, *_) = door.reply()
    assert (rid, tag, len(shares)) == (1, HELLO_DONE, 3)
    assert session
    door.send({"@": "Unpin", "pins": []}, 2, session)
    assert door.reply() == [2, [DONE]]


def test_a_version_that_is_not_spoken_is_refused_and_another_may_be_tried(door: Door) -> None:
    door.send(HELLO | {"version": 99}, 1)
    rid, (tag, code, *_) = door.reply()
    assert (rid, tag, code) == (1, FAILED, "VersionMismatch")
    door.send(HELLO, 2)
    assert door.reply()[1][0] == HELLO_DONE


def test_a_session_that_is_not_there_cannot_be_joined(door: Door) -> None:
    door.send(HELLO | {"session": 5}, 1)
    assert door.reply()[1][:2] == [FAILED, "ClientClosed"]


def test_one_way_messages_are_not_answered(door: Door) -> None:
    door.send(HELLO, 1)
    session = door.reply()[1][1]
    door.send({"@": "Unpin", "pins": [7]}, 0, session)
    door.send({"@": "Unpin", "pins": []}, 3, session)
    assert door.reply() == [3, [DONE]]


BAD = {
    "a length over the limit": (b"\x01\x00\x00\x04" + b"x", "FrameTooLarge"),
    "no MessagePack": (b"\x01\x00\x00\x00\xc1", "ProtocolError"),
    "an unknown tag": (bytes.fromhex("08000000960102030407 9163"), "ProtocolError"),
    "text that is not UTF-8": (
        bytes.fromhex("0b000000960102030407 9332a1ff00"),
        "ProtocolError",
    ),
    "no Hello": (bytes.fromhex("08000000960102030407 9104"), "ProtocolError"),
}


@pytest.mark.parametrize("what", list(BAD))
def test_a_bad_frame_ends_its_connection_and_no_other(what: str, door: Door, peer: Path) -> None:
    frame, code = BAD[what]
    with contextlib.closing(Door(peer)) as other:
        door.sock.sendall(frame)
        rid, (tag, found, *_) = door.reply()
        assert (rid, tag, found) == (0, FAILED, code)
        assert door.ended()
        other.send(HELLO, 1)
        assert other.reply()[1][0] == HELLO_DONE


# between peers: a DEALER of pyzmq, whose own framing is not ours, and a stream


class Link:
    """To the peer, which takes this test for the other seed."""

    def __init__(self, addresses: list[str]) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
        self.socket.connect(addresses[0])
        self.address = addresses[1]
        self.epoch = [xxhash.xxh3_64_intdigest("\n".join(addresses).encode()) % 2**53, 1]

        self._stream: socket.socket | None = None

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self.socket.close()
        self._context.term()

    @property
    def stream(self) -> socket.socket:
        """The call stream, over which all but greetings goes here."""
        if self._stream is None:
            *_, address, secret, _, _ = self.ask(0, self.hello())[2]
            host, port = address.rsplit(":", 1)
            self._stream = socket.create_connection((host, int(port)), SECONDS)
            assert len(secret) == 16
            self._stream.sendall(secret)
        return self._stream

    def ask(self, rid: int, body: dict[str, Any], **envelope: Any) -> Any:
        fields = {"rid": rid, "sender": self.address, "incarnation": 9, "session": 0}
        fields |= {"epoch": self.epoch, "deadline_ms": 5000, "body": body} | envelope
        packed = pack(PEERS.array("PeerRequest", fields))
        if body["@"] == "PeerHello":
            self.socket.send(packed)
            return msgpack.unpackb(self.socket.recv())
        self.stream.sendall(len(packed).to_bytes(4, "little") + packed)
        return self.reply()

    def reply(self) -> Any:
        """The next one of the stream."""
        with self.stream.makefile("rb", buffering=0) as replies:
            frame = read(replies, int.from_bytes(read(replies, 4), "little"))
        return msgpack.unpackb(frame)

    def hello(self, **other: Any) -> dict[str, Any]:
        hello: dict[str, Any] = {"@": "PeerHello", "versions": [1, 3], "plane": "raw", "name": "b"}
        hello |= {"incarnation": 9, "address": self.address, "epoch": self.epoch}
        return hello | {"shards": 4096, "bulk": ""} | other


def read(stream: Any, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = stream.read(count - len(data))
        assert part, "the peer closed the connection"
        data += part
    return bytes(data)


@pytest.fixture
def link(addresses: list[str], peer: Path) -> Iterator[Link]:
    link = Link(addresses)
    yield link
    link.close()


def test_peers_tell_who_they_are(link: Link, addresses: list[str]) -> None:
    rid, incarnation, hello, _ = link.ask(1, link.hello())
    assert (rid, hello[0], hello[4]) == (1, PEER_HELLO, incarnation)
    assert hello[1:4] == [[1, 1], "raw", "a"]
    assert hello[5:8] == [addresses[0], link.epoch, 4096]


@pytest.mark.parametrize("versions", [[0, 1], [1, 1], [1, 2], [0, 2]])
def test_a_peer_of_a_neighbouring_release_is_met(versions: list[int], link: Link) -> None:
    assert link.ask(1, link.hello(versions=versions))[2][0] == PEER_HELLO


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ({"versions": [2, 9]}, "VersionMismatch"),
        ({"versions": [2, 2]}, "VersionMismatch"),
        ({"versions": [0, 0]}, "VersionMismatch"),
        ({"plane": "another"}, "RosterMismatch"),
        ({"shards": 1024}, "RosterMismatch"),
        ({"epoch": [1, 1]}, "RosterMismatch"),
        ({"name": "a"}, "PeerNameTaken"),
    ],
)
def test_a_stranger_is_refused(other: dict[str, Any], code: str, link: Link) -> None:
    assert link.ask(1, link.hello(**other))[2][:2] == [FAILED, code]


def test_a_peer_that_is_no_seed_may_say_who_it_is(link: Link) -> None:
    assert link.ask(1, link.hello(address="tcp://127.0.0.1:1", name="c"))[2][0] == PEER_HELLO


def in_force(link: Link) -> list[Any]:
    """The table of the peer's roster, once this test is a member in it: its life sign lets it in,
    as soon as the peer has looked for an older roster."""
    end = time.monotonic() + SECONDS
    while True:
        _, _, (tag, table, _), _ = link.ask(50, {"@": "Beat"}, epoch=[0, 0])
        assert tag == ROSTERED
        if 9 in table[1]:
            return list(table)
        assert time.monotonic() < end, "the peer does not keep the roster"
        select.select([], [], [], 0.02)


def test_a_life_sign_is_answered_by_the_roster(link: Link, addresses: list[str]) -> None:
    members, incarnations, (authority, number), *columns = in_force(link)
    assert members == addresses
    assert incarnations == [authority, 9] and number > 1
    assert [len(column) for column in columns] == [8192, 8192, 512, 0, 0, 0, 0]


GIVEN_UP = {"@": "Withdraw", "partition": "p", "generation": 1, "numbers": [7]}


def test_a_request_counts_under_the_roster_in_force_only(link: Link) -> None:
    while True:
        epoch = in_force(link)[2]
        answer = link.ask(1, GIVEN_UP, epoch=epoch)[2]
        if answer == [DONE]:
            break
        assert answer[1] == "StaleEpoch"  # a new one came into force on the way
    older, newer = [epoch[0], epoch[1] - 1], [epoch[0], epoch[1] + 1_000]
    for other in (older, newer):
        answer = link.ask(2, GIVEN_UP, epoch=other, deadline_ms=10)[2]
        assert answer[:2] == [FAILED, "StaleEpoch"]


@pytest.mark.parametrize("who", [{"sender": "tcp://127.0.0.1:1"}, {"incarnation": 10}])
def test_a_sender_that_is_no_member_is_refused(who: dict[str, Any], link: Link) -> None:
    answer = link.ask(1, GIVEN_UP, epoch=in_force(link)[2], **who)[2]
    assert answer[:2] == [FAILED, "StaleEpoch"]


def test_a_change_is_carried_out_once_and_one_that_was_settled_never(link: Link) -> None:
    def ask(body: dict[str, Any]) -> Any:
        """Under the roster that is in force."""
        while True:
            answer = link.ask(1, body, epoch=in_force(link)[2])[2]
            if answer[1:2] != ["StaleEpoch"]:
                return answer

    definition = {"@": "Definition", "stages": {}}
    for name in map(str, range(50)):  # until the shard of one is at this peer
        declared = link.ask(
            1,
            {"@": "Define", "partition": name, "definition": definition},
            epoch=in_force(link)[2],
            deadline_ms=500,
        )[2]
        if declared[0] == DEFINED:
            break
    of = {"partition": name, "generation": declared[1]}
    rows = {"@": "Rows", "keys": bytes(15) + b"k"}
    put = {"@": "Put", "rows": rows} | of

    def change(number: int, floor: int) -> dict[str, Any]:
        caller = {"@": "Owner", "peer": link.address, "incarnation": 9}
        return {"change": {"@": "Change", "caller": caller, "number": number, "floor": floor}}

    settled, carried_out = change(7, 7), change(8, 7)
    assert ask({"@": "Settle"} | settled | of) == [SETTLED, False]
    assert ask(put | settled)[:2] == [FAILED, "ChangeExpired"]
    for _ in range(2):
        assert ask(put | carried_out)[0] == PUT_DONE
    assert ask({"@": "Settle"} | carried_out | of) == [SETTLED, True]
    drop = {"@": "Drop", "rows": rows} | change(9, 9) | of
    assert [ask(drop)[:2] for _ in range(2)] == [[DROPPED, 1]] * 2
    assert ask(put | carried_out)[:2] == [FAILED, "ChangeExpired"], "it is below the floor"


def test_figures_are_told_under_any_roster(link: Link) -> None:
    assert link.ask(1, {"@": "Stats", "partition": None}, epoch=[1, 1])[2][0] == STATS_DONE


def test_operations_of_one_whom_nobody_backs_up_here_are_refused(link: Link) -> None:
    append = {"@": "Append", "stream": 1, "first": 0, "partitions": []}
    answer = link.ask(1, append, epoch=[1, 0])[2]
    assert answer[:2] == [FAILED, "StaleEpoch"]


@pytest.mark.parametrize(
    "message", [b"", b"\xc1", bytes.fromhex("9901a1ff0203040592060708 9232c0")]
)
def test_a_message_that_cannot_be_read_leaves_the_link(message: bytes, link: Link) -> None:
    link.socket.send(message)
    rid, _, (tag, code, *_), _ = msgpack.unpackb(link.socket.recv())
    assert (rid, tag, code) == (0, FAILED, "ProtocolError")
    assert link.ask(2, link.hello())[2][0] == PEER_HELLO
    link.stream.sendall(len(message).to_bytes(4, "little") + message)
    rid, _, (tag, code, *_), _ = link.reply()
    assert (rid, tag, code) == (0, FAILED, "ProtocolError")
    assert link.ask(3, {"@": "Stats", "partition": None}, epoch=[1, 1])[2][0] == STATS_DONE


def test_over_zmq_a_peer_only_greets(link: Link) -> None:
    fields = {"rid": 5, "sender": link.address, "incarnation": 9, "session": 0}
    fields |= {"epoch": link.epoch, "deadline_ms": 5000, "body": {"@": "Beat"}}
    link.socket.send(pack(PEERS.array("PeerRequest", fields)))
    assert msgpack.unpackb(link.socket.recv())[2][:2] == [FAILED, "ProtocolError"]


@pytest.mark.parametrize("said", [b"x" * 16, b"\x00\x00", b"x" * 40])
def test_a_stream_that_was_not_promised_ends(said: bytes, link: Link) -> None:
    host, port = link.stream.getpeername()[:2]
    with socket.create_connection((host, port), SECONDS) as stranger:
        stranger.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert link.ask(3, {"@": "Stats", "partition": None}, epoch=[1, 1])[2][0] == STATS_DONE
