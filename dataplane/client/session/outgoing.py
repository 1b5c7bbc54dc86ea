"""One call on its way: the same requests on every connection, until one brings the answer.

Runs in the client, without I/O. `calls.send` sends what `begin` returns. One-way messages that are
due go ahead of the request in the same bytes, and the call that follows may go behind it. All of
them keep their operation ids until the answer is there, so the peer recognises what it has carried
out already when a connection breaks and everything is sent again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec

from dataplane.client.deadline import Deadline
from dataplane.client.session.connection import UNENCODABLE, Connection, not_encoded
from dataplane.client.session.session import Session
from dataplane.errors import ClientClosed, DataplaneError, PeerEnded, PeerLeaves, PeerLost
from dataplane.wire.frames import encode
from dataplane.wire.messages import UNHEARD, Body, Request

REPEATS = 8
"""How often one call is sent again, each time on a connection that was made for it."""
_FOREVER_S = ((1 << 31) - 1) / 1e3


class Call(msgspec.Struct, eq=False):
    """Send `body` and wait for the answer. blocking: the body says itself how long the peer may
    wait (for rows), and `deadline` only how long this side does."""

    body: Body
    deadline: Deadline
    blocking: bool = False
    then: Call | None = None
    """Goes in the same bytes. The caller awaits it by itself afterwards, or leaves it."""
    sent: Connection | None = None
    """Where the answer comes, if this call went along with the one before it."""
    in_flight: bool = False
    """The whole message may have left this process. Until then the caller owns what it names."""
    again: Request | None = None
    """The request of an earlier call that has no answer yet: it is asked under the same number."""
    keeps: bool = False
    """If this call fails in flight, its request stays unanswered, to be asked again."""

    # while it is in flight
    request: Request | None = None
    rid: int = 0
    """Names the answer."""
    later: int = 0
    """Names the answer to `then`; 0 if there is none."""
    ahead: Sequence[Request] = ()
    """One-way messages that are sent in the same bytes."""
    repeats: int = 0

    def begin(self, session: Session, along: bool = False) -> bytes:
        """Give the request its number, and return what is to be sent. along: with the call before
        it."""
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
            due, request.unpin = session.parting()
            self.ahead = [session.request(body, one_way=True) for body in due]
        try:
            frame = encode(request)
        except UNENCODABLE as exc:
            raise not_encoded(request, exc) from exc
        if self.ahead:
            frame = b"".join(map(encode, self.ahead)) + frame
        if (then := self.then) is not None:
            # The peer counts its time from its arrival, and it may have been made long before.
            then.deadline = Deadline(then.deadline.timeout_s)
            frame += then.begin(session, along=True)
            self.later = then.rid
        return frame

    def answered(self, session: Session, connection: Connection) -> None:
        """The answer is there. The connection is free, or waits for the answer to `then`."""
        self.in_flight = True
        session.unanswered.discard(self.rid)
        for request in self.ahead:
            session.answered(request)
        if self.then is None:
            session.connections.give_back(connection)
        else:
            self.then.sent, self.then.in_flight = connection, True

    def broke(self, session: Session, connection: Connection, exc: PeerLost) -> bytes:
        """The connection broke before the answer was there. Return what is to be sent again. Raises
        the error if that was done often enough, or nobody is there, and ClientClosed if another
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
        """The call ends with an error, which may be its answer."""
        if not isinstance(exc, DataplaneError):  # its reply must not reach the next call
            connection.leave()
        unheard = isinstance(exc, DataplaneError) and exc.details.pop(UNHEARD, False)
        if connection.frame_sent and (not unheard or self.repeats or self.again is not None):
            self.in_flight = True
        self._give_up(session, connection)

    def leave(self, session: Session) -> None:
        """Nobody will wait for the answer, if this call went along. The housekeeper gives back what
        it brings."""
        if self.sent is not None:
            connection, self.sent = self.sent, None
            connection.leave()
            self._give_up(session, connection)

    def _give_up(self, session: Session, connection: Connection) -> None:
        was_told = connection.frame_sent and connection.is_whole  # else perhaps not to its end
        request, then = self.request, self.then
        over = list(self.ahead) if self.in_flight else []
        if request is not None and self.keeps and self.in_flight:
            self.again = request
        elif request is not None:
            over.append(request)
        session.given_up(connection if self.in_flight else None, over)
        if not self.in_flight:
            for one in self.ahead:
                session.tell_again(one)
        if request is not None and not was_told:
            session.not_told(request.unpin)
        if then is None:
            session.connections.failed(connection)
            return
        then.in_flight = self.in_flight
        if was_told:
            then.sent = connection
        else:
            then._give_up(session, connection)
