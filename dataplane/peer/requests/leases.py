"""The leases of this host's clients: who holds which rows of which partition, and until when.

A lease goes by the number under which the partition's shard knows it, and when it is finished or
its session has ended. A claim that a client repeats is answered from its lease, until the client
has shown that it has it.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import Any

import msgspec

from dataplane.errors import LeaseExpired
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Claimed

Part = tuple[int, str, int, str]
"""session, partition, generation and stage of who takes part in a plan"""


class Lease(msgspec.Struct, eq=False):
    number: int
    partition: str
    generation: int
    stage: str
    rows: int
    session: Session
    deadline: float | None = None
    finished: set[int] = set()
    """rows that left, by their place in the claim"""
    plan: bool = False
    """it is a part in one"""
    claimed: tuple[int, int] | None = None
    """session and operation that took it, while they may ask again"""


class Leases:
    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._answers: dict[tuple[int, int], Body] = {}
        self._leaving: dict[asyncio.Future[Any], Part] = {}
        """processes that take part in a plan no more, until its shard knows: to that they do as
        long, and may not do so twice"""

    def __len__(self) -> int:
        return len(self._leases)

    def open(
        self,
        session: Session,
        number: int,
        partition: str,
        generation: int,
        stage: str,
        rows: int,
        plan: bool = False,
    ) -> Lease:
        lease = Lease(number, partition, generation, stage, rows, session, plan=plan)
        self._leases[number] = lease
        session.leases.add(number)
        return lease

    def limit(self, number: int, deadline: float) -> None:
        """Its hard limit, which begins when its holder has the rows; one that ended has none."""
        lease = self._leases.get(number)
        if lease is not None:
            lease.deadline = deadline
            heapq.heappush(self._deadlines, (deadline, number))

    def overdue(self, now: float) -> list[Lease]:
        """Those whose hard limit has passed, each once."""
        passed = []
        while self._deadlines and self._deadlines[0][0] <= now:
            lease = self._leases.get(heapq.heappop(self._deadlines)[1])
            if lease is not None:
                passed.append(lease)
        return passed

    def of(self, session: Session, number: int, now: float) -> Lease:
        """LeaseExpired unless this session holds it, and its time is not up."""
        lease = self._leases.get(number) if number in session.leases else None
        if lease is not None:
            self._heard(lease)
        if lease is None or (lease.deadline is not None and now >= lease.deadline):
            raise LeaseExpired(
                "this lease has ended: it was acked or released, or its time was up and its rows "
                "went back to the stage. Nothing of this call was stored; claim again",
                lease=number,
            )
        return lease

    def close(self, lease: Lease) -> None:
        """The lease is over."""
        lease.session.leases.discard(lease.number)
        self._heard(lease)
        self._leases.pop(lease.number, None)

    def leave(self, session: Session, number: int) -> Lease | None:
        """The session holds it no more. The lease, where it did."""
        lease = self._leases[number] if number in session.leases else None
        if lease is not None:
            self.close(lease)
        return lease

    # plans

    def leaves(self, told: asyncio.Future[Any], part: Part) -> None:
        """Its shard is being told that this process takes part no more."""
        self._leaving[told] = part
        told.add_done_callback(self._leaving.pop)

    def leaving(self, part: Part) -> list[asyncio.Future[Any]]:
        """What a shard has yet to hear before this process may take part again."""
        return [told for told, one in self._leaving.items() if one == part]

    # a claim that is repeated

    def recall(self, session: int, op: int) -> Body | None:
        """What this operation of a session was answered, where that was a lease."""
        return self._answers.get((session, op))

    def remember(self, session: int, op: int, floor: int, reply: Body) -> None:
        lease = self._leases.get(reply.lease) if isinstance(reply, Claimed) else None
        if lease is not None:
            lease.claimed = session, op
            self._answers[session, op] = reply

    def _heard(self, lease: Lease) -> None:
        """Nobody asks again for its claim."""
        if lease.claimed is not None:
            self._answers.pop(lease.claimed, None)
            lease.claimed = None
