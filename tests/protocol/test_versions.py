"""Releases side by side: handshakes settle on a common version.

Raw frames by the independent encoder, against a real peer, a real bulk worker and a real client.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from typing import Any

import msgpack
import numpy as np
import pytest

from dataplane import VersionMismatch
from dataplane.client.session import handshake
from dataplane.testing import hosts
from dataplane.transport import joining
from dataplane.transport.bulk_frames import COPY
from dataplane.transport.connections import Connections
from dataplane.transport.reading import Reading
from dataplane.transport.seam import Remote
from dataplane.transport.tickets import plane_key, proof
from dataplane.wire.limits import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN
from dataplane.wire.messages import Hello
from dataplane.wire.tables import Owner
from tests.client.conftest import peer
from tests.client.scripted_peer import ScriptedPeer

__all__ = ["peer"]

N = PROTOCOL_VERSION
KEY = plane_key("test", (1, 1))
CHALLENGE = b"sixteen bytes..."
# what a client settles on with the peer of its host


@pytest.mark.parametrize("versions", [(N - 1, N), (N, N), (N, N + 1), (N - 1, N + 1)])
def test_a_client_and_a_peer_of_a_neighbouring_release_speak_the_version_of_both(
    peer: ScriptedPeer, versions: tuple[int, int]
) -> None:
    peer.welcome.versions = versions
    keeper = peer.keeper()
    (hello,) = peer.bodies(Hello)
    assert hello.version == N
    keeper.close("the test is over")


def test_a_client_that_speaks_two_versions_takes_the_older_one_of_an_older_peer(
    peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", N + 1)
    keeper = peer.keeper()
    (hello,) = peer.bodies(Hello)
    assert hello.version == N
    keeper.close("the test is over")


@pytest.mark.parametrize("versions", [(N + 1, N + 1), (N - 1, N - 1)])
def test_a_client_and_a_peer_without_a_common_version_part(
    peer: ScriptedPeer, versions: tuple[int, int]
) -> None:
    peer.welcome.versions = versions
    with pytest.raises(VersionMismatch):
        peer.keeper()
    peer.await_closed()


# what bulk workers settle on


class OwnersPort:
    """An owner's port that greets with these versions, and tells what joins."""

    def __init__(self, versions: tuple[int, int]) -> None:
        self._versions = versions
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.joined: list[Any] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._thread.join(20)
        self._listener.close()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock, contextlib.suppress(ConnectionError):  # readers leave without a word
            greeting = [1, list(self._versions), CHALLENGE, 1 << 20, 16_384, 8 << 20]
            sock.sendall(frame(greeting))
            join = receive(sock)
            if join is not None:
                self.joined.append(join)
                sock.sendall(frame([7, proof(KEY, "owner", CHALLENGE, join[2])]))
                receive(sock)


def frame(array: list[Any]) -> bytes:
    body: bytes = msgpack.packb(array, use_bin_type=True)
    return struct.pack("<I", len(body)) + body


def receive(sock: socket.socket) -> Any:
    """The next frame's array; None at the end."""
    sock.settimeout(20)
    header = sock.recv(4, socket.MSG_WAITALL)
    if len(header) < 4:
        return None
    return msgpack.unpackb(sock.recv(struct.unpack("<I", header)[0], socket.MSG_WAITALL))


def joins(versions: tuple[int, int]) -> list[Any]:
    """Return what a reader sends to an owner with these versions: one `Join`."""
    owner, pool = OwnersPort(versions), Connections(KEY)
    try:
        remote = Remote(Owner("a", 1), owner.address)
        pool.discard(pool.borrow(Reading(remote, np.zeros(0, COPY), time.monotonic() + 20)))
    finally:
        owner.close()
    return owner.joined


@pytest.mark.parametrize("versions", [(N - 1, N), (N, N), (N, N + 1)])
def test_a_reader_and_an_owner_of_a_neighbouring_release_speak_the_version_of_both(
    versions: tuple[int, int],
) -> None:
    (join,) = joins(versions)
    assert join[:2] == [6, N]


def test_a_reader_that_speaks_two_versions_takes_the_older_one_of_an_older_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "PROTOCOL_VERSION", N + 1)
    (join,) = joins((N, N))
    assert join[:2] == [6, N]


@pytest.mark.parametrize("versions", [(N + 1, N + 1), (N - 1, N - 1)])
def test_a_reader_and_an_owner_without_a_common_version_part(versions: tuple[int, int]) -> None:
    with pytest.raises(VersionMismatch, match=f"{versions[0]} to {versions[1]}"):
        joins(versions)


@pytest.mark.parametrize("version", [N - 1, N, N + 1])
async def test_an_owner_takes_readers_of_its_own_version_only(version: int) -> None:
    async with hosts() as start:
        address = (await start("a")).engine.address
        answer = await asyncio.to_thread(_join, address, version)
    assert (answer[0] == 7) if version == N else (answer[1] == "VersionMismatch"), answer


def _join(address: str, version: int) -> Any:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as sock:
        tag, versions, challenge, *_ = receive(sock)
        assert tag == 1 and versions == [PROTOCOL_VERSION_MIN, N]
        sock.sendall(frame([6, version, CHALLENGE, proof(KEY, "reader", challenge, CHALLENGE)]))
        return receive(sock)
