"""A plane with a cluster token: members work as before, strangers get nothing but a refusal."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

import dataplane
from dataplane.launch.token import Token, new_token, read_token
from dataplane.peer.net.greetings import Gate
from dataplane.wire import limits, peering
from dataplane.wire.peering import PeerHello, PeerRequest
from tests.end_to_end.conftest import PLANE, Cluster, free_addresses, peer_command, until

REFUSALS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Token:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(new_token())
    monkeypatch.setenv("DATAPLANE_TOKEN_FILE", str(path))
    return read_token(path)


@pytest.fixture
def members(cluster: Cluster, token: Token) -> Iterator[Cluster]:
    cluster.start("a", "b")
    yield cluster


def rows_travel(cluster: Cluster) -> None:
    """From each host to the other, by the peer door and by bulk transfer."""
    with cluster.connect("a") as a, cluster.connect("b") as b:
        for here, there in ((a, b), (b, a)):
            part = here.partition("works", {"s": ["x"]})
            part.put({"x": np.full((4, 5000), 7.0)})
            batch = there.partition("works").claim("s", rows=4, timeout=20)
            assert np.all(batch.numpy("x") == 7)
            batch.ack()
            part.drop()


def address_of(cluster: Cluster, name: str) -> str:
    with cluster.connect("a") as plane:
        return str(plane.stats()["peers"][name]["address"])


def what_a_dealer_gets(address: str, secure: object) -> list[int]:
    """Events until the peer turned it away; fails when it was answered."""
    hello = PeerHello((1, 1), PLANE, "c", 1, address, (0, 0), limits.SHARDS, "")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if callable(secure):
            secure(dealer)
        with dealer.get_monitor_socket(REFUSALS) as monitor:
            dealer.connect(address)
            dealer.send(peering.encode(PeerRequest(1, address, 1, 0, (0, 0), 1000, hello)))
            assert monitor.poll(20_000), "it was not turned away"
            event = recv_monitor_message(monitor)["event"]
            assert not dealer.poll(0), "it was answered"
            dealer.disable_monitor()
        return [int(event)]


def test_members_work_as_before_and_the_token_is_nowhere(members: Cluster, token: Token) -> None:
    rows_travel(members)
    with members.connect("a") as plane:
        assert plane.stats()["encrypted"]
    secret = token.path.read_text().encode()
    for peer in members.peers.values():
        assert secret not in Path(f"/proc/{peer.pid}/cmdline").read_bytes()
        assert secret not in Path(f"/proc/{peer.pid}/environ").read_bytes()
    assert not any(secret.decode() in members.log(name) for name in members.peers)


def test_strangers_at_the_peer_door_get_nothing(members: Cluster, token: Token) -> None:
    address = address_of(members, "b")
    other_token = Gate(Token(Path("guess"), b"x" * 32), PLANE)
    other_plane = Gate(token, "another plane")

    def with_own_key(dealer: zmq.Socket[bytes]) -> None:
        """It has learned what to encrypt to, but is no member."""
        Gate(token, PLANE).secure_dealer(dealer)
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()

    what_a_dealer_gets(address, None)
    what_a_dealer_gets(address, other_token.secure_dealer)
    what_a_dealer_gets(address, other_plane.secure_dealer)
    events = what_a_dealer_gets(address, with_own_key)
    assert events == [zmq.EVENT_HANDSHAKE_FAILED_AUTH]
    with members.connect("b") as plane:
        until(lambda: plane.stats()["refused"] >= 4, "each of them is counted")
    assert "a different token or run name" in members.log("b")
    rows_travel(members)


def test_a_peer_without_the_token_is_told_what_may_be_wrong(
    cluster: Cluster, token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = free_addresses(2)
    logs = {name: cluster.run_dir / f"{name}.log" for name in "ab"}
    for name, listen in zip("ab", addresses, strict=True):
        command = peer_command(name, PLANE, "--listen", listen, "--seeds", ",".join(addresses))
        cluster.spawn(name, command)
        monkeypatch.delenv("DATAPLANE_TOKEN_FILE", raising=False)
    cluster.await_up("a")
    with (
        cluster.connect("a") as plane,
        pytest.raises(dataplane.Unavailable, match="same --run, --seeds and --token-file"),
    ):
        for i in range(64):  # until one has its home at the other peer
            with suppress(dataplane.DeadlineExceeded):  # a busy peer is late to know whom it asked
                plane.partition(f"p{i}", {"s": ["x"]}, timeout=1)
    until(lambda: "waiting to join" in logs["b"].read_text(), "the stranger says why it waits")
    assert addresses[0] in logs["b"].read_text() and "--token-file" in logs["b"].read_text()
    cluster.peers["b"].terminate()
    assert cluster.peers["b"].wait(10) == 0, "it ends when it is told to, though it never served"


def test_what_libzmq_asks_is_answered_by_the_key_alone() -> None:
    gate = Gate(Token(Path("t"), b"x" * 32), "p")
    member = gate._credentials[1]
    request = [b"1.0", b"7", b"dataplane", b"192.0.2.1", b"", b"CURVE", member]
    assert gate.answer(request)[:3] == [b"1.0", b"7", b"200"]
    for place, other in ((0, b"2.0"), (2, b"*"), (2, b""), (5, b"NULL"), (6, b"n" * 32), (6, b"")):
        refused = [*request[:place], other, *request[place + 1 :]]
        assert gate.answer(refused)[:3] == [b"1.0", b"7", b"400"]
    assert gate.answer(request[:5])[2] == gate.answer([])[2] == b"400"
    assert gate.refusals.total == 8
    open_gate = Gate(None, "p")
    assert open_gate.answer([*request[:5], b"NULL"])[2] == b"200"
    assert open_gate.answer(request)[2] == b"400"


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace with an address that is not loopback's by rule."""
    name = f"dataplane-{os.getpid()}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"no network namespace can be made here: {exc}")
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        subprocess.run(["ip", "-n", name, "addr", "add", "192.0.2.7/32", "dev", "lo"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.needs("ip")
def test_with_a_token_peers_listen_beyond_loopback(
    namespace: str, cluster: Cluster, token: Token
) -> None:
    addresses = [f"tcp://192.0.2.7:{port}" for port in (7101, 7102)]
    for name, listen in zip("ab", addresses, strict=True):
        command = peer_command(name, PLANE, "--listen", listen, "--seeds", ",".join(addresses))
        cluster.spawn(name, ["ip", "netns", "exec", namespace, *command])
        cluster.await_up(name)
    rows_travel(cluster)
