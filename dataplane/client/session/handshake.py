"""The handshake: the peer speaks first, with its limits and the arena's descriptors."""

from __future__ import annotations

import array
import errno
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

from dataplane.client.arguments import Deadline
from dataplane.client.session.connection import (
    Connection,
    Opener,
    answer,
    expect,
    no_answer,
    peer_lost,
    process_of,
    unwrap,
)
from dataplane.client.session.session import Session
from dataplane.errors import (
    ConnectError,
    DataplaneError,
    DeadlineExceeded,
    LimitExceeded,
    PeerLost,
    VersionMismatch,
    duration,
    mixed_releases,
)
from dataplane.launch import processes, rundir
from dataplane.launch.embedded import is_embedded
from dataplane.wire.frames import decode_reply, encode
from dataplane.wire.limits import MAX_HELLO_BYTES, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN
from dataplane.wire.messages import Hello, HelloDone, Request, Welcome

HANDSHAKE_S, LEAST_S = 20.0, 1.0
_GONE = ConnectionRefusedError, FileNotFoundError
"""Errors of `connect` which prove that no peer listens."""
_LOOKS, _LOOK_S = 10, 0.02


def negotiate(welcome: Welcome) -> int:
    """The highest protocol version that both sides speak."""
    lowest, highest = welcome.versions
    version = min(highest, PROTOCOL_VERSION)
    if version < max(lowest, PROTOCOL_VERSION_MIN):
        raise VersionMismatch(
            f"peer {welcome.peer!r} speaks protocol versions {lowest} to {highest}, but this "
            f"client speaks {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}: install the same "
            "dataplane release everywhere",
            peer_versions=list(welcome.versions),
        )
    return version


def open_connection(
    opener: Opener,
    session: Session | None = None,
    limit_s: float = HANDSHAKE_S,
    greet: Callable[[Welcome], list[int]] = lambda welcome: [],
    begun: Callable[[Connection], object] = lambda connection: None,
) -> tuple[Connection, Welcome, HelloDone, list[int]]:
    """Connect and shake hands. Returns the arena's descriptors (read-only, read-write), which the
    caller then owns. With a `session`, there are none. greet: gets the welcome, and returns the
    pools that a new session reads in place. begun: gets the connection before its handshake. Raises
    PeerLost, also if another incarnation than the session's replies. If the peer does not reply in
    time, raises DeadlineExceeded with a session, else ConnectError.
    """
    descriptors: list[int] = []
    deadline = Deadline(limit_s)
    peer = "?" if session is None else session.peer
    try:
        connection = Connection(opener(limit_s), peer)
    except OSError as exc:
        if is_without_descriptors(exc):
            raise no_descriptors() from exc
        if session is None:
            pid = exc.pid() if isinstance(exc, QueueFull) else 0
            raise _not_accepted(exc, "of this run", limit_s, pid) from exc
        if isinstance(exc, TimeoutError):
            raise no_answer(session.peer, deadline) from exc
        if not isinstance(exc, _GONE):
            raise peer_lost(session.peer) from exc
        session.peer_is_gone()
        raise peer_gone(session) from exc
    begun(connection)
    where = f"at {connection.sock.getpeername()}"
    try:
        connection.sock.settimeout(max(_LOOK_S, deadline.until - time.monotonic()))
        welcome = _receive_welcome(connection, descriptors if session is None else None)
        connection.sock.setblocking(True)
        if session is not None and welcome.incarnation != session.incarnation:
            session.peer_is_gone()
            raise peer_gone(session)
        joined = 0 if session is None else session.id
        rid = connection.next_rid()
        version = negotiate(welcome)
        hello = Hello(version, joined, pid=os.getpid())
        if session is None:
            hello.pools, hello.command = greet(welcome), processes.own_command()
            hello.rank = processes.own_rank(os.environ)
        request = Request(rid, joined, 0, 0, int(limit_s * 1e3), hello)
        connection.send(encode(request), deadline)
        done = expect(unwrap(answer(connection.receive(deadline), rid)), HelloDone, hello)
    except BaseException as exc:
        pid = process_of(connection.sock)
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        of_socket = isinstance(exc, OSError) and not isinstance(exc, DataplaneError)
        if session is None and (of_socket or type(exc) in (PeerLost, DeadlineExceeded)):
            raise _not_accepted(exc, where, limit_s, pid) from exc
        late = isinstance(exc, TimeoutError)
        broke = type(exc) is PeerLost or (of_socket and not late)
        if session is not None and broke and _is_gone(opener):  # it died during the handshake
            session.peer_is_gone()
            raise peer_gone(session) from exc
        if of_socket:
            raise (no_answer(peer, deadline) if late else peer_lost(peer)) from exc
        raise
    return connection, welcome, done, descriptors


