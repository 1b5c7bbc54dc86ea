"""A plan: a rank's part of all that a stage has left, in mini- and micro-batches, for several
epochs.

Runs in the client. All ranks lay the plan out alike (`balancing`) and fetch their rows, micro-batch
by micro-batch, under one lease that ends when all of them have acked. Without I/O: `aio.plan` and
`sync.plan` are what users iterate over, and their drivers fetch ahead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.client import arguments
from dataplane.client.core import (
    DEFAULT_TIMEOUT_S,
    Handle,
    Operation,
    ask,
    milliseconds,
    wait_for,
)
from dataplane.client.deadline import Deadline
from dataplane.client.operations.balancing import Layout, Rows
from dataplane.client.operations.claiming import Demand
from dataplane.client.operations.lease import Lease
from dataplane.client.operations.leased import LeasedRows
from dataplane.client.operations.reads import join_tables
from dataplane.client.operations.write import write_columns
from dataplane.client.read.selection import Selection
from dataplane.client.write.values import by_name
from dataplane.errors import (
    FrameTooLarge,
    InvalidCall,
    InvalidRows,
    LeaseExpired,
    ProtocolError,
    RowsGone,
    StreamEnd,
    counted,
)
from dataplane.memory.mapping import Pin
from dataplane.wire.limits import MAX_PLAN_PARTS, MAX_RANKS
from dataplane.wire.messages import Claim, Claimed, Fetch, Fetched, Finish, PutDone, Want
from dataplane.wire.records import EXTENT, U4, column
from dataplane.wire.tables import Shape, Table, volume

log = logging.getLogger(__name__)

Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

SOUGHT = 1_024
"""Rows of which a rank asks at once whether they are there, when its own are gone."""


def shape_of(
    rank: int,
    ranks: int,
    minibatches: int,
    budget: Mapping[str, float] | None,
    balance: str | None,
    epochs: int,
    seed: int,
    remainder: str,
    unit: str,
) -> tuple[Shape, int]:
    """What the arguments of `plan(…)` spell, and the rank. InvalidCall names what is wrong."""
    rank, ranks = arguments.whole(rank, "rank"), arguments.count(ranks, "ranks")
    if ranks > MAX_RANKS:
        raise InvalidCall(f"ranks={ranks}: a plan can have at most {MAX_RANKS} ranks")
    if rank >= ranks:
        raise InvalidCall(f"rank={rank}: with ranks={ranks}, expected 0 to {ranks - 1}")
    minibatches = arguments.count(minibatches, "minibatches")
    if ranks * minibatches > MAX_PLAN_PARTS:
        raise InvalidCall(
            f"ranks={ranks} × minibatches={minibatches} is over the limit of "
            f"{MAX_PLAN_PARTS} parts: use fewer mini-batches"
        )
    if remainder not in ("pad", "drop"):
        raise InvalidCall(f"remainder={remainder!r:.40}: expected 'pad' or 'drop'")
    if unit not in ("rows", "groups"):
        raise InvalidCall(f"unit={unit!r:.40}: expected 'rows' or 'groups'")
    tag, amount = None, 0.0
    if budget is not None:
        want = Demand(None, None, budget, None, None, None).want("rows")
        tag, amount = want.budget_tag, want.budget
    ways: dict[str, Literal["pad", "drop"]] = {"pad": "pad", "drop": "drop"}
    units: dict[str, Literal["rows", "groups"]] = {"rows": "rows", "groups": "groups"}
    shape = Shape(
        ranks,
        minibatches,
        tag,
        amount,
        tag if balance is None else arguments.text(balance, "a tag"),
        arguments.count(epochs, "epochs"),
        arguments.whole(seed, "seed"),
        ways[remainder],
        units[unit],
    )
    return shape, rank


LEFT = (
    "a loop ended early and left a plan of {}",
    "Call plan.ack() before `break`, or write `with part.plan(…) as plan:`, which acks at its end",
)


class Part(Lease):
    """A process's part in a plan: of all its rows, by their positions."""

    def __init__(self, handle: Handle, stage: str, claimed: Claimed, rows: int) -> None:
        super().__init__(handle, stage, claimed)
        self.n = rows
        self.why = ""
        self.at_once = handle.session.max_rows
        """rows that one message brings: fewer once that was too large"""

    def check(self) -> None:
        if self.state != "leased":
            raise LeaseExpired(
                self.why or f"this plan was {self.state}: call part.plan(…) for another",
                stage=self.stage,
            )


