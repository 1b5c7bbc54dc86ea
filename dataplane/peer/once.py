"""Operations that a client may repeat: carried out once, answered as the first time.

A repetition that arrives while the first is still under way waits for its end. What failed was not
carried out, and is tried again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Hashable

from dataplane.metadata.operations import Operations
from dataplane.wire.messages import Body, Close, Drop, Finish, Put, Reset, Tag
from dataplane.wire.peering import Grant, Order, Release, Settled

REPEATABLE = (Put, Finish, Tag, Drop, Close, Reset, Release)
"""Operations that a peer carries out once however often they are forwarded to it."""

Start = Callable[[], Body | Awaitable[Body]]


class Once:
    """The answers of one door. `who` is the session, or what else tells operations apart."""

    def __init__(self, answers: Operations[Body]) -> None:
        self.answers = answers
        self._under_way: dict[tuple[Hashable, int], asyncio.Future[Body]] = {}

    def run(self, who: Hashable, op: int, floor: int, start: Start) -> Body | Awaitable[Body]:
        """The answer to operation `op`: remembered, or what `start` does. At once where it can."""
        first = self._under_way.get((who, op))
        if first is not None:
            return self._after(first, who, op, floor, start)
        before = self.answers.recall(who, op)
        if before is not None:
            return before
        outcome = start()
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
        self, first: asyncio.Future[Body], who: Hashable, op: int, floor: int, start: Start
    ) -> Body:
        await asyncio.wait([first])
        outcome = self.run(who, op, floor, start)
        return outcome if isinstance(outcome, Body) else await outcome


def may_repeat(body: Body, op: int) -> bool:
    """Whether a request to a peer that was perhaps carried out may be sent once more."""
    if isinstance(body, REPEATABLE):
        return op > 0
    return not isinstance(body, Order | Grant | Settled)
