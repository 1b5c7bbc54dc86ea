"""The claims of one stage that wait at its partition's shard, and which of them is granted next.

Sans-I/O: claims come in, and ready rows are read from the store and leased there. Waiting claims
hold nothing. First come, first served: claims with equal unit and filter form a lane. The head
of a lane leaves rows to older heads that match them, unless another claim must proceed first for
those to be granted. A claim whose values are all on its own host may overtake a head with none
on its host, NEAR_TURNS times at most. Calls that ask for a part in the stage's plan are in no
lane: all rows that are left must be ready for that.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Container, Iterator

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
from dataplane.metadata.shard import plans, rows_out, takes
from dataplane.metadata.shard.blocks import LEASED, PENDING
from dataplane.metadata.shard.permits import by_age
from dataplane.metadata.shard.stages import Counts, Units
from dataplane.metadata.shard.store import Store
from dataplane.metadata.shard.takes import NEAR_TURNS, PullCredit, Reservation
from dataplane.wire.events import Reason
from dataplane.wire.messages import Claim, Claimed, Finish, Want

NEAR_CLAIMS = 64
"""How far down the lane such a claim is looked for."""
MAX_BROKEN = 16
"""Claims that may fail before the others are not served either."""

Lane = tuple[str, bytes]
"""Unit, and the filter's MessagePack form, b"" without one."""


class WaitingClaim:
    """A waiting claim of the peer at `address`. since: when it was made. let_by: near claims
    that overtook it."""

    __slots__ = (
        "address",
        "asked",
        "holder",
        "lane",
        "let_by",
        "number",
        "reason",
        "since",
        "want",
    )

    def __init__(self, asked: Claim, holder: int, address: str, since: float) -> None:
        self.asked = asked
        self.number, self.want = asked.number, asked.want
        self.holder = holder
        self.address = address
        self.since = since
        self.let_by = 0
        self.reason = Reason.NONE
        where = asked.want.where
        self.lane: Lane = asked.want.unit, b"" if where is None else msgspec.msgpack.encode(where)

    @property
    def least(self) -> int:
        """The size at which a claim by count may return before the partition is sealed."""
        want = self.want
        return want.minimum if 0 < want.minimum < want.count else want.count


Outcome = tuple[WaitingClaim, Claimed | DataplaneError]
"""A claim with its rows, or its part in the plan, or why it never can be met."""


