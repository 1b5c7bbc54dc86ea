"""The claims of one stage that wait at its partition's shard, and which of them is granted next.

Sans-I/O: it takes claims, and leases ready rows in the store. Claims are
tried in order of age. A claim for which too few units are ready is *short*: it keeps its place and
blocks no other claim. After KEEP_AFTER_S, units that it wants are kept from younger claims until it
is granted. A claim that is not short is granted as soon as rows come, so a waiting claim counts as
short since it was made, at any peer. Claims of a part in the stage's plan wait apart, because they
need all remaining rows to be ready.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterator
from heapq import heapify, heappop, heappush

import msgspec

from dataplane.errors import (
    DataplaneError,
    ProtocolError,
    RowsLost,
    StreamEnd,
    ValueTooLarge,
    counted,
    sized,
)
from dataplane.metadata.shard import plans, rows_out
from dataplane.metadata.shard.blocks import LEASED, PENDING
from dataplane.metadata.shard.permits import by_age
from dataplane.metadata.shard.stages import Counts, Units
from dataplane.metadata.shard.store import Store
from dataplane.metadata.shard.takes import PullCredit, Reservation
from dataplane.wire.events import Reason
from dataplane.wire.messages import Claim, Claimed, Finish, Want

KEEP_AFTER_S = 1.0
"""Units are kept for a claim that has been short for longer than this."""
MAX_BROKEN = 16
"""Up to this many claims may fail because of a bug. One more failure also stops the others."""


class WaitingClaim:
    """A waiting claim of the peer at `address`. since: when it was made."""

    __slots__ = ("address", "asked", "holder", "number", "reason", "since", "want")

    def __init__(self, asked: Claim, holder: int, address: str, since: float) -> None:
        self.asked = asked
        self.number, self.want = asked.number, asked.want
        self.holder = holder
        self.address = address
        self.since = since
        self.reason = Reason.NONE

    @property
    def least(self) -> int:
        """The fewest units with which the claim may be met before the partition is sealed."""
        want = self.want
        if want.budget_tag is not None:
            return 1
        return want.minimum if 0 < want.minimum < want.count else want.count

    @property
    def credit(self) -> PullCredit:
        return PullCredit(self.address, self.asked.most_bytes, self.asked.fields)

    @property
    def terms(self) -> bytes:
        """The key of claims that are short together: if a claim is short, so are younger claims of
        equal terms that need as many units."""
        want = self.want
        of_budget = (want.budget_tag, want.budget, want.count, self.credit)
        by_count = want.budget_tag is None
        return msgspec.msgpack.encode((want.unit, want.where, None if by_count else of_budget))


class _Line:
    """The claims of equal terms, the oldest first."""

    def __init__(self) -> None:
        self.claims: list[WaitingClaim] = []
        self._leasts: list[int] = []
        """in ascending order"""

    def add(self, claim: WaitingClaim) -> None:
        insort(self.claims, claim, key=by_age)
        insort(self._leasts, claim.least)

    def remove(self, claim: WaitingClaim) -> None:
        self.claims.remove(claim)
        del self._leasts[bisect_left(self._leasts, claim.least)]

    def first(
        self,
        without: Container[int],
        most: float = math.inf,
        after: tuple[float, int] = (-math.inf, 0),
    ) -> WaitingClaim | None:
        """Return the oldest claim that is younger than `after`, needs at most `most` units and is
        not in `without`."""
        if not self._leasts or self._leasts[0] > most:
            return None
        for at in range(bisect_right(self.claims, after, key=by_age), len(self.claims)):
            claim = self.claims[at]
            if claim.least <= most and claim.number not in without:
                return claim
        return None


Outcome = tuple[WaitingClaim, Claimed | DataplaneError]
"""A claim with its rows, or its part in the plan, or why it never can be met."""


class ClaimQueue:
    def __init__(self, store: Store, stage: str) -> None:
        self.store = store
        self.stage = stage
        self._lines: dict[bytes, _Line] = {}
        """by terms"""
        self._claims: dict[int, WaitingClaim] = {}
        self._joining: dict[int, WaitingClaim] = {}
        """the claims among them that ask for a part in the plan"""

    def __repr__(self) -> str:
        return f"<ClaimQueue of {self.stage!r}: {len(self)} claims>"

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[WaitingClaim]:
        """The oldest first."""
        return iter(sorted(self._claims.values(), key=by_age))

    def __contains__(self, number: int) -> bool:
        return number in self._claims

    @staticmethod
    def _check(claim: WaitingClaim) -> None:
        """Raise ProtocolError for a claim of nothing, or of a part that no plan has."""
        want, plan = claim.want, claim.asked.plan
        if plan is not None:
            plans.check(plan, claim.asked.rank)
            return
        if want.budget_tag is None and want.count < 1:
            raise ProtocolError(f"cannot claim {want.count} {want.unit}: ask for at least 1")
        if want.budget_tag is not None and not want.budget > 0:
            raise ProtocolError(
                f"cannot claim with a budget of {want.budget}: pass a budget above 0"
            )

    def at_once(self, claim: WaitingClaim, now: float) -> Claimed | DataplaneError | None:
        """Meet a claim if no other one is queued. Return None if it must be queued. Raises what
        `add` raises."""
        self._check(claim)
        if self._claims or claim.asked.plan is not None:
            return None
        counts = self.store.counts(self.stage, claim.want.unit, claim.want.where)
        met = self._try(claim, counts, now, [])
        return None if met is None else met[1]

    def add(self, claim: WaitingClaim) -> None:
        """Queue a claim by its age. A claim with the same number is replaced and keeps its age.

        Raises ProtocolError for a claim of nothing, an invalid filter, or a part that no plan
        has.
        """
        self._check(claim)
        before = self._claims.get(claim.number)
        if before is not None:
            self.withdraw(claim.number)
            claim.since = min(claim.since, before.since)
        if claim.asked.plan is not None:
            self._claims[claim.number] = self._joining[claim.number] = claim
            return
        terms = claim.terms
        if terms not in self._lines:
            self._units(claim.want).want(claim.want.where, True)
            self._lines[terms] = _Line()
        self._claims[claim.number] = claim
        self._lines[terms].add(claim)

    def _units(self, want: Want) -> Units:
        return self.store.stage(self.stage).units(want.unit)

    def withdraw(self, number: int) -> bool:
        """Withdraw a claim. Return whether it waited here."""
        claim = self._claims.pop(number, None)
        if claim is None:
            return False
        if self._joining.pop(number, None) is not None:
            return True
        terms = claim.terms
        line = self._lines[terms]
        line.remove(claim)
        if not line.claims:
            del self._lines[terms]
            self._units(claim.want).want(claim.want.where, False)
        return True

    def before(self, number: int, made_before: float = math.inf) -> int:
        """Return how many older claims wait that may want the same units as a waiting claim.
        made_before: count only claims that were made before this time."""
        claim = self._claims.get(number)
        if claim is None or claim.asked.plan is not None:
            return 0
        until, where = min(by_age(claim), (made_before, 0)), claim.want.where
        return sum(
            bisect_left(line.claims, until, key=by_age)
            for line in self._lines.values()
            if where is None or line.claims[0].want.where in (None, where)
        )

    def reason(self, number: int, now: float) -> Reason:
        """Why a claim waits, derived from counts alone."""
        claim = self._claims[number]
        if claim.asked.plan is not None:
            return Reason.PLAN
        stage, want = self.store.stage(self.stage), claim.want
        units = stage.units(want.unit)
        ready, matching = units.ready(None), units.ready(want.where)
        by_count, least = want.budget_tag is None, claim.least
        if matching >= least and (by_count or self.before(number, now - KEEP_AFTER_S)):
            return Reason.BEHIND
        if ready >= least > matching:
            return Reason.FILTER
        if stage.rows.counts[PENDING]:
            return Reason.FIELD
        if units.counts[PENDING]:
            return Reason.OPEN_GROUP
        if units.counts[LEASED] and self.store.sealed:
            return Reason.LEASED
        return Reason.TOO_FEW if matching else Reason.NO_ROWS

    def note_reason(self, number: int, now: float) -> None:
        """Remember why a claim waits now."""
        self._claims[number].reason = self.reason(number, now)

    def get(self, number: int) -> WaitingClaim | None:
        return self._claims.get(number)

    def waits_for(self, number: int, now: float) -> str:
        """Why a call that asks for a part in the plan waits, if rows are not the reason."""
        claim = self._joining.get(number)
        if claim is None:
            return ""
        return plans.waits_for(self.store, self.stage, claim.asked.rank, now)

    def serve(self, now: float, keep: bool = True) -> Iterator[Outcome]:
        """Grant every claim that can be granted, one by one on request, and report the outcome of
        each.

        keep: reserve units for claims that have been short for over KEEP_AFTER_S. A claim that
        fails because of a bug keeps waiting, and nothing is kept for it. The first such error is
        raised at the end.
        """
        unjoined: list[Exception] = []
        yield from self._joined(now, unjoined) if self._joining else []
        broken: dict[int, Exception] = {}
        goes_on = True
        while goes_on:  # rows taken singly may end an older claim of groups
            goes_on = False
            for outcome in self._pass(now, keep, broken):
                goes_on = True
                yield outcome
        for failure in (*unjoined, *broken.values()):
            raise failure

    def _pass(self, now: float, keep: bool, broken: dict[int, Exception]) -> Iterator[Outcome]:
        """Try claims in order of age. Skip those that are short because others in line are."""
        kept: list[Reservation] = []
        firsts = [(line.first(broken), line) for line in self._lines.values()]
        heads = [(*by_age(claim), claim, line) for claim, line in firsts if claim is not None]
        heapify(heads)
        while heads:
            claim, line = heappop(heads)[2:]
            form, most = (claim.want.unit, claim.want.where), math.inf
            try:
                counts = self.store.counts(self.stage, *form)
                outcome = self._try(claim, counts, now, kept)
            except Exception as exc:
                if len(broken) == MAX_BROKEN:
                    raise
                broken[claim.number] = exc
            else:
                if outcome is not None:
                    yield outcome
                elif not keep or now - claim.since <= KEEP_AFTER_S:
                    most = min(claim.least - 1, counts.ready)
                else:  # nothing is left for the others of its line
                    kept += [] if form in kept else [form]
                    continue
            following = line.first(broken, most, by_age(claim))
            if following is not None:
                heappush(heads, (*by_age(following), following, line))

    def _joined(self, now: float, failures: list[Exception]) -> list[Outcome]:
        """Outcomes of the claims that joined the plan or never can. failures: gets errors of
        bugs."""
        if self.store.sealed and not self.store.counts(self.stage).outstanding:
            return [self._ended(claim) for claim in list(self._joining.values())]
        outcomes: list[Outcome] = []
        if not plans.may_join(self.store, self.stage):  # the usual case at a put
            return outcomes
        for claim in list(self._joining.values()):
            plan, rank = claim.asked.plan, claim.asked.rank
            assert plan is not None
            try:
                member = self.store.join(self.stage, plan, rank, claim.holder, now, claim.number)
            except DataplaneError as exc:
                outcomes.append(self._over(claim, exc))
                continue
            except Exception as exc:
                failures.append(exc)
                continue
            if member is not None:
                self.withdraw(claim.number)
                outcomes.append((claim, plans.part(member)))
        return outcomes

    def _try(
        self, claim: WaitingClaim, counts: Counts, now: float, kept: list[Reservation]
    ) -> Outcome | None:
        """Return what becomes of a claim; None if it is short. counts: of its units."""
        want, sealed = claim.want, self.store.sealed
        if sealed and not counts.to_come:
            return self._ended(claim)
        if not counts.ready:
            return None
        all_there = sealed and counts.remaining == counts.ready
        if want.budget_tag is None:
            least = min(claim.least, counts.remaining) if sealed else claim.least
            if counts.ready < least:
                return None
            if least != want.minimum:
                want = Want(want.unit, want.count, least, want.where, in_order=want.in_order)
        last = all_there and want.budget_tag is not None and not kept
        try:
            rows_out.check_known(self.store, claim.asked.fields or (), self.stage)
            taken = self.store.take(
                self.stage, want, claim.holder, now, claim.number, claim.credit, last, kept
            )
        except DataplaneError as exc:  # it would fail at every turn, for any caller
            return self._over(claim, exc)
        if taken.lease is not None:
            assert taken.rows is not None and taken.values is not None
            try:
                table = rows_out.table_of(self.store, taken.rows, taken.values)
            except BaseException:  # the claim keeps waiting, so nobody would hold the lease
                self.store.finish(Finish(taken.lease, "release"), now)
                raise
            self.withdraw(claim.number)
            return claim, Claimed(taken.lease, 0, table)
        if taken.needed_bytes:
            return self._too_large(claim, taken.needed_bytes)
        return None

    def _over(self, claim: WaitingClaim, why: DataplaneError) -> Outcome:
        self.withdraw(claim.number)
        return claim, why

    def _ended(self, claim: WaitingClaim) -> Outcome:
        """The outcome of a claim after the last row: StreamEnd, or RowsLost if rows were lost."""
        store, stage = self.store, self.stage
        had = f"partition {store.partition!r} is sealed and stage {stage!r} has received every row"
        if store.stage(stage).lost:
            total, keys = store.losses.total, store.losses.latest()
            lost = RowsLost(
                f"{had} that remains, but {counted(total, 'row')} (for example "
                f"{', '.join(map(repr, keys[:3]))}) {'was' if total == 1 else 'were'} lost "
                "when a peer died. part.lost() lists all "
                "lost rows. To process these rows, put them into a new partition",
                partition=store.partition,
                rows=total,
                keys=keys,
            )
            return self._over(claim, lost)
        unit = claim.want.unit
        counts = store.counts(stage, unit)
        left = counts.remaining
        if split := counts.outstanding - counts.to_come:
            had += (
                f" that is part of a complete group. Rows of {counted(split, unit[:-1])} were "
                "claimed individually, so a claim for groups cannot return them"
            )
        elif left:
            one, many = f"other {unit[:-1]} remains", f"other {unit} remain"
            had += f" that matches, but {counted(left, one, many)}"
        return self._over(claim, StreamEnd(had, remaining=left))

    def _too_large(self, claim: WaitingClaim, needed_bytes: int) -> Outcome:
        """The outcome of a claim whose next unit needs more bytes than its host's arena can
        hold."""
        return self._over(
            claim,
            ValueTooLarge(
                f"a claim for stage {self.stage!r} of partition {self.store.partition!r} "
                f"needs to pull {sized(needed_bytes)} from other hosts at once, but the "
                f"arena of this host can hold at most {sized(claim.asked.most_bytes)} of "
                "pulled values: claim fewer rows at a time, pass min= to accept fewer rows "
                "than you ask for, or give the peer a larger arena (--arena, DATAPLANE_ARENA)",
                needed_bytes=needed_bytes,
                cap_bytes=claim.asked.most_bytes,
                admission="pull",
            ),
        )
