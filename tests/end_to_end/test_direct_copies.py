"""Batches that a GPU copies straight from the pinned arena: over the twin, tensors of the host."""

from __future__ import annotations

import gc
import logging
import select
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import dataplane
from dataplane.client.read import tensors
from dataplane.errors import DeviceMissing
from dataplane.gpu import direct
from dataplane.gpu.direct import DirectCopies, Landing, Runs
from dataplane_twin import TwinDevice
from tests.end_to_end.conftest import Cluster, until

MIB = 1 << 20


class Landings:
    """Tensors of the host stand for those of a GPU."""

    def __init__(self, device: TwinDevice) -> None:
        self.device = device

    def of(self, where: object) -> Landing | None:
        return Landing(self.device, 0, "cpu")


class PromptTwin(TwinDevice):
    """Copies at once, as torch's operations on the same stream would see them."""

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        super().copy(target, source, nbytes, stream)
        self.synchronize(stream)


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    device = TwinDevice()
    yield device
    device.close()


@pytest.fixture
def plane(cluster: Cluster, device: TwinDevice) -> Iterator[dataplane.Plane]:
    cluster.start("a", arena="128MiB")
    with cluster.connect("a") as connected:
        copies(connected).landing_on = Landings(device).of
        yield connected


def copies(plane: dataplane.Plane) -> DirectCopies:
    return plane._session.direct


def test_every_layout_comes_straight_from_the_arena_as_it_was_put(
    plane: dataplane.Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "PIECE_BYTES", MIB)  # values lie over the ends of several
    device = PromptTwin()
    copies(plane).landing_on = Landings(device).of
    rng = np.random.default_rng(0)
    part = plane.partition("p", free="drop")
    dense = rng.integers(0, 255, (8, 300_000), np.uint8)
    ragged = [rng.random((40_000 + 7 * row, 3)).astype(ml_dtypes.bfloat16) for row in range(8)]
    part.put({"dense": dense, "ragged": ragged, "few": np.arange(8)}, key=list(range(8)))
    rows = part.get(keys=list(range(8)))
    plain = rows["ragged"]
    assert torch.equal(rows.torch("dense"), torch.from_numpy(dense))
    assert len(device.pinned) >= 3 and max(device.pinned.values()) == MIB
    for layout in ("list", "padded", "jagged"):
        found = rows.torch("ragged", layout=layout)
        wanted = tensors.to_torch(plain, layout)
        pairs = (
            zip(found.unbind(), wanted.unbind(), strict=True)
            if layout != "list"
            else zip(found, wanted, strict=True)
        )
        assert all(torch.equal(one, two) for one, two in pairs), layout
    asked = len(device.pinned)
    assert rows.torch("few").tolist() == list(range(8)) and len(device.pinned) == asked
    del rows, plain
    plane.close()
    until(lambda: not device.pinned, "nothing is pinned when the client has left")
    device.close()


