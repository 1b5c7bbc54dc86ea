"""Requests that a client may repeat: run once, and answered again with the first reply.

A repetition that arrives while the first attempt still runs waits for its end. Each request
carries the lowest operation of its session that has no reply yet. Operations below that floor
can never be repeated, so their replies are forgotten. `Operation.once` says what a repetition
gets.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from typing import Any

from dataplane.errors import ProtocolError
from dataplane.metadata.tables.answers import CallerAnswers
from dataplane.peer.failures import failed
from dataplane.peer.operations import Once, Operation, WaitLimit
from dataplane.peer.tasks import result_of
from dataplane.wire.messages import Body, Request

Start = Callable[[int], Body | Awaitable[Body]]
"""Calls the handler of a request, after it has released the pin that an earlier reply to the
request returned (0: none)."""
MAX_ANSWERS = 16_384
"""Replies remembered per session; the oldest are forgotten. A client may make a few thousand other
calls before it repeats one that timed out."""


class NumberSet:
    """A set of numbers that are mostly consecutive."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        """The number of spans."""
        return len(self._starts)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number)
        return at > 0 and number < self._ends[at - 1]

    def add(self, number: int) -> None:
        """Add a number that is not in the set."""
        at = bisect_right(self._starts, number)
        follows = at > 0 and self._ends[at - 1] == number
        leads = at < len(self._starts) and self._starts[at] == number + 1
        if follows and leads:
            self._ends[at - 1] = self._ends.pop(at)
            del self._starts[at]
        elif follows:
            self._ends[at - 1] = number + 1
        elif leads:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._ends.insert(at, number + 1)

    def forget(self, below: int) -> None:
        """Remove the spans that end below this number."""
        gone = bisect_right(self._ends, below)
        del self._starts[:gone], self._ends[:gone]


class Repeats:
    """The replies of one session to requests that it may repeat."""

    __slots__ = ("_forgotten", "_given", "_pending", "claimed")

    def __init__(self) -> None:
        self._given = CallerAnswers[Body | int]()
        """by operation: its reply, or the pin that the reply granted"""
        self._forgotten: NumberSet | None = None
        """operations whose replies were forgotten because there were too many"""
        self._pending: dict[int, asyncio.Future[None] | None] = {}
        """operations in progress, each with a future that is done at its end; None if no repetition
        waits for it"""
        self.claimed: dict[int, Body] = {}
        """by operation: the grant of a claim, until its client uses the lease"""

    def __len__(self) -> int:
        return len(self._given.answers)

    async def run(self, request: Request, operation: Operation, start: Start) -> Body:
        """Return the reply to a request: the first one if it is a repetition, else that of its
        handler."""
        op, once = request.op, operation.once
        while op in self._pending:
            await asyncio.wait([self._end_of(op)])
        before = self.claimed.get(op) if once is Once.LEASE else self.recall(op)
        if isinstance(before, Body):
            return before
        self._pending[op] = None
        try:
            outcome = start(before or 0)
            reply = outcome if isinstance(outcome, Body) else await result_of(outcome)
        except Exception as exc:
            if operation.waits is not WaitLimit.NO or once is Once.PIN:
                raise  # the call waits or reads, so a repetition runs it again
            # What the client wrote for this request is no longer granted to the client.
            reply = failed(exc)
        finally:
            if (ended := self._pending.pop(op)) is not None:
                ended.set_result(None)
        if once is Once.LEASE:
            self.claimed[op] = reply
        else:
            answer: Any = reply.pin if once is Once.PIN else reply  # type: ignore[attr-defined]
            self.remember(op, request.floor, answer)
        return reply

    def _end_of(self, op: int) -> asyncio.Future[None]:
        """Return a future that is done when a pending operation ends."""
        ended = self._pending[op]
        if ended is None:
            ended = self._pending[op] = asyncio.get_running_loop().create_future()
        return ended

    def remember(self, op: int, floor: int, answer: Body | int) -> None:
        """Store the reply to an operation, and forget replies below the floor."""
        given = self._given
        if floor > given.floor:
            given.raise_floor(floor)
            if self._forgotten is not None:
                self._forgotten.forget(floor)
        if op < given.floor:
            return
        answers = given.answers
        answers[op] = answer
        if len(answers) > MAX_ANSWERS:
            oldest = next(iter(answers))
            del answers[oldest]
            self._forgotten = self._forgotten or NumberSet()
            self._forgotten.add(oldest)

    def recall(self, op: int) -> Body | int | None:
        """Return the stored reply to an operation, or None if the operation is new.

        Raise ProtocolError if its reply was forgotten, because running it twice would be wrong.
        """
        given, forgotten = self._given, self._forgotten
        answer = given.answers.get(op)
        if answer is None and (op < given.floor or (forgotten is not None and op in forgotten)):
            raise ProtocolError(
                f"the peer has already answered operation {op} of this session, but no longer "
                "stores "
                "the answer: read the rows to see whether the operation took effect. If it did "
                "not, "
                "make a new call",
                op=op,
                floor=self._given.floor,
            )
        return answer

    def forget(self, op: int) -> None:
        """Forget a reply that was taken back before the client had it, so that a retry runs
        again."""
        self._given.answers.pop(op, None)
