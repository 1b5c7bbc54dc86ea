"""Homes of stages: what becomes of their orders."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from dataplane.errors import Unavailable
from dataplane.metadata.journal import JournaledStore
from dataplane.metadata.roster import Roster
from dataplane.peer.host import Caller, Entry
from dataplane.peer.seats import Seats
from dataplane.wire.messages import Body, Done, Want
from dataplane.wire.peering import Demand, Order, Settled, Supplied
from dataplane.wire.tables import Definition
from tests.metadata.stores import put

HERE, THERE = "tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"
ROSTER = Roster.from_seeds([HERE, THERE])
DEFINITION = Definition({"s": ["tokens"]}, None, None, "acked", 1)
CLAIMANT = Caller(THERE, 2)


class Wires:
    """The peer's way to others: each call waits until the test lets it through."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Body]] = []
        self.epochs: list[tuple[int, int] | None] = []
        self.held: list[tuple[Body, asyncio.Future[Body]]] = []
        self.on_parted: list[Any] = []
        self.handlers: dict[Any, Any] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    async def call(self, address: str, body: Body, **how: Any) -> Body:
        self.sent.append((address, body))
        self.epochs.append(how.get("epoch"))
        if isinstance(body, Settled):
            return Done()
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self.held.append((body, answer))
        return await answer

    async def insist(self, find: Callable[[], str | None], body: Body) -> Body | None:
        address = find()
        return None if address is None else await self.call(address, body)

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        async def awaited() -> Any:
            return await work

        task = asyncio.get_running_loop().create_task(awaited())
        self.tasks.add(task)
        return task

    def of(self, kind: type[Body]) -> list[Body]:
        return [body for _, body in self.sent if isinstance(body, kind)]


def entry_of(name: str) -> Entry:
    return Entry(name, 1, DEFINITION, JournaledStore(name, DEFINITION, 1, itertools.count(1)))


def seats_of(name: str, wires: Wires) -> tuple[Seats, Entry]:
    entry = entry_of(name)
    host = SimpleNamespace(address=HERE, roster=ROSTER, entries={name: entry}, silent=False)

    async def found(partition: str, generation: int, stage: str = "") -> Entry:
        return entry

    partitions = SimpleNamespace(on_phase=[], entry=found)
    return Seats(host, wires, partitions), entry  # type: ignore[arg-type]


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


async def test_a_claim_queues_anew_where_a_supplier_does_not_answer() -> None:
    wires = Wires()
    seats, entry = seats_of(named(HERE), wires)
    put(entry.store, ["a", "b"])
    want = Want("rows", 2, 2)
    demand = Demand(entry.name, 1, "s", 5, want, 9, "a client", 0, ["tokens"], 1 << 20)
    await wires.handlers[Demand](CLAIMANT, demand)
    await until(lambda: len(wires.of(Order)) == 1)
    (_, answer) = next(held for held in wires.held if isinstance(held[0], Order))
    answer.set_exception(Unavailable("it may have granted them"))
    await until(lambda: len(wires.of(Settled)) == 1)
    assert wires.of(Settled) == [Settled(5, "moved")]
    await settle_down()
    assert len(wires.of(Order)) == 1


async def test_a_home_at_a_peer_that_hands_its_shards_over_orders_nothing() -> None:
    wires = Wires()
    seats, entry = seats_of(named(HERE), wires)
    put(entry.store, ["a", "b"])
    seats.host.silent = True
    want = Want("rows", 2, 2)
    demand = Demand(entry.name, 1, "s", 5, want, 9, "a client", 0, ["tokens"], 1 << 20)
    await wires.handlers[Demand](CLAIMANT, demand)
    await settle_down()
    assert wires.of(Order) == []


async def test_a_home_that_moved_orders_nothing_more_for_the_claims_that_it_had() -> None:
    wires = Wires()
    seats, entry = seats_of(named(HERE), wires)
    put(entry.store, ["a", "b"])
    want = Want("rows", 2, 2)
    demand = Demand(entry.name, 1, "s", 5, want, 9, "a client", 0, ["tokens"], 1 << 20)
    await wires.handlers[Demand](CLAIMANT, demand)
    await until(lambda: len(wires.of(Order)) == 1)
    seats.turned()
    await until(lambda: len(wires.of(Settled)) == 1)
    (_, answer) = next(held for held in wires.held if isinstance(held[0], Order))
    begun = len(wires.tasks)
    answer.set_result(Supplied(0, 0.0, False))
    await settle_down()
    assert len(wires.of(Order)) == 1 and len(wires.tasks) == begun
