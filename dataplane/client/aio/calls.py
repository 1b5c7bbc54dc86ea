"""Carries the steps of operations out, over whatever connection to the peer there is."""

from __future__ import annotations

from typing import Any, TypeVar

from dataplane.client.aio.driver import exchange, further, offload
from dataplane.client.core import Operation
from dataplane.client.session.outgoing import Call, Outgoing
from dataplane.client.session.session import Session
from dataplane.client.tracebacks import shorten
from dataplane.errors import DataplaneError, PeerLost
from dataplane.wire.messages import Body

T = TypeVar("T")


class Calls:
    """Operations of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def run(self, operation: Operation[T]) -> T:
        """Carry out the steps of an operation, and return its result."""
        outcome: Any = None
        failure: BaseException | None = None
        while True:
            try:
                step = operation.throw(failure) if failure else operation.send(outcome)
            except StopIteration as stop:
                result: T = stop.value
                return result
            except DataplaneError as exc:
                shorten(exc)
                raise
            finally:
                # An error that this frame kept would keep the frames of its traceback, this one
                # and the caller's, and so the batches in them, until the collector runs.
                outcome, failure = None, None
            try:
                outcome = await (self._call(step) if isinstance(step, Call) else offload(step))
            except BaseException as exc:
                failure = exc

    async def _call(self, step: Call) -> Body:
        """On another connection to the same incarnation of the peer where one breaks."""
        session, deadline = self._session, step.deadline
        outgoing: Outgoing | None = None
        answered = False
        if step.sent is None:
            connection = session.connections.idle() or await further(session, deadline)
        else:
            (connection, outgoing), step.sent = step.sent, None
        try:
            outgoing = outgoing or Outgoing(session, step)
            while True:
                connection.later = outgoing.later
                connection.frame_sent = not outgoing.frame
                session.connections.begins(connection)
                try:
                    body = await exchange(connection, outgoing.frame, outgoing.rid, deadline)
                    answered = True
                    return body
                except BaseException as exc:
                    outgoing.failed(connection, exc)
                    if not isinstance(exc, PeerLost):
                        raise
                    outgoing.broke(exc)
                finally:
                    session.connections.ends(connection)
                connection = await further(session, deadline)
        finally:
            if outgoing is None:
                session.connections.give_back(connection)
            else:
                outgoing.over(connection, answered)
