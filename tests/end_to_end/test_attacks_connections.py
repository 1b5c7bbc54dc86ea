"""Connections between client and peer that break in the middle: no call counts twice or is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import dataplane
from dataplane import Plane, aio
from dataplane.client.session.opening import join
from tests.end_to_end.attacks import no_leaks, used_bytes
from tests.end_to_end.conftest import PLANE, Cluster, until
from tests.end_to_end.proxy import Proxy


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    cluster.start("a")
    started = Proxy(cluster.run_dir / "proxy.sock", cluster.run_dir / PLANE / "a.sock")
    yield started
    started.close()


def once() -> Callable[[bytes], bool]:
    """Breaks the next connection that carries something."""
    left = [True]

    def breaks(data: bytes) -> bool:
        with contextlib.suppress(IndexError):  # asked by several threads, and popped by one
            return left.pop()
        return False

    return breaks


@pytest.mark.parametrize("side", ["asking", "answering"])
def test_each_call_survives_a_broken_connection(proxy: Proxy, cluster: Cluster, side: str) -> None:
    watcher = cluster.connect("a")
    plane = Plane(join(proxy.connect))

    def breaking() -> None:
        setattr(proxy, side, once())

    breaking()
    part = plane.partition("p", stages={"s": ["x"], "t": ["x", "y"]}, group_size=2)
    breaking()
    part.put({"x": [np.full(5000, i) for i in range(4)]}, key=list("abcd"), group=[1, 1, 2, 2])
    breaking()
    batch = part.claim("s", groups=1, timeout=10)
    assert batch.keys == ["a", "b"]
    batch.add(y=[np.ones(3000), np.ones(3000)])
    breaking()
    batch.ack()
    breaking()
    second = part.claim("s", groups=1, timeout=10)
    breaking()
    second.release()
    breaking()
    assert part.get(keys=["a"])["y"][0].sum() == 3000
    breaking()
    part.tag(["c"], {"n": 1}, expect={"n": None})
    breaking()
    part.close(1, 2)
    third = part.claim("s", groups=1, timeout=10, fields=[])
    assert third.keys == ["c", "d"]
    breaking()
    third.fetch("x")
    breaking()
    third.ack()
    breaking()
    part.seal()
    breaking()
    with pytest.raises(dataplane.ClaimTimeout):
        part.claim("t", groups=2, timeout=0.5)
    breaking()
    assert part.drop(keys=["d"]).rows == 1
    breaking()
    part.wait("t", groups=1, timeout=5)
    breaking()
    last = part.claim("t", groups=1, timeout=5)
    last.ack()
    assert proxy.broken >= 15
    setattr(proxy, side, lambda data: False)
    del batch, second, third, last
    gc.collect()
    no_leaks(watcher)
    part.drop()
    until(lambda: used_bytes(watcher) == 0, "every byte came back")
    plane.close()
    watcher.close()


def test_a_refusal_that_got_lost_is_told_again_whatever_changed_meanwhile(
    proxy: Proxy, cluster: Cluster
) -> None:
    watcher = cluster.connect("a")
    plane = Plane(join(proxy.connect))
    part = plane.partition("p", stages={"s": ["x"]})
    part.put({"x": [np.zeros(100_000)]}, key=["k"])
    batches = [watcher.partition("p").claim("s", rows=1, timeout=10)]

    def freeing(data: bytes) -> bool:
        """Breaks once, when the put that is repeated would be let in."""
        if b"FieldExists" not in data or not batches:
            return False
        batches.pop().ack()
        until(lambda: used_bytes(watcher) == 0, "the row is freed")
        return True

    proxy.answering = freeing
    with pytest.raises(dataplane.FieldExists):
        part.put({"x": [np.ones(100_000)], "y": [1]}, key=["k"])
    assert proxy.broken == 1
    part.put({"x": [np.ones(100_000)]}, key=["k"], reuse=True)
    plane.close()
    watcher.close()


@pytest.mark.parametrize("seed", range(3))
def test_rows_flow_over_connections_that_break_at_random(
    proxy: Proxy, cluster: Cluster, seed: int
) -> None:
    watcher = cluster.connect("a")
    plane = Plane(join(proxy.connect))
    rng = random.Random(seed)
    part = plane.partition("p", stages={"s": ["x"]})
    proxy.asking = proxy.answering = lambda data: rng.random() < 0.1
    got: Counter[str | int] = Counter()
    failures: list[BaseException] = []
    lock = threading.Lock()

    def produce(at: int) -> None:
        try:
            for i in range(40):
                part.put({"x": [np.full(3000, i)]}, key=[f"{at}-{i}"])
        except BaseException as exc:
            failures.append(exc)

    def consume() -> None:
        try:
            for batch in part.stream("s", rows=2, min=1, timeout=20):
                for key, x in zip(batch.keys, batch["x"], strict=True):
                    assert (x == int(str(key).split("-")[1])).all()
                    with lock:
                        got[key] += 1
        except BaseException as exc:
            failures.append(exc)

    producers = [threading.Thread(target=produce, args=(i,)) for i in range(2)]
    consumers = [threading.Thread(target=consume) for _ in range(2)]
    for thread in producers + consumers:
        thread.start()
    for thread in producers:
        thread.join(60)
    part.seal()
    for thread in consumers:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures
    assert proxy.broken > 10
    assert got == Counter(f"{at}-{i}" for at in range(2) for i in range(40))
    proxy.asking = proxy.answering = lambda data: False
    gc.collect()
    no_leaks(watcher)
    assert used_bytes(watcher) == 0
    plane.close()
    watcher.close()


@pytest.mark.parametrize("side", ["asking", "answering"])
def test_awaited_calls_survive_a_broken_connection(proxy: Proxy, side: str) -> None:
    async def calls() -> list[object]:
        async with aio.Plane(join(proxy.connect)) as plane:
            part = await plane.partition("p", stages={"s": ["x"]})
            keys: list[object] = []
            for i in range(4):
                setattr(proxy, side, once())
                await part.put({"x": [np.full(2000, i)]})
                setattr(proxy, side, once())
                async with await part.claim("s", rows=1, timeout=10) as batch:
                    keys.append(batch["x"][0][0])
                    setattr(proxy, side, once())
            return keys

    assert asyncio.run(calls()) == [0, 1, 2, 3]
    assert proxy.broken >= 12
