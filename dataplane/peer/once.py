"""Operations that a client may repeat: carried out once, answered as the first time.

A repetition that arrives while the first is still under way waits for its end. What failed was not
carried out, and is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable

from dataplane.metadata.operations import Operations
from dataplane.wire.messages import Body

Start = Callable[[], Body | Awaitable[Body]]


class Once:
    """The answers of one door. `who` is the session, or what else tells operations apart."""

    def __init__(self, answers: Operations[Body]) -> None:
        self.answers = answers
        self._under_way: dict[tuple[Hashable, int], asyncio.Future[None]] = {}

    def run(self, who: Hashable, op: int, floor: int, start: Start) -> Body | Awaitable[Body]:
        """The answer to operation `op`: remembered, or what `start` does. At once where it can."""
        if (who, op) in self._under_way:
            return self._after(who, op, floor, start)
        before = self.answers.recall(who, op)
        if before is not None:
            return before
        outcome = start()
        if isinstance(outcome, Body):
            self.answers.remember(who, op, floor, outcome)
            return outcome
        ended = self._under_way[who, op] = asyncio.get_running_loop().create_future()
        return self._finish(who, op, floor, outcome, ended)

    async def _finish(
        self,
        who: Hashable,
        op: int,
        floor: int,
        outcome: Awaitable[Body],
        ended: asyncio.Future[None],
    ) -> Body:
        try:
            reply = await outcome
            self.answers.remember(who, op, floor, reply)
            return reply
        finally:
            del self._under_way[who, op]
            ended.set_result(None)

    async def _after(self, who: Hashable, op: int, floor: int, start: Start) -> Body:
        await asyncio.wait([self._under_way[who, op]])
        outcome = self.run(who, op, floor, start)
        return outcome if isinstance(outcome, Body) else await outcome
