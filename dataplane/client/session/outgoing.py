"""One call on its way: the same requests on every connection, until one brings the answer.

Runs in the client, without I/O. What is due to be told to the peer goes ahead in the same bytes,
and the call that follows may go along. All of it keeps its operation ids until the answer is there,
so that the peer knows what it has carried out already when a connection broke and everything is
sent again.
"""

from __future__ import annotations

import math
import time

import msgspec

from dataplane.client.deadline import Deadline
from dataplane.client.session.connection import Connection, frame_of
from dataplane.client.session.session import Session
from dataplane.errors import ClientClosed, DataplaneError, PeerEnded, PeerLeaves, PeerLost
from dataplane.wire.frames import encode
from dataplane.wire.messages import UNHEARD, Body, Request

REPEATS = 8
"""How often one call is sent again, each time on a connection that was made for it."""
_FOREVER_MS = (1 << 31) - 1


class Call(msgspec.Struct, eq=False):
    """Send `body`, wait for the answer. `blocking`: the body says itself how long the peer may
    wait (for rows), `deadline` only how long this side does."""

    body: Body
    deadline: Deadline
    blocking: bool = False
    then: Call | None = None
    """goes in the same piece, and is waited for by itself afterwards, or left"""
    sent: tuple[Connection, Outgoing] | None = None
    """where its answer comes, of one that went along with the call before it"""
    in_flight: bool = False
    """The whole message may have left this process. Until then the caller owns what it names."""
    again: Request | None = None
    """The request of an earlier call that has no answer yet: it is asked under the same number."""
    keeps: bool = False
    """If this call fails in flight, its request stays unanswered, to be asked again."""

    def leave(self) -> None:
        """Nobody will wait for it, should it have gone along; what it is given is given back."""
        if self.sent is not None:
            (connection, outgoing), self.sent = self.sent, None
            connection.leave()
            outgoing.over(connection)


class Outgoing:
    """A call, and what goes ahead of it."""

    __slots__ = (
        "_ahead",
        "_repeats",
        "_request",
        "_session",
        "_step",
        "_then",
        "frame",
        "later",
        "rid",
    )

    def __init__(self, session: Session, step: Call, along: bool = False) -> None:
        """along: with the call before it."""
        self._session = session
        self._step = step
        self._repeats = 0
        self._ahead: list[Request] = []
        self._then: tuple[Call, Outgoing] | None = None
        left_ms = 1e3 * (step.deadline.until - time.monotonic())
        deadline_ms = max(1, int(min(left_ms, _FOREVER_MS)))
        if step.again is None:
            limit_ms = 0 if step.blocking else deadline_ms
            request = session.request(step.body, limit_ms, waits=step.blocking)
        else:
            request = msgspec.structs.replace(step.again, deadline_ms=deadline_ms)
        if not along:
            request.unpin = session.unpinned()
        self._request = request
        self.rid = request.rid
        """names the answer"""
        self.later = 0
        """names the answer to what goes along; 0 where nothing does"""
        try:
            self.frame = frame_of(request)
            if step.then is not None:
                # The peer counts its time from its arrival, and it may have been made long before.
                step.then.deadline = Deadline(step.then.deadline.timeout_s)
                self._then = step.then, Outgoing(session, step.then, along=True)
                self.frame += self._then[1].frame
                self.later = self._then[1].rid
        except BaseException:
            session.answered(request)
            session.not_told(request.unpin)
            raise
        if not along and not session.due.empty() and (due := session.parting()):
            self._ahead = [session.request(body, one_way=True) for body in due]
            self.frame = self._ahead_of() + self.frame

    def broke(self, exc: PeerLost) -> None:
        """The connection broke before the answer was there: `frame` is to be sent again. Raises
        the error where that was done often enough, or nobody is there, and ClientClosed where the
        client was closed meanwhile, by another thread or task."""
        if self._session.closed is not None:
            raise ClientClosed(self._session.closed) from None
        self._repeats += 1
        if isinstance(exc, PeerLeaves | PeerEnded):
            self._session.farewell = type(exc)(exc.message, **exc.details)
            raise exc
        if self._repeats > REPEATS:
            raise exc
        request, until = self._request, self._step.deadline.until
        if self._step.blocking and until < math.inf:
            left_ms = max(0, int(1e3 * (until - time.monotonic())))
            body = msgspec.structs.replace(request.body, timeout_ms=left_ms)
            request = msgspec.structs.replace(request, body=body)
        self.frame = self._ahead_of() + frame_of(request)
        if self._then is not None:
            self.frame += self._then[1].frame

    def failed(self, connection: Connection, exc: BaseException) -> None:
        """There is no answer on this connection, or an error. Whether the peer may have looked at
        the request is known from then on."""
        step = self._step
        unheard = isinstance(exc, DataplaneError) and exc.details.pop(UNHEARD, False)
        if connection.frame_sent and (not unheard or self._repeats or step.again is not None):
            step.in_flight = True

    def over(self, connection: Connection, answered: bool = False) -> None:
        """The call has its answer, or was given up. The connection is free, or waits for the answer
        to what went along."""
        session, step = self._session, self._step
        step.in_flight = step.in_flight or answered
        if not answered and step.in_flight and step.keeps:
            step.again = self._request
        else:
            session.answered(self._request)
        for request in self._ahead:
            if step.in_flight:
                session.answered(request)
            else:
                session.tell_again(request)
        if self._request.unpin and not connection.is_whole:  # perhaps it was not sent to its end
            session.not_told(self._request.unpin)
        if self._then is None:
            session.connections.give_back(connection)
            return
        (call, outgoing), self._then = self._then, None
        call.in_flight = step.in_flight
        if connection.is_whole:
            outgoing.frame = b""  # it was sent
            call.sent = connection, outgoing
        else:
            outgoing.over(connection)

    def _ahead_of(self) -> bytes:
        return b"".join(map(encode, self._ahead))
