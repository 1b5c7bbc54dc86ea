"""What is said of rows and partitions that were lost, and to whom."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import StaleEpoch
from dataplane.memory.arena import Arena
from dataplane.memory.space import Space
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.shards.partitions import Partitions
from dataplane.wire.messages import Losses
from dataplane.wire.tables import Definition


async def test_a_subscriber_asks_elsewhere_as_soon_as_the_shard_is() -> None:
    entry = Entry(Store("p", Definition({"s": ["x"]}), 1))

    def moved(*partition: Any) -> Entry:
        raise StaleEpoch("the shard moved")

    host: Any = SimpleNamespace(shard=lambda *partition: entry, now=time.monotonic)
    mesh: Any = SimpleNamespace(handlers={})
    nothing: Any = None
    parts = Partitions(host, mesh, nothing, nothing, nothing)
    waits = asyncio.ensure_future(
        parts.losses_here(Caller("tcp://10.0.0.2:7101", 2), Losses("p", 1, 0, 600_000))
    )
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waits.done()
    host.shard = moved
    with pytest.raises(StaleEpoch):
        await asyncio.wait_for(waits, 20)


def test_whether_a_generation_was_lost_or_dropped_hangs_on_no_clock() -> None:
    """The host that declared it may have a clock that is an hour ahead, or behind."""
    seeds = ["tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"]
    first = dataclasses.replace(Roster.from_seeds(seeds), incarnations=(1, 2))
    arena = Arena.create(1 << 20, "test")
    host = Host("plane", "a", 1, seeds[0], first, arena, Space(1 << 20), itertools.count(1), (1, 1))
    ahead, behind, now = 4 * 10**18, 10**18, 2 * 10**18

    def reason(generation: int) -> Any:
        return host.gone("p", generation).details["reason"]

    for generation in (ahead, behind):
        host.saw("p", generation)
        assert reason(generation) == "dropped"  # no copy was ever lost
    lost = first.lost.copy()
    lost[first.bucket("p")] += 1
    host.turn(dataclasses.replace(first, epoch=(1, 3), lost=lost))
    assert [reason(one) for one in (ahead, behind)] == ["lost", "lost"]
    host.saw("p", now)  # declared anew, and dropped
    assert [reason(one) for one in (ahead, behind, now)] == ["lost", "lost", "dropped"]
    arena.close()
