"""The home of one (partition, stage): where claims queue that were not met at once.

Sans-I/O: demands and answers in, instructions out. It is where the rows are, and reads their counts
when it decides; what it keeps is soft: the claims that wait. Within a lane: first come, first
served, but that a claim on whose host all lies that it wants goes before one on whose host nothing
does, NEAR_TURNS times at most; across lanes: round robin.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dataplane.errors import ProtocolError
from dataplane.metadata.counts import Counts, Lane
from dataplane.metadata.instructions import (
    ClaimId,
    Complete,
    Ended,
    Instruction,
    Order,
    Starved,
    Unmeetable,
)
from dataplane.wire.messages import Want
from dataplane.wire.tables import Where

NEAR_TURNS = 8
"""How often a lane's head lets a claim go first that lies nearer: where whoever writes and whoever
reads share hosts, rows then stay where they are."""
NEAR_CLAIMS = 64
"""How far down the lane such a claim is looked for."""


@dataclass(slots=True)
class _Demand:
    claim: ClaimId
    want: Want
    lane: Lane
    credit_bytes: int
    ordered: int = 0
    """units that were asked for and not yet answered"""
    held: int = 0
    """units, of a budget: what is counted comes at once"""
    amount: float = 0.0
    needed_bytes: int = 0
    passed_over: int = 0
    before: ClaimId | None = None
    """the head that let this one go first, as it lies nearer"""
    told: bool = False
    """by an exact order's grant, that it has all it gets"""
    blocked: bool = False
    """its next unit exceeds the budget"""

    @property
    def least(self) -> int:
        """The size at which a claim by count may return before the partition is sealed."""
        want = self.want
        return want.minimum if 0 < want.minimum < want.count else want.count


