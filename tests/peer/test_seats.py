"""Homes of stages: what becomes of their orders."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from dataplane.errors import Unavailable
from dataplane.metadata.instructions import Order
from dataplane.metadata.journal import JournaledStore
from dataplane.metadata.roster import Roster
from dataplane.peer.host import Caller, Entry
from dataplane.peer.seats import Seats
from dataplane.peer.supplying import Supplied
from dataplane.wire.messages import Body, Done, Want
from dataplane.wire.peering import Demand, Settled
from dataplane.wire.tables import Definition
from tests.metadata.stores import put

HERE, THERE = "tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"
ROSTER = Roster.from_seeds([HERE, THERE])
DEFINITION = Definition({"s": ["tokens"]}, None, None, "acked", 1)
CLAIMANT = Caller(THERE, 2)


class Wires:
    """The peer's way to others, and to its own shards: each order waits until the test lets it
    through."""

    def __init__(self) -> None:
        self.settled: list[Settled] = []
        self.orders: list[asyncio.Future[Supplied]] = []
        self.handlers: dict[Any, Any] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    async def insist(self, find: Callable[[], str | None], body: Settled) -> Body:
        assert find() == THERE
        self.settled.append(body)
        return Done()

    async def supply(self, entry: Entry, demand: Demand, order: Order) -> Supplied:
        self.orders.append(asyncio.get_running_loop().create_future())
        return await self.orders[-1]

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task


def entry_of(name: str) -> Entry:
    return Entry(JournaledStore(name, DEFINITION, 1, itertools.count(1)))


def seats_of(name: str, wires: Wires) -> tuple[Seats, Entry]:
    entry = entry_of(name)
    host = SimpleNamespace(address=HERE, roster=ROSTER, entries={name: entry}, silent=False)
    host.shard = lambda partition, generation: entry
    partitions = SimpleNamespace(on_phase=[])
    return Seats(host, wires, partitions, wires), entry  # type: ignore[arg-type]


def named(home: str) -> str:
    """A partition of which the stage's home is there."""
    names = (f"p{number}" for number in itertools.count())
    return next(name for name in names if ROSTER.home(name) == home)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0)


async def settle_down() -> None:
    """Whatever can go on without an answer has gone on."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_a_claim_queues_anew_where_its_order_fails() -> None:
    wires = Wires()
    seats, entry = seats_of(named(HERE), wires)
    put(entry.store, ["a", "b"])
    want = Want("rows", 2, 2)
    demand = Demand(entry.name, 1, "s", 5, want, 9, "a client", 0, ["tokens"], 1 << 20)
    wires.handlers[Demand](CLAIMANT, demand)
    await until(lambda: len(wires.orders) == 1)
    (answer,) = wires.orders
    answer.set_exception(Unavailable("it may have granted them"))
    await until(lambda: len(wires.settled) == 1)
    assert wires.settled == [Settled(5, "moved")]
    await settle_down()
    assert len(wires.orders) == 1


async def test_a_home_at_a_peer_that_hands_its_shards_over_orders_nothing() -> None:
    wires = Wires()
    seats, entry = seats_of(named(HERE), wires)
    put(entry.store, ["a", "b"])
    seats.host.silent = True
    want = Want("rows", 2, 2)
    demand = Demand(entry.name, 1, "s", 5, want, 9, "a client", 0, ["tokens"], 1 << 20)
    wires.handlers[Demand](CLAIMANT, demand)
    await settle_down()
    assert wires.orders == []


async def test_a_home_that_moved_orders_nothing_more_for_the_claims_that_it_had() -> None:
    wires = Wires()
    seats, entry = seats_of(named(HERE), wires)
    put(entry.store, ["a", "b"])
    want = Want("rows", 2, 2)
    demand = Demand(entry.name, 1, "s", 5, want, 9, "a client", 0, ["tokens"], 1 << 20)
    wires.handlers[Demand](CLAIMANT, demand)
    await until(lambda: len(wires.orders) == 1)
    seats.turned()
    await until(lambda: len(wires.settled) == 1)
    (answer,) = wires.orders
    begun = len(wires.tasks)
    answer.set_result(Supplied())
    await settle_down()
    assert len(wires.orders) == 1 and len(wires.tasks) == begun
