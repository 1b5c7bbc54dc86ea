"""The leases of this host's clients: which parts at which shards one claim handed out, and to whom.

A lease here is a handle; the rows are leased at the stores that granted them. It has a set of
holders, sessions of this host, and goes when it is finished or its last holder ended.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from dataplane.errors import LeaseExpired
from dataplane.peer.sessions import Session
from dataplane.wire.tables import Owner, Table

MAX_REFUSED = 16_384


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that one peer's store leased: consecutive rows of the claim's table. Who has that store
    now, `Host.heir` knows."""

    owner: Owner
    lease: int
    rows: int


@dataclass(frozen=True, slots=True)
class Handed:
    """A part with its rows."""

    part: Part
    table: Table


@dataclass(slots=True, eq=False)
class Lease:
    id: int
    partition: str
    generation: int
    stage: str
    parts: list[Part]
    holders: set[Session]
    deadline: float | None = None
    finished: set[int] = field(default_factory=set)
    """rows that left, by their place in the claim"""
    ended: set[int] = field(default_factory=set)
    """parts of which every row left"""

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


class Leases:
    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._refused: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def numbers(self) -> set[int]:
        """As the peers know them that granted the parts."""
        return {part.lease for lease in self._leases.values() for part in lease.parts}

    def open(
        self,
        session: Session,
        partition: str,
        generation: int,
        stage: str,
        parts: list[Part],
    ) -> Lease:
        lease = Lease(next(self._ids), partition, generation, stage, parts, {session})
        self._leases[lease.id] = lease
        session.leases.add(lease.id)
        return lease

    def limit(self, lease_id: int, deadline: float) -> None:
        """Its hard limit, which begins when its holder has the rows; one that ended has none."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.deadline = deadline
            heapq.heappush(self._deadlines, (deadline, lease_id))

    def overdue(self, now: float) -> list[Lease]:
        """Those whose hard limit has passed, each once."""
        passed = []
        while self._deadlines and self._deadlines[0][0] <= now:
            lease = self._leases.get(heapq.heappop(self._deadlines)[1])
            if lease is not None:
                passed.append(lease)
        return passed

    def among(self, leases: Iterable[int], partition: str, stage: str) -> bool:
        """Whether some of these are of a stage."""
        found = filter(None, map(self._leases.get, leases))
        return any((one.partition, one.stage) == (partition, stage) for one in found)

    def refuse(self, numbers: list[int]) -> None:
        """Parts that no claim here has, as was said to who granted them: their grants are too late
        now. The oldest are forgotten."""
        self._refused.update(dict.fromkeys(numbers))
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def is_refused(self, number: int) -> bool:
        return number in self._refused

    def of(self, session: Session, lease_id: int, now: float) -> Lease:
        """LeaseExpired unless this session holds it, and its time is not up."""
        lease = self._leases.get(lease_id) if lease_id in session.leases else None
        if lease is None or (lease.deadline is not None and now >= lease.deadline):
            raise LeaseExpired(
                "this lease has ended: it was acked or released, or its time was up and its rows "
                "went back to the stage. Nothing of this call was stored; claim again",
                lease=lease_id,
            )
        return lease

    def close(self, lease: Lease) -> None:
        """The lease is over, for all that hold it."""
        for holder in lease.holders:
            holder.leases.discard(lease.id)
        lease.holders.clear()
        self._leases.pop(lease.id, None)

    def leave(self, session: Session, lease_id: int) -> Lease | None:
        """The session holds it no more. The lease, where this was its last holder."""
        if lease_id not in session.leases:
            return None
        lease = self._leases[lease_id]
        session.leases.discard(lease_id)
        lease.holders.discard(session)
        if lease.holders:
            return None
        del self._leases[lease_id]
        return lease
