"""The leases of this host's clients: which parts at which shards one claim handed out, and to whom.

A lease here is a handle; the rows are leased at the stores that granted them. It has a set of
holders, sessions of this host, and goes when it is finished or its last holder ended.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from dataplane.errors import LeaseExpired
from dataplane.peer.sessions import Session


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that one peer's store leased: consecutive rows of the claim's table."""

    address: str
    lease: int
    rows: int


@dataclass(slots=True, eq=False)
class Lease:
    id: int
    partition: str
    generation: int
    stage: str
    parts: list[Part]
    holders: set[Session]
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

    def __len__(self) -> int:
        return len(self._leases)

    def open(
        self, session: Session, partition: str, generation: int, stage: str, parts: list[Part]
    ) -> Lease:
        lease = Lease(next(self._ids), partition, generation, stage, parts, {session})
        self._leases[lease.id] = lease
        session.leases.add(lease.id)
        return lease

    def of(self, session: Session, lease_id: int) -> Lease:
        """LeaseExpired unless this session holds it."""
        if lease_id not in session.leases:
            raise LeaseExpired(
                "this lease has ended: it was acked or released, or its time was up and its rows "
                "went back to the stage. Nothing of this call was stored; claim again",
                lease=lease_id,
            )
        return self._leases[lease_id]

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
