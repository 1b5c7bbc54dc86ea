"""The leases of a store: which rows of which stage somebody holds, since when, by which claim.

A lease names rows by their block, in which a row that is gone is never another one. Positions in a
lease never change: what is finished is marked.
A hard limit is kept by the holder's peer. The lease of a plan has no holder but members, who go by
numbers of their own.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, count

import msgspec

from dataplane.metadata.shard.blocks import Block, Rows
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.tables.bits import bits_of, rows_of
from dataplane.wire.tables import PlanRows, Shape

MAX_OVER = 16_384
"""Members of plans that ended before their time, of one partition."""


class Numbers:
    """Numbers of the leases, claims and permits that one peer makes. Changes have their own.

    A peer counts from a random place among 2⁶²: two of a thousand lives that make a million numbers
    each meet with a chance of 2e-7, and are confused only by numbers that are in use at once."""

    def __init__(self, first: int = 1) -> None:
        self._coming = count(first)

    @classmethod
    def of_new_peer(cls) -> Numbers:
        return cls(secrets.randbits(62) + 1)

    def __next__(self) -> int:
        return next(self._coming)


class Part:
    """Rows of one block in a lease, and for which rows of a message they are. number: which part of
    the lease they are of. bits: the same rows as a set."""

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
        """Without rows that are gone."""
        live = self.block.live
        if not self.bits & ~live:
            return self
        kept = [i for i, row in enumerate(self.rows) if live >> row & 1]
        return Part(
            self.number, self.block, [self.rows[i] for i in kept], [self.at[i] for i in kept]
        )


class Lease(msgspec.Struct, eq=False):
    """left: of each part of `rows` those that are not finished yet. claim: the number of the one
    that was met, by which it is answered again; 0: none."""

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
        """Those that are not finished, and there."""
        parts = zip(self.rows.parts, self.left, strict=True)
        return Rows([(b, bits) for (b, _), left in parts if (bits := left & b.live)])

    @property
    def is_done(self) -> bool:
        return not any(self.left)

    @property
    def many_left(self) -> int:
        return sum([left.bit_count() for left in self.left])

    def unfinished(self) -> list[Part]:
        """All that is left, in order."""
        found, at = [], 0
        for number, ((block, _), left) in enumerate(zip(self.rows.parts, self.left, strict=True)):
            if left:
                rows = rows_of(left)
                found.append(Part(number, block, rows, range(at, at + len(rows)), left))
                at += len(rows)
        return found

    def at(self, positions: Sequence[int]) -> list[Part]:
        """The rows at these positions, which the lease has, in order of its parts."""
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
            rows.append(of[number][position - self._ends[number]])  # from its end
            at.append(place)
        parts = self.rows.parts
        return [Part(n, parts[n][0], *both) for n, both in by_part.items()]

    @property
    def count(self) -> int:
        """Rows that it was granted."""
        return len(self.rows)


class Plan(msgspec.Struct, eq=False):
    """members: by number, in the order in which they came."""

    lease: Lease
    shape: Shape
    rows: PlanRows
    members: dict[int, Member] = {}

    @property
    def working(self) -> list[Member]:
        """Those that have not acked yet."""
        return [one for one in self.members.values() if not one.acked]


class Member(msgspec.Struct, eq=False):
    """A process that takes part in a plan. number: as of a lease. claim: the number of its call.
    started: when it joined."""

    number: int
    plan: Plan
    rank: int
    holder: int
    claim: int
    started: float
    acked: bool = False


class Leases:
    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._by_claim: dict[int, Lease] = {}
        self._over: OrderedDict[int, str] = OrderedDict()
        """members of plans that ended before their time, with why they did"""
        self._plans: dict[str, Plan] = {}
        """by stage"""

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
        """What a claim was met with, as long as it is not finished."""
        return self._by_claim.get(number)

    def end(self, lease: Lease) -> None:
        del self._leases[lease.number]
        self._by_claim.pop(lease.claim, None)

    def of(self, holder: int) -> list[Lease]:
        """A holder's leases, oldest first."""
        return [one for one in self._leases.values() if one.holder == holder]

    # plans

    def plan(self, stage: str) -> Plan | None:
        """The plan that a stage has."""
        return self._plans.get(stage)

    @property
    def plans(self) -> Iterable[Plan]:
        return self._plans.values()

    @property
    def members(self) -> Iterator[Member]:
        """Of all plans."""
        return (one for plan in self._plans.values() for one in plan.members.values())

    def member(self, number: int) -> Member | None:
        for plan in self._plans.values():
            if number in plan.members:
                return plan.members[number]
        return None

    def member_of_claim(self, number: int) -> Member | None:
        """Who came by this call."""
        return next((one for one in self.members if one.claim == number), None)

    def members_of(self, holder: int) -> list[Member]:
        """Of a holder, one for each plan in which it has yet to ack."""
        found = {
            one.plan.lease.number: one
            for one in self.members
            if one.holder == holder and not one.acked
        }
        return list(found.values())

    def add_plan(self, plan: Plan) -> None:
        self._plans[plan.lease.stage.name] = plan

    def end_plan(self, plan: Plan, why: str = "") -> None:
        """It is no more; its lease is the caller's to end. why: what its members are told."""
        del self._plans[plan.lease.stage.name]
        if why:
            self._over |= dict.fromkeys(plan.members, why)
            while len(self._over) > MAX_OVER:
                self._over.popitem(last=False)

    def why_ended(self, number: int) -> str:
        """What a member of a plan that ended before its time is told; "" for all others."""
        return self._over.get(number, "")

    @property
    def holders(self) -> set[int]:
        """All who have rows in hand. A plan's lease is nobody's: its members have it."""
        members = {one.holder for one in self.members if not one.acked}
        return {one.holder for one in self._leases.values()} - {0} | members