class Joined:
    """What a process has that takes part in a plan."""

    def __init__(self, part: Part, layout: Layout, rank: int, fields: list[str]) -> None:
        self.part, self.layout, self.rank, self.fields = part, layout, rank, fields
        self._minis: dict[tuple[int, int], list[Rows]] = {}
        """of this epoch and the last one; replaced whole, as the loop and the prefetch both do"""

    def mini(self, number: int) -> list[Rows]:
        """The micro-batches of one of the mini-batches of all epochs."""
        at = divmod(number, self.layout.shape.minibatches)
        known = self._minis
        rows = known.get(at)
        if rows is None:
            rows = self.layout.mini(self.rank, *at)
            recent = {key: one for key, one in known.items() if key[0] >= at[0] - 1}
            self._minis = {**recent, at: rows}
        return rows


def join(
    handle: Handle,
    stage: str,
    shape: Shape,
    rank: int,
    fields: Sequence[str] | None,
    timeout: float | None,
) -> Operation[Joined]:
    """Take part. Waits until the partition is sealed and all that the stage has left is ready."""
    session = handle.session
    arguments.text(stage, "a stage")
    wanted = arguments.optional_texts(fields, "fields")
    timeout = arguments.seconds(timeout, "timeout")
    generation = yield from handle.attach_to_wait(timeout)
    body = Claim(
        handle.name,
        generation,
        stage,
        Want(shape.unit, 0, 0),
        wanted,
        declare=None if stage in handle.definition.stages else wanted,
        timeout_ms=milliseconds(timeout),
        plan=shape,
        rank=rank,
        own=session.leases.mine(handle.name),
    )
    began, claimed = time.monotonic(), None
    try:
        claimed = yield from wait_for(body, Claimed, timeout)
    finally:
        session.tally.of_stage(stage, wait_s=time.monotonic() - began)
        if session.spans is not None:
            lease = claimed.lease if claimed is not None else None
            session.spans.claim(handle.name, stage, began, lease)
    session.leased(claimed.lease, handle.name)
    if claimed.plan is None:
        raise ProtocolError("the peer replied to a plan request with a batch")
    part = Part(handle, stage, claimed, claimed.plan.rows)
    if wanted is None and stage not in handle.definition.stages:  # declared meanwhile
        yield from handle.define(None, Deadline(DEFAULT_TIMEOUT_S))
    needed = handle.definition.stages[stage] if wanted is None else wanted
    try:
        layout = Layout(shape, claimed.plan)
    except InvalidRows:
        yield from part.give_back(Deadline(DEFAULT_TIMEOUT_S))
        raise
    return Joined(part, layout, rank, needed)


@dataclass(frozen=True, slots=True)
class Came:
    """Rows of a plan that were fetched, and where they are in it, ascending."""

    table: Table
    pin: Pin
    there: Index


Fetching = tuple[Came, Index, Mask]
"""Rows that came; the positions of a micro-batch's rows, and which of them are no padding."""


def fetch(part: Part, fields: Sequence[str], rows: Rows) -> Operation[Fetching]:
    """The rows of a micro-batch. Those that were dropped or lost meanwhile become padding, so that
    its rank stays in step with the others."""
    wanted = np.array(rows, np.intp)
    mask = wanted >= 0
    positions = np.where(mask, wanted, ~wanted)
    deadline = Deadline(DEFAULT_TIMEOUT_S)
    came = yield from _fetched(part, fields, np.unique(positions), deadline)
    if not len(came.there):
        came = yield from _any_row(part, fields, deadline)
    gone = ~np.isin(positions, came.there)
    if gone.any():
        log.warning(
            "partition %r, stage %r: %s of the plan were dropped or lost, so padding replaces them",
            part.handle.name,
            part.stage,
            counted(int((gone & mask).sum()), "row"),
        )
        mask &= ~gone
        positions = np.where(gone, came.there[0], positions)
    nbytes, tally = volume(came.table.columns), part.handle.session.tally
    tally.of_stage(part.stage, claims=1, rows=int(mask.sum()), bytes=nbytes)
    return came, positions, mask


