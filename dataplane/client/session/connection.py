"""Connections to this host's peer: one call at a time on each, strictly request and reply.

Runs in the client. An error that interrupts a wait ends the connection, which cancels the call at
the peer. A connection that breaks raises PeerLost, and `calls.send` sends the call again on
another. `client/_async/backend.py` waits for the same sockets in an event loop.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from dataplane.client.arguments import Deadline
from dataplane.errors import (
    ClientClosed,
    DataplaneError,
    DeadlineExceeded,
    InvalidValue,
    PeerLost,
    ProtocolError,
    duration,
    from_wire,
    mixed_releases,
)
from dataplane.launch import processes
from dataplane.wire.frames import FrameReader, decode_reply
from dataplane.wire.messages import Body, Failed, Notice, Reply, Request

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long a call waits after its deadline for the peer's own reply, unless the peer's process is
stopped."""
LOOK_S = 10.0
"""The first pause after which a waiting call checks that the peer runs; later pauses are longer.
The peer itself says what a call waits for (`Notice`)."""
REPEATS = 8
"""How often one call is retried, each time on a new connection."""
_CREDENTIALS = struct.Struct("3i")

_RECEIVE_BYTES = 64 << 10
_IDLE_CONNECTIONS = 16
_AT_ONCE = int(socket.MSG_DONTWAIT)

Opener = Callable[[float], socket.socket]
"""Connects within this many seconds. Raises TimeoutError, and what `connect` of a socket raises."""


B = TypeVar("B", bound=Body)


class Cancelled(BaseException):
    """Another thread has cancelled the call."""


