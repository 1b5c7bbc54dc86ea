"""Requests to the peer and their replies, on whichever connection is free.

Every call of the client goes through `send`. One-way messages that are due go ahead of the request
in the same bytes, and the call that follows may go behind it. If a connection breaks, everything is
sent again on another connection, under the same operation ids, so the peer recognises what it has
carried out already. `attach` finds the partition of a call.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from dataplane.client._async.backend import exchange, further
from dataplane.client.arguments import Deadline
from dataplane.client.session.connection import (
    REPEATS,
    UNENCODABLE,
    Connection,
    expect,
    not_encoded,
)
from dataplane.client.session.housekeeping import undo
from dataplane.client.session.session import Handle, Session, caller
from dataplane.client.tracebacks import shorten
from dataplane.errors import (
    ClientClosed,
    DataplaneError,
    DeadlineExceeded,
    PartitionGone,
    PartitionSealed,
    PeerEnded,
    PeerLeaves,
    PeerLost,
    PutIncomplete,
    RowsDropped,
    Unavailable,
)
from dataplane.memory.extents import Extent
from dataplane.wire.frames import encode
from dataplane.wire.messages import UNHEARD, Body, Define, Defined, PutDone, Request
from dataplane.wire.packed import EXTENT, column
from dataplane.wire.tables import Definition

DEFAULT_TIMEOUT_S = 30.0
ATTACH_S = 1.0
"""A call that waits for rows has at least this many seconds to find its partition."""
UNKNOWN = (DeadlineExceeded, PeerLost, Unavailable)
"""Failures after which it is unknown whether the call took effect."""

_FOREVER_S = ((1 << 31) - 1) / 1e3

P = ParamSpec("P")
T = TypeVar("T")
B = TypeVar("B", bound=Body)


def public(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Mark a method of the public surface: the traceback of its errors ends at the caller's line.

    See `client/tracebacks.py`.
    """

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except DataplaneError as exc:
            shorten(exc)
            raise

    return call


async def ask(
    session: Session, body: Body, expected: type[B], deadline: Deadline, doing: str = ""
) -> B:
    """Send one request and return its reply, of the expected type. doing: names the operation in
    the error if the deadline passes before anything is sent."""
    deadline.check(doing or type(body).__name__.lower())
    reply = await send(session, Call(body, deadline))
    if reply.__class__ is expected:  # no call here: an interrupt in it would lose the reply
        return reply
    return expect(reply, expected, body)


async def wait_for(session: Session, body: Body, expected: type[B], timeout_s: float | None) -> B:
    """Send a request that waits at the peer for rows. Its body carries the same timeout."""
    return expect(await send(session, Call(body, Deadline(timeout_s), True)), expected, body)


async def send(session: Session, call: Call) -> Body:
    """Send a call and return its reply. If its connection breaks, the call is sent again on another
    connection to the same incarnation of the peer."""
    connections, frame = session.connections, b""
    connection, call.sent = call.sent, None
    body: Body | None = None
    granted: list[Extent] = []
    try:
        if connection is None:  # else it was sent along with the call before it
            connection = connections.idle() or await _opened(session, call)
            connection.frame_sent = False  # the call before may have set it
            frame = call.begin(session)
        while True:
            connection.frame_sent, connection.later = not frame, call.later
            connection.received, connection.is_retry = None, call.again is not None
            try:
                body = await exchange(connection, frame, call.rid, call.deadline)
            except PeerLost as exc:
                frame = call.broke(session, connection, exc)
                connection = await _opened(session, call)
            else:
                connection.received, call.in_flight = None, True
                if isinstance(body, PutDone) and body.extents and call.again is None:
                    granted, body.extents = column(body.extents, EXTENT).tolist(), b""
                    session.keep(granted)
                call.answered(session)
                if call.then is not None:
                    call.then.sent, call.then.in_flight = connection, True
                else:  # after an interrupt, another call may have it
                    free, connection = connection, None
                    connections.give_back(free)
                return body
    except BaseException as exc:
        if body is not None:  # an interrupt: nobody gets the reply
            session.keep(granted)
            if call.again is None:
                session.abandon_grants(undo(body))
            if call.keeps:
                call.again = call.request
                session.unanswered.add(call.rid)  # the peer must remember its reply
        if connection is not None:
            call.failed(session, connection, exc)
        raise