class QueueFull(TimeoutError):
    """The peer accepts no connections, and the kernel's listen queue is full."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the peer did not accept a connection to {path}: its listen queue is full"
        )
        self.path = Path(path)

    def pid(self) -> int:
        """The peer's process; 0 where that is not visible from here."""
        return rundir.holder(self.path.parent, self.path.stem) or 0


def _is_gone(opener: Opener) -> bool:
    """Whether no process listens. A dying process closes its sockets one by one, so look
    repeatedly."""
    for _ in range(_LOOKS):
        try:
            opener(_LOOK_S).close()
        except _GONE:
            return True
        except OSError:
            return False
        time.sleep(_LOOK_S)
    return False


def peer_gone(session: Session) -> PeerLost:
    """The error for a session whose peer ended: which rows are lost, and where the log is."""
    if session.farewell is not None:
        return type(session.farewell)(session.farewell.message, **session.farewell.details)
    welcome = session.welcome
    gone = (
        (
            "It was the only peer of its run, so all rows of the run are gone. "
            + (
                "Call dataplane.connect() again: the run starts empty"
                if is_embedded(session.peer)
                else "Start the peer again, then call dataplane.connect(): the run starts empty"
            )
        )
        if welcome.alone
        else (
            "Rows that were stored only on this host are lost, unless the peer moved them to "
            "another host before it exited. Call dataplane.connect() again to read the other rows; "
            "part.lost() lists the lost ones"
        )
    )
    log = f". The peer's log is {welcome.log}" if welcome.log else ""
    if log and is_embedded(session.peer):
        log += f" (or {welcome.log}.old if a new peer has started since)"
    return PeerLost(
        f"peer {session.peer!r} of run {session.plane!r} exited. {gone}. The call may have "
        f"taken effect{log}",
        peer=session.peer,
        run=session.plane,
        log=welcome.log,
        alone=welcome.alone,
    )


def is_without_descriptors(exc: OSError) -> bool:
    """Whether this process, or its host, has no file descriptor left."""
    return exc.errno in (errno.EMFILE, errno.ENFILE)


def no_descriptors() -> LimitExceeded:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LimitExceeded(
        "this process cannot connect to its peer, because no file descriptor is free (limit: "
        f"{limit}). Raise the limit (ulimit -n), or close files and unused "
        "clients",
        limit=limit,
    )


def _not_accepted(exc: BaseException, where: str, limit_s: float, pid: int) -> DataplaneError:
    """The error for a client that the peer did not accept. pid: of the peer; 0: unknown."""
    if isinstance(exc, TimeoutError):
        process = f"the peer {where} (pid {pid})" if pid else f"the peer {where}"
        late = f"{process} did not accept this client within {duration(limit_s)}"
        text = (
            f"{late}: {processes.how_to_continue(pid)}"
            if processes.is_stopped(pid)
            else f"{late}: it may be stopped, starved of processor time, or out of file "
            "descriptors. Check the load of this host and the peer's log, then connect again"
        )
        return ConnectError(text, limit_s=limit_s, pid=pid)
    return PeerLost(
        f"the peer {where} closed the connection before accepting this client: check the peer's "
        "log, then connect again"
    )


def further(
    session: Session,
    deadline: Deadline,
    begun: Callable[[Connection], object] = lambda connection: None,
) -> Connection:
    """One more connection of a session, for a call with this deadline. begun: gets the connection
    before its handshake, and may end the handshake with `shut`."""
    limit_s = min(HANDSHAKE_S, max(LEAST_S, deadline.until - time.monotonic()))
    return open_connection(session.connections.opener, session, limit_s, begun=begun)[0]


def _receive_welcome(connection: Connection, descriptors: list[int] | None) -> Welcome:
    while (frame := connection.frames.next()) is None:
        if descriptors is None:
            connection.take(flags=0)
        else:
            data = _receive_with_descriptors(connection.sock, descriptors)
            if not data:
                raise peer_lost(connection.peer)
            connection.frames.add(data)
    body = unwrap(decode_reply(frame).body)
    if not isinstance(body, Welcome):
        raise mixed_releases(
            f"unexpected first message from the peer: expected Welcome, got {type(body).__name__}"
        )
    if descriptors is not None and len(descriptors) != 2:
        raise mixed_releases(f"expected 2 file descriptors with Welcome, got {len(descriptors)}")
    connection.peer = body.peer
    return body


def _receive_with_descriptors(sock: socket.socket, descriptors: list[int]) -> bytes:
    data, ancillary, flags, _ = sock.recvmsg(
        MAX_HELLO_BYTES, socket.CMSG_SPACE(2 * 4), socket.MSG_CMSG_CLOEXEC
    )
    if flags & socket.MSG_CTRUNC:
        raise no_descriptors()
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(rights[: len(rights) - len(rights) % received.itemsize])
            descriptors.extend(received)
    return data
