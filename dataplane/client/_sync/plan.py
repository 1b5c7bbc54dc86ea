"""Plans: one rank's part of a stage's remaining rows, in mini- and micro-batches, for several
epochs.

Generated from dataplane/client/_async/plan.py: change that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dataplane.client import arguments
from dataplane.client._sync.backend import Prefetch
from dataplane.client._sync.batch import LeasedRows
from dataplane.client._sync.calls import DEFAULT_TIMEOUT_S, UNKNOWN, public
from dataplane.client._sync.lease import Added
from dataplane.client._sync.plan_part import Fetching, Index, Part, fetch, fetch_rows
from dataplane.client.arguments import Deadline
from dataplane.client.balancing import Rows
from dataplane.client.read.selection import Selection
from dataplane.client.write.columns import named_once, prepare
from dataplane.errors import DataplaneError, LeaseExpired, StreamEnd, counted
from dataplane.wire.messages import Finish
from dataplane.wire.packed import U4

log = logging.getLogger(__name__)

LEFT = (
    "a plan of {} was left before the end of its loop",
    "Call plan.ack() before `break`, or use `with part.plan(…) as plan:`, which acks the plan when "
    "its body ends",
)


class Micro(LeasedRows):
    """The rows of one forward and backward pass.

    `mask` is a bool array [n] that is False for padding rows. Padding gives every rank the same
    number of passes. A padding row repeats the values of another row, so leave padding rows out of
    the loss.
    """

    def __init__(self, part: Part, fetched: Fetching) -> None:
        reader, at, self._positions, self.mask = fetched
        rows = Selection(part.handle, reader)
        self.__dict__.update(rows.__dict__)
        self.lease = part
        self._of = self._at = None
        if len(at) != len(rows) or (at != np.arange(len(at))).any():
            Selection._become_part(self, rows, at)

    def _become_part(self, of: Selection, at: Index) -> None:
        Selection._become_part(self, of, at)
        assert isinstance(of, Micro)
        self.mask, self._positions = of.mask[at], of._positions[at]

    def _unused(self) -> None:
        """Keep the lease, which is that of the whole plan."""

    def _more(self, fields: Sequence[str], timeout: float | None) -> None:
        self.lease.check()
        assert isinstance(self.lease, Part)
        wanted = arguments.texts(fields, "fields")
        at = np.unique(self._positions)
        reader, _ = fetch_rows(self.lease, wanted, at, Deadline(timeout))
        self._admit(reader)

    @public
    def add(
        self,
        columns: Mapping[str, Any] | None = None,
        /,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        **named: Any,
    ) -> None:
        """Add fields, one value per row, and store them immediately.

        Values for padding rows are ignored. If this stage has already set one of the fields for a
        row, the old value stays. Raises LeaseExpired if the plan has ended.
        """
        columns = named_once(columns, named)
        lease, deadline = self.lease, Deadline(timeout)
        lease.check()
        real = np.flatnonzero(self.mask)
        if not len(real):
            prepare(columns, len(self), (), self._handle.definition.fields, "the batch has")
            return
        order = None if len(real) == len(self) else real.tolist()
        positions = self._positions[real]
        what = "values added to a plan"
        pieces = lease._write(what, columns, deadline, order, None, len(self))
        body = Finish(lease.id, "keep", positions.astype(U4).tobytes())
        lease.send(body, 0, [Added(0, pieces)], deadline)

    def __repr__(self) -> str:
        padding = len(self) - int(self.mask.sum())
        said = f", {padding} of them padding" if padding else ""
        fields = ", ".join(self.fields) or "no fields"
        return (
            f"<Micro {counted(len(self), 'row')} of {self.partition!r} for {self.stage!r}{said}: "
            f"{fields}>"
        )


class Mini:
    """A mini-batch. Iterating over it yields micro-batches. While your loop works on one
    micro-batch, the next one is fetched. `epoch` is the mini-batch's epoch, and `number` is its
    position in that epoch."""

    def __init__(self, plan: Plan, at: int) -> None:
        self._plan, self._number = plan, at
        self.epoch, self.number = divmod(at, plan._part.layout.shape.minibatches)

    def __iter__(self) -> Micros:
        return Micros(self._plan, self._number)

    def __len__(self) -> int:
        """Return the number of micro-batches, which is the same on every rank."""
        return len(self._plan._part.mini(self._number))

    def __repr__(self) -> str:
        micros = counted(len(self), "micro-batch", "micro-batches")
        return f"<Mini {self.number} of epoch {self.epoch}, rank {self._plan.rank}: {micros}>"


class Micros(Iterator[Micro]):
    """An iterator over the micro-batches of a mini-batch."""

    def __init__(self, plan: Plan, mini: int) -> None:
        self._plan, self._mini, self._at = plan, mini, 0

    @public
    def __next__(self) -> Micro:
        if self._at == len(self._plan._part.mini(self._mini)):
            raise StopIteration
        micro = self._plan._take(self._mini, self._at)
        self._at += 1
        return micro


class Minis(Iterator[Mini]):
    """An iterator over the mini-batches of a plan.

    The end of the loop acks the plan. `break`, `return` or an exception releases it. In a `with
    plan:` block, the end of the block acks or releases the plan instead.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._number = plan, 0

    @public
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