async def _opened(session: Session, call: Call) -> Connection:
    return session.connections.opened(await further(session, call.deadline))


def background_timeout_s(timeout_s: float | None) -> float:
    """Return the timeout of requests that accompany calls with `timeout_s`, such as the acks of a
    stream: the same number of seconds, but at least 1 and at most the default."""
    if timeout_s is None:
        return DEFAULT_TIMEOUT_S
    return min(max(timeout_s, ATTACH_S), DEFAULT_TIMEOUT_S)


def milliseconds(timeout_s: float | None) -> int:
    """Return the timeout in milliseconds, as messages carry it; -1 for no limit."""
    return -1 if timeout_s is None else max(0, int(timeout_s * 1e3))


class Call(msgspec.Struct, eq=False):
    """One request to the peer, from its frame to its reply. blocking: the body carries the time
    that the peer may wait for rows, and `deadline` limits only the wait of this client."""

    body: Body
    deadline: Deadline
    blocking: bool = False
    then: Call | None = None
    """A second call, sent in the same bytes. The caller awaits it afterwards, or leaves it."""
    sent: Connection | None = None
    """The connection that brings the reply, if this call was sent with the one before it."""
    in_flight: bool = False
    """Whether the whole message may have left this process. Until then the caller owns the chunks
    that the message names."""
    again: Request | None = None
    """The request of an earlier call without a reply. This call retries it under its number."""
    keeps: bool = False
    """Whether a request that fails in flight is kept in `again`, for a retry."""

    # while it is in flight
    request: Request | None = None
    rid: int = 0
    """The number that matches the reply."""
    later: int = 0
    """The number that matches the reply to `then`; 0 if there is none."""
    ahead: Sequence[Request] = ()
    """One-way messages that are sent in the same bytes."""
    repeats: int = 0

    def begin(self, session: Session, along: bool = False) -> bytes:
        """Number the request and return its frame. along: the frame is sent with the call before
        this one."""
        if self.blocking:
            request = session.request(self.body, 0, True)
        else:
            left_s = self.deadline.until - time.monotonic()
            if left_s > _FOREVER_S:
                left_s = _FOREVER_S
            deadline_ms = int(left_s * 1e3) if left_s > 1e-3 else 1
            if self.again is None:
                request = session.request(self.body, deadline_ms)
            else:
                request = msgspec.structs.replace(self.again, deadline_ms=deadline_ms, unpin=[])
        self.request, self.rid = request, request.rid
        if not along and not session.due.empty():
            due, request.unpin = session.drain_due()
            self.ahead = [session.request(body, one_way=True) for body in due]
        try:
            frame = encode(request)
        except UNENCODABLE as exc:
            raise not_encoded(request, exc) from exc
        if self.ahead:
            frame = b"".join(map(encode, self.ahead)) + frame
        if (then := self.then) is not None:
            # The peer counts the deadline from arrival, and `then` may have been made long before.
            then.deadline = Deadline(then.deadline.timeout_s)
            frame += then.begin(session, along=True)
            self.later = then.rid
        return frame

    def answered(self, session: Session) -> None:
        """Note that the reply has arrived."""
        session.unanswered.discard(self.rid)
        for request in self.ahead:
            session.answered(request)

    def broke(self, session: Session, connection: Connection, exc: PeerLost) -> bytes:
        """Handle a connection that broke before the reply. Return the bytes to send again. Raises
        `exc` after REPEATS retries or if the peer has ended or leaves, and ClientClosed if another
        thread or task has closed the client."""
        assert self.request is not None
        self.in_flight = self.in_flight or connection.frame_sent
        connection.close()
        if session.closed is not None:
            raise ClientClosed(session.closed) from None
        self.repeats += 1
        if isinstance(exc, PeerLeaves | PeerEnded):
            session.farewell = type(exc)(exc.message, **exc.details)
            raise exc
        if self.repeats > REPEATS:
            raise exc
        session.connections.failed(connection)
        request, until = self.request, self.deadline.until
        if self.blocking and until < math.inf:
            left_ms = max(0, int(1e3 * (until - time.monotonic())))
            body = msgspec.structs.replace(request.body, timeout_ms=left_ms)
            request = msgspec.structs.replace(request, body=body)
        behind = None if self.then is None else self.then.request
        requests = [*self.ahead, request] if behind is None else [*self.ahead, request, behind]
        return b"".join(map(encode, requests))

    def failed(self, session: Session, connection: Connection, exc: BaseException) -> None:
        """End the call with an error, which may be the reply itself."""
        if not isinstance(exc, DataplaneError):  # its reply must not reach the next call
            connection.leave()
        else:
            connection.received = None  # the caller has the error
        unheard = isinstance(exc, DataplaneError) and exc.details.pop(UNHEARD, False)
        if connection.frame_sent and (not unheard or self.repeats or self.again is not None):
            self.in_flight = True
        self._abandon(session, connection)

    def leave(self, session: Session) -> None:
        """Abandon the reply to a call that was sent with the one before it. The housekeeper returns
        what the reply grants."""
        if self.sent is not None:
            connection, self.sent = self.sent, None
            connection.leave()
            self._abandon(session, connection)

    def _abandon(self, session: Session, connection: Connection) -> None:
        sent_whole = connection.frame_sent and connection.is_whole
        request, then = self.request, self.then
        over = list(self.ahead) if self.in_flight else []
        if request is not None and self.keeps and self.in_flight:
            self.again = request
        elif request is not None:
            over.append(request)
        session.abandon_replies(connection if self.in_flight else None, over)
        if not self.in_flight:
            for one in self.ahead:
                session.resend(one)
        if request is not None and not sent_whole:
            session.requeue_pins(request.unpin)
        if then is None:
            session.connections.failed(connection)
            return
        then.in_flight = self.in_flight
        if sent_whole:
            then.sent = connection
        else:
            then._abandon(session, connection)


