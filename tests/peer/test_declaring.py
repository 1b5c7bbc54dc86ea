"""Calls that wait at a shard until a process declares their partition."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import PartitionUndefined, StaleEpoch
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import Caller
from dataplane.peer.shards.partitions import Partitions
from dataplane.wire.messages import Body, Define, Defined
from dataplane.wire.tables import Definition

DEFINITION = Definition({"s": ["x"]})


class Declaring:
    """The peer that serves every partition, until it serves none."""

    def __init__(self) -> None:
        self.serves = True
        host: Any = SimpleNamespace(
            entries={},
            now=time.monotonic,
            serves=lambda name: self.serves,
            note_generation=lambda name, generation: None,
            events=SimpleNamespace(add=lambda record: None),
        )
        nothing: Any = None
        self.partitions = Partitions(host, nothing, nothing, nothing, nothing)

    async def waiting(self, name: str, wait_ms: int = 600_000) -> asyncio.Task[Body]:
        body = Define(name, None, wait_ms)
        call = self.partitions.define_here(Caller("tcp://10.0.0.2:7101", 2), body)
        task = asyncio.ensure_future(call)
        await self.turns()
        assert not task.done()
        return task

    async def turns(self) -> None:
        """Let what is due run; no time passes."""
        for _ in range(20):
            await asyncio.sleep(0)


async def test_who_waits_for_a_partition_has_it_as_soon_as_it_is_declared() -> None:
    peer = Declaring()
    first, other = await peer.waiting("p"), await peer.waiting("q")
    peer.partitions.serve(Store("p", DEFINITION, 3))
    await peer.turns()
    assert first.result() == Defined(3, DEFINITION, "open") and not other.done()
    peer.partitions.serve(Store("q", DEFINITION, 4))
    await peer.turns()
    assert other.result() == Defined(4, DEFINITION, "open")


async def test_who_waits_for_a_partition_asks_elsewhere_as_soon_as_its_shard_is_there() -> None:
    peer = Declaring()
    waits = await peer.waiting("p")
    peer.partitions.turned()
    await peer.turns()
    assert not waits.done()
    peer.serves = False
    peer.partitions.turned()
    await peer.turns()
    assert isinstance(waits.exception(), StaleEpoch)


async def test_a_partition_that_nobody_declares_is_undefined_at_the_deadline() -> None:
    waits = await Declaring().waiting("p", 50)
    with pytest.raises(PartitionUndefined):
        await asyncio.wait_for(waits, 20)
