"""From a name to a session: find or start this host's peer, shake hands, map its arena."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from functools import partial

from dataplane.client.connection import GRACE_S, Connection, Connections, frame_of, peer_lost
from dataplane.client.core import Call, Tell
from dataplane.client.handshake import open_connection
from dataplane.client.housekeeping import Housekeeper
from dataplane.client.session import Session
from dataplane.errors import ClientClosed, PeerLost
from dataplane.launch.embedded import attach
from dataplane.memory.mapping import ReadMap, WriteMaps
from dataplane.wire.frames import encode
from dataplane.wire.messages import Request

_FOREVER_MS = (1 << 31) - 1
_ATTEMPTS = 3


def open_session(name: str | None, plane: str | None) -> Housekeeper:
    """A new session at the peer `name` of this host, or at the embedded one."""
    for attempt in range(_ATTEMPTS):
        path = attach(plane, name)
        try:
            return join(partial(_connected, path))
        except PeerLost:
            # An embedded peer may have left between the two steps; the next one starts another.
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def join(opener: Callable[[], socket.socket]) -> Housekeeper:
    """A new session over the sockets that `opener` makes."""
    anchor, welcome, done, (readable, writable) = open_connection(opener)
    try:
        reads = ReadMap(readable, welcome.arena_bytes)
        writes = WriteMaps(writable)
    except BaseException:
        anchor.close()
        os.close(writable)
        raise
    finally:
        os.close(readable)
    # The windows are mapped from it for as long as anybody writes.
    weakref.finalize(writes, os.close, writable).atexit = False
    return Housekeeper(Session(welcome, done, Connections(opener), reads, writes), anchor)


def further(session: Session) -> Connection:
    """One more connection of a session."""
    connection, welcome, _, _ = open_connection(
        session.connections.opener, session.id, session.peer
    )
    if welcome.incarnation != session.incarnation:
        connection.close()
        raise peer_lost(session.peer)
    return connection


def framed(
    session: Session, connection: Connection, step: Call
) -> tuple[Request, bytearray, float | None]:
    """A call as its request, the bytes to send, and how long to wait for the answer.

    What is due to be told to the peer goes ahead in the same bytes.
    """
    left = step.deadline_s
    if step.blocking:
        deadline_ms = 0
    else:
        deadline_ms = _FOREVER_MS if left is None else max(1, min(int(left * 1e3), _FOREVER_MS))
    request = session.request(connection.next_rid(), step.body, deadline_ms)
    try:
        frame = frame_of(request)
    except BaseException:
        session.answered(request)
        raise
    due = session.parting()
    if due:
        ahead = bytearray().join(encode(session.one_way(body)) for body in due)
        frame = ahead + frame
    return request, frame, None if left is None else max(left, 0.0) + GRACE_S


def told(session: Session, step: Tell) -> bytearray:
    """A one-way message as bytes."""
    if session.closed is not None:
        raise ClientClosed(session.closed)
    return frame_of(session.one_way(step.body))
