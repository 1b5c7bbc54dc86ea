"""The home of one (partition, stage): where claims queue that no peer could meet alone.

Sans-I/O: reports and demands in, instructions out. Holds soft state only: the latest counts of each
peer and the claims that wait. Rows go from the supplying peer straight to the claimant's; the home
learns how many. Within a lane: first come, first served, but that a claim on whose host all lies
that it wants goes before one on whose host nothing does, NEAR_TURNS times at most; across lanes:
round robin.
A peer's reports must arrive here in the order in which it made them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dataplane.errors import ProtocolError
from dataplane.metadata.counts import Counts, Lane
from dataplane.metadata.instructions import (
    ClaimId,
    Complete,
    Ended,
    Instruction,
    Order,
    Return,
    Starved,
    Unmeetable,
    Watch,
)
from dataplane.metadata.tally import Tally
from dataplane.wire.messages import Want

MAX_WATCHED = 32
"""Filters whose counts are kept up to date; the one that was wanted longest ago goes first."""

NEAR_TURNS = 8
"""How often a lane's head lets a claim go first that lies nearer: where whoever writes and whoever
reads share hosts, rows then stay where they are."""
NEAR_CLAIMS = 64
"""How far down the lane such a claim is looked for."""


@dataclass(slots=True)
class _Part:
    asked: int
    exact: bool
    version: int


@dataclass(slots=True)
class _Demand:
    claim: ClaimId
    want: Want
    lane: Lane
    held: int
    amount: float
    credit_bytes: int
    needed_bytes: int = 0
    passed_over: int = 0
    told: bool = False
    """by an exact order's grant, that it has all it gets"""
    parts: dict[str, _Part] = field(default_factory=dict)
    blocked: set[str] = field(default_factory=set)

    @property
    def least(self) -> int:
        """The size at which a claim by count may return before the partition is sealed."""
        want = self.want
        return want.minimum if 0 < want.minimum < want.count else want.count