class Connection:
    """A joined socket with the bytes that arrived on it; borrowed by one call at a time.

    A call waits in `poll`, never in `recv`: the kernel wakes a thread that waits in the `recv` of a
    unix socket also when the other side reads, which costs both sides a switch.
    """

    __slots__ = (
        "sock",
        "frames",
        "peer",
        "left",
        "later",
        "early",
        "frame_sent",
        "is_retry",
        "received",
        "unread",
        "_begun",
        "_cancel_fd",
        "_complaint",
        "_readable",
        "_rid",
    )

    def __init__(self, sock: socket.socket, peer: str = "?") -> None:
        sock.setblocking(True)
        self.sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self.frames = FrameReader()
        self.peer = peer
        self.left = False
        self.later = 0
        """The number of the request that was sent with the awaited one; 0 if there is none."""
        self.early: bytes | memoryview | None = None
        """The reply to `later`, if it arrived first."""
        self.frame_sent = False
        """Whether the whole frame of this call may have left this process."""
        self.is_retry = False
        """Whether this call repeats an earlier one. The peer may repeat its reply, too, and the
        space in that is not granted twice."""
        self.received: bytes | memoryview | None = None
        """The reply that `arrived` returned last, until its caller has it."""
        self.unread: list[Request] = []
        """requests whose callers have left, which the peer may not have read yet"""
        self._begun = b""
        """the rest of a frame that `send` sent only a part of"""
        self._rid = 0
        self._cancel_fd = -1
        """becomes readable when another thread cancels the call; -1: none does"""
        self._complaint: DataplaneError | None = None

    def next_rid(self) -> int:
        self._rid += 1
        return self._rid

    def close(self) -> None:
        self.sock.close()

    @property
    def is_open(self) -> bool:
        return self.sock.fileno() >= 0

    @property
    def is_whole(self) -> bool:
        """Whether the connection is open and its caller has not left it."""
        return not self.left and self.is_open

    def ended(self) -> bool:
        """Whether the peer's side is closed; asked between calls."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def leave(self) -> None:
        """Stop waiting for the reply. The peer sees the end and cancels the call. The housekeeper
        reads a reply that is already in flight, and undoes what it grants."""
        self.left = True
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.sock.close()

    def shut(self) -> None:
        """Shut the socket down. This wakes the waiting call, which reads the bytes that have
        arrived."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    # one call

    def exchange(self, frame: bytes, rid: int, deadline: Deadline) -> Body:
        """Send one request, if it was not sent along with another, and wait for its answer. Raises
        what the peer answered as an error."""
        try:
            if frame:
                if (sent := self.send_some(frame)) < len(frame):
                    self._send_rest(frame, sent, deadline, GRACE_S)
                reply = self.receive(deadline, GRACE_S)
            else:  # it was sent along with another
                reply = self.take_early() or self.receive(deadline, GRACE_S)
            while reply.rid != rid:
                self.keep_early(reply, rid)
                reply = self.receive(deadline, GRACE_S)
        except BaseException as exc:
            self.fail(exc)
            raise
        return unwrap(reply.body)

    def send(self, frame: bytes, deadline: Deadline) -> None:
        """Send all of it. If the deadline ends the send in the middle of the frame, the next send
        finishes that frame first, because the peer reads the bytes as its rest."""
        if self._begun:
            self._send_rest(self._begun, 0, deadline, 0.0)
        self._send_rest(frame, 0, deadline, 0.0)

    def receive(self, deadline: Deadline, grace_s: float = 0.0) -> Reply:
        """Wait for the next reply to a request. If one has arrived at the deadline, it is used."""
        if self.frames.held and (reply := self.arrived()) is not None:
            return reply
        waits: Iterator[float] | None = None
        left_s = deadline.until - time.monotonic()
        wait_s = LOOK_S if left_s > LOOK_S else max(0.0, left_s)
        while True:
            if ready := self._readable.poll(wait_s * 1e3):
                if self._cancel_fd >= 0 and any(fd == self._cancel_fd for fd, _ in ready):
                    raise Cancelled
                self.take()
                if (reply := self.arrived()) is not None:
                    return reply
            if waits is None:  # most calls have their reply by now
                waits = self.waits(deadline, grace_s, wait_s)
            try:
                wait_s = next(waits)
            except DeadlineExceeded:
                if (reply := self.last()) is None:
                    raise
                return reply

    def waits(self, deadline: Deadline, grace_s: float, waited_s: float = 0.0) -> Iterator[float]:
        """Yield the seconds of each further wait for the peer. Raise DeadlineExceeded after the
        deadline. waited_s: how long the caller has waited already.

        A peer whose process runs gets `grace_s` more, because its answer may be on its way. If the
        deadline had passed before the first wait, the grace counts from there. Logs that the peer
        is stopped.
        """
        began = time.monotonic() - waited_s
        look_at = began + LOOK_S
        while True:
            now = time.monotonic()
            if now >= look_at:
                waited_s = now - began
                look_at = now + waited_s
                if is_stopped(self.sock):
                    log.warning(
                        "peer %r is stopped (by SIGSTOP or a debugger), and a call has been "
                        "waiting for %s: resume the peer (SIGCONT)",
                        self.peer,
                        duration(waited_s),
                    )
            until = deadline.until
            if now >= until and not is_stopped(self.sock):
                until = max(until, began) + grace_s
            if now >= until:
                raise no_answer(self.peer, deadline)
            yield min(until, look_at) - now

    # non-blocking steps

    def send_some(self, rest: bytes | memoryview) -> int:
        """Send as much of the rest of a frame as the socket takes without waiting."""
        # An interrupt may hide the result of `send`. Until then, the whole frame may be sent.
        self.frame_sent = True
        try:
            sent = self.sock.send(rest, _AT_ONCE)
        except BlockingIOError:
            sent = 0
        if sent < len(rest):
            self.frame_sent = False
        return sent

    def take(self, flags: int = _AT_ONCE) -> None:
        """Receive the bytes that have arrived. Raises BlockingIOError if there are none."""
        data = self.sock.recv(self.frames.awaited_bytes or _RECEIVE_BYTES, flags)
        if not data:
            raise self._complaint or peer_lost(self.peer)
        self.frames.add(data)

    def arrived(self) -> Reply | None:
        """Return the next reply to a request, if all of it has arrived."""
        while True:
            self.received = body = self.frames.next()
            if body is None:
                return None
            reply = decode_reply(body)
            if reply.rid:
                return reply
            self._log_notice(reply.body)

    def unclaimed(self) -> Iterator[Reply]:
        """Yield the replies that have arrived and that no caller got."""
        kept, self.early, self.received = (self.early, self.received), None, None
        for body in kept:
            if body is not None:
                yield decode_reply(body)
        while (reply := self.arrived()) is not None:
            yield reply

    def last(self) -> Reply | None:
        """Return the next reply to a request that has arrived, as the wait for it ends."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.take()
                if (reply := self.arrived()) is not None:
                    return reply
        return None

    def keep_early(self, reply: Reply, rid: int) -> None:
        """Keep the reply to the request that was sent along with request `rid`. Raises
        ProtocolError for any other reply."""
        if reply.rid != self.later:
            raise _unexpected(reply, rid)
        self.early, self.received = self.received, None

    def take_early(self) -> Reply | None:
        """Return the reply that `keep_early` kept, if there is one."""
        body = self.early
        if body is None:
            return None
        self.early, self.received = None, body
        return decode_reply(body)

    def _log_notice(self, body: Body) -> None:
        """Log a notice, or the error of a one-way message, which has no caller. If the peer then
        closes the connection, that error was the reason."""
        if isinstance(body, Notice):
            log.warning("%s", body.text)
            return
        if not isinstance(body, Failed):
            raise _unexpected(Reply(0, body), self.later)  # type: ignore[arg-type]
        self._complaint = from_wire(body.code, body.message, body.details)
        if isinstance(self._complaint, PeerLost):  # the peer is shutting down
            log.warning("%s", body.message)
            return
        log.warning("peer %r rejected a one-way message: %s", self.peer, body.message)

    @contextlib.contextmanager
    def cancelled_by(self, fd: int) -> Iterator[None]:
        """Raise `Cancelled` from calls in the body when `fd` is readable."""
        self._readable.register(fd, select.POLLIN)
        self._cancel_fd = fd
        try:
            yield
        finally:
            self._cancel_fd = -1
            self._readable.unregister(fd)

    def _send_rest(self, frame: bytes, sent: int, deadline: Deadline, grace_s: float) -> None:
        """Send the rest of a frame after its first `sent` bytes."""
        rest, waits = memoryview(frame)[sent:], self.waits(deadline, grace_s)
        writable = select.poll()
        writable.register(self.sock, select.POLLOUT)
        try:
            while rest := rest[self.send_some(rest) :]:
                writable.poll(next(waits) * 1e3)
        finally:
            if len(rest) < len(frame):
                self._begun = bytes(rest)

    # its end

    def fail(self, exc: BaseException) -> None:
        """End the connection because of this error. Raise PeerLost if the socket failed."""
        # A signal handler may raise TimeoutError, which is an OSError, but not one of the socket.
        socket_failed = isinstance(exc, OSError) and exc.errno is not None
        ours = isinstance(exc, DataplaneError) and not isinstance(exc, DeadlineExceeded)
        if not ours and not socket_failed:
            self.leave()
            return
        try:
            if socket_failed:
                raise self._farewell() from exc
        finally:
            self.close()

    def _farewell(self) -> DataplaneError:
        """Return why the peer closed the connection. It may have said so while no call waited
        here."""
        with contextlib.suppress(OSError, DataplaneError):
            while True:
                self.take()
                self.arrived()
        return self._complaint or peer_lost(self.peer)


def answer(reply: Reply, rid: int) -> Body:
    """Return the body of the reply to request `rid`."""
    if reply.rid != rid:
        raise _unexpected(reply, rid)
    return reply.body


def _unexpected(reply: Reply, rid: int) -> ProtocolError:
    return mixed_releases(
        f"unexpected reply from the peer: expected a reply to request {rid}, got one to request "
        f"{reply.rid}"
    )


def unwrap(body: Body) -> Body:
    """Return the body. Raise it if it is an error."""
    if isinstance(body, Failed):
        raise from_wire(body.code, body.message, body.details)
    return body


def expect(reply: object, expected: type[B], body: Body) -> B:
    """Return the reply to `body`. Raise ProtocolError if it does not have the expected type."""
    if not isinstance(reply, expected):
        raise mixed_releases(
            f"unexpected reply to {type(body).__name__}: expected {expected.__name__}, got "
            f"{type(reply).__name__}"
        )
    return reply


UNENCODABLE = (OverflowError, UnicodeEncodeError, TypeError, msgspec.MsgspecError)
"""What `encode` raises for a scalar that MessagePack cannot hold."""


def not_encoded(request: Request, exc: Exception) -> InvalidValue:
    name = type(request.body).__name__
    return InvalidValue(
        f"cannot encode the {name} message of this call: {exc}. Pass tags, keys and group ids "
        "as str, bool, float or 64-bit int values"
    )


def peer_lost(peer: str) -> PeerLost:
    return PeerLost(
        f"the connection to peer {peer!r} was lost during a call, which may have taken effect: "
        "connect again with dataplane.connect(), then repeat the call. Repeat a put only if its "
        "rows have keys: without keys, they may be stored twice",
        peer=peer,
    )


def no_answer(peer: str, deadline: Deadline) -> DeadlineExceeded:
    limit_s = deadline.timeout_s or 0.0
    return DeadlineExceeded(
        f"peer {peer!r} did not answer within {duration(limit_s)}, so the client cancelled the "
        "call: check the peer's log, or pass a longer timeout=",
        peer=peer,
        limit_s=limit_s,
    )


class Connections:
    """The connections of one session's calls; more are opened as calls need them.

    Idle sockets belong to no event loop, so threads and loops share one pool.
    """

    def __init__(self, opener: Opener) -> None:
        self.opener = opener
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        """all, whether idle or borrowed by a call"""
        self._closed: str | None = None
        self.orphaned: Callable[[Connection], None] = Connection.close
        """receives connections that were left with a call in flight"""

    def idle(self) -> Connection | None:
        """Return the connection used last, which keeps a lone caller's one-way frames in order."""
        if self._closed is not None:
            raise ClientClosed(self._closed)
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def opened(self, connection: Connection) -> Connection:
        """Borrow a new connection. Raise ClientClosed if the client has been closed."""
        self._open.add(connection)
        if self._closed is not None:  # otherwise end_calls() ends it
            self._open.discard(connection)
            connection.close()
            raise ClientClosed(self._closed)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next call."""
        if len(self._idle) < _IDLE_CONNECTIONS:
            self._idle.append(connection)
            if self._closed is None:
                return
        self._open.discard(connection)
        connection.close()

    def failed(self, connection: Connection) -> None:
        """Give back the connection of a call that failed, if the call has not ended it."""
        if connection.is_whole:
            self.give_back(connection)
            return
        self._open.discard(connection)
        if connection.is_open:
            self.orphaned(connection)

    def end_calls(self, why: str) -> None:
        """Refuse new calls, and end the waiting calls of other threads and loops. The peer sees the
        end of their connections and undoes the calls."""
        self._closed = why
        for connection in list(self._open):
            connection.shut()

    def close(self, why: str) -> None:
        """Close all connections without a message, as in a forked child, which shares its sockets
        with the parent. Takes no lock, because the collector may call it. Connections given back
        later are closed then."""
        self._closed = why
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                connection = self._idle.pop()
                self._open.discard(connection)
                connection.close()


def process_of(sock: socket.socket) -> int:
    """Return the pid of the process at the other end of a unix socket; 0 if it is not visible, as
    in another pid namespace."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return 0
    pid: int = _CREDENTIALS.unpack(raw)[0]
    return pid


def is_stopped(sock: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket is stopped, so that it cannot reply. A
    busy peer gets more time, because its own reply explains more. False if the process is not
    visible, as in another pid namespace."""
    return processes.is_stopped(process_of(sock))
