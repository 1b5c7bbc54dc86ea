"""Connections to this host's peer: one call at a time on each, strictly request and reply.

Runs in the client. Whatever interrupts a wait ends the connection, which cancels the call at the
peer; a connection that breaks is PeerLost, and the shells send the call again on another. The event
loop's side of the same sockets is in `client/_async/backend.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

import msgspec

from dataplane.client.deadline import Deadline
from dataplane.errors import (
    ClientClosed,
    DataplaneError,
    DeadlineExceeded,
    InvalidValue,
    PeerLost,
    ProtocolError,
    duration,
    from_wire,
)
from dataplane.launch import processes
from dataplane.wire.frames import HEADER_BYTES, body_length, decode_reply, encode
from dataplane.wire.messages import Body, Failed, Notice, Reply, Request

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long after a call's deadline the peer's own answer is still awaited, unless its process is
stopped: longer than it needs to say that the time is up."""
LOOK_S = 10.0
"""After so long, and then less and less often, a call looks whether the peer runs at all. What a
call waits for the peer says itself (`Notice`)."""
_CREDENTIALS = struct.Struct("3i")

_BUFFER_BYTES = 64 << 10
_KEPT_BUFFER_BYTES = 1 << 20
_IDLE_CONNECTIONS = 16
_AT_ONCE = int(socket.MSG_DONTWAIT)

Opener = Callable[[float], socket.socket]
"""Connects within so many seconds. TimeoutError, and what `connect` of a socket raises."""


class Cancelled(BaseException):
    """Another thread has cancelled the call."""


class Inbox:
    """Cuts what arrives into replies, in one buffer that grows to what a frame announces."""

    __slots__ = ("_buffer", "filled")

    def __init__(self) -> None:
        self._buffer = bytearray(_BUFFER_BYTES)
        self.filled = 0
        """bytes that were written into the room and were not cut into replies yet"""

    def room(self) -> bytearray | memoryview:
        """Where the next bytes go. Never empty."""
        return memoryview(self._buffer)[self.filled :] if self.filled else self._buffer

    def reply(self) -> Reply | None:
        """The next whole reply; None where more bytes are needed."""
        if self.filled < HEADER_BYTES:
            return None
        end = HEADER_BYTES + body_length(self._buffer)
        if self.filled < end:
            if end > len(self._buffer):
                self._move(0, end)
            return None
        reply = decode_reply(memoryview(self._buffer)[HEADER_BYTES:end])
        if self.filled > end or len(self._buffer) > _KEPT_BUFFER_BYTES:
            self._move(end, _BUFFER_BYTES)
        else:
            self.filled = 0
        return reply

    def _move(self, start: int, size: int) -> None:
        rest = bytes(memoryview(self._buffer)[start : self.filled])
        # One byte more than what is there, so that room() is never empty.
        self._buffer = bytearray(max(size, len(rest) + 1))
        self._buffer[: len(rest)] = rest
        self.filled = len(rest)


