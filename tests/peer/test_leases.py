"""Leases of a host's clients: limits that the peer keeps, and what a shard is told of their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import BackPressure, LeaseExpired
from dataplane.memory.admission import Admission
from dataplane.memory.space import Space
from dataplane.peer.requests.leases import Finishing, Lease, Leases
from dataplane.peer.requests.puts import Committed, Grants
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Claimed, Done, Finish
from dataplane.wire.tables import Chunk, Owner, Piece, Rows, Table, Values


def client() -> Session:
    return Session(7, 0, "it")


def test_a_lease_is_over_its_limit_once_and_not_before() -> None:
    leases = Leases()
    one, other = client(), client()
    first = Lease(7, "p", 1, "s", 2, one)
    leases.open(first)
    leases.limit(first.number, 5.0)
    leases.open(Lease(8, "p", 1, "s", 2, other))
    acked = Lease(9, "p", 1, "s", 2, one)
    leases.open(acked)
    leases.limit(acked.number, 4.0)
    leases.close(acked)
    assert leases.overdue(4.9) == []
    assert leases.overdue(5.0) == [first]
    assert leases.leave(one, first.number) is first
    assert leases.overdue(9.0) == []


def test_a_lease_is_fenced_off_at_its_limit_before_anybody_ends_it() -> None:
    leases = Leases()
    holder = client()
    lease = Lease(7, "p", 1, "s", 2, holder)
    leases.open(lease)
    leases.limit(lease.number, 5.0)
    assert leases.of(holder, lease.number, 4.9) is lease
    with pytest.raises(LeaseExpired, match="claim again"):
        leases.of(holder, lease.number, 5.0)


@pytest.mark.parametrize("first", ["an ack", "the clock"])
def test_time_in_which_the_peer_was_stopped_ends_no_lease(first: str) -> None:
    """What its client sent meanwhile has arrived, and is read only now."""
    leases, holder = Leases(), client()
    lease, later = Lease(7, "p", 1, "s", 2, holder), Lease(8, "p", 1, "s", 2, holder)
    for one in (lease, later):
        leases.open(one)
        leases.look(0.0)
        leases.limit(one.number, 5.0 if one is lease else 6.0)
    assert leases.overdue(0.2) == []
    if first == "the clock":
        assert leases.overdue(100.2) == []
    assert leases.of(holder, lease.number, 100.2) is lease
    for tick in range(1, 24):
        assert leases.overdue(100.2 + tick / 5) == []
    assert leases.overdue(105.0) == [lease]
    leases.close(lease)
    assert leases.overdue(105.4) == leases.overdue(105.8) == []
    assert leases.overdue(106.0) == [later]


@pytest.mark.parametrize(
    "ends", [Leases.of, lambda leases, holder, lease, now: leases.leave(holder, lease)]
)
def test_a_claim_is_answered_again_until_its_lease_is_used_or_has_ended(
    ends: Callable[[Leases, Session, int, float], object],
) -> None:
    leases, holder = Leases(), client()
    leases.open(Lease(7, "p", 1, "s", 2, holder, claimed=50))
    claimed = Claimed(7, 0, Table(Rows(b"")))
    holder.repeats.claimed = {50: claimed, 51: claimed}
    ends(leases, holder, 7, 0.0)
    assert list(holder.repeats.claimed) == [51]


async def test_who_never_heard_of_its_part_in_a_plan_leaves_it_and_ends_it_for_nobody() -> None:
    told: list[Body] = []

    def tell(body: Body) -> asyncio.Future[None]:
        told.append(body)
        return asyncio.get_running_loop().create_future()

    router: Any = SimpleNamespace(handlers={}, tell=tell)
    host: Any = SimpleNamespace(now=lambda: 0.0)
    writing: Any = SimpleNamespace(host=host, mesh=router, grants=None)
    leases, holder = Leases(), client()
    finishing = Finishing(router, leases, writing)
    leases.open(Lease(7, "p", 1, "s", 2, holder))
    leases.open(Lease(8, "p", 1, "s", 0, holder, plan=True))
    leases.open(Lease(9, "p", 1, "s", 0, holder, plan=True))
    for unheard in (7, 8, 8):
        finishing.release(holder, unheard, heard=False)
    finishing.release(holder, 9)
    leases.open(Lease(10, "p", 1, "s", 0, holder, plan=True))
    request: Any = SimpleNamespace(rid=0)
    assert await finishing.finish(holder, request, Finish(10, "leave")) == Done()
    await asyncio.sleep(0)
    assert told == [
        Finish(7, "release", partition="p", generation=1),
        Finish(8, "leave", partition="p", generation=1),
        Finish(9, "release", partition="p", generation=1),
        Finish(10, "leave", partition="p", generation=1),
    ]
    assert not holder.leases


@pytest.mark.parametrize("over", [False, True])
async def test_an_ack_that_fails_holds_its_values_as_long_as_its_lease(over: bool) -> None:
    leases, holder, me = Leases(), client(), Owner("tcp://a", 7)
    space = Space(1 << 20)
    nobody: Any = None
    host: Any = SimpleNamespace(space=space, owner=me, now=lambda: 0.0)

    async def store(
        session: Session, asked: Finish, committed: Committed, work: Any, keep: Any
    ) -> None:
        if over:  # its time is up while the shard has no room
            leases.leave(holder, 7)
        failure = BackPressure("no room for second copies")
        keep(failure)
        space.release(committed.chunks)
        raise failure

    writing: Any = SimpleNamespace(host=host, grants=Grants(host, nobody, nobody), store=store)
    leases.open(Lease(7, "p", 1, "s", 1, holder))
    extents = space.grant(holder.id, Admission.OPEN, 64)
    chunk = Chunk(0, 0, 1, 64, 0, b"", extents["offset"].item())
    brought = Values(["x"], [me], [b""], [chunk], [Piece(0, (0,), 0, b"\1")])
    body = Finish(7, "ack", values=brought)
    request: Any = SimpleNamespace(rid=1)
    with pytest.raises(BackPressure):
        await Finishing(nobody, leases, writing).finish(holder, request, body)
    assert space.chunks.live == (not over)
