"""Plans as the caller sees them: mini-batches of micro-batches.

`client/operations/plan.py` has the rules."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from dataplane.client.aio.batch import Converting
from dataplane.client.aio.driver import Prefetch, Run
from dataplane.client.core import DEFAULT_TIMEOUT_S
from dataplane.client.deadline import Deadline
from dataplane.client.operations.plan import (
    LEFT,
    Feed,
    Fetching,
    Part,
    Planned,
    PlannedRows,
    Steps,
)
from dataplane.errors import DataplaneError, LeaseExpired

log = logging.getLogger(__name__)


class Micro(PlannedRows, Converting):
    """The rows of one forward and backward pass.

    `mask`, bool[n], is False for padding rows. Padding gives every rank the same number of passes.
    A padding row repeats the values of another row: leave it out of the loss.
    """

    def __init__(self, run: Run, part: Part, fetched: Fetching) -> None:
        super().__init__(part, fetched)
        self._run = run

    async def add(
        self,
        columns: Mapping[str, Any] | None = None,
        /,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **named: Any,
    ) -> None:
        """Add fields, one value per row, and store them at once.

        Values for padding are ignored. If this stage has already set the field for a row, the old
        value is kept. Raises LeaseExpired once the plan has ended.
        """
        await self._run(self._add(columns, named, timeout))


class Mini(Steps):
    """A mini-batch. Iterating over it gives micro-batches; the next one is fetched while the loop
    works on the current one. `epoch`, `number`: its epoch, and its position in that epoch."""

    def __aiter__(self) -> Micros:
        return Micros(self._plan, self._number)  # type: ignore[arg-type]


class Micros(AsyncIterator[Micro]):
    """One way through a mini-batch."""

    def __init__(self, plan: Plan, mini: int) -> None:
        self._plan, self._mini, self._at = plan, mini, 0

    async def __anext__(self) -> Micro:
        if self._at == len(self._plan._joined.mini(self._mini)):
            raise StopAsyncIteration
        micro = await self._plan._take(self._mini, self._at)
        self._at += 1
        return micro


class Minis(AsyncIterator[Mini]):
    """An iterator over the mini-batches of a plan.

    The end of the loop acks the plan. `break`, `return` or an exception releases it. Inside `with
    plan:`, the end of the `with` acks or releases instead.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._number = plan, 0

    async def __anext__(self) -> Mini:
        plan = self._plan
        if self._number == len(plan):
            if not plan._entered and plan.state == "leased":
                await plan.ack()
            raise StopAsyncIteration
        self._number += 1
        return Mini(plan, self._number - 1)

    def __del__(self) -> None:
        # Left by break, return or an exception.
        if not self._plan._entered:
            self._plan._leave()


class Plan(Planned[Micro]):
    """One rank's part of the rows of a stage. Iterating over it gives `len(plan)` mini-batches,
    epoch after epoch; iterating over a mini-batch gives micro-batches.

    A loop that runs to its end acks the plan. Any other way out of the loop (break, return, an
    exception) releases it. As a context manager, the plan acks at the end of the body, and releases
    if the body raises. Once every rank has acked its part, the stage is done with the rows. If a
    rank leaves earlier, the plan ends for all ranks: their next call raises LeaseExpired, which
    names that rank.
    """

    _kind = "aio.Plan"
    _prefetch: Prefetch[Micro] | None = None

    def __aiter__(self) -> Minis:
        return Minis(self)

    async def ack(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Ack this rank's part of the plan. A no-op if it has been acked already."""
        await self._stop()
        part = self._joined.part
        if part.state == "acked":
            return
        part.check()
        await self._run(part.finish("ack", Deadline(timeout)))

    async def release(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """End the plan for all ranks. The rows return to their stage."""
        await self._stop()
        part = self._joined.part
        part.check()
        await self._run(part.finish("release", Deadline(timeout)))

    async def _take(self, mini: int, at: int) -> Micro:
        self._joined.part.check()
        if self._prefetch is None or self._upcoming != (mini, at):
            await self._stop()
            self._prefetch = Prefetch(Feed(self, mini, at))
        try:
            micro, _ = await self._prefetch.next()
        except Exception:
            await self._stop()
            raise
        more = at + 1 < len(self._joined.mini(mini))
        self._upcoming = (mini, at + 1) if more else (mini + 1, 0)
        return micro

    async def _stop(self) -> None:
        """Nothing is fetched any more."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.left()
            await prefetch.end()

    def __del__(self) -> None:
        # Nobody has it any more, but for a prefetch that is under way.
        if hasattr(self, "_joined"):
            self._leave()

    def _leave(self) -> None:
        """Release it, unless it has ended, without waiting."""
        if self._prefetch is not None:
            self._prefetch.stop()
        self._joined.part.abandon(LEFT)

    async def __aenter__(self) -> Plan:
        self._entered = True
        return self

    async def __aexit__(self, kind: object, exc: object, trace: object) -> None:
        if self.state != "leased":
            await self._stop()
            return
        if kind is None:
            await self.ack()
            return
        try:
            await self.release()
        except DataplaneError as failure:
            # The body's own exception is the one to see; the rows come back with the session.
            if not isinstance(failure, LeaseExpired):
                log.warning(
                    "%r: could not be released; its rows return to the stage when the session "
                    "ends: %s",
                    self,
                    failure,
                )
