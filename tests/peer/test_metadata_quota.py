"""New rows that find no room at a full shard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import BackPressure, ShardFull
from dataplane.events.ring import Ring
from dataplane.metadata.shard import inspection
from dataplane.metadata.shard.store import Store
from dataplane.peer.host import CallContext, Entry, call_context
from dataplane.peer.requests.checkpoints import Checkpoints
from dataplane.peer.requests.outgoing_changes import ChangeNumbers
from dataplane.peer.requests.puts import Committed, Writing
from dataplane.peer.shards.metadata_quota import LEAST_S, MetadataQuota
from dataplane.wire.checkpoint import Progress, Restore
from dataplane.wire.messages import Put
from dataplane.wire.packed import KEY
from dataplane.wire.tables import Definition, Owner, Rows, Values
from tests.metadata.stores import named, put


class Shard:
    """Of one partition, and the writers of its own host."""

    host: Any

    def __init__(self) -> None:
        self.store = Store("p", Definition(), 1)
        self.host = SimpleNamespace(
            name="a", space=SimpleNamespace(size_bytes=0), now=time.monotonic,
            entries={"p": Entry(self.store)}, events=Ring(), caller=lambda session: None,
            entry=lambda *of: None,
        )  # fmt: skip
        self.quota = MetadataQuota(self.host)
        self.quota.size_bytes = 0

    async def carried(self, session: Any, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """What a put gets whose shard does this at each attempt."""
        outgoing: Any = SimpleNamespace(send=lambda *of: attempt())
        grants: Any = SimpleNamespace(keep_where_full=lambda *of: None)
        nothing: Any = None
        writing = Writing(self.host, grants, outgoing, nothing, nothing, self.quota, nothing)
        elsewhere = Put("q", 1, Rows(b""))
        return await writing.store(session, elsewhere, Committed(Values()), nothing)


async def test_names_that_are_remembered_are_not_waited_for() -> None:
    shard = Shard()
    put(shard.store, list(range(1000)))
    shard.store.drop(rows=named(list(range(1000))))
    assert shard.quota.figures()["names_bytes"] > 0
    shard.quota.check(Values(), has_new_rows=True)


async def test_new_rows_end_where_nobody_is_left_who_could_make_room() -> None:
    shard, one = Shard(), SimpleNamespace(id=1, waiting=0)
    refused: list[None] = []
    shard.quota.on_refused.append(lambda: refused.append(None))
    put(shard.store, [1])

    async def attempt() -> None:
        shard.quota.check(Values(), has_new_rows=True)

    waits = [asyncio.create_task(shard.carried(one, attempt)) for _ in range(2)]
    await asyncio.sleep(0)
    assert (one.waiting, shard.quota.writers, len(refused)) == (2, 2, 2)
    shard.quota.fail_waiting()
    for wait in waits:
        with pytest.raises(ShardFull, match="all of them are waiting"):
            await wait
    assert (one.waiting, shard.quota.writers) == (0, 0)


async def test_a_put_whose_second_copies_find_no_room_is_another_change_each_time() -> None:
    """One change that waited held its caller's floor, and with it the acks that would make room."""
    shard, changes = Shard(), ChangeNumbers(Owner("tcp://10.0.0.1:7101", 7))
    floors: list[int] = []

    async def attempt() -> str:
        change = await changes.begin("p", 1, time.monotonic())
        floors.append(change.floor)
        try:
            if len(floors) < 3:
                raise BackPressure("there is no room for second copies")
            return "stored"
        finally:
            changes.end("p", 1, change)

    session: Any = SimpleNamespace(id=1, waiting=0)
    assert await shard.carried(session, attempt) == "stored"
    assert floors == [1, 2, 3] and (session.waiting, shard.quota.writers) == (0, 0)


async def test_a_put_is_not_tried_again_when_its_answer_could_not_arrive() -> None:
    """An attempt that ends without an answer is Unavailable, and hides that there is no room."""
    shard, woken_late = Shard(), [0.0]
    shard.host.now = lambda: time.monotonic() + woken_late[0]
    call_context.set(CallContext(shard.host.now() + LEAST_S + 0.2))
    left: list[float] = []

    async def attempt() -> None:
        left.append(call_context.get().until - shard.host.now())
        if len(left) == 2:  # this process gets no processor time while it waits to try again
            asyncio.get_running_loop().call_later(0.01, woken_late.__setitem__, 0, 0.4)
        raise BackPressure("there is no room for replicas")

    session: Any = SimpleNamespace(id=1, waiting=0)
    with pytest.raises(BackPressure, match="no room for replicas"):
        await shard.carried(session, attempt)
    assert len(left) == 2 and min(left) > LEAST_S / 2


def test_a_restore_brings_no_rows_into_a_full_shard() -> None:
    shard, router = Shard(), SimpleNamespace(mesh=None)
    put(shard.store, [1])
    shard.host.shard = lambda *_: shard.host.entries["p"]
    nothing, references = None, SimpleNamespace(answered=lambda *of: None)
    writing = Writing(shard.host, nothing, nothing, references, nothing, shard.quota, nothing)  # type: ignore[arg-type]
    checkpoints = Checkpoints(writing, nothing, router, nothing)  # type: ignore[arg-type]
    restore = Restore("p", 1, Rows(bytes(KEY.itemsize)), Values(), {}, Progress())
    with pytest.raises(ShardFull, match="Consume or drop rows"):
        checkpoints.restore_here(None, restore)  # type: ignore[arg-type]
    assert inspection.stats(shard.store)["rows"] == 1
