"""Values of torch and cupy through a real peer and real clients, on a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane.transport import registry
from tests.end_to_end.conftest import PLANE, Cluster, line, until
from tests.gpu.conftest import bring, two_planes

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def cluster(run_dir: Any) -> Iterator[Cluster]:
    running = Cluster(run_dir)
    running.start("a", "b", arena="256MiB", devices={"a": "256MiB"})
    yield running
    running.stop()


@pytest.fixture
def plane(cluster: Cluster) -> Iterator[dataplane.Plane]:
    with dataplane.connect("a", run=PLANE, devices="required") as connected:
        yield connected


def figures(plane: dataplane.Plane) -> dict[str, Any]:
    return dict(plane.stats()["devices"][0])


def all_free(plane: dataplane.Plane) -> None:
    until(lambda: figures(plane)["free_bytes"] == figures(plane)["size_bytes"], "all is free")


def test_tensors_stay_on_the_gpu_and_are_seen_there(
    plane: dataplane.Plane, cluster: Cluster
) -> None:
    torch = pytest.importorskip("torch")
    part = plane.partition("p", stages={"s": ["hidden"]})
    tensors = [torch.randn(1000 + row, 64, dtype=torch.bfloat16, device="cuda") for row in range(8)]
    part.put({"hidden": tensors})
    assert figures(plane)["used_bytes"] >= sum(t.nbytes for t in tensors)
    batch = part.claim("s", rows=8, timeout=20)
    found = batch.torch("hidden", device="cuda")
    assert all(torch.equal(one, two) for one, two in zip(found, tensors, strict=True))
    view = torch.as_tensor(batch["hidden"][0], device="cuda")
    assert (
        torch.equal(view.view(torch.bfloat16), tensors[0]) and figures(plane)["staged_bytes"] == 0
    )
    with dataplane.connect("b", run=PLANE) as other:
        rows = other.partition("p").get(keys=batch.keys)
        there = rows.torch("hidden")
        assert all(torch.equal(one, two.cpu()) for one, two in zip(there, tensors, strict=True))
    assert figures(plane)["staged_bytes"] > 0
    batch.ack()
    del batch, view, rows
    all_free(plane)


def test_cupy_arrays_stay_on_the_gpu_too(plane: dataplane.Plane) -> None:
    cupy = pytest.importorskip("cupy")
    part = plane.partition("p", free="drop")
    array = cupy.arange(8 * 5000, dtype=cupy.float32).reshape(8, 5000)
    part.put({"x": array}, key=list(range(8)))
    rows = part.get(keys=list(range(8)))
    assert cupy.array_equal(cupy.asarray(rows["x"][3]), array[3])
    assert np.array_equal(rows.numpy("x"), array.get())


def test_values_of_the_host_go_to_the_gpu_straight_from_the_pinned_arena(
    plane: dataplane.Plane,
) -> None:
    torch = pytest.importorskip("torch")
    part = plane.partition("p", stages={"s": ["dense", "ragged"]})
    rng = np.random.default_rng(0)
    dense = rng.integers(0, 255, (8, MIB), np.uint8)
    ragged = [rng.random((100_000 + row, 2), np.float32) for row in range(8)]
    part.put({"dense": dense, "ragged": ragged})
    batch = part.claim("s", rows=8, timeout=20)
    there = {name: batch.torch(name, device="cuda") for name in ("dense", "ragged")}
    jagged = batch.torch("ragged", layout="jagged", device="cuda")
    here = {name: batch.torch(name) for name in ("dense", "ragged")}
    direct = plane._session.direct
    assert not direct.refused and "0 pieces" not in repr(direct), repr(direct)
    assert torch.equal(there["dense"].cpu(), here["dense"])
    for one, two, three in zip(there["ragged"], here["ragged"], jagged.unbind(), strict=True):
        assert torch.equal(one.cpu(), two) and torch.equal(three.cpu(), two)
    batch.ack()
    del batch
    until(lambda: plane.stats()["arena"]["used_bytes"] == 0, "the copies hold nothing any more")


@pytest.mark.parametrize("what", ["views", "copies"])
def test_a_client_killed_with_views_or_in_a_put_leaves_the_pool_exact(
    plane: dataplane.Plane, cluster: Cluster, what: str
) -> None:
    torch = pytest.importorskip("torch")
    part = plane.partition("p", stages={"s": ["x"]})
    if what == "views":
        part.put({"x": [torch.ones(MIB, dtype=torch.uint8, device="cuda")] * 4})
    ends = {
        "views": 'batch = part.claim("s", rows=4, timeout=20); views = list(batch["x"])',
        "copies": """
    tensors = [torch.ones(16 << 20, dtype=torch.uint8, device="cuda")] * 4
    torch.cuda._sleep(1 << 40)
    import threading
    threading.Thread(target=lambda: part.put({"x": tensors})).start()
    """,
    }
    worker = cluster.worker(
        f"""
    import signal
    import torch
    import dataplane
    torch.zeros(1, device="cuda")
    plane = dataplane.connect("a", devices="required")
    part = plane.partition("p")
    {ends[what].strip()}
    print("here", flush=True)
    signal.pause()
    """
    )
    line(worker)
    if what == "copies":
        until(lambda: figures(plane)["granted_bytes"] > 0, "it copies")
    worker.kill()
    if what == "views":
        part.claim("s", rows=4, timeout=20).ack()
    all_free(plane)


def test_a_graph_that_one_thread_captures_is_left_alone_by_what_another_puts_and_reads(
    plane: dataplane.Plane,
) -> None:
    torch = pytest.importorskip("torch")
    part = plane.partition("p", stages={"s": ["x"]})
    tensors = [torch.ones(1000, device="cuda")] * 4
    counted = torch.zeros(1000, device="cuda")
    captured, kept = threading.Event(), list[Any]()

    def work() -> None:
        while not captured.is_set():
            part.put({"x": tensors})
            batch = part.claim("s", rows=4, timeout=20)
            kept.append(list(batch["x"]))  # see docs/transports.md: views are kept during a capture
            batch.ack()

    graph, worker = torch.cuda.CUDAGraph(), threading.Thread(target=work)
    with torch.cuda.graph(graph):
        worker.start()
        for _ in range(50):
            counted += 1
            time.sleep(0.01)
        meanwhile = len(kept)
    captured.set()
    worker.join()
    graph.replay()
    torch.cuda.synchronize()
    assert (counted == 50).all() and meanwhile > 2
    kept.clear()
    all_free(plane)


@pytest.mark.parametrize("way", ["cuda_ipc", "nixl"])
def test_values_go_from_one_peer_to_another_on_the_same_gpu_and_it_is_said_how(
    run_dir: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Whether the driver lets an engine register a pool that was opened by handle, only this
    tells."""
    if why := registry.missing(way):
        pytest.skip(f"not run: {why}")
    if way != "cuda_ipc":
        monkeypatch.setenv("DATAPLANE_TRANSPORT", f"required:{way}")
    with two_planes(run_dir) as (a, b):
        ways = bring(a, b)
        print(ways)
        if way not in ways["runs"]:
            assert way != "cuda_ipc" and ways["missing"][way]
            return
        (path,) = ways["peers"].values()
        tried = path["tried"][way]
        assert tried.get("exact") or (way != "cuda_ipc" and tried["error"])
        assert (path["transport"] == way) == tried.get("exact", False)
        if path["transport"] == way:
            assert figures(a)["staged_bytes"] == 0 and figures(b)["cached_bytes"] > 0