class Connection:
    """A joined socket with its inbox; borrowed by one call at a time.

    A call waits in `poll`, never in `recv`: who waits in that for a unix socket is woken as well
    when the other side takes what was sent, looks, and sleeps again: a switch more for both sides.
    """

    __slots__ = (
        "sock",
        "inbox",
        "peer",
        "left",
        "later",
        "early",
        "frame_sent",
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
        self.inbox = Inbox()
        self.peer = peer
        self.left = False
        self.later = 0
        """the request that went along with the one whose answer is waited for, which comes first"""
        self.early: Reply | None = None
        """its answer, which came before that"""
        self.frame_sent = False
        """The frame of this call may have left this process to its last byte."""
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
    def is_whole(self) -> bool:
        """Open, and nobody has left it."""
        return not self.left and self.sock.fileno() >= 0

    def ended(self) -> bool:
        """Whether the peer's side is closed; asked between calls."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def leave(self) -> None:
        """Nobody waits for the answer any more. The peer sees the end and cancels the call; an
        answer that is on its way already is read by the housekeeper, who undoes what it gives."""
        self.left = True
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.sock.close()

    def shut(self) -> None:
        """Whoever waits here is woken, and finds what has arrived or the end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def receive(self, turns: Turns) -> Reply:
        """The next reply, waiting as `turns` say. A reply that arrived before they end is used."""
        reply = self.arrived_reply() if self.inbox.filled or self.early else None
        while reply is None:
            try:
                ready = self._readable.poll(next(turns) * 1e3)
            except DeadlineExceeded:
                if (reply := self.take_reply()) is None:
                    raise
            else:
                if self._cancel_fd >= 0 and any(fd == self._cancel_fd for fd, _ in ready):
                    raise Cancelled
                if ready:
                    self.take()
                    reply = self.arrived_reply()
        return reply

    def take_reply(self) -> Reply | None:
        """Return the next whole reply that has arrived, without waiting; None if there is none."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.take()
                if (reply := self.arrived_reply()) is not None:
                    return reply
        return None

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

    def take(self) -> None:
        """Receive what has arrived, without waiting; BlockingIOError where nothing has."""
        self.count(self.sock.recv_into(self.inbox.room(), 0, _AT_ONCE))

    def turns(self, deadline: Deadline, grace_s: float = 0.0) -> Turns:
        """How to wait for the peer until a deadline."""
        return Turns(self, deadline, grace_s)

    def count(self, arrived: int) -> None:
        """Bytes arrived in the inbox; none means that the peer closed the connection."""
        if not arrived:
            raise self._complaint or peer_lost(self.peer)
        self.inbox.filled += arrived

    def arrived_reply(self) -> Reply | None:
        """A whole reply, if one is there. What the peer says about one-way frames is only logged:
        their call is over. Where it then closes the connection, that was the reason."""
        if self.early is not None and not self.later:
            early, self.early = self.early, None
            return early
        while (reply := self.inbox.reply()) is not None:
            if reply.rid:
                if reply.rid != self.later:
                    return reply
                self.early = reply
            elif isinstance(reply.body, Notice):
                log.warning("%s", reply.body.text)
            elif isinstance(reply.body, Failed):
                failed = reply.body
                self._complaint = from_wire(failed.code, failed.message, failed.details)
                if isinstance(self._complaint, PeerLost):  # it says good-bye
                    log.warning("%s", failed.message)
                    continue
                log.warning(
                    "peer %r refused a message that needs no reply: %s", self.peer, failed.message
                )
            else:
                return reply
        return None

    def exchange(self, frame: bytes, rid: int, deadline: Deadline) -> Body:
        """Send one request, if it was not sent along with another, and wait for its answer. Raises
        what the peer answered as an error."""
        turns = self.turns(deadline, GRACE_S)
        try:
            if frame:
                self.send(frame, turns)
            body = answer(self.receive(turns), rid)
        except BaseException as exc:
            self.fail(exc)
            raise
        return unwrap(body)

    def fail(self, exc: BaseException) -> None:
        """End the connection because of this error; PeerLost where the socket failed."""
        if isinstance(exc, DeadlineExceeded) or not isinstance(exc, Exception):
            self.leave()
            return
        try:
            if isinstance(exc, OSError) and not isinstance(exc, DataplaneError):
                raise self._farewell() from exc
        finally:
            self.close()

    def _farewell(self) -> DataplaneError:
        """Why the peer closed the connection, which it may have said while nobody waited here."""
        with contextlib.suppress(OSError, DataplaneError):
            while True:
                self.take()
                self.arrived_reply()
        return self._complaint or peer_lost(self.peer)

    def send(self, frame: bytes, turns: Turns) -> None:
        """Send all of it, waiting as `turns` say. If the time ends in the middle of the frame, the
        next send finishes that frame first, because the peer reads the bytes as its rest."""
        if self._begun:
            self._send(self._begun, turns)
        self._send(frame, turns)

    def _send(self, frame: bytes, turns: Turns) -> None:
        """The same of one frame, or of the rest of one."""
        if (sent := self.send_some(frame)) == len(frame):
            self._begun = b""
            return
        rest, writable = memoryview(frame)[sent:], select.poll()
        writable.register(self.sock, select.POLLOUT)
        try:
            while rest:
                writable.poll(next(turns) * 1e3)
                rest = rest[self.send_some(rest) :]
        finally:
            if len(rest) < len(frame):
                self._begun = bytes(rest)

    def send_some(self, rest: bytes | memoryview) -> int:
        """Send as much of the rest of a frame as the socket takes without waiting."""
        # An interrupt may hide the count of a send: until it is known, all of it may have left.
        self.frame_sent = True
        try:
            sent = self.sock.send(rest, _AT_ONCE)
        except BlockingIOError:
            sent = 0
        self.frame_sent = sent == len(rest)
        return sent


class Turns:
    """How long one call may still wait for the peer.

    `next` returns the seconds of the next wait, and raises DeadlineExceeded after the deadline. A
    peer whose process runs gets `grace_s` more, because its answer may be on its way. If the
    deadline had passed before the wait began, the grace counts from there. Logs that the peer is
    stopped. A generator would not do: it ends with its first error, and the housekeeper waits for
    several answers under one deadline."""

    __slots__ = ("_began", "_connection", "_deadline", "_grace_s", "_look_at")

    def __init__(self, connection: Connection, deadline: Deadline, grace_s: float) -> None:
        self._connection, self._deadline, self._grace_s = connection, deadline, grace_s
        self._began = 0.0
        self._look_at = math.inf

    def __next__(self) -> float:
        now, connection = time.monotonic(), self._connection
        if not self._began:
            self._began = now
            self._look_at = now + LOOK_S
        elif now >= self._look_at:
            waited_s = now - self._began
            self._look_at = now + waited_s
            if is_stopped(connection.sock):
                log.warning(
                    "peer %r is stopped (by SIGSTOP or a debugger), and a call has been "
                    "waiting for %s",
                    connection.peer,
                    duration(waited_s),
                )
        until = self._deadline.until
        if now >= until and not is_stopped(connection.sock):
            until = max(until, self._began) + self._grace_s
        if now >= until:
            raise no_answer(connection.peer, self._deadline)
        return min(until, self._look_at) - now


def answer(reply: Reply, rid: int) -> Body:
    """The body of the reply to request `rid`."""
    if reply.rid != rid:
        raise ProtocolError(
            f"unexpected reply from the peer: expected a reply to request {rid}, got one to "
            f"request {reply.rid}. Install the same dataplane release everywhere"
        )
    return reply.body


def unwrap(body: Body) -> Body:
    """The body, unless it is an error: that is raised as its own type."""
    if isinstance(body, Failed):
        raise from_wire(body.code, body.message, body.details)
    return body


def frame_of(request: Request) -> bytes:
    """The request's frame; InvalidValue for a scalar that MessagePack cannot hold."""
    try:
        return encode(request)
    except (OverflowError, UnicodeEncodeError, TypeError, msgspec.MsgspecError) as exc:
        name = type(request.body).__name__
        raise InvalidValue(
            f"cannot encode the {name} message of this call: {exc}. Pass tags, keys and group ids "
            "as str, bool, float or 64-bit int values"
        ) from exc


def peer_lost(peer: str) -> PeerLost:
    return PeerLost(
        f"the connection to peer {peer!r} was lost during a call, which may have taken effect: "
        "connect again with dataplane.connect() and repeat the call",
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
    """The idle connections of one session; more are opened as calls need them.

    Idle sockets belong to no event loop, so threads and loops share one pool.
    """

    def __init__(self, opener: Opener) -> None:
        self.opener = opener
        self._idle: list[Connection] = []
        self._under_way: set[Connection] = set()
        self._closed: str | None = None
        self.orphaned: Callable[[Connection], None] = Connection.close
        """takes connections that were left with a call under way"""

    def idle(self) -> Connection | None:
        """The connection used last, which keeps a lone caller's one-way frames in order."""
        if self._closed is not None:
            raise ClientClosed(self._closed)
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def begins(self, connection: Connection) -> None:
        """A call is about to wait on it."""
        self._under_way.add(connection)
        if self._closed is not None:  # since it was borrowed; or else end_calls() finds it
            self._under_way.discard(connection)
            raise ClientClosed(self._closed)

    def ends(self, connection: Connection) -> None:
        self._under_way.discard(connection)

    def end_calls(self, why: str) -> None:
        """No call begins any more, and those of other threads and loops that wait hear of it now:
        their connections are over, for the peer too, which takes them back."""
        self._closed = why
        for connection in list(self._under_way):
            connection.shut()

    def give_back(self, connection: Connection) -> None:
        if connection.sock.fileno() < 0:
            return
        if connection.left:
            self.orphaned(connection)
            return
        if len(self._idle) < _IDLE_CONNECTIONS:
            self._idle.append(connection)
            if self._closed is None:
                return
        connection.close()

    def close(self, why: str) -> None:
        """Without a lock: the collector may call it, and a forked child, whose sockets are the
        parent's too and are closed without a word to the peer. What is given back later is closed
        then."""
        self._closed = why
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._idle.pop().close()

    def __len__(self) -> int:
        return len(self._idle)


def process_of(sock: socket.socket) -> int:
    """Return the pid of the process at the other end of a unix socket, 0 if it cannot be seen from
    here, as in another pid namespace."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return 0
    pid: int = _CREDENTIALS.unpack(raw)[0]
    return pid


def is_stopped(sock: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket is stopped, so that it will not answer:
    a peer that is only busy gets a moment more, for its own answer says more than the client's.
    False where that cannot be seen from here, as in another pid namespace."""
    return processes.is_stopped(process_of(sock))
