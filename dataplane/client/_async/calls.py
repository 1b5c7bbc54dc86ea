"""One request and its reply, on whichever connection to the peer is free.

Every call of the client goes through `send`. Nothing else here waits for the peer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from dataplane.client._async.backend import exchange, further
from dataplane.client.deadline import Deadline
from dataplane.client.session.connection import Connection, expect
from dataplane.client.session.outgoing import Call
from dataplane.client.session.session import Session
from dataplane.client.tracebacks import shorten
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    PeerLost,
    Unavailable,
)
from dataplane.wire.messages import Body

DEFAULT_TIMEOUT_S = 30.0
ATTACH_S = 1.0
"""A call that waits for rows has at least this many seconds to find its partition."""
UNKNOWN = (DeadlineExceeded, PeerLost, Unavailable)
"""Failures that do not say whether a call took effect."""

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
    return expect(await send(session, Call(body, deadline)), expected, body)


async def wait_for(session: Session, body: Body, expected: type[B], timeout_s: float | None) -> B:
    """Send a request that waits at the peer for rows. Its body carries the same timeout."""
    return expect(await send(session, Call(body, Deadline(timeout_s), True)), expected, body)


async def send(session: Session, call: Call) -> Body:
    """Send a call and return its reply. If its connection breaks, the call is sent again on another
    connection to the same incarnation of the peer."""
    connections, frame = session.connections, b""
    connection, call.sent = call.sent, None
    try:
        if connection is None:  # else it went along with the call before it
            connection = connections.idle() or await _opened(session, call)
            frame = call.begin(session)
        while True:
            connection.frame_sent, connection.later = not frame, call.later
            try:
                body = await exchange(connection, frame, call.rid, call.deadline)
            except PeerLost as exc:
                frame = call.broke(session, connection, exc)
                connection = await _opened(session, call)
            else:
                call.answered(session, connection)
                return body
    except BaseException as exc:
        if connection is not None:
            call.failed(session, connection, exc)
        raise


async def _opened(session: Session, call: Call) -> Connection:
    return session.connections.opened(await further(session, call.deadline))


def limit_beside(timeout_s: float | None) -> float:
    """Return the timeout of requests that accompany calls with `timeout_s`, such as the acks of a
    stream: the same number of seconds, but at least 1 and at most the default."""
    if timeout_s is None:
        return DEFAULT_TIMEOUT_S
    return min(max(timeout_s, ATTACH_S), DEFAULT_TIMEOUT_S)


def milliseconds(timeout_s: float | None) -> int:
    """Return the timeout in milliseconds, as messages carry it; -1 for no limit."""
    return -1 if timeout_s is None else max(0, int(timeout_s * 1e3))
