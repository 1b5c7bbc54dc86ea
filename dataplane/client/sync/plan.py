"""Plans as the caller sees them: mini-batches of micro-batches.

`client/operations/plan.py` has the rules.

Made of dataplane/client/aio/plan.py, which is the one to change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

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
from dataplane.client.sync.batch import Converting
from dataplane.client.sync.driver import Prefetch, Run
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

    def add(
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
        self._run(self._add(columns, named, timeout))


class Mini(Steps):
    """A mini-batch. Iterating over it gives micro-batches; the next one is fetched while the loop
    works on the current one. `epoch`, `number`: its epoch, and its position in that epoch."""

    def __iter__(self) -> Micros:
        return Micros(self._plan, self._number)  # type: ignore[arg-type]


class Micros(Iterator[Micro]):
    """One way through a mini-batch."""

    def __init__(self, plan: Plan, mini: int) -> None:
        self._plan, self._mini, self._at = plan, mini, 0

    def __next__(self) -> Micro:
        if self._at == len(self._plan._joined.mini(self._mini)):
            raise StopIteration
        micro = self._plan._take(self._mini, self._at)
        self._at += 1
        return micro


class Minis(Iterator[Mini]):
    """An iterator over the mini-batches of a plan.

    The end of the loop acks the plan. `break`, `return` or an exception releases it. Inside `with
    plan:`, the end of the `with` acks or releases instead.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._number = plan, 0

    def __next__(self) -> Mini:
        plan = self._plan
        if self._number == len(plan):
            if not plan._entered and plan.state == "leased":
                plan.ack()
            raise StopIteration
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

    _kind = "Plan"
    _prefetch: Prefetch[Micro] | None = None

    def __iter__(self) -> Minis:
        return Minis(self)

    def ack(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Ack this rank's part of the plan. A no-op if it has been acked already."""
        self._stop()
        part = self._joined.part
        if part.state == "acked":
            return
        part.check()
        self._run(part.finish("ack", Deadline(timeout)))

    def release(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """End the plan for all ranks. The rows return to their stage."""
        self._stop()
        part = self._joined.part
        part.check()
        self._run(part.finish("release", Deadline(timeout)))

    def _take(self, mini: int, at: int) -> Micro:
        self._joined.part.check()
        if self._prefetch is None or self._upcoming != (mini, at):
            self._stop()
            self._prefetch = Prefetch(Feed(self, mini, at))
        try:
            micro, _ = self._prefetch.next()
        except Exception:
            self._stop()
            raise
        more = at + 1 < len(self._joined.mini(mini))
        self._upcoming = (mini, at + 1) if more else (mini + 1, 0)
        return micro

    def _stop(self) -> None:
        """Nothing is fetched any more."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.left()
            prefetch.end()

    def __del__(self) -> None:
        # Nobody has it any more, but for a prefetch that is under way.
        if hasattr(self, "_joined"):
            self._leave()

    def _leave(self) -> None:
        """Release it, unless it has ended, without waiting."""
        if self._prefetch is not None:
            self._prefetch.stop()
        self._joined.part.abandon(LEFT)

    def __enter__(self) -> Plan:
        self._entered = True
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        if self.state != "leased":
            self._stop()
            return
        if kind is None:
            self.ack()
            return
        try:
            self.release()
        except DataplaneError as failure:
            # The body's own exception is the one to see; the rows come back with the session.
            if not isinstance(failure, LeaseExpired):
                log.warning(
                    "%r: could not be released; its rows return to the stage when the session "
                    "ends: %s",
                    self,
                    failure,
                )
