"""Whoever does not belong here, at the local door, at the peer door and on the command line."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

import dataplane
from dataplane.launch import embedded
from dataplane.wire import frames, limits, peering
from dataplane.wire.messages import Failed, Hello, Request
from dataplane.wire.peering import PeerHello, PeerReply, PeerRequest
from tests.end_to_end.conftest import PLANE, Cluster, free_addresses, peer_command, until


def refused(*command: str) -> str:
    """What a peer says that refuses to start: one line, exit code 2."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2, (done.returncode, done.stderr)
    (said,) = done.stderr.strip().splitlines()
    return said


def still_works(plane: dataplane.Plane) -> None:
    part = plane.partition("works", {"s": ["x"]})
    part.put({"x": np.ones((1, 2000))})
    part.claim("s", rows=1, timeout=10).ack()
    part.drop()


# the local door


def test_a_client_of_another_protocol_version_is_refused(cluster: Cluster) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(cluster.run_dir / PLANE / "a.sock"))
        stranger.settimeout(10)
        stranger.recv(1 << 16)
        stranger.sendall(frames.encode(Request(1, 0, 0, 0, 0, Hello(99))))
        header = stranger.recv(4, socket.MSG_WAITALL)
        body = stranger.recv(frames.body_length(header), socket.MSG_WAITALL)
        reply = frames.decode_reply(body).body
        assert isinstance(reply, Failed) and reply.code == "VersionMismatch"
        assert "install the same dataplane release everywhere" in reply.message
        still_works(plane)


def test_a_request_before_the_hello_ends_only_that_connection(cluster: Cluster) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(cluster.run_dir / PLANE / "a.sock"))
        stranger.settimeout(10)
        stranger.recv(1 << 16)
        stranger.sendall(frames.encode(Request(1, 7, 1, 1, 0, dataplane_stats())))
        data = b""
        while chunk := stranger.recv(1 << 16):
            data += chunk
        assert b"first message from a client must be Hello" in data
        still_works(plane)


def dataplane_stats() -> Any:
    from dataplane.wire.messages import Stats

    return Stats()


# the peer door


