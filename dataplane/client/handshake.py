"""The handshake: the peer speaks first, with its limits and the arena's descriptors."""

from __future__ import annotations

import array
import os
import socket

from dataplane.client.connection import Connection, Opener, answer, peer_lost, unwrap
from dataplane.errors import DataplaneError, ProtocolError, VersionMismatch
from dataplane.wire.frames import encode
from dataplane.wire.limits import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN
from dataplane.wire.messages import Hello, HelloDone, Request, Welcome

_HANDSHAKE_S = 20.0


def negotiate(welcome: Welcome) -> int:
    """The highest protocol version that both sides speak."""
    lowest, highest = welcome.versions
    version = min(highest, PROTOCOL_VERSION)
    if version < max(lowest, PROTOCOL_VERSION_MIN):
        raise VersionMismatch(
            f"peer {welcome.peer!r} speaks protocol versions {lowest} to {highest}, this client "
            f"{PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}; install the same dataplane on both",
            peer_versions=list(welcome.versions),
        )
    return version


def open_connection(
    opener: Opener, session: int = 0, peer: str = "?"
) -> tuple[Connection, Welcome, HelloDone, list[int]]:
    """Connect and shake hands. Returns the arena's descriptors (read-only, read-write), owned by
    the caller, when `session` is 0; a further connection of a session lets the kernel drop them."""
    descriptors: list[int] = []
    try:
        connection = Connection(opener(), peer)
    except OSError as exc:
        raise peer_lost(peer) from exc
    try:
        connection.sock.settimeout(_HANDSHAKE_S)
        welcome = _receive_welcome(connection, descriptors if session == 0 else None)
        hello = Hello(negotiate(welcome), session)
        rid = connection.next_rid()
        request = Request(rid, session, 0, 0, welcome.epoch, int(_HANDSHAKE_S * 1e3), hello)
        connection.send(encode(request), _HANDSHAKE_S)
        done = unwrap(answer(connection.receive(_HANDSHAKE_S), rid))
        if not isinstance(done, HelloDone):
            raise ProtocolError(f"the peer answered Hello with {type(done).__name__}")
    except BaseException as exc:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(exc, OSError) and not isinstance(exc, DataplaneError):
            raise peer_lost(connection.peer) from exc
        raise
    return connection, welcome, done, descriptors


def _receive_welcome(connection: Connection, descriptors: list[int] | None) -> Welcome:
    while (reply := connection.inbox.reply()) is None:
        room = connection.inbox.room()
        if descriptors is None:
            connection.count(connection.sock.recv_into(room))
        else:
            connection.count(_receive_with_descriptors(connection.sock, room, descriptors))
    body = unwrap(reply.body)
    if not isinstance(body, Welcome):
        raise ProtocolError(f"the peer opened with {type(body).__name__}, not Welcome")
    if descriptors is not None and len(descriptors) != 2:
        raise ProtocolError(f"Welcome brought {len(descriptors)} descriptors instead of 2")
    connection.peer = body.peer
    return body


def _receive_with_descriptors(sock: socket.socket, room: memoryview, descriptors: list[int]) -> int:
    count, ancillary, _, _ = sock.recvmsg_into(
        [room], socket.CMSG_SPACE(2 * 4), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
            descriptors.extend(received)
    return count
