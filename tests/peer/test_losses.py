"""Who waits for news of lost rows at a shard."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import StaleEpoch
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import Caller, Entry
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
    Partitions(host, mesh, nothing, nothing, nothing)
    waits = asyncio.ensure_future(
        mesh.handlers[Losses](Caller("tcp://10.0.0.2:7101", 2), Losses("p", 1, 0, 600_000))
    )
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waits.done()
    host.shard = moved
    with pytest.raises(StaleEpoch):
        await asyncio.wait_for(waits, 20)