class Dealer:
    """A stranger that speaks zmq to a peer's address."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def ask(self, body: Any, sender: str, epoch: tuple[int, int]) -> Any:
        request = PeerRequest(1, sender, 1, 0, epoch, 1000, body)
        self.socket.send(peering.encode(request))
        return self.answer()

    def answer(self) -> Any:
        assert self.socket.poll(10_000), "no answer"
        reply: PeerReply = peering.decode_reply(self.socket.recv())
        return reply.body

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def test_strangers_at_the_peer_door_disturb_nobody(cluster: Cluster) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as plane:
        stats = plane.stats()
        address, other = (stats["peers"][name]["address"] for name in "ab")
        hello = PeerHello((1, 1), PLANE, "c", 1, other, (0, 0), limits.SHARDS, "")
        with closing(Dealer(address)) as stranger:
            for junk in ([b""], [b"\xc1" * 100], [b"a", b"b", b"c"], [b"\x97\x01"]):
                stranger.socket.send_multipart(junk)
            stranger.socket.send(b"\x00" * (limits.MAX_FRAME_BYTES + 1))  # ends the connection
        with closing(Dealer(address)) as stranger:
            for change, code, says in (
                ({"versions": (7, 9)}, "VersionMismatch", "speaks protocol versions"),
                ({"plane": "elsewhere"}, "RosterMismatch", "same --run and --seeds"),
                ({"shards": 64}, "RosterMismatch", "has shard count 64"),
                ({}, "RosterMismatch", "has founding epoch"),
            ):
                reply = stranger.ask(msgspec.structs.replace(hello, **change), other, (0, 0))
                assert isinstance(reply, Failed) and reply.code == code and says in reply.message
            reply = stranger.ask(peering.Release(b"", b"", 1), other, (0, 0))
            assert (
                isinstance(reply, Failed)
                and "expected PeerHello on the zmq socket" in reply.message
            )
        still_works(plane)


def sent_away(cluster: Cluster, key: str) -> str:
    """What a peer says that is not let in, and ends for that."""
    assert cluster.peers.pop(key).wait(20) == 2
    return (cluster.run_dir / f"{key}.log").read_text()


def launch(cluster: Cluster, name: str, key: str, *arguments: str) -> None:
    cluster.spawn(key, peer_command(name, PLANE, *arguments))


def test_a_peer_with_other_seeds_is_not_let_in(cluster: Cluster) -> None:
    first, second, third = free_addresses(3)
    launch(cluster, "a", "a", "--listen", first, "--seeds", f"{first},{second}")
    cluster.await_up("a")
    launch(cluster, "b", "b", "--listen", second, "--seeds", f"{first},{second},{third}")
    assert "same --run and --seeds" in sent_away(cluster, "b")
    with cluster.connect("a") as plane:
        assert plane.stats()["peer"] == "a"


def test_a_second_peer_of_one_name_on_another_host_is_not_let_in(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = free_addresses(2)
    hosts = [cluster.run_dir / host for host in ("host-1", "host-2")]
    for host, listen in zip(hosts, addresses, strict=True):
        arguments = ["--listen", listen, "--seeds", ",".join(addresses), "--run-dir", str(host)]
        launch(cluster, "a", host.name, *arguments)
        if host is hosts[0]:
            path = host / PLANE / "a.sock"
            until(partial(cluster.is_up, "host-1", path), "the first is up")
    assert "give each peer its own --name" in sent_away(cluster, "host-2")
    monkeypatch.setenv("DATAPLANE_RUN_DIR", str(hosts[0]))
    with cluster.connect("a") as plane:
        assert plane.peer == "a"


def test_a_seed_that_does_not_answer_is_named_in_bounded_time(cluster: Cluster) -> None:
    mine, dead = free_addresses(2)
    launch(cluster, "a", "a", "--listen", mine, "--seeds", f"{mine},{dead}")
    cluster.await_up("a")
    with cluster.connect("a") as plane:
        began = time.monotonic()
        with pytest.raises(dataplane.Unavailable, match=rf"{dead}.*check that the peer is running"):
            for i in range(64):
                plane.partition(f"p{i}", {"s": ["x"]}, timeout=1)
        assert time.monotonic() - began < 10
        assert "error" in plane.stats()["peers"][dead]


# the command line and the run directory


def test_what_a_peer_cannot_be_started_with_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = free_addresses(2)
    for arguments, says in (
        (["--listen", "tcp://0.0.0.0:7101", "--seeds", f"tcp://0.0.0.0:7101,{mine}"], "token"),
        (["--listen", mine, "--seeds", other], "including this address"),
        (["--seeds", f"{mine},{other}"], "--listen"),
        (["--listen", mine], "the same --seeds"),
        (["--listen", "here", "--seeds", other], "use tcp://host:port"),
        (["--arena", "many"], "such as 8GiB"),
        (["--arena", "1"], "at least 1MiB"),
        (["--arena", "900TiB"], "this host or cgroup allows: use a smaller arena"),
        (["--name", "a/b"], "letters, digits"),
    ):
        assert says in refused(*peer_command("a", PLANE, *arguments))
    file = cluster.run_dir / "file"
    file.touch()
    for run_dir in (file, file / "below", Path("/proc/nowhere")):
        monkeypatch.setenv("DATAPLANE_RUN_DIR", str(run_dir))
        assert "DATAPLANE_RUN_DIR" in refused(*peer_command("a", PLANE))
        with pytest.raises(dataplane.InvalidConfig, match="DATAPLANE_RUN_DIR"):
            dataplane.connect()


def test_a_missing_socket_and_a_dead_peer_are_told_apart(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start("a", "b")
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 0.3)
    (cluster.run_dir / PLANE / "a.sock").unlink()
    with pytest.raises(
        dataplane.ConnectError, match=r"socket .*a\.sock is missing.*start it again"
    ):
        cluster.connect("a")
    cluster.peers["b"].kill()
    cluster.peers["b"].wait()
    monkeypatch.setenv("DATAPLANE_PEER", "b")
    with pytest.raises(dataplane.PeerNotFound, match=r"'b'.*running: a\).*dataplane peer --name b"):
        dataplane.connect(run=PLANE)


def test_a_peer_that_dies_is_told_in_bounded_time(cluster: Cluster) -> None:
    cluster.start("a")
    plane = cluster.connect("a")
    part = plane.partition("p", {"s": ["x"]}, free="drop")
    part.put({"x": np.full((1, 2000), 7)}, key=["k"])
    view = part.get(keys=["k"])["x"][0]
    cluster.peers["a"].send_signal(signal.SIGKILL)
    cluster.peers["a"].wait()
    for call in (
        lambda: part.put({"x": [1]}),
        lambda: part.claim("s", rows=1),
        lambda: plane.stats(),
    ):
        began = time.monotonic()
        with pytest.raises(dataplane.PeerLost, match=r"dataplane.connect\(\)"):
            call()
        assert time.monotonic() - began < 3
    assert (view == 7).all()
    plane.close()
    with pytest.raises(dataplane.ClientClosed, match="connect"):
        part.put({"x": [1]})
