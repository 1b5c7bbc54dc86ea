"""One call on its way: the same requests on every connection, until one brings the answer.

Runs in the client, without I/O. What is due to be told to the peer goes ahead in the same bytes.
All of it keeps its operation ids until the answer is there, so that the peer knows what it has
carried out already when a connection broke and everything is sent again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from dataplane.client.session.connection import frame_of
from dataplane.client.session.session import Session
from dataplane.errors import PeerLeaves, PeerLost
from dataplane.wire.frames import encode
from dataplane.wire.messages import Admit, Body, Claim, Losses, Request, Wait

REPEATS = 8
"""How often one call is sent again, each time on a connection that was made for it."""
_FOREVER_MS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Call:
    """Send `body`, wait for the answer. `blocking`: the body says itself how long the peer may
    wait (for rows), `deadline_s` only how long this side does; None: for ever."""

    body: Body
    deadline_s: float | None
    blocking: bool = False


class Outgoing:
    """A call, and what goes ahead of it."""

    __slots__ = (
        "_ahead",
        "_blocking",
        "_repeats",
        "_request",
        "_session",
        "_until",
        "frame",
        "rid",
    )

    def __init__(self, session: Session, step: Call, began: float) -> None:
        """began: when the call did (monotonic); a connection for it may have been made since."""
        left = step.deadline_s
        self._session = session
        self._blocking = step.blocking
        self._until = None if left is None else began + max(left, 0.0)
        self._repeats = 0
        self._ahead: list[Request] = []
        deadline_ms = _FOREVER_MS if left is None else max(1, min(int(left * 1e3), _FOREVER_MS))
        self._request = session.request(step.body, 0 if step.blocking else deadline_ms)
        self.rid = self._request.rid
        """names the answer"""
        try:
            self.frame = frame_of(self._request)
        except BaseException:
            self.done()
            raise
        if not session.due.empty() and (due := session.parting()):
            self._ahead = [session.request(body, one_way=True) for body in due]
            self.frame = self._ahead_of() + self.frame

    def limit_s(self) -> float | None:
        """How long to wait for the answer."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def broke(self, exc: PeerLost) -> None:
        """The connection broke before the answer was there: `frame` is to be sent again. Raises
        the error where that was done often enough, or nobody is there."""
        self._repeats += 1
        if self._repeats > REPEATS or isinstance(exc, PeerLeaves):
            raise exc
        body = self._request.body
        if (
            self._blocking
            and self._until is not None
            and isinstance(body, Admit | Claim | Wait | Losses)
        ):
            left_ms = max(0, int((self._until - time.monotonic()) * 1e3))
            body = msgspec.structs.replace(body, timeout_ms=left_ms)
            again = msgspec.structs.replace(self._request, body=body)
            self.frame = self._ahead_of() + frame_of(again)

    def done(self) -> None:
        """Answered, or given up."""
        for request in (self._request, *self._ahead):
            self._session.answered(request)

    def _ahead_of(self) -> bytearray:
        return bytearray().join(encode(request) for request in self._ahead)
