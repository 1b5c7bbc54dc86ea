"""New rows that wait for room at a full shard."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import ShardFull
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import Caller
from dataplane.peer.shards.metadata_share import MetadataShare
from dataplane.wire.messages import Body
from dataplane.wire.peering import Vacancy
from dataplane.wire.tables import Definition
from tests.metadata.stores import named, put

HERE = "tcp://10.0.0.1:7101"


class Shard:
    """Of one partition, and the writers of its own host."""

    def __init__(self) -> None:
        self.store = Store("p", Definition(), 1)
        self.host: Any = SimpleNamespace(
            name="a", space=SimpleNamespace(size_bytes=0), now=time.monotonic,
            entries={"p": SimpleNamespace(store=self.store)}, shard=lambda *partition: None,
            roster=Roster.from_seeds([HERE]),
        )  # fmt: skip
        self.handlers: dict[Any, Any] = {}
        self.asked: list[Vacancy] = []
        self.told = 0
        self.share = MetadataShare(self.host, self)  # type: ignore[arg-type]
        self.share.size_bytes = 0
        self.share.on_wait.append(self._waits)

    def _waits(self) -> None:
        self.told += 1

    async def call(self, address: str, body: Vacancy, **options: Any) -> Body:
        self.asked.append(body)
        done: Body = await self.handlers[Vacancy](Caller(HERE, 1), body)
        return done

    def spawn(self, work: Any) -> Any:
        return asyncio.ensure_future(work)

    def wait(self, session: Any) -> asyncio.Task[None]:
        return asyncio.create_task(self.share.another_try(session, "p", 1, self.share.full()))


def client() -> Any:
    return SimpleNamespace(waiting=0)


async def until(true: Any) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


async def test_they_wait_in_a_line_of_which_one_tries_whenever_there_is_room() -> None:
    shard, one = Shard(), client()
    put(shard.store, list(range(100)))
    waits = [shard.wait(one) for _ in range(3)]
    await until(lambda: len(shard.share) == 3)
    assert (one.waiting, shard.share.writers, shard.told) == (3, 3, 3)
    assert len(shard.asked) == 3  # and no message of rows
    shard.store.drop(rows=named(list(range(100))))
    await until(lambda: waits[0].done())
    assert not waits[1].done() and not waits[2].done()
    shard.share.look()  # as when rows came in
    await until(lambda: waits[1].done())
    await until(lambda: waits[2].done())  # also where nothing comes
    assert (one.waiting, shard.share.writers, len(shard.share)) == (0, 0, 0)


async def test_names_that_are_remembered_are_not_waited_for() -> None:
    shard = Shard()
    put(shard.store, list(range(1000)))
    shard.store.drop(rows=named(list(range(1000))))
    assert shard.share.figures()["names_bytes"] > 0
    assert not shard.share.is_full


async def test_they_end_where_nobody_is_left_who_could_make_room() -> None:
    shard, one = Shard(), client()
    put(shard.store, [1])
    waits = [shard.wait(one) for _ in range(2)]
    await until(lambda: len(shard.share) == 2)
    shard.share.end_in_vain()
    for wait in waits:
        with pytest.raises(ShardFull, match="every client waits"):
            await wait
    await until(lambda: not len(shard.share))
    assert one.waiting == 0
