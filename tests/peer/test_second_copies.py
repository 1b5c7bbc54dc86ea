"""Second copies of another peer's values: how many transfers, where some were freed meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from dataplane.memory.space import Space
from dataplane.metadata.shard.second_copies import Copies
from dataplane.peer.pull.pulls import Pulls
from dataplane.peer.shards.replication import Copying
from dataplane.transport.registry import TCP
from dataplane.transport.seam import ReadOutcome, Records, Remote
from dataplane.wire.records import RANGE, U4, U8
from dataplane.wire.tables import Owner

THERE = Owner("tcp://10.0.0.2:7101", 2)
ARENA_BYTES, VALUE_BYTES, VALUES = 1 << 20, 64, 1000


class Engine:
    """Of the owner's ranges every other one is gone."""

    transport = TCP

    def __init__(self, arena: memoryview) -> None:
        self.arena = arena
        self.reads = 0

    async def read(self, remote: Remote, copies: Records, *how: Any) -> ReadOutcome:
        self.reads += 1
        gone = np.asarray(copies["range"] % 2 == 1, np.bool_)
        for copy in copies[~gone]:
            dest, text = int(copy["dest"]), b"%64d" % copy["range"]
            self.arena[dest : dest + VALUE_BYTES] = text
        return ReadOutcome(gone, int(copies["nbytes"][~gone].sum()), 0.0)


async def test_what_was_freed_meanwhile_costs_no_transfer_of_its_own() -> None:
    """A backup that is told of much at once finds half of it gone: it went one by one then, and did
    not get in sync while its primary was busy."""
    space, arena = Space(ARENA_BYTES), memoryview(bytearray(ARENA_BYTES))

    async def reserve(*what: Any) -> tuple[int, Any]:
        return space.reserve(*what[:3])

    async def hello(address: str) -> Any:
        return SimpleNamespace(incarnation=THERE.incarnation, bulk="", bulk_fingerprint="")

    now = asyncio.get_running_loop().time
    host: Any = SimpleNamespace(space=space, arena=SimpleNamespace(view=arena), now=now)
    mesh: Any = SimpleNamespace(handlers={}, hello=hello, others=SimpleNamespace(on_away=[]))
    room: Any = SimpleNamespace(reserve=reserve, pump=lambda: None)
    pulls = Pulls(host, mesh, room, None)  # type: ignore[arg-type]
    engine: Any = Engine(arena)
    pulls.use(engine)
    copies, ranges = Copies(), np.zeros(VALUES, RANGE)
    ranges["range"], ranges["generation"] = np.arange(VALUES), 1
    copies.note(THERE, ranges, np.ones(VALUES, U4), np.full(VALUES, VALUE_BYTES, U8))
    await Copying(host, mesh, pulls, room).bring(copies, THERE)
    assert engine.reads == 1
    missing, _ = copies.missing(THERE)
    assert missing["range"].tolist() == list(range(1, VALUES, 2))
    brought, _, local = copies.take(THERE)
    places = space.ranges.extents(local)["offset"].tolist()
    assert [int(bytes(arena[at : at + VALUE_BYTES])) for at in places] == brought["range"].tolist()
    assert space.stats()["used_bytes"] == VALUES // 2 * VALUE_BYTES
    assert space.stats()["granted_bytes"] == 0
