"""The async surface: same operations, cancellation, and copies off the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import uvloop

import dataplane
from dataplane import aio
from dataplane.client._async import backend
from dataplane.wire.messages import (
    Claim,
    Failed,
    Fetch,
    Fetched,
    Finish,
    Put,
    Stats,
    StatsDone,
)
from tests.client.scripted_peer import SILENCE, ScriptedPeer


@pytest.fixture
async def plane(peer: ScriptedPeer) -> AsyncIterator[aio.Plane]:
    async with aio.Plane(peer.keeper()) as client:
        yield client


@pytest.fixture
async def part(peer: ScriptedPeer, plane: aio.Plane) -> aio.Partition:
    part = await plane.partition("x", stages={"s": ["a"]})
    await part.put({"a": [np.arange(4)] * 2, "b": ["p", "q"]}, key=["k", "m"])
    peer.serve_put(peer.bodies(Put)[0])
    return part


async def test_a_batch_is_claimed_read_added_to_and_acked(
    peer: ScriptedPeer, part: aio.Partition
) -> None:
    async with await part.claim("s", rows=2) as batch:
        assert [x.tolist() for x in batch["a"]] == [[0, 1, 2, 3]] * 2
        await batch.add(reward=[1.0, 2.0])
    (finish,) = peer.bodies(Finish)
    assert finish.outcome == "ack" and finish.values.fields == ["reward"]


async def test_a_field_that_is_not_here_is_not_fetched_by_subscription(
    peer: ScriptedPeer, part: aio.Partition
) -> None:
    put = peer.bodies(Put)[0]
    peer.scripts[Fetch] = lambda r, b: Fetched(peer.new_pin(), peer.table(put, b.fields))
    batch = await part.claim("s", rows=2)
    with pytest.raises(dataplane.NotFetched, match="await"):
        batch["b"]
    with pytest.raises(dataplane.NotFetched) as caught:
        batch["x" * 100_000]
    assert len(caught.value.message) < 1_000
    await batch.fetch("b")
    assert list(batch["b"]) == ["p", "q"]
    other = await part.claim("s", rows=2)
    assert await other.numpy("b") == ["p", "q"]
    await batch.ack()
    await other.ack()


async def test_a_stream_acks_and_ends(peer: ScriptedPeer, part: aio.Partition) -> None:
    claimed = peer.scripts[Claim]

    def script(request: Any, body: Claim) -> Any:
        ended = len(peer.bodies(Claim)) >= 3
        return Failed("StreamEnd", "drained") if ended else claimed(request, body)

    peer.scripts[Claim] = script
    rows = 0
    async for batch in part.stream("s", rows=2):
        rows += len(batch)
        await batch.add(reward=[1, 2])
    assert rows == 6
    assert [f.outcome for f in peer.bodies(Finish)] == ["ack"] * 3


async def test_a_stream_left_by_an_exception_releases(
    peer: ScriptedPeer, part: aio.Partition
) -> None:
    with pytest.raises(RuntimeError):
        async with part.stream("s", rows=2) as stream:
            async for _batch in stream:
                raise RuntimeError("mine")
    assert peer.await_body(Finish).outcome == "release"


async def test_a_stream_left_by_break_releases_and_one_of_so_many_batches_acks_the_last(
    peer: ScriptedPeer, part: aio.Partition
) -> None:
    async with part.stream("s", rows=2) as stream:
        async for _batch in stream:
            break
    assert _batch.state == "released"
    async for _batch in part.stream("s", rows=2, batches=1):
        pass
    assert [f.outcome for f in peer.bodies(Finish)][-1] == "ack"
    assert {f.outcome for f in peer.bodies(Finish)[:-1]} == {"release"}


async def test_cancelling_a_claim_closes_its_connection(
    peer: ScriptedPeer, part: aio.Partition
) -> None:
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    def silent(request: object, body: object) -> bytes:
        loop.call_soon_threadsafe(arrived.set)
        return SILENCE

    peer.scripts[Claim] = silent
    claim = asyncio.ensure_future(part.claim("s", rows=2))
    await arrived.wait()
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    await asyncio.to_thread(peer.await_closed)


async def test_a_call_in_flight_does_not_hold_up_another(
    peer: ScriptedPeer, plane: aio.Plane, part: aio.Partition
) -> None:
    peer.scripts[Claim] = lambda r, b: SILENCE
    peer.scripts[Stats] = lambda r, b: StatsDone({"a": 1})
    claim = asyncio.ensure_future(part.claim("s", rows=2))
    await asyncio.to_thread(peer.await_body, Claim)
    assert await plane.stats() == {"a": 1}
    claim.cancel()
    await asyncio.gather(claim, return_exceptions=True)


async def test_a_deadline_ends_a_call_and_its_connection(
    peer: ScriptedPeer, plane: aio.Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.client._async.backend.GRACE_S", 0.05)
    peer.scripts[Stats] = lambda r, b: SILENCE
    with pytest.raises(dataplane.DeadlineExceeded):
        await plane.stats(timeout=0.05)
    await asyncio.to_thread(peer.await_closed)


async def test_a_lost_peer_is_peer_lost(peer: ScriptedPeer, plane: aio.Plane) -> None:
    def gone(request: object, body: object) -> bytes:
        peer.connections[-1].close()
        return SILENCE

    peer.scripts[Stats] = gone
    with pytest.raises(dataplane.PeerLost, match="'scripted'"):
        await plane.stats()


async def test_big_copies_leave_the_loop_and_small_ones_do_not() -> None:
    here = threading.get_ident()
    assert await backend.offload(threading.get_ident, backend.OFFLOAD_BYTES) != here
    assert await backend.offload(threading.get_ident, 100) == here


async def test_a_cancelled_copy_is_waited_for_before_its_memory_is_given_away() -> None:
    started, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait(10)
        done.set()

    copy = asyncio.ensure_future(backend.offload(work, backend.OFFLOAD_BYTES))
    await asyncio.to_thread(started.wait)
    copy.cancel()
    await asyncio.sleep(0)
    assert not copy.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await copy
    assert done.is_set()


def test_one_client_serves_several_loops_of_either_kind(peer: ScriptedPeer) -> None:
    peer.scripts[Stats] = lambda r, b: StatsDone({"a": 1})
    plane = aio.Plane(peer.keeper())

    async def ask() -> dict[str, Any]:
        answers = await asyncio.gather(*(plane.stats() for _ in range(3)))
        return answers[0]

    for _ in range(2):
        assert asyncio.run(ask()) == {"a": 1}
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(ask()) == {"a": 1}

    async def cancel_under_uvloop() -> None:
        peer.scripts[Stats] = lambda r, b: SILENCE
        before = len(peer.bodies(Stats))
        call = asyncio.ensure_future(plane.stats())
        await asyncio.to_thread(peer.await_body, Stats, before + 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.to_thread(peer.await_closed)
        peer.scripts[Stats] = lambda r, b: StatsDone({"b": 2})
        assert await plane.stats() == {"b": 2}
        await plane.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(cancel_under_uvloop())


async def test_repr_shows_the_state(plane: aio.Plane, part: aio.Partition) -> None:
    assert repr(plane) == "<aio.Plane 'p' at peer 'scripted'>"
    assert repr(part) == "<aio.Partition 'x' of plane 'p', generation 4>"
    assert repr(part.stream("s", rows=1)) == "<aio.Stream of 'x' for 's': holds no batch>"