class Plan:
    """One rank's part of a stage's rows. Iterating over the plan yields `len(plan)` mini-batches:
    those of all epochs, in order. Iterating over a mini-batch yields micro-batches.

    If the loop runs to completion, the plan is acked. If the loop ends early (break, return or an
    exception), the plan is released. Used as a context manager, the plan is acked when the body
    ends, and released if the body raises. The stage is done with the rows once every rank has acked
    its part. If a rank releases its part or dies before then, the plan ends for all ranks: their
    next call raises LeaseExpired, which names that rank.
    """

    _kind = "Plan"
    _prefetch: Prefetch[Micro] | None = None

    def __init__(self, part: Part, prefetch: int) -> None:
        self._part, self._ahead = part, prefetch
        self._entered = False
        """Whether the plan is in a `with` block, whose end acks or releases it."""
        self._upcoming = (-1, -1)
        """The next result of the prefetch: mini-batch, micro-batch."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._part.rank

    @property
    def stage(self) -> str:
        """The stage that leased the rows."""
        return self._part.stage

    @property
    def state(self) -> str:
        """The state of the plan: `leased`, `acked`, `released` or `expired`."""
        return self._part.state

    def __len__(self) -> int:
        """Return the number of mini-batches in all epochs together."""
        shape = self._part.layout.shape
        return shape.epochs * shape.minibatches

    def __repr__(self) -> str:
        part, shape = self._part, self._part.layout.shape
        minis = counted(len(self), "mini-batch", "mini-batches")
        return (
            f"<{self._kind} of {part.handle.name!r} for {part.stage!r}, rank {self.rank} of "
            f"{shape.ranks}, {counted(part.n, 'row')}, {minis}: {part.state}>"
        )

    def __iter__(self) -> Minis:
        return Minis(self)

    @public
    def ack(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Ack this rank's part of the plan. A no-op if the part is already acked."""
        deadline = Deadline(timeout)
        self._stop(deadline)
        part = self._part
        if part.state == "acked":
            return
        part.check()
        part.finish("ack", deadline)

    @public
    def release(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """End the plan for all ranks. The rows return to their stage."""
        deadline = Deadline(timeout)
        self._stop(deadline)
        part = self._part
        part.check()
        part.finish("release", deadline)

    def _take(self, mini: int, at: int) -> Micro:
        self._part.check()
        if self._prefetch is None or self._upcoming != (mini, at):
            self._stop(Deadline(DEFAULT_TIMEOUT_S))
            take = _upcoming(self._part, len(self), mini, at)
            session = self._part.handle.session
            self._prefetch = Prefetch(take, None, self._ahead, None, session)
        try:
            micro, _ = self._prefetch.next()
        except Exception as exc:
            self._stop(Deadline(0 if isinstance(exc, UNKNOWN) else DEFAULT_TIMEOUT_S))
            raise
        more = at + 1 < len(self._part.mini(mini))
        self._upcoming = (mini, at + 1) if more else (mini + 1, 0)
        return micro

    def _stop(self, deadline: Deadline) -> None:
        """Stop the prefetch."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.left()
            prefetch.end(deadline)

    def __del__(self) -> None:
        # Only a running prefetch may still use the plan.
        if hasattr(self, "_part"):
            self._leave()

    def _leave(self) -> None:
        """Release the plan without waiting, unless it has ended."""
        if self._prefetch is not None:
            self._prefetch.stop()
        self._part.abandon(LEFT)

    def __enter__(self) -> Plan:
        self._entered = True
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        if isinstance(exc, UNKNOWN):  # the peer did not reply: do not wait again
            if self._prefetch is not None:
                self._prefetch.stop()
            self._part.abandon()
            return
        if self.state != "leased":
            self._stop(Deadline(DEFAULT_TIMEOUT_S))
            return
        if kind is None:
            self.ack()
            return
        try:
            self.release()
        except DataplaneError as failure:
            # Show the exception of the body instead. The end of the session returns the rows.
            if not isinstance(failure, LeaseExpired):
                log.warning(
                    "%r: could not release the plan: %s. Its rows return to the stage when the "
                    "session ends",
                    self,
                    failure,
                )


def _upcoming(part: Part, minis: int, mini: int, at: int) -> Callable[[], Micro]:
    """A function that fetches one micro-batch after another, from micro-batch `at` of mini-batch
    `mini` on. It does not refer to the plan, which ends when nothing else refers to it."""
    coming = _rows_from(part, minis, mini, at)

    def take() -> Micro:
        rows = next(coming, None)
        if rows is None:
            raise StreamEnd("this plan has no more batches")
        return Micro(part, fetch(part, rows))

    return take


def _rows_from(part: Part, minis: int, mini: int, at: int) -> Iterator[Rows]:
    yield from part.mini(mini)[at:]
    for number in range(mini + 1, minis):
        yield from part.mini(number)