class StageHome:
    """Waiting claims of one stage. `peers` are all that may hold rows; `near` says of a lane's
    first ready units how many lie at which peer."""

    def __init__(
        self,
        peers: Iterable[str],
        near: Callable[[Lane], Mapping[str, int]] = lambda lane: {},
    ) -> None:
        self._peers = set(peers)
        self._near = near
        self._sealed = False
        self._lanes: OrderedDict[Lane, OrderedDict[ClaimId, _Demand]] = OrderedDict()
        self._demands: dict[ClaimId, _Demand] = {}
        self._tallies: OrderedDict[bytes, Tally] = OrderedDict({b"": Tally()})
        self._asked_final: set[tuple[bytes, str]] = set()
        # Of all heads that count units only one keeps less than it wants: two that each hold what
        # the other lacks would wait for ever.
        self._partial: ClaimId | None = None
        self._out: list[Instruction] = []

    def __repr__(self) -> str:
        sealed = "sealed" if self._sealed else "open"
        return f"<StageHome {sealed}, {len(self._demands)} claims in {len(self._lanes)} lanes>"

    @property
    def hungry(self) -> bool:
        """Claims wait here: peers send later local claims here too, or they would overtake."""
        return bool(self._demands)

    def watches(self, lane: Lane) -> bool:
        """Are the figures of this lane's filter wanted?"""
        return lane.where in self._tallies

    def instructions(self) -> list[Instruction]:
        """What to do since the last call; the caller sends it."""
        out, self._out = self._out, []
        return out

    def progress(self, claim: ClaimId) -> dict[str, int]:
        """Figures for a timeout's message: units ready and held, claims ahead in the lane."""
        demand = self._demands.get(claim)
        if demand is None:
            return {}
        ahead = list(self._lanes[demand.lane]).index(claim)
        ready = self._tallies[demand.lane.where].ready(demand.lane.unit)
        return {"ready": ready, "held": demand.held, "ahead": ahead}

    # events

    def report(self, peer: str, lane: Lane, counts: Counts, sealed: bool) -> None:
        """The peer's counts under the lane's filter. sealed: taken when the peer no longer took
        new rows (its phase was sealing or sealed); without that word no stream could end exactly.
        """
        tally = self._tallies.get(lane.where)
        if tally is None or peer not in self._peers:
            return
        tally.report(peer, counts, sealed)
        self._run()

    def demand(
        self,
        claim: ClaimId,
        want: Want,
        held: int = 0,
        amount: float = 0.0,
        credit_bytes: int = 0,
    ) -> None:
        """A claim queues. held, amount: what it got under an earlier home (after a fail-over).
        credit_bytes: what its peer may pull."""
        if claim in self._demands:
            return
        if want.budget_tag is None and want.count < 1:
            raise ProtocolError(f"a claim of {want.count} {want.unit} asks for nothing")
        lane = Lane.of(want)
        self._watch(lane)
        demand = _Demand(claim, want, lane, held, amount, credit_bytes)
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
        peer: str,
        units: int,
        amount: float,
        blocked: bool,
        nbytes: int = 0,
        needed_bytes: int = 0,
    ) -> None:
        """The answer of a supplying peer to an order. blocked: its next unit exceeds the budget.
        nbytes: of the claim's credit. needed_bytes: cut by it, which had to be this much."""
        demand = self._demands.get(claim)
        part = demand.parts.pop(peer, None) if demand else None
        if demand is None or part is None:
            return
        tally, unit = self._tallies[demand.lane.where], demand.lane.unit
        tally.ordered(peer, unit, -part.asked)
        if tally.version(peer) == part.version:
            short = units < part.asked and not blocked and not needed_bytes
            tally.granted(peer, unit, units, short)
            if short:
                self._out.append(Watch(demand.lane, True, peer))
        demand.held += units
        demand.amount += amount
        demand.credit_bytes -= nbytes
        demand.told = part.exact and units > 0
        if needed_bytes:
            demand.needed_bytes = max(demand.needed_bytes, needed_bytes - nbytes)
        if blocked:
            demand.blocked.add(peer)
        self._settle(demand)
        self._run()

    def sealed(self, sealed: bool) -> None:
        """Every peer has stopped taking new rows."""
        self._sealed = sealed
        self._run()

    def admit(self, peer: str) -> None:
        """The peer is there, after all or again."""
        self._peers.add(peer)

    def forget(self, peer: str) -> None:
        """The peer is gone: so are its rows, its claims, and what was ordered from it."""
        self._peers.discard(peer)
        for demand in [d for d in self._demands.values() if d.claim.peer == peer]:
            self._remove(demand)
        for demand in self._demands.values():
            part = demand.parts.pop(peer, None)
            if part is not None:
                tally = self._tallies[demand.lane.where]
                tally.ordered(peer, demand.lane.unit, -part.asked)
                self._settle(demand)
        for tally in self._tallies.values():
            tally.forget(peer)
        self._run()

    # what follows from them

    def _run(self) -> None:
        # A head that ends may free what another lane's head waits for: go round until none does.
        while self._run_once():
            pass

    def _run_once(self) -> bool:
        ended = False
        for lane in list(self._lanes):
            if self._sealed:
                self._ask_final(lane)
            while lane in self._lanes and self._advance(lane):
                ended = True
        return ended

    def _advance(self, lane: Lane) -> bool:
        """One step of a lane's head; whether another may follow."""
        head = self._head(lane)
        if head.parts:
            return False
        if head.told or self._is_met(head):
            self._end(head, Complete(head.claim, head.held, head.told))
            return True
        if head.needed_bytes:
            self._end(head, Starved(head.claim, head.needed_bytes))
            return True
        if not head.held and self._is_drained(lane):
            self._end(head, Ended(head.claim))
            return True
        if lane.budget_tag is None:
            self._order_count(head)
            return False
        return self._order_budget(head)

    def _head(self, lane: Lane) -> _Demand:
        """The oldest claim, or one behind it on whose host all lies that it wants."""
        queue = self._lanes[lane]
        head = next(iter(queue.values()))
        settled = head.parts or head.held or head.told or head.needed_bytes
        if settled or lane.budget_tag is not None or head.passed_over >= NEAR_TURNS:
            return head
        if len(queue) == 1 or self._tallies[lane.where].ready(lane.unit) <= 0:
            return head
        near = self._near(lane)
        if near.get(head.claim.peer):
            return head
        for other in itertools.islice(queue.values(), 1, NEAR_CLAIMS):
            if not other.held and near.get(other.claim.peer, 0) >= other.least:
                head.passed_over += 1
                queue.move_to_end(other.claim, last=False)
                return other
        return head

    def _is_met(self, head: _Demand) -> bool:
        if not head.held:
            return False
        nothing_left = self._is_final(head.lane) and not self._remaining(head.lane)
        if head.lane.budget_tag is not None:
            full = head.amount >= head.want.budget or head.needed_bytes > 0
            return bool(head.blocked) or full or nothing_left
        return head.held >= head.least or nothing_left

    def _order_count(self, head: _Demand) -> None:
        """Order what is missing: all of it where nothing is held yet, else whatever there is."""
        tally, unit = self._tallies[head.lane.where], head.lane.unit
        least = head.least - head.held
        if self._is_final(head.lane):
            least = min(least, self._remaining(head.lane))
        available = tally.ready(unit)
        if available <= 0 or (not head.held and available < least):
            return
        parts = self._split(head, min(available, head.want.count - head.held))
        exact = len(parts) == 1 and not head.held
        for peer, units in parts:
            want = Want(unit, units, max(1, min(units, least)), head.want.where)
            self._send(head, peer, units, want, exact)

    def _split(self, head: _Demand, units: int) -> list[tuple[str, int]]:
        tally, parts = self._tallies[head.lane.where], []
        for peer, ready in tally.suppliers(head.lane.unit, head.claim.peer):
            parts.append((peer, min(ready, units)))
            units -= parts[-1][1]
            if not units:
                break
        return parts

    def _order_budget(self, head: _Demand) -> bool:
        """One peer after another, each with what the others left of the budget."""
        tally, unit, want = self._tallies[head.lane.where], head.lane.unit, head.want
        for peer, ready in tally.suppliers(unit, head.claim.peer):
            if peer not in head.blocked:
                left = want.budget - head.amount
                rest = Want(unit, want.count, 1, want.where, want.budget_tag, left)
                self._send(head, peer, ready, rest, exact=False)
                return False
        if head.blocked and not head.held:
            self._end(head, Unmeetable(head.claim))
            return True
        return False

    def _send(self, head: _Demand, peer: str, units: int, want: Want, exact: bool) -> None:
        tally = self._tallies[head.lane.where]
        head.parts[peer] = _Part(units, exact, tally.version(peer))
        tally.ordered(peer, head.lane.unit, units)
        self._out.append(Order(head.claim, peer, want, exact, max(0, head.credit_bytes)))
        self._lanes.move_to_end(head.lane)

    def _settle(self, head: _Demand) -> None:
        """All suppliers have answered: may the head keep less than it wants?"""
        if head.parts or not head.held or self._is_met(head) or head.lane.budget_tag is not None:
            return
        if head.told or head.needed_bytes:
            return  # it has all it gets, or gives everything back
        if self._partial in (None, head.claim):
            self._partial = head.claim
        else:
            head.held = 0
            self._out.append(Return(head.claim))

    def _is_final(self, lane: Lane) -> bool:
        """No new row can come: every peer counted after it had stopped taking them."""
        return self._sealed and self._tallies[lane.where].sealed_peers == len(self._peers)

    def _is_drained(self, lane: Lane) -> bool:
        return self._is_final(lane) and not self._tallies[lane.where].outstanding(lane.unit)

    def _remaining(self, lane: Lane) -> int:
        return self._tallies[lane.where].remaining(lane.unit)

    def _end(self, demand: _Demand, instruction: Complete | Ended | Unmeetable | Starved) -> None:
        self._remove(demand)
        self._out.append(instruction)

    def _remove(self, demand: _Demand) -> None:
        tally = self._tallies[demand.lane.where]
        for peer, part in demand.parts.items():
            tally.ordered(peer, demand.lane.unit, -part.asked)
        del self._demands[demand.claim]
        queue = self._lanes[demand.lane]
        del queue[demand.claim]
        if not queue:
            del self._lanes[demand.lane]
        if self._partial == demand.claim:
            self._partial = None

    # which counts the peers send

    def _watch(self, lane: Lane) -> None:
        """Have the lane's filter counted; the plain lanes always are."""
        where = lane.where
        if where in self._tallies:
            self._tallies.move_to_end(where)
            return
        self._tallies[where] = Tally()
        self._out.append(Watch(lane, True))
        wanted = {other.where for other in self._lanes} | {b"", where}
        idle = [w for w in self._tallies if w not in wanted]
        for old in idle[: max(0, len(self._tallies) - 1 - MAX_WATCHED)]:
            del self._tallies[old]
            self._asked_final = {(w, p) for w, p in self._asked_final if w != old}
            self._out.append(Watch(Lane(lane.unit, old), False))

    def _ask_final(self, lane: Lane) -> None:
        """Peers that counted before the seal are asked once more."""
        tally = self._tallies[lane.where]
        if tally.sealed_peers == len(self._peers):
            return
        for peer in sorted(self._peers):
            if not tally.is_sealed(peer) and (lane.where, peer) not in self._asked_final:
                self._asked_final.add((lane.where, peer))
                self._out.append(Watch(lane, True, peer))
