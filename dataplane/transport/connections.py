"""Outbound connections of a bulk worker: greeted, joined, and pooled per remote peer.

A connection carries one transfer at a time. The number of connections to a peer is bounded.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from dataplane.errors import TransportMissing
from dataplane.transport.bulk_frames import MAX_JOIN_FRAME_BYTES, FromOwner, Greeting
from dataplane.transport.joining import Joining, answer_of
from dataplane.transport.reading import Reading
from dataplane.transport.seam import Remote
from dataplane.transport.secure_stream import dialling
from dataplane.transport.stream import BulkStream, unconnected
from dataplane.transport.tickets import nonce_of
from dataplane.wire.tables import Owner

PARALLEL = 4
"""Connections to one peer that may be in use at once."""
IDLE_S = 60.0
"""How long an idle connection stays in the pool. Shorter than the owner's timeout, so that a pooled
connection is rarely found closed."""
CONNECT_S = 5.0
CHECK_S = 0.1
"""A read that waits for a connection notices within this time that it was cancelled."""


@dataclass(slots=True, eq=False)
class Connection:
    """A joined stream. Take `nonce` exactly once per request.

    clean: no reply is still in flight.
    """

    remote: Remote
    stream: BulkStream
    greeting: Greeting
    sequence: int = 0
    clean: bool = False
    idle_since: float = 0.0

    def nonce(self) -> bytes:
        self.sequence += 1
        return nonce_of(self.greeting.challenge, self.sequence - 1)


class Connections:
    """The pool. A user of a connection returns or discards it."""

    def __init__(self, key: bytes, *, tls_only: bool = False) -> None:
        self._key = key
        self._tls_only = tls_only
        self._idle: defaultdict[Remote, list[Connection]] = defaultdict(list)
        self._used: defaultdict[Remote, int] = defaultdict(int)
        self._changed = threading.Condition()

    def borrow(self, reading: Reading) -> Connection:
        """Return a connection for one transfer. The reading aborts it when it stops.

        Raises TimeoutError if none is free before the deadline, and OSError if the connection
        fails or the reading was stopped.
        """
        remote = reading.remote
        with self._changed:
            self._await_turn(reading)
            self._expire(time.monotonic() - IDLE_S)
            self._used[remote] += 1
            if self._idle.get(remote):
                connection = self._idle[remote].pop()
                connection.clean = False
                reading.watch(connection.stream)
                return connection
        try:
            return self._joined(reading)
        except BaseException:
            self._leave(remote)
            raise

    def give_back(self, connection: Connection) -> None:
        connection.idle_since = time.monotonic()
        with self._changed:
            self._idle[connection.remote].append(connection)
        self._leave(connection.remote)

    def discard(self, connection: Connection) -> None:
        """Close a connection that is broken or may still have replies in flight."""
        connection.stream.reset()
        self._leave(connection.remote)

    def forget(self, owner: Owner) -> None:
        """Close idle connections to a peer. Those in use end by themselves."""
        with self._changed:
            for remote in [remote for remote in self._idle if remote.owner == owner]:
                for connection in self._idle.pop(remote):
                    connection.stream.close()

    def _joined(self, reading: Reading) -> Connection:
        remote, deadline = reading.remote, reading.deadline
        stream, place = unconnected(remote.address, self._stream_of(remote))
        try:
            reading.watch(stream)
            stream.dial(*place, min(deadline, time.monotonic() + CONNECT_S))
            stream.handshake(deadline)
            joining = Joining(remote.address, self._key, _opening(stream, deadline))
            stream.send(joining.join(), deadline)
            joining.check(_opening(stream, deadline))
            return Connection(remote, stream, joining.greeting)
        except BaseException:
            reading.unwatch()
            stream.reset()
            raise

    def _stream_of(self, remote: Remote) -> Callable[[socket.socket], BulkStream]:
        if remote.fingerprint:
            return dialling(remote.fingerprint)
        if self._tls_only:
            raise TransportMissing(
                f"the peer at {remote.address} does not use TLS, but the reading peer requires "
                "TLS: start every peer of the run with --bulk-tls (DATAPLANE_BULK_TLS=1)",
                address=remote.address,
            )
        return BulkStream

    def _await_turn(self, reading: Reading) -> None:
        remote, deadline = reading.remote, reading.deadline
        while self._used.get(remote, 0) >= PARALLEL and not reading.stopped:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"all {PARALLEL} connections to {remote.address} stayed busy until the deadline"
                )
            self._changed.wait(min(CHECK_S, max(0.0, deadline - time.monotonic())))
        if reading.stopped:
            raise ConnectionAbortedError("the transfer was cancelled")

    def _leave(self, remote: Remote) -> None:
        with self._changed:
            self._used[remote] -= 1
            if not self._used[remote]:
                del self._used[remote]
            self._changed.notify_all()

    def _expire(self, before: float) -> None:
        for remote, idle in list(self._idle.items()):
            for connection in [c for c in idle if c.idle_since < before]:
                idle.remove(connection)
                connection.stream.close()
            if not idle:
                del self._idle[remote]


def _opening(stream: BulkStream, deadline: float) -> FromOwner:
    """One of the owner's first two frames."""
    frame = stream.receive(MAX_JOIN_FRAME_BYTES, deadline)
    if frame is None:
        raise ConnectionResetError(
            "the owner's bulk worker closed the connection during the handshake"
        )
    return answer_of(frame)
