"""An effect of a command on other callers fails: the command stands, and the others are served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from dataplane.errors import InternalError
from dataplane.memory.space import Space
from dataplane.metadata.shard.claim_queue import ClaimQueue
from dataplane.peer.requests.puts import Writing
from dataplane.peer.shards import retries
from dataplane.peer.shards.references import References
from dataplane.wire.messages import Claim, Claimed, Want
from dataplane.wire.tables import Definition
from tests.simulation.cluster import Cluster
from tests.simulation.ledger import SMALL, Ledger
from tests.simulation.line import Client
from tests.simulation.loop import VirtualLoop
from tests.simulation.roles import Consumer, Producer, Role, keys_of
from tests.simulation.script import played

GROUP_ROWS = 4
SERVED_S = 1.0


class _Failing:
    """A method that fails at the first calls that `counts` says count."""

    def __init__(self, kind: type, name: str, times: int, counts: Callable[..., bool]) -> None:
        self.kind, self.name, self.times = kind, name, times
        self.failed = 0
        self._method = getattr(kind, name)
        self._counts = counts

    def __enter__(self) -> _Failing:
        failing, method = self, self._method

        def once(this: Any, *given: Any, **more: Any) -> Any:
            if failing.failed < failing.times and failing._counts(this, *given):
                failing.failed += 1
                raise RuntimeError("an effect that fails")
            return method(this, *given, **more)

        self._patch = mock.patch.object(self.kind, self.name, once)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def _played(script: Callable[[Cluster, Ledger], Any], definition: Definition) -> None:
    cluster, wrong = Cluster(VirtualLoop(), random.Random(29), 3), list[str]()

    async def started() -> None:
        for place in cluster.places:
            cluster.start(place)
        await script(cluster, Ledger(SMALL, definition, wrong))

    played(cluster, started)
    assert wrong == []


def _role(cluster: Cluster, ledger: Ledger, kind: type[Role], place: int, name: str) -> Any:
    return kind(Client(cluster, cluster.places[place], name), ledger, random.Random(name))


def _puts(producer: Any, number: int) -> Any:
    group = producer._group(number, given=False)
    producer.ledger.opened(group)
    producer.sizes = (5000,)  # bytes in the arena, not in the shard
    return producer._patiently(lambda: producer._put_all([group]))


async def _claim(consumer: Any, rows: int, timeout_s: float = 60.0) -> list[bytes]:
    async def claimed() -> list[bytes]:
        want = Want("rows", rows, rows)
        body = Claim(consumer.partition, consumer.generation, "train", want, ["x"])
        answer = await consumer.client.call(body, Claimed, timeout_s)
        consumer.compare(answer.table, keys_of(answer.table))
        return keys_of(answer.table)

    keys: list[bytes] = await consumer._patiently(claimed)
    return keys


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # tasks cancelled before they began
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_put_stands_where_waking_the_claim_of_another_client_fails(place: int) -> None:
    """The put failed although it was applied, and its bytes were freed: each claim was granted the
    rows, and told that they are gone."""

    async def script(cluster: Cluster, ledger: Ledger) -> None:
        await asyncio.sleep(4.0)
        producer = _role(cluster, ledger, Producer, place, "producer")
        consumers = [_role(cluster, ledger, Consumer, 1, f"consumer{n}") for n in range(2)]
        waiting = [asyncio.ensure_future(_claim(one, GROUP_ROWS)) for one in consumers]
        await asyncio.sleep(1.0)
        with _Failing(ClaimQueue, "serve", 2, lambda queue, *_: len(queue) > 0) as failing:
            for number in range(2):
                await _puts(producer, number)
            began = cluster.loop.now
            keys = [key for one in waiting for key in await one]
            assert failing.failed == 2 and cluster.loop.now - began < SERVED_S
        assert len(set(keys)) == 2 * GROUP_ROWS

    _played(script, Definition({"train": ["x"]}, GROUP_ROWS))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_values_of_a_put_stay_where_its_shard_fails_after_it_was_applied(place: int) -> None:
    """They were freed, here and at another host, and claims looped over rows without values."""

    async def script(cluster: Cluster, ledger: Ledger) -> None:
        await asyncio.sleep(4.0)
        producer = _role(cluster, ledger, Producer, place, "producer")
        consumer = _role(cluster, ledger, Consumer, 1, "consumer")
        applied, once = list[object](), Writing._once

        def failing(this: Writing, *given: Any) -> Any:
            applied.append(once(this, *given))
            raise RuntimeError("after it was applied")

        with mock.patch.object(Writing, "_once", failing), pytest.raises(InternalError):
            await _puts(producer, 0)
        assert len(applied) == 1
        await asyncio.sleep(SERVED_S)
        assert len(await _claim(consumer, GROUP_ROWS)) == GROUP_ROWS

    _played(script, Definition({"train": ["x"]}, GROUP_ROWS, replicas=2))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_claim_whose_reason_to_wait_cannot_be_found_is_served(place: int) -> None:
    """It failed and stayed in the queue, so that its rows went to a caller that had gone."""

    async def script(cluster: Cluster, ledger: Ledger) -> None:
        await asyncio.sleep(4.0)
        producer = _role(cluster, ledger, Producer, 0, "producer")
        consumer = _role(cluster, ledger, Consumer, place, "consumer")
        with _Failing(ClaimQueue, "note_reason", 1, lambda *_: True) as failing:
            waiting = asyncio.ensure_future(_claim(consumer, GROUP_ROWS))
            await asyncio.sleep(1.0)
            assert failing.failed == 1 and not waiting.done()
        await _puts(producer, 0)
        assert len(await waiting) == GROUP_ROWS

    _played(script, Definition({"train": ["x"]}, GROUP_ROWS))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_ack_stands_where_freeing_what_it_ended_fails_and_is_made_up_for() -> None:
    async def script(cluster: Cluster, ledger: Ledger) -> None:
        await asyncio.sleep(4.0)
        producer = _role(cluster, ledger, Producer, 1, "producer")
        consumer = _role(cluster, ledger, Consumer, 2, "consumer")
        await _puts(producer, 0)
        assert cluster.places[1].peer is not None
        space: Space = cluster.places[1].peer.host.space
        before = space.stats()["used_bytes"]
        with _Failing(References, "let_go", 1, lambda *_: True) as failing:
            consumer.waits_ms, consumer.hold_s = (5000,), 0.1
            while ledger.groups[0].rows[0].acks.get("train") is None:
                await consumer._patiently(consumer._once)
            assert failing.failed == 1
        await asyncio.sleep(SERVED_S)
        assert before and not space.stats()["used_bytes"] - space.stats()["cached_bytes"]

    _played(script, Definition({"train": ["x"]}, GROUP_ROWS, free="acked"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_effect_that_fails_for_minutes_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(cluster: Cluster, ledger: Ledger) -> None:
        await asyncio.sleep(4.0)
        producer = _role(cluster, ledger, Producer, 0, "producer")
        consumer = _role(cluster, ledger, Consumer, 1, "consumer")
        waiting = asyncio.ensure_future(_claim(consumer, GROUP_ROWS, timeout_s=200.0))
        await asyncio.sleep(1.0)
        with _Failing(ClaimQueue, "serve", 10_000, lambda queue, *_: len(queue) > 0) as failing:
            await _puts(producer, 0)
            await asyncio.sleep(150.0)
            assert failing.failed > 250
        assert len(await waiting) == GROUP_ROWS

    _played(script, Definition({"train": ["x"]}, GROUP_ROWS))
    lines = [one for one in caplog.records if one.name == retries.__name__]
    assert [bool(one.exc_info) for one in lines] == [True, False, False]
    assert "serving waiting claims of stage 'train' failed 1" in lines[1].getMessage()