# the partition of a call


async def attach(handle: Handle, deadline: Deadline) -> int:
    """Return the generation of the partition, after a process has declared it."""
    if handle.session.closed is not None:  # before anything is copied
        raise ClientClosed(handle.session.closed)
    if handle.defined is None:
        await define(handle, None, deadline)
    return handle.generation


async def attach_to_wait(handle: Handle, timeout_s: float | None) -> int:
    """Attach for a call that waits for rows. Without a timeout, there is no limit."""
    return await attach(handle, Deadline(None if timeout_s is None else max(timeout_s, ATTACH_S)))


async def define(
    handle: Handle, definition: Definition | None, deadline: Deadline, restores: bool = False
) -> None:
    """Declare the partition; with None, wait until a process has declared it. restores: this
    session restores it."""
    doing = f"attaching to partition {handle.name!r}"
    body = Define(handle.name, definition, restores=restores)
    handle.defined = await ask(handle.session, body, Defined, deadline, doing)


async def takes_rows(handle: Handle) -> bool:
    """Return whether the partition accepts new rows: it is neither sealed nor dropped."""
    await attach_to_wait(handle, None)
    body = Define(handle.name, None, generation=handle.generation)
    try:
        now = await ask(handle.session, body, Defined, Deadline(DEFAULT_TIMEOUT_S))
    except PartitionGone as exc:
        if exc.details.get("reason") == "lost":
            raise
        return False
    return now.phase == "open"


async def comes_too_late(handle: Handle, exc: DataplaneError) -> bool:
    """Return whether a call in a loop over `producing` failed because the partition accepts no new
    rows. The loop then ends without an error."""
    if (handle.name, caller()) not in handle.session.producers:
        return False
    if isinstance(exc, PartitionSealed):
        return True
    if isinstance(exc, PartitionGone | RowsDropped | PutIncomplete):
        return not await takes_rows(handle)
    return False
