"""Operations that a client may repeat: carried out once, answered as the first time.

A repetition that arrives while the first is still under way waits for its end. What failed was not
carried out, and is tried again, but for what is made `final`. Each request carries the lowest
operation of its session that has no answer yet: what is below can never be repeated, and is
forgotten.
"""

from __future__ import annotations

import asyncio
import functools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from dataplane.errors import ProtocolError
from dataplane.peer.failures import failed
from dataplane.wire.messages import Body

MAX_ANSWERS_PER_SESSION = 1_024
MAX_SESSIONS = 65_536
"""Sessions whose end was never told are forgotten, the longest silent first."""

Start = Callable[..., Body | Awaitable[Body]]


class Memory(Protocol):
    """Of answers that were given, as `Operations`."""

    def recall(self, session: Any, op: int) -> Body | None: ...

    def remember(self, session: Any, op: int, floor: int, reply: Body) -> None: ...


class Once:
    """The answers of one door. `who` is the session."""

    def __init__(self, answers: Memory) -> None:
        self.answers = answers
        self._under_way: dict[tuple[Hashable, int], asyncio.Future[Body]] = {}

    def run(
        self, who: Hashable, op: int, floor: int, start: Start, *given: Any
    ) -> Body | Awaitable[Body]:
        """The answer to operation `op`: remembered, or what `start` does with what it is given. At
        once where it can."""
        first = self._under_way.get((who, op))
        if first is not None:
            return self._after(first, who, op, floor, start, *given)
        before = self.answers.recall(who, op)
        if before is not None:
            return before
        outcome = start(*given)
        if isinstance(outcome, Body):
            self.answers.remember(who, op, floor, outcome)
            return outcome
        # A callback and not a `finally`: a task that is cancelled before it began runs neither.
        work = self._under_way[who, op] = asyncio.ensure_future(outcome)
        work.add_done_callback(functools.partial(self._ended, who, op, floor))
        return work

    def _ended(self, who: Hashable, op: int, floor: int, work: asyncio.Future[Body]) -> None:
        del self._under_way[who, op]
        if not work.cancelled() and work.exception() is None:
            self.answers.remember(who, op, floor, work.result())

    async def _after(
        self,
        first: asyncio.Future[Body],
        who: Hashable,
        op: int,
        floor: int,
        start: Start,
        *given: Any,
    ) -> Body:
        await asyncio.wait([first])
        outcome = self.run(who, op, floor, start, *given)
        return outcome if isinstance(outcome, Body) else await outcome


def final(start: Start, *given: Any) -> Body | Awaitable[Body]:
    """With a failure as the answer, so that a repetition is told the same. What a client wrote for
    a request that failed is granted to it no more, or for another one already."""
    try:
        outcome = start(*given)
    except Exception as exc:
        return failed(exc)
    return outcome if isinstance(outcome, Body) else _final(outcome)


async def _final(outcome: Awaitable[Body]) -> Body:
    try:
        return await outcome
    except Exception as exc:
        return failed(exc)


# answers that were given

ReplyT = TypeVar("ReplyT")


class Spans:
    """A set of numbers that mostly follow each other."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        """How many spans there are."""
        return len(self._starts)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number)
        return at > 0 and number < self._ends[at - 1]

    def add(self, number: int) -> None:
        """A number that is not here."""
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
        """Spans that end below this number."""
        gone = bisect_right(self._ends, below)
        del self._starts[:gone], self._ends[:gone]


@dataclass(slots=True)
class _Session(Generic[ReplyT]):
    floor: int = 0
    forgotten: Spans = field(default_factory=Spans)
    """operations whose answers were pushed out before their time"""
    answers: OrderedDict[int, ReplyT] = field(default_factory=OrderedDict)


class Operations(Generic[ReplyT]):
    """Remembered answers by session and operation."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[Hashable, _Session[ReplyT]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(session.answers) for session in self._sessions.values())

    def remember(self, session: Hashable, op: int, floor: int, reply: ReplyT) -> None:
        """Keep the answer to `op`, and forget those below `floor`."""
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Session()
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        self._raise_floor(known, floor)
        if op < known.floor:
            return
        known.answers[op] = reply
        if len(known.answers) > MAX_ANSWERS_PER_SESSION:
            oldest, _ = known.answers.popitem(last=False)
            known.forgotten.add(oldest)

    def recall(self, session: Hashable, op: int) -> ReplyT | None:
        """The answer to `op`, None where it is new.

        ProtocolError for an operation whose answer was forgotten: doing it twice would be wrong.
        """
        known = self._sessions.get(session)
        if known is None:
            return None
        reply = known.answers.get(op)
        if reply is None and (op < known.floor or op in known.forgotten):
            raise ProtocolError(
                f"operation {op} of session {session} was already answered, and the answer "
                "is no longer stored: read the rows to see whether it took effect, then "
                "make a new call",
                op=op,
                floor=known.floor,
            )
        return reply

    def forget(self, session: Hashable, op: int) -> None:
        """The answer was taken back before anybody had it: a retry is carried out anew."""
        known = self._sessions.get(session)
        if known is not None:
            known.answers.pop(op, None)

    def end(self, session: Hashable) -> None:
        """The session is over: nothing of it will be repeated."""
        self._sessions.pop(session, None)

    def _raise_floor(self, known: _Session[ReplyT], floor: int) -> None:
        if floor <= known.floor:
            return
        known.floor = floor
        known.forgotten.forget(floor)
        while known.answers and (oldest := next(iter(known.answers))) < floor:
            del known.answers[oldest]