def _any_row(part: Part, fields: Sequence[str], deadline: Deadline) -> Operation[Came]:
    """A row of the plan that is still there. RowsGone where none is."""
    start = 0
    while start < part.n:
        some = np.arange(start, min(start + SOUGHT, part.n), dtype=np.intp)
        left = yield from _fetched(part, [], some, deadline)
        if not len(left.there):
            start += SOUGHT
            continue
        came = yield from _fetched(part, fields, left.there[:1], deadline)
        if len(came.there):  # or else it went just now
            return came
    raise RowsGone(
        "every row of this plan was dropped or lost; release it and call part.plan(…) again",
        rows=part.n,
    )


def _fetched(
    part: Part, fields: Sequence[str], positions: Index, deadline: Deadline
) -> Operation[Came]:
    """In as many messages as it takes: rows may have many small values."""
    session, done = part.handle.session, list[Fetched]()
    at = 0
    try:
        while at < len(positions) or not done:
            some = positions[at : at + part.at_once]
            body = Fetch(part.id, list(fields), index=some.astype(U4).tobytes())
            try:
                done.append((yield from ask(body, Fetched, deadline)))
            except FrameTooLarge:
                if len(some) == 1:
                    raise
                part.at_once = -(-len(some) // 2)
                continue
            at += len(some)
    except LeaseExpired as exc:
        part.why = exc.message
        part._end("expired")
        raise
    finally:
        # Of one that failed, the pieces before are pinned; their pins go with this object.
        pin = session.pinned(*(one.pin for one in done))
    there = column(b"".join(one.index for one in done), U4).astype(np.intp)
    return Came(join_tables([one.table for one in done]), pin, there)


class PlannedRows(LeasedRows):
    """What a micro-batch is without its methods that wait. `mask`: bool[n], False for padding."""

    def __init__(self, part: Part, fetched: Fetching) -> None:
        came, positions, mask = fetched
        rows = Selection(part.handle, came.table, came.pin)
        self.__dict__.update(rows.__dict__)
        self.lease = part
        self._of = self._at = None
        at = np.searchsorted(came.there, positions)
        if len(at) != len(rows) or (at != np.arange(len(at))).any():
            Selection._become_part(self, rows, at)
        self.mask = mask
        self._positions = positions

    def _become_part(self, of: Selection, at: Index) -> None:
        Selection._become_part(self, of, at)
        assert isinstance(of, PlannedRows)
        self.mask, self._positions = of.mask[at], of._positions[at]

    def _more(self, fields: Sequence[str], timeout: float | None) -> Operation[None]:
        self.lease.check()
        assert isinstance(self.lease, Part)
        came = yield from _fetched(
            self.lease,
            arguments.texts(fields, "fields"),
            np.unique(self._positions),
            Deadline(timeout),
        )
        self._admit(came.table, came.pin)

    def _add(
        self, given: Mapping[str, Any] | None, named: dict[str, Any], timeout: float | None
    ) -> Operation[None]:
        """Stored at once, for the rows that are no padding."""
        columns = {} if given is None else dict(by_name(given))
        lease, session, deadline = self.lease, self._handle.session, Deadline(timeout)
        lease.check()
        columns |= named
        if session.devices is not None:
            session.devices.tell_of_host_copies(columns, "values added to a plan always are")
        written = yield from write_columns(self._handle, columns, len(self), deadline)
        lease._check_size([written], written)
        real = np.flatnonzero(self.mask)
        if not len(real):
            session.keep(written.ranges)
            return
        if len(real) < len(self):
            written, unused = written.take(real)
            session.keep(unused)
        lease._tally(written)
        body = Finish(lease.id, "keep", self._positions[real].astype(U4).tobytes())
        done = yield from lease._send_with(body, written, deadline)
        if isinstance(done, PutDone):
            session.keep(np.frombuffer(done.extents, EXTENT))

    def __repr__(self) -> str:
        padding = len(self) - int(self.mask.sum())
        said = f", {padding} of them padding" if padding else ""
        fields = ", ".join(self.fields) or "no fields"
        return (
            f"<Micro {counted(len(self), 'row')} of {self.partition!r} for {self.stage!r}{said}: "
            f"{fields}>"
        )


M = TypeVar("M", bound=PlannedRows)


class Feed(Generic[M]):
    """The micro-batches of a plan from one on, as a driver fetches them ahead. It does not know the
    plan, which goes when nobody has it any more."""

    _collate = None
    _wanted = None

    def __init__(self, plan: Planned[M], mini: int, at: int) -> None:
        self._run, self._ahead = plan._run, plan._ahead
        self._handle = plan._joined.part.handle
        joined, make = plan._joined, plan._make
        coming = _coming(joined, len(plan), mini, at)
        self._claim: Callable[[], Operation[Fetching]] = lambda: _next(joined, coming)
        self._make: Callable[[Fetching], M] = lambda fetched: make(joined.part, fetched)

    def _fresh(self, micro: M) -> Operation[M]:
        return micro
        yield


def _coming(joined: Joined, minis: int, mini: int, at: int) -> Iterator[Rows]:
    yield from joined.mini(mini)[at:]
    for number in range(mini + 1, minis):
        yield from joined.mini(number)


def _next(joined: Joined, coming: Iterator[Rows]) -> Operation[Fetching]:
    rows = next(coming, None)
    if rows is None:
        raise StreamEnd("this plan has no more batches")
    return (yield from fetch(joined.part, joined.fields, rows))


class Planned(Generic[M]):
    """What is to be gone through, mini-batch by mini-batch."""

    _kind = "Plan"

    def __init__(
        self, run: Any, make: Callable[[Part, Fetching], M], joined: Joined, prefetch: int
    ) -> None:
        self._run, self._make, self._joined = run, make, joined
        self._ahead = prefetch
        self._entered = False
        """in a `with`, whose end decides"""
        self._upcoming = (-1, -1)
        """what the prefetch gives next: mini- and micro-batch"""

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._joined.rank

    @property
    def stage(self) -> str:
        """The stage that leased the rows."""
        return self._joined.part.stage

    @property
    def state(self) -> str:
        """`leased`, `acked`, `released` or `expired`."""
        return self._joined.part.state

    def __len__(self) -> int:
        """Mini-batches, of all epochs."""
        shape = self._joined.layout.shape
        return shape.epochs * shape.minibatches

    def __repr__(self) -> str:
        part, shape = self._joined.part, self._joined.layout.shape
        minis = counted(len(self), "mini-batch", "mini-batches")
        return (
            f"<{self._kind} of {part.handle.name!r} for {part.stage!r}, rank {self.rank} of "
            f"{shape.ranks}, {counted(part.n, 'row')}, {minis}: {part.state}>"
        )


class Steps:
    """A mini-batch: what one optimiser step is made of. epoch, number: which one of the plan it is,
    and which one of its epoch."""

    def __init__(self, plan: Planned[Any], at: int) -> None:
        self._plan, self._number = plan, at
        self.epoch, self.number = divmod(at, plan._joined.layout.shape.minibatches)

    def __len__(self) -> int:
        """Micro-batches, as many as at any other rank."""
        return len(self._plan._joined.mini(self._number))

    def __repr__(self) -> str:
        micros = counted(len(self), "micro-batch", "micro-batches")
        return f"<Mini {self.number} of epoch {self.epoch}, rank {self._plan.rank}: {micros}>"
