"""OpenRLHF's queue: what `ray.util.queue.Queue` does for it, between processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle  # noqa: S403
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensordict", reason="make test installs it")
pytest.importorskip("omegaconf", reason="make test installs it")

import dataplane  # noqa: E402
from dataplane.integrations.openrlhf import Empty, Full, Queue  # noqa: E402
from tests.cluster import environment  # noqa: E402
from tests.end_to_end.conftest import running  # noqa: E402
from tests.processes import ending  # noqa: E402

ROOT = Path(__file__).parents[2]


@dataclass
class Experience:
    """As OpenRLHF's: tensors, lists of objects, a dict, and much that is None."""

    sequences: Any = None
    values: Any = None
    prompts: list[str] = field(default_factory=list)
    mm_train_inputs: list[Any] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def queue(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.setenv("DATAPLANE_ARENA", "64MiB")
    monkeypatch.setenv("DATAPLANE_LINGER", "0.5")
    monkeypatch.setenv("DATAPLANE_RUN", "openrlhf")
    made = Queue(2)
    yield made
    made.close()


def test_an_item_comes_out_as_it_went_in(queue: Queue) -> None:
    pixels = torch.rand(1 << 18)
    made = [
        Experience(
            sequences=torch.arange(n).unsqueeze(0),
            prompts=[f"p{n}"],
            mm_train_inputs=[{"pixel_values": pixels.clone()}],
            info={"length": torch.tensor([float(n)])},
        )
        for n in range(1, 9)
    ]
    state = {"episode": 0, "loader": {"steps": [1, 2], "rng": b"\x00\x01", "snapshot": None}}
    queue.put((made, state, 0.5, 1.25), block=True)
    assert queue._plane.stats()["arena"]["used_bytes"] < 2 * pixels.nbytes
    found, told, *rest = queue.get(block=True)
    assert told == state and rest == [0.5, 1.25]
    assert [type(one) for one in found] == [Experience] * 8
    assert all(torch.equal(a.sequences, b.sequences) for a, b in zip(found, made, strict=True))
    assert found[3].prompts == ["p4"] and found[3].values is None
    assert torch.equal(found[3].mm_train_inputs[0]["pixel_values"], pixels)
    found[3].sequences += 1  # private
    for item in ("done", None, 0, ("eval", 3, {"accuracy": 0.5})):
        queue.put(item)
        assert queue.get() == item
    assert queue._plane.stats()["arena"]["used_bytes"] == 0


def test_it_is_first_in_first_out_and_says_how_full_it_is(queue: Queue) -> None:
    assert queue.empty() and not queue.full() and queue.qsize() == 0
    queue.put("a")
    queue.put_nowait("b")
    assert queue.full() and queue.qsize() == len(queue) == 2
    with pytest.raises(Full):
        queue.put("c", block=False)
    with pytest.raises(Full):
        queue.put("c", timeout=0.1)
    assert [queue.get(), queue.get_nowait()] == ["a", "b"]
    with pytest.raises(Empty):
        queue.get(block=False)
    with pytest.raises(Empty):
        asyncio.run(queue.get_async(timeout=0.1))


@pytest.fixture
def queues() -> Iterator[dict[str, Queue]]:
    """One queue, at each of two hosts."""
    with running("a", "b") as cluster, contextlib.ExitStack() as ends:
        found = {}
        for host in "ab":
            with environment(DATAPLANE_PEER=host):
                found[host] = Queue(name="both", run=cluster.run)
                ends.callback(found[host].close)
        yield found


def numbered(number: int) -> tuple[int, np.ndarray]:
    return number, np.arange(5_000 if number % 3 else 1)  # in the arena of its host, or inline


@pytest.mark.parametrize("seed", range(3))
def test_items_come_out_in_order_whichever_host_puts_and_gets(
    queues: dict[str, Queue], seed: int
) -> None:
    count, rng, found = 60, random.Random(seed), list[int]()
    for number in range(count):
        queues[rng.choice("ab")].put(numbered(number))
        if rng.random() < 0.3:
            found.append(queues[rng.choice("ab")].get(timeout=30)[0])
    found += [queues[rng.choice("ab")].get(timeout=30)[0] for _ in range(count - len(found))]
    assert found == list(range(count))


def test_items_of_several_producers_come_out_in_order_of_arrival(queues: dict[str, Queue]) -> None:
    """An item that was put before another `put` began leaves before it."""
    each, puts, gets = 12, dict[int, tuple[float, float]](), dict[int, tuple[float, float]]()
    producers = list(enumerate("aabb"))

    def put(producer: tuple[int, str]) -> None:
        for number in range(producer[0] * each, producer[0] * each + each):
            began = time.monotonic()
            queues[producer[1]].put(numbered(number))
            puts[number] = began, time.monotonic()

    def get(consumer: tuple[int, str]) -> None:
        for _ in range(each):
            began = time.monotonic()
            number = queues[consumer[1]].get(timeout=60)[0]
            gets[number] = began, time.monotonic()

    for at_once in (False, True):
        puts.clear()
        gets.clear()
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(get, one) for one in producers] if at_once else []
            list(pool.map(put, producers))
            for call in calls:
                call.result(90)
        for consumer in () if at_once else producers:
            get(consumer)
        assert puts.keys() == gets.keys() == set(range(4 * each))
        pairs = itertools.permutations(puts, 2)
        ordered = [(x, y) for x, y in pairs if puts[x][1] < puts[y][0]]
        assert len(ordered) >= 4 * each * (each - 1) // 2
        assert not [(x, y) for x, y in ordered if gets[y][1] < gets[x][0]]


def test_an_item_that_comes_back_is_the_first_again(queues: dict[str, Queue]) -> None:
    for number in range(6):
        queues["b"].put(numbered(number))
    part = queues["a"]._plane.partition("both")
    taken = [part.claim("get", rows=1, in_order=True, timeout=30) for _ in range(4)]
    for at in (2, 0, 3):
        taken[at].release()
    assert [queues["b"].get(timeout=30)[0] for _ in range(5)] == [0, 2, 3, 4, 5]


def test_a_put_waits_for_a_get_of_another_process(queue: Queue) -> None:
    queue.put("a")
    queue.put("b")
    script = "import pickle, sys; q = pickle.load(sys.stdin.buffer); print(q.get() + q.get())"
    pipe = subprocess.PIPE
    reader = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdin=pipe, stdout=pipe)
    with (
        ThreadPoolExecutor(1) as pool,
        contextlib.closing(queue),  # ends the put where the test fails before the queue has room
        ending(reader),
    ):
        written = pool.submit(queue.put, "c")  # it is full
        told, _ = reader.communicate(pickle.dumps(queue), timeout=100)
        written.result(30)
        assert told.strip() == b"ab" and queue.get() == "c"


def test_what_cannot_be_read_safely_is_named(queue: Queue) -> None:
    with pytest.raises(dataplane.InvalidValue, match="odd"):
        queue.put({"odd": object()})
    for values in (["a", "b"], [1, None]):
        with pytest.raises(dataplane.InvalidValue, match="would lose its mask"):
            queue.put({"texts": np.ma.array(values, mask=[False, True])})
    assert queue.empty()

    @dataclass
    class Local:
        x: int = 0

    queue.put(Local())
    with pytest.raises(TypeError, match="Local, because this process's module"):
        queue.get()


def test_whoever_waits_is_told_that_the_queue_has_ended(queue: Queue) -> None:
    ended = threading.Timer(0.2, queue.shutdown)
    ended.start()
    with pytest.raises(dataplane.PartitionGone):
        queue.get()
    ended.join()
