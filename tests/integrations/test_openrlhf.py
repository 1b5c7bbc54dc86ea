"""OpenRLHF's queue: what `ray.util.queue.Queue` does for it, between processes."""

from __future__ import annotations

import asyncio
import contextlib
import pickle  # noqa: S403
import subprocess
import sys
import threading
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


def test_the_items_of_each_host_come_out_in_order_at_every_host() -> None:
    count = 20
    with running("a", "b") as cluster, contextlib.ExitStack() as ends:
        queues = {}
        for host in "ab":
            with environment(DATAPLANE_PEER=host):
                queues[host] = Queue(name="both", run=cluster.run)
                ends.callback(queues[host].close)

        def put(host: str) -> None:
            for number in range(count):
                values = 5_000 if number % 3 else 1  # in the arena of this host, or inline
                queues[host].put((host, number, np.arange(values)))

        def get(host: str) -> list[tuple[str, int]]:
            return [queues[host].get(timeout=30)[:2] for _ in range(count)]

        def in_order(found: list[tuple[str, int]]) -> bool:
            each = [[number for host, number in found if host == one] for one in "ab"]
            return all(numbers == sorted(numbers) for numbers in each)

        every = [(host, number) for host in "ab" for number in range(count)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(put, "ab"))
            found = get("b") + get("a")  # one after the other
            assert in_order(found) and sorted(found) == every
            gets = [pool.submit(get, host) for host in "ab"]
            list(pool.map(put, "ab"))
            both = [one.result(60) for one in gets]
        assert all(map(in_order, both)) and sorted(both[0] + both[1]) == every


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