class StageHome:
    """Waiting claims of one stage. `counts` under a filter are as they are now; `near` says of a
    lane's first ready units how many lie at which peer."""

    def __init__(
        self,
        counts: Callable[[Where | None], Counts],
        near: Callable[[Lane], Mapping[str, int]] = lambda lane: {},
    ) -> None:
        self._counts = counts
        self._near = near
        self._sealed = False
        self._lanes: OrderedDict[Lane, OrderedDict[ClaimId, _Demand]] = OrderedDict()
        self._demands: dict[ClaimId, _Demand] = {}
        self._out: list[Instruction] = []

    def __repr__(self) -> str:
        sealed = "sealed" if self._sealed else "open"
        return f"<StageHome {sealed}, {len(self._demands)} claims in {len(self._lanes)} lanes>"

    @property
    def hungry(self) -> bool:
        """Claims wait here: later local claims queue as well, or they would overtake."""
        return bool(self._demands)

    def instructions(self) -> list[Instruction]:
        """What to do since the last call; the caller does it."""
        out, self._out = self._out, []
        return out

    # events

    def changed(self, sealed: bool) -> None:
        """The counts did. sealed: no new row can come any more."""
        self._sealed = sealed
        self._run()

    def demand(self, claim: ClaimId, want: Want, credit_bytes: int = 0) -> None:
        """A claim queues. credit_bytes: what its peer may pull."""
        if claim in self._demands:
            return
        if want.budget_tag is None and want.count < 1:
            raise ProtocolError(f"a claim of {want.count} {want.unit} asks for nothing")
        lane = Lane.of(want)
        demand = _Demand(claim, want, lane, credit_bytes)
        self._demands[claim] = demand
        self._lanes.setdefault(lane, OrderedDict())[claim] = demand
        self._run()

    def withdraw(self, claim: ClaimId) -> None:
        """The claim was cancelled or timed out; its peer gives back what it was granted."""
        if claim in self._demands:
            self._remove(self._demands[claim])
            self._run()

    def supplied(
        self,
        claim: ClaimId,
        units: int,
        amount: float,
        blocked: bool,
        nbytes: int = 0,
        needed_bytes: int = 0,
    ) -> None:
        """What came of an order. blocked: its next unit exceeds the budget. nbytes: of the claim's
        credit. needed_bytes: cut by it, which had to be this much."""
        demand = self._demands.get(claim)
        if demand is None or not demand.ordered:
            return
        demand.ordered = 0
        demand.held += units
        demand.amount += amount
        demand.credit_bytes -= nbytes
        demand.told = demand.lane.budget_tag is None and units > 0
        demand.blocked = blocked
        if needed_bytes:
            demand.needed_bytes = needed_bytes - nbytes
        elif not demand.held:
            self._go_back(demand)
        self._run()

    # what follows from them

    def _run(self) -> None:
        # A head that ends may free what another lane's head waits for: go round until none does.
        while self._run_once():
            pass

    def _run_once(self) -> bool:
        ended = False
        for lane in list(self._lanes):
            while lane in self._lanes and self._advance(lane):
                ended = True
        return ended

    def _advance(self, lane: Lane) -> bool:
        """One step of a lane's head; whether another may follow."""
        first = next(iter(self._lanes[lane].values()))
        if first.ordered:
            return False
        counts = self._counts(first.want.where)
        ready = counts.ready(lane.unit) - self._ordered(lane)
        head = self._head(lane, first, ready)
        if head.told or self._is_met(head, counts):
            self._end(head, Complete(head.claim, head.told))
            return True
        if head.needed_bytes:
            self._end(head, Starved(head.claim, head.needed_bytes))
            return True
        if self._sealed and not head.held and not counts.outstanding(lane.unit):
            self._end(head, Ended(head.claim))
            return True
        if head.blocked:
            self._end(head, Unmeetable(head.claim))
            return True
        if ready > 0:
            self._order(head, ready, counts.remaining(lane.unit))
        return False

    def _ordered(self, lane: Lane) -> int:
        """Units of this kind that heads of other lanes are about to get."""
        return sum(
            next(iter(queue.values())).ordered
            for other, queue in self._lanes.items()
            if other.unit == lane.unit and other.where == lane.where
        )

    def _head(self, lane: Lane, first: _Demand, ready: int) -> _Demand:
        """The oldest claim, or one behind it on whose host all lies that it wants."""
        queue = self._lanes[lane]
        settled = first.held or first.needed_bytes or lane.budget_tag is not None
        if settled or first.passed_over >= NEAR_TURNS or len(queue) == 1 or ready <= 0:
            return first
        near = self._near(lane)
        if near.get(first.claim.peer):
            return first
        for other in itertools.islice(queue.values(), 1, NEAR_CLAIMS):
            if min(ready, near.get(other.claim.peer, 0)) >= other.least:
                first.passed_over += 1
                other.before = first.claim
                queue.move_to_end(other.claim, last=False)
                return other
        return first

    def _go_back(self, demand: _Demand) -> None:
        """What it went first for was taken meanwhile: it waits behind the head again."""
        queue = self._lanes[demand.lane]
        if demand.before is not None and demand.before in queue:
            queue.move_to_end(demand.before, last=False)
        demand.before = None

    def _is_met(self, head: _Demand, counts: Counts) -> bool:
        """Has a budget all that it gets?"""
        if not head.held:
            return False
        nothing_left = self._sealed and not counts.remaining(head.lane.unit)
        full = head.amount >= head.want.budget or head.needed_bytes > 0
        return head.blocked or full or nothing_left

    def _order(self, head: _Demand, ready: int, remaining: int) -> None:
        """By count all of it, or nothing; of a budget what is there."""
        want = head.want
        if want.budget_tag is not None:
            left = want.budget - head.amount
            rest = Want(want.unit, want.count, 1, want.where, want.budget_tag, left)
            self._send(head, ready, rest, exact=False)
            return
        least = min(head.least, remaining) if self._sealed else head.least
        if ready >= least:
            units = min(ready, want.count)
            least = max(1, min(units, least))
            self._send(head, units, Want(want.unit, units, least, want.where), exact=True)

    def _send(self, head: _Demand, units: int, want: Want, exact: bool) -> None:
        head.ordered = units
        self._out.append(Order(head.claim, want, exact, max(0, head.credit_bytes)))
        self._lanes.move_to_end(head.lane)

    def _end(self, demand: _Demand, instruction: Complete | Ended | Unmeetable | Starved) -> None:
        self._remove(demand)
        self._out.append(instruction)

    def _remove(self, demand: _Demand) -> None:
        del self._demands[demand.claim]
        queue = self._lanes[demand.lane]
        del queue[demand.claim]
        if not queue:
            del self._lanes[demand.lane]
