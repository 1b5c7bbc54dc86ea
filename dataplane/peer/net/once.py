"""Operations that a client may repeat: carried out once, answered as the first time.

A repetition that arrives while the first is still under way waits for its end. What failed was not
carried out, and is tried again, but for what is made `final`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Protocol

from dataplane.peer.net.failures import failed
from dataplane.wire.checkpoint import Restore
from dataplane.wire.messages import Advance, Body, Close, Drop, Finish, Put, Reset, Tag
from dataplane.wire.peering import Release

REPEATABLE = frozenset({Put, Finish, Tag, Drop, Close, Reset, Advance, Restore, Release})
"""Operations that a peer carries out once however often they are forwarded to it."""

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


def may_repeat(body: Body, op: int) -> bool:
    """Whether a request to a peer that was perhaps carried out may be sent once more."""
    return op > 0 or type(body) not in REPEATABLE
