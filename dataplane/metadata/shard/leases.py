"""The leases of a store: which rows of which stage somebody holds, since when, by which claim.

A lease names rows by slot and incarnation, so that a slot which was freed and used again is not
taken for the row that was leased. Positions in a lease never change: what is finished is marked.
A hard limit is kept by the holder's peer. The lease of a plan has no holder but members, who go by
numbers of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.tables.columns import Array
from dataplane.wire.tables import Laid, Shape

MAX_FINISHED = 16_384
"""Finished leases that are known by number, for whoever asks again because a peer died before it
answered."""


@dataclass(slots=True, eq=False)
class Lease:
    """`left`: which of the rows are not finished yet. claim: the number of the one that was met, by
    which it is answered again; 0: none."""

    number: int
    stage: Stage
    unit: str
    slots: Array
    incarnations: Array
    left: Array
    holder: int
    started: float
    claim: int = 0
    plan: Plan | None = None


@dataclass(slots=True, eq=False)
class Plan:
    """members: by number, in the order in which they came."""

    lease: Lease
    shape: Shape
    laid: Laid
    members: dict[int, Member] = field(default_factory=dict)

    @property
    def working(self) -> list[Member]:
        """Those that have not acked yet."""
        return [one for one in self.members.values() if not one.acked]

    def of_rank(self, rank: int) -> list[Member]:
        return [one for one in self.members.values() if one.rank == rank]


@dataclass(slots=True, eq=False)
class Member:
    """A process that takes part in a plan. number: as of a lease. claim: the number of its call."""

    number: int
    plan: Plan
    rank: int
    holder: int
    claim: int
    acked: bool = False


class Leases:
    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._held: dict[int, set[int]] = {}
        self._by_claim: dict[int, Lease] = {}
        self._finished: dict[int, None] = {}
        self._plans: dict[str, Plan] = {}
        self._members: dict[int, Member] = {}
        self._ended: dict[int, str] = {}
        """members of plans that ended before their time, and why"""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def add(self, lease: Lease) -> None:
        self._leases[lease.number] = lease
        self._held.setdefault(lease.holder, set()).add(lease.number)
        if lease.claim:
            self._by_claim[lease.claim] = lease

    def get(self, number: int) -> Lease | None:
        return self._leases.get(number)

    def of_claim(self, number: int) -> Lease | None:
        """What a claim was met with, as long as it is not finished."""
        return self._by_claim.get(number)

    def finish(self, lease: Lease) -> None:
        """Its holder is done with all of it."""
        self.end(lease)
        self.remember([lease.number])

    def remember(self, numbers: Iterable[int]) -> None:
        """Leases that were finished; the oldest are forgotten."""
        self._finished.update(dict.fromkeys(numbers))
        while len(self._finished) > MAX_FINISHED:
            del self._finished[next(iter(self._finished))]

    @property
    def finished(self) -> list[int]:
        """Those that are remembered, oldest first."""
        return list(self._finished)

    def was_finished(self, number: int) -> bool:
        return number in self._finished

    def end(self, lease: Lease) -> None:
        del self._leases[lease.number]
        self._by_claim.pop(lease.claim, None)
        held = self._held[lease.holder]
        held.discard(lease.number)
        if not held:
            del self._held[lease.holder]

    def of(self, holder: int) -> list[Lease]:
        """A holder's leases, oldest first."""
        return [self._leases[number] for number in sorted(self._held.get(holder, ()))]

    # plans

    def plan(self, stage: str) -> Plan | None:
        """The plan that a stage has."""
        return self._plans.get(stage)

    @property
    def plans(self) -> Iterable[Plan]:
        return self._plans.values()

    def member(self, number: int) -> Member | None:
        return self._members.get(number)

    def member_of_claim(self, number: int) -> Member | None:
        """Who came by this call."""
        return next((one for one in self._members.values() if one.claim == number), None)

    def members_of(self, holder: int) -> list[Member]:
        """Of a holder, one for each plan in which it has yet to ack."""
        found = {
            one.plan.lease.number: one
            for one in self._members.values()
            if one.holder == holder and not one.acked
        }
        return list(found.values())

    def add_plan(self, plan: Plan) -> None:
        plan.lease.plan = plan
        self._plans[plan.lease.stage.name] = plan

    def add_member(self, member: Member) -> None:
        self._members[member.number] = member.plan.members[member.number] = member

    def remove_member(self, member: Member) -> None:
        del self._members[member.number], member.plan.members[member.number]

    def end_plan(self, plan: Plan, why: str = "") -> None:
        """It is no more; its lease is the caller's to end. why: what its members are told."""
        del self._plans[plan.lease.stage.name]
        for number in plan.members:
            del self._members[number]
            if why:
                self._ended[number] = why
        while len(self._ended) > MAX_FINISHED:
            del self._ended[next(iter(self._ended))]

    def why_ended(self, number: int) -> str:
        """What a member of a plan that ended before its time is told; "" for all others."""
        return self._ended.get(number, "")

    @property
    def holders(self) -> set[int]:
        """All who have rows in hand. A plan's lease is nobody's: its members have it."""
        return set(self._held) - {0} | {
            one.holder for one in self._members.values() if not one.acked
        }