class ClaimQueue:
    def __init__(self, store: Store, stage: str) -> None:
        self.store = store
        self.stage = stage
        self._lanes: dict[Lane, list[WaitingClaim]] = {}
        """the oldest claim first"""
        self._claims: dict[int, WaitingClaim] = {}
        self._joining: dict[int, WaitingClaim] = {}
        """of them, those who ask for a part in the plan"""
        self._trying = 0
        """the number of the claim that is being met"""

    def __repr__(self) -> str:
        return f"<ClaimQueue of {self.stage!r}: {len(self)} claims in {len(self._lanes)} lanes>"

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
        want = claim.want
        counts = self.store.counts(self.stage, want.unit, want.where)
        if self.store.sealed and not counts.to_come:
            return self._ended(claim)[1]
        met = self._meet(claim, counts, now, []) if counts.ready else None
        return None if met is None else met[1]

    def add(self, claim: WaitingClaim) -> None:
        """Queue a claim by its age. A claim with the same number is replaced and keeps its age.

        Raises ProtocolError for a claim of nothing, an invalid filter, or a part that no plan
        has.
        """
        self._check(claim)
        want, before = claim.want, self._claims.get(claim.number)
        if before is not None:
            self.withdraw(claim.number)
            if before.lane == claim.lane:
                claim.since, claim.let_by = min(claim.since, before.since), before.let_by
        if claim.asked.plan is not None:
            self._claims[claim.number] = self._joining[claim.number] = claim
            return
        if claim.lane not in self._lanes:
            self._units(want).want(want.where, True)
            self._lanes[claim.lane] = []
        self._claims[claim.number] = claim
        insort(self._lanes[claim.lane], claim, key=by_age)

    def _units(self, want: Want) -> Units:
        return self.store.stage(self.stage).units(want.unit)

    def withdraw(self, number: int) -> bool:
        """Withdraw a claim. Return whether it waited here."""
        claim = self._claims.pop(number, None)
        if claim is None:
            return False
        if self._joining.pop(number, None) is not None:
            return True
        lane = self._lanes[claim.lane]
        lane.remove(claim)
        if not lane:
            del self._lanes[claim.lane]
            self._units(claim.want).want(claim.want.where, False)
        return True

    def before(self, number: int) -> int:
        """How many claims of its lane are ahead of a waiting claim."""
        claim = self._claims.get(number)
        if claim is None or claim.asked.plan is not None:
            return 0
        return self._lanes[claim.lane].index(claim)

    def reason(self, number: int) -> Reason:
        """Why a claim waits, derived from counts alone."""
        claim = self._claims[number]
        if claim.asked.plan is not None:
            return Reason.PLAN
        stage, want = self.store.stage(self.stage), claim.want
        units = stage.units(want.unit)
        ready, matching = units.ready(None), units.ready(want.where)
        least = claim.least if want.budget_tag is None else 1
        if matching >= least and (want.budget_tag is None or self.before(number)):
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

    def note_reason(self, number: int) -> None:
        """Remember why a claim waits now."""
        self._claims[number].reason = self.reason(number)

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

        keep: rows that match older heads are not given to younger claims. A claim that fails
        because of a bug keeps waiting and holds no rows back. The first such error is raised at
        the end.
        """
        unjoined: list[Exception] = []
        yield from self._joined(now, unjoined) if self._joining else []
        broken: dict[int, Exception] = {}
        while True:
            try:
                outcome = self._next(now, keep, broken)
            except Exception as exc:
                if self._trying in broken or len(broken) == MAX_BROKEN:
                    raise
                broken[self._trying] = exc
                continue
            if outcome is None:
                break
            yield outcome
        for failure in (*unjoined, *broken.values()):
            raise failure

    def _next(self, now: float, keep: bool, broken: Container[int]) -> Outcome | None:
        """What becomes of the first who can be met."""
        kept: list[Reservation] = []
        heads = [queue[0] for queue in self._lanes.values()]
        if broken:
            firsts = (self._first(queue, broken) for queue in self._lanes.values())
            heads = [head for head in firsts if head is not None]
        for head in sorted(heads, key=lambda one: one.since) if len(heads) > 1 else heads:
            outcome = self._advance(head, now, kept, broken)
            if outcome is not None:
                return outcome
            if keep:
                kept.append((head.want.unit, head.want.where))
        return None

    @staticmethod
    def _first(queue: list[WaitingClaim], broken: Container[int]) -> WaitingClaim | None:
        return next((claim for claim in queue if claim.number not in broken), None)

    def _joined(self, now: float, failures: list[Exception]) -> list[Outcome]:
        """Who now takes part in the plan, or never will. failures: gets what bugs raised."""
        if self.store.sealed and not self.store.counts(self.stage).outstanding:
            return [self._ended(claim) for claim in list(self._joining.values())]
        outcomes: list[Outcome] = []
        if not plans.may_join(self.store, self.stage):  # as at every put, however many wait
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

    def _advance(
        self, head: WaitingClaim, now: float, kept: list[Reservation], broken: Container[int]
    ) -> Outcome | None:
        """Meet a lane's head, or a claim that goes before it."""
        queue, want = self._lanes[head.lane], head.want
        self._trying = head.number
        counts = self.store.counts(self.stage, want.unit, want.where)
        if self.store.sealed and not counts.to_come:
            return self._ended(head)
        if not counts.ready:
            return None
        near = self._near(head, queue, counts, broken) if len(queue) > 1 else None
        for claim in (near, head):
            outcome = self._meet(claim, counts, now, kept) if claim is not None else None
            if outcome is not None:
                if claim is not head:
                    head.let_by += 1
                return outcome
        return None

    def _meet(
        self, claim: WaitingClaim, counts: Counts, now: float, kept: list[Reservation]
    ) -> Outcome | None:
        self._trying = claim.number
        want, sealed = claim.want, self.store.sealed
        all_there = sealed and counts.remaining == counts.ready
        if want.budget_tag is None:
            least = min(claim.least, counts.remaining) if sealed else claim.least
            if counts.ready < least:
                return None
            if least != want.minimum:
                want = Want(want.unit, want.count, least, want.where)
        credit = PullCredit(claim.address, claim.asked.most_bytes, claim.asked.fields)
        last = all_there and want.budget_tag is not None and not kept
        try:
            rows_out.check_known(self.store, claim.asked.fields or (), self.stage)
            taken = self.store.take(
                self.stage, want, claim.holder, now, claim.number, credit, last, kept
            )
        except DataplaneError as exc:  # it would at every turn, and whoever put something be told
            return self._over(claim, exc)
        if taken.lease is not None:
            assert taken.rows is not None and taken.values is not None
            try:
                table = rows_out.table_of(self.store, taken.rows, taken.values)
            except BaseException:  # the claim waits on: the lease would be nobody's
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
        """No row can come any more."""
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
        """What is next needs more bytes at its host than can be."""
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

    # who goes before whom

    def _near(
        self,
        head: WaitingClaim,
        queue: list[WaitingClaim],
        counts: Counts,
        broken: Container[int],
    ) -> WaitingClaim | None:
        """A claim behind the head, on whose host all lies that it wants, while nothing lies on the
        head's."""
        if head.let_by >= NEAR_TURNS or head.want.budget_tag is not None:
            return None
        near = takes.near(self.store, self.stage, head.want.unit, head.want.where)
        if near.get(head.address):
            return None
        for other in itertools.islice(queue, 1, NEAR_CLAIMS):
            if other is head or other.number in broken:
                continue
            enough = min(counts.ready, near.get(other.address, 0)) >= other.least
            if enough and other.want.budget_tag is None:
                return other
        return None
