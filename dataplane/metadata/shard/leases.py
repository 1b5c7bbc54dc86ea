"""The leases of a store: which rows of which stage a client holds, since when, and by which claim.

A lease names rows by their block, in which a row number is never reused. Indices in a lease
never change: finished rows are marked. The holder's peer keeps a hard limit. The lease of a plan
has members instead of a holder, with numbers of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from dataplane.latest import Latest
from dataplane.metadata.shard.blocks import Block, Rows
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.tables.bits import bits_of, rows_of
from dataplane.wire.tables import PlanRows, Shape

MAX_OVER = 16_384
"""Members of plans that ended early, per partition."""
RETRY_KEY_S = 120.0
"""A partition remembers a finished call for at least this long, so that it recognises a retry: the
deadlines of two calls, and a pause between them."""
MAX_RETRY_KEYS = 131_072
"""A partition remembers at most this many finished calls, even if more come within that time."""


class Part:
    """Rows of one block in a lease, and the message rows that they belong to. number: of the
    part in the lease. bits: the same rows as a set."""

    __slots__ = ("at", "bits", "block", "number", "rows")

    def __init__(
        self, number: int, block: Block, rows: Sequence[int], at: Sequence[int], bits: int = 0
    ) -> None:
        self.number = number
        self.block = block
        self.rows = rows
        self.at = at
        self.bits = bits or bits_of(rows)

    def there(self) -> Part:
        """The part without rows that no longer exist."""
        live = self.block.live
        if not self.bits & ~live:
            return self
        kept = [i for i, row in enumerate(self.rows) if live >> row & 1]
        return Part(
            self.number, self.block, [self.rows[i] for i in kept], [self.at[i] for i in kept]
        )


class Lease(msgspec.Struct, eq=False):
    """A lease. left: the unfinished rows of each part of `rows`. claim: the number of the granted
    claim, which identifies a retry; 0 if none."""

    number: int
    stage: Stage
    rows: Rows
    left: list[int]
    holder: int
    started: float
    claim: int = 0
    _ends: list[int] = []
    """how many rows there are up to each part"""

    @property
    def held(self) -> Rows:
        """The rows that are not finished and exist."""
        parts = zip(self.rows.parts, self.left, strict=True)
        return Rows([(b, bits) for (b, _), left in parts if (bits := left & b.live)])

    @property
    def is_done(self) -> bool:
        return not any(self.left)

    @property
    def many_left(self) -> int:
        return sum([left.bit_count() for left in self.left])

    def unfinished(self) -> list[Part]:
        """The unfinished rows, in order."""
        found, at = [], 0
        for number, left in enumerate(self.left):
            if left:
                rows, end = rows_of(left), at + left.bit_count()
                found.append(Part(number, self.rows.parts[number][0], rows, range(at, end), left))
                at = end
        return found

    def at(self, positions: Sequence[int]) -> list[Part]:
        """The rows at these indices of the lease, in order of its parts."""
        if not self._ends:
            self._ends = list(accumulate(bits.bit_count() for _, bits in self.rows.parts))
        by_part: dict[int, tuple[list[int], list[int]]] = {}
        of: dict[int, Sequence[int]] = {}
        for place, position in enumerate(positions):
            number = bisect_right(self._ends, position)
            if number not in of:
                of[number] = rows_of(self.rows.parts[number][1])
                by_part[number] = [], []
            rows, at = by_part[number]
            rows.append(of[number][position - self._ends[number]])  # a negative index
            at.append(place)
        parts = self.rows.parts
        return [Part(n, parts[n][0], *both) for n, both in by_part.items()]

    @property
    def count(self) -> int:
        """The number of rows that were granted."""
        return len(self.rows)


class Plan(msgspec.Struct, eq=False):
    """The plan of a stage. members: by number, in the order in which they joined."""

    lease: Lease
    shape: Shape
    rows: PlanRows
    members: dict[int, Member] = {}

    @property
    def working(self) -> list[Member]:
        """The members that have not acked yet."""
        return [one for one in self.members.values() if not one.acked]


class Member(msgspec.Struct, eq=False):
    """A process that takes part in a plan. number: like a lease's. claim: the number of its
    call. started: when it joined."""

    number: int
    plan: Plan
    rank: int
    holder: int
    claim: int
    started: float
    acked: bool = False


class RetryKeys:
    """The keys of the last calls that ended rows, see `finishes.retry_key`. Each is kept for
    RETRY_KEY_S to twice that time, and for less only if there are MAX_RETRY_KEYS."""

    def __init__(self) -> None:
        self._recent: dict[int, None] = {}
        self._before: dict[int, None] = {}
        self._since = 0.0
        """when the first of the recent keys was added"""

    def __contains__(self, key: int) -> bool:
        return key in self._recent or key in self._before

    def __iter__(self) -> Iterator[int]:
        """All keys, the oldest first."""
        yield from self._before
        yield from self._recent

    def add(self, key: int, now: float) -> None:
        if not self._recent:
            self._since = now
        elif now - self._since >= RETRY_KEY_S or len(self._recent) >= MAX_RETRY_KEYS // 2:
            self._before, self._recent, self._since = self._recent, {}, now
        self._recent[key] = None


class Leases:
    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._by_claim: dict[int, Lease] = {}
        self.over = Latest[int, str](MAX_OVER)
        """members of plans that ended early, each with the reason"""
        self.plans: dict[str, Plan] = {}
        """by stage"""
        self.retry_keys = RetryKeys()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def add(self, lease: Lease) -> None:
        self._leases[lease.number] = lease
        if lease.claim:
            self._by_claim[lease.claim] = lease

    def get(self, number: int) -> Lease | None:
        return self._leases.get(number)

    def of_claim(self, number: int) -> Lease | None:
        """The unfinished lease that a claim was granted."""
        return self._by_claim.get(number)

    def end(self, lease: Lease) -> None:
        del self._leases[lease.number]
        self._by_claim.pop(lease.claim, None)

    def of(self, holder: int) -> list[Lease]:
        """A holder's leases, oldest first."""
        return [one for one in self._leases.values() if one.holder == holder]

    # plans

    @property
    def members(self) -> Iterator[Member]:
        """The members of all plans."""
        return (one for plan in self.plans.values() for one in plan.members.values())

    def member(self, number: int) -> Member | None:
        for plan in self.plans.values():
            if number in plan.members:
                return plan.members[number]
        return None

    def member_of_claim(self, number: int) -> Member | None:
        """The member that joined by this call."""
        return next((one for one in self.members if one.claim == number), None)

    def members_of(self, holder: int) -> list[Member]:
        """The members of a holder, one for each plan that it has not acked."""
        found = {
            one.plan.lease.number: one
            for one in self.members
            if one.holder == holder and not one.acked
        }
        return list(found.values())

    def end_plan(self, plan: Plan, why: str = "") -> None:
        """End a plan; the caller ends its lease. why: the reason for its members."""
        del self.plans[plan.lease.stage.name]
        if why:
            self.over.update(dict.fromkeys(plan.members, why))

    @property
    def holders(self) -> set[int]:
        """All clients with leased rows. A plan's lease counts for its members."""
        members = {one.holder for one in self.members if not one.acked}
        return {one.holder for one in self._leases.values()} - {0} | members
