"""A drop and a put of the same given names at once: the directory moves under both of them."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import RowsDropped, RowsGone
from dataplane.metadata.journal import JournaledStore
from dataplane.metadata.names import hash_name
from dataplane.metadata.roster import Roster
from dataplane.peer.changes import Changes
from dataplane.peer.host import Entry
from dataplane.peer.naming import Naming
from dataplane.peer.routing import Routing
from dataplane.wire.messages import Body, Done, Drop, Dropped, Read
from dataplane.wire.peering import Enter, Entered, Leave
from dataplane.wire.records import KEY, U2, U4, column
from dataplane.wire.tables import Definition, Rows

HERE, THERE = "tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"
ROSTER = Roster.from_seeds([HERE, THERE])
SHARD = {at: int(ROSTER.mint_shards(at)[0]) for at in (HERE, THERE)}


def kept_together(count: int) -> list[str]:
    """Names whose entries one peer keeps, so that each look is one message."""
    names = [f"row-{number}" for number in range(64)]
    keys = column(b"".join(map(hash_name, names)), KEY)
    keepers = ROSTER.primary(ROSTER.directory_shards("p", keys))
    return [name for name, keeper in zip(names, keepers, strict=True) if keeper == 0][:count]


NAMES = kept_together(2)
KEYS = b"".join(map(hash_name, NAMES))
DEFINITION = Definition({"s": ["tokens"]}, None, None, "acked", 1)


class Others:
    """The directory, and another peer's tombstones; `leads` says where the names lead, in turn."""

    def __init__(self, leads: list[str]) -> None:
        self.leads = leads
        self.handlers: dict[Any, Any] = {}
        self.told: list[tuple[str, Body]] = []
        self.dropped_there: list[str] = []

    async def call(self, address: str, body: Body, **how: Any) -> Body:
        if isinstance(body, Enter):
            to = self.leads.pop(0) if len(self.leads) > 1 else self.leads[0]
            return Entered(np.full(len(body.keys) // 16, SHARD[to], U2).tobytes())
        self.told.append((address, body))
        if isinstance(body, Read):
            raise RowsGone("not there", keys=body.rows.names, dropped=list(self.dropped_there))
        return Dropped(0, 0) if isinstance(body, Drop) else Done()

    async def insist(self, find: Any, body: Body) -> Body:
        if isinstance(body, Leave):  # between the look and the move somebody drops them there
            self.dropped_there = NAMES[:1]
        return await self.call(find(), body)

    def of(self, kind: type[Body]) -> list[tuple[str, Any]]:
        return [(address, body) for address, body in self.told if isinstance(body, kind)]


def parts(others: Others) -> tuple[Entry, Routing, Changes]:
    entry = Entry("p", 1, DEFINITION, JournaledStore("p", DEFINITION, 1, itertools.count(1)))
    host: Any = SimpleNamespace(
        address=HERE,
        roster=ROSTER,
        solo=False,
        now=lambda: 0.0,
        incarnation=1,
        unanswered={},
    )

    async def found(partition: str, generation: int) -> Entry:
        return entry

    mesh: Any = others
    routing = Routing(host, mesh, Naming(host, mesh))
    partitions: Any = SimpleNamespace(entry=found)
    nothing: Any = lambda *args: None  # noqa: E731
    return entry, routing, Changes(host, mesh, partitions, routing, nothing, nothing)


def test_a_drop_follows_names_that_a_put_moved_before_it_saw_them_dropped() -> None:
    others = Others([HERE, THERE])
    _, _, changes = parts(others)
    session: Any = SimpleNamespace(id=7)
    request: Any = SimpleNamespace(op=1, floor=1)
    asyncio.run(changes.drop(session, request, Drop("p", 1, Rows(KEYS, NAMES))))
    assert [(at, body.rows.names) for at, body in others.of(Drop)] == [
        (HERE, NAMES), (THERE, NAMES),
    ]  # fmt: skip


def test_a_put_that_moves_names_looks_again_whether_they_were_dropped_where_they_were() -> None:
    others = Others([HERE, THERE, HERE])
    entry, routing, _ = parts(others)
    rows = Rows(KEYS, NAMES, np.zeros(2, U4).tobytes(), hash_name("g"), ["g"])
    with pytest.raises(RowsDropped):
        asyncio.run(routing.place(entry, SHARD[HERE], rows))
    ((at, drop),) = others.of(Drop)
    assert (at, drop.rows.names) == (HERE, NAMES[:1])  # a late put is led to a tombstone