def test_what_a_gpu_still_copies_from_is_held_when_the_batch_is_gone(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", stages={"s": ["x"]})
    block = np.random.default_rng(1).integers(0, 255, (4, MIB), np.uint8)
    part.put({"x": block})
    batch = part.claim("s", rows=4, timeout=10)
    order = batch.numpy("x").copy()
    go_on = device.hold()
    tensor = batch.torch("x")
    batch.ack()
    del batch
    part.put({"x": block})
    part.claim("s", rows=4, timeout=10).ack()
    until(lambda: plane.stats()["arena"]["pinned_bytes"] == 4 * MIB, "only the copy's are held")
    assert not np.array_equal(tensor.numpy(), order)
    go_on()
    until(lambda: plane.stats()["arena"]["used_bytes"] == 0, "the copy is done and all is free")
    assert np.array_equal(tensor.numpy(), order)


def test_a_copy_that_is_interrupted_holds_its_bytes_until_the_gpu_is_done(
    plane: dataplane.Plane, device: TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "PIECE_BYTES", MIB)
    part = plane.partition("p", stages={"s": ["x"]})
    part.put({"x": np.ones((4, MIB), np.uint8)})
    go_on, queued, copy = device.hold(), [0], device.copy
    sink = np.empty(MIB, np.uint8)  # the interrupted call frees its own tensor

    def interrupted(target: int, source: int, nbytes: int, stream: int = 0) -> None:
        copy(sink.ctypes.data, source, nbytes, stream)
        queued[0] += 1
        if queued[0] == 2:
            raise KeyboardInterrupt

    device.copy = interrupted  # type: ignore[method-assign]
    batch = part.claim("s", rows=4, timeout=10)
    with pytest.raises(KeyboardInterrupt):
        batch.torch("x")
    batch.ack()
    del batch
    select.select([], [], [], 1)
    assert plane.stats()["arena"]["pinned_bytes"] == 4 * MIB
    go_on()
    until(lambda: plane.stats()["arena"]["used_bytes"] == 0, "the copies are done and all is free")


def test_memory_that_the_driver_does_not_unpin_stays_mapped(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", free="drop")
    part.put({"x": np.ones((4, MIB), np.uint8)}, key=[0, 1, 2, 3])
    tensor = part.get(keys=[0, 1, 2, 3]).torch("x")
    device.synchronize()  # before the tensor, host memory here, may be freed
    assert tensor.shape == (4, MIB)
    (address,) = device.pinned

    def refuse(address: int) -> None:
        raise DeviceMissing("cudaErrorIllegalAddress")

    device.unpin_host = refuse  # type: ignore[method-assign]
    plane.close()
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert any(line.startswith(f"{address:x}-") for line in maps)


def test_a_client_that_leaves_keeps_the_arena_pinned_until_its_copies_are_done(
    plane: dataplane.Plane, device: TwinDevice, cluster: Cluster
) -> None:
    part = plane.partition("p", stages={"s": ["x"]})
    block = np.random.default_rng(2).integers(0, 255, (4, MIB), np.uint8)
    part.put({"x": block})
    go_on = device.hold()
    batch = part.claim("s", rows=4, timeout=10)
    tensor = batch.torch("x")
    order = batch.numpy("x").copy()
    batch.ack()
    del batch
    plane.close()
    assert device.pinned
    with cluster.connect("a") as other:
        assert other.stats()["arena"]["pinned_bytes"] == 4 * MIB
        go_on()
        until(lambda: other.stats()["arena"]["used_bytes"] == 0, "all is free")
    until(lambda: not device.pinned, "nothing is pinned")
    assert np.array_equal(tensor.numpy(), order)


def test_the_arena_of_a_peer_that_died_does_not_stay_pinned(
    plane: dataplane.Plane, device: TwinDevice, cluster: Cluster
) -> None:
    part = plane.partition("p", free="drop")
    part.put({"x": np.ones((4, MIB), np.uint8)}, key=[0, 1, 2, 3])
    tensor = part.get(keys=[0, 1, 2, 3]).torch("x")
    device.synchronize()  # unlike memory of a GPU, that of the host is given back at once
    assert tensor.shape == (4, MIB) and device.pinned
    cluster.peers["a"].kill()
    cluster.peers["a"].wait()
    until(lambda: not device.pinned, "it is let go of")


def test_a_piece_of_the_arena_that_nobody_copies_from_is_unpinned(
    plane: dataplane.Plane, device: TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "PINNED_S", 0.5)
    part = plane.partition("p", free="drop")
    block = np.random.default_rng(4).integers(0, 255, (4, MIB), np.uint8)
    part.put({"x": block}, key=[0, 1, 2, 3])
    rows = part.get(keys=[0, 1, 2, 3])
    go_on = device.hold()
    first = rows.torch("x")
    part.get(keys=[0])
    assert device.pinned
    select.select([], [], [], 1)
    assert device.pinned  # a copy is still to be made
    go_on()
    until(lambda: not device.pinned, "the idle piece is unpinned")
    second = rows.torch("x")
    device.synchronize()
    assert np.array_equal(first.numpy(), block) and np.array_equal(second.numpy(), block)


def test_where_memory_cannot_be_pinned_batches_come_all_the_same_and_the_log_says_so_once(
    plane: dataplane.Plane, device: TwinDevice, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, nbytes: int, read_only: bool = False) -> None:
        raise DeviceMissing("cudaErrorNotSupported")

    device.pin_host = refuse  # type: ignore[method-assign]
    part = plane.partition("p", free="drop")
    block = np.random.default_rng(3).integers(0, 255, (4, MIB), np.uint8)
    part.put({"x": block}, key=[0, 1, 2, 3])
    rows = part.get(keys=[0, 1, 2, 3])
    with caplog.at_level(logging.WARNING, "dataplane"):
        for _ in range(2):
            assert torch.equal(rows.torch("x"), torch.from_numpy(block))
    assert caplog.text.count("cudaErrorNotSupported") == 1
    assert "pinning failed" in caplog.text


def test_neighbours_in_both_memories_are_one_copy_that_is_cut_where_a_piece_ends() -> None:
    def column(*numbers: int) -> np.ndarray:
        return np.array(numbers, np.uint64)

    runs = Runs(
        column(100, 164, 300, 50, 0), column(0, 64, 128, 228, 260), column(64, 10, 0, 32, 5)
    )
    assert list(runs.cut(128)) == [(100, 0, 28), (128, 28, 46), (50, 228, 32), (0, 260, 5)]
    assert runs.pieces(128) == [0, 1] and not runs.long
    assert not Runs(column(), column(), column()).long
