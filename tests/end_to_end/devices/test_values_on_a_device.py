"""All that a partition takes, with values on a device: over the twin in host memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import dataplane
from dataplane import aio
from dataplane_twin import TwinArray, TwinDevice
from tests.end_to_end.conftest import PLANE, Cluster, peer_command
from tests.end_to_end.devices.twins import (
    MIB,
    all_free,
    given,
    on_device,
    same,
    values,
)


def test_every_dtype_and_shape_comes_back_as_it_was(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", free="drop")
    arrays: list[np.ndarray] = [
        np.float64(3.5) * np.ones(()),
        np.zeros((0, 4), np.int16),
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        np.arange(5000).astype(ml_dtypes.bfloat16),
        np.arange(5000).astype(ml_dtypes.float8_e4m3fn).reshape(50, 100),
        np.arange(3000, dtype=np.complex64),
        np.array([True, False]),
    ]
    part.put({"x": given(device, arrays)}, key=list(range(7)))
    found = part.get(keys=list(range(7)))
    assert same(found["x"], arrays) and [v.shape for v in found["x"]] == [a.shape for a in arrays]
    assert same(found.numpy("x"), arrays)
    assert same(found["x"][2:4], arrays[2:4]) and len(found["x"][2:4]) == 2
    whole = np.arange(6 * 2000, dtype=np.int32).reshape(6, 2000)
    part.put({"x": device.array(whole)}, key=list("abcdef"))
    rows = part.get(keys=list("abcdef"))
    assert np.array_equal(rows.numpy("x"), whole)
    assert np.array_equal(rows.torch("x").numpy(), whole)
    assert rows.arrow(["x"]).num_rows == 6


def test_fields_in_both_memories_go_in_one_put_with_groups_and_dedup(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", stages={"s": ["x", "image", "mixed"]}, group_size=4)
    count = 64
    arrays = values(count, 300_000)
    image = np.arange(200_000, dtype=np.uint8)
    mixed = [*given(device, values(1)), *values(count - 1, first=1)]
    part.put(
        {"x": given(device, arrays), "image": [image] * count, "mixed": mixed},
        key=list(range(count)),
        group=[row % 16 for row in range(count)],
        dedup=["image"],
        timeout=30,
    )
    assert on_device(plane)["used_bytes"] >= sum(a.nbytes for a in arrays)
    assert plane.stats()["arena"]["used_bytes"] < 3 * MIB
    batch = part.claim("s", groups=16, timeout=10)
    order = [int(key) for key in batch.keys]
    assert sorted(order) == list(range(count))
    assert same(batch["x"], [arrays[row] for row in order])
    assert same(batch["mixed"], [values(1, first=row)[0] for row in order])
    assert all(np.array_equal(one, image) for one in batch["image"])
    for group in batch.groups():
        assert same(group["x"], [arrays[int(key)] for key in group.keys])
    with pytest.raises(dataplane.InvalidCall, match="dedup"):
        part.put({"x": given(device, arrays)}, dedup=["x"])
    with pytest.raises(dataplane.InvalidRows):
        part.put({"x": given(device, arrays), "image": [image]})


def test_values_on_a_device_that_are_copied_to_the_host_are_named_in_the_log(
    plane: dataplane.Plane, device: TwinDevice, caplog: pytest.LogCaptureFixture
) -> None:
    part = plane.partition("p", stages={"s": ["x", "mixed", "plain"]})
    mixed = [*values(1), *given(device, values(1))]
    for _ in range(2):
        part.put({"x": given(device, values(2)), "mixed": mixed, "plain": values(2)})
        with part.claim("s", rows=2, timeout=10) as batch:
            batch.add(score=given(device, values(2)))
    told = [record.getMessage() for record in caplog.records if "host arena" in record.getMessage()]
    assert [message.split(":")[0] for message in told] == ["field 'mixed'", "field 'score'"]


def test_a_checkpoint_and_a_spill_file_do_not_mind_values_on_a_device(
    cluster: Cluster, device: TwinDevice, tmp_path: Path
) -> None:
    spill = f"{tmp_path}:64MiB"
    cluster.start("a", arena="16MiB", spill=spill, devices={"a": "twin:32MiB"})
    arrays = values(4, MIB)
    with cluster.connect("a") as plane:
        part = plane.partition("p", free="drop")
        part.put({"x": given(device, arrays)}, key=list("abcd"))
        for row in range(8):
            part.put({"y": [np.full(3 * MIB, row, np.uint8)]}, key=[row], timeout=30)
        assert plane.stats()["arena"]["spilled_bytes"] > 0
        assert on_device(plane)["used_bytes"] >= 4 * MIB
        with dataplane.connect("a", run=PLANE, devices="off") as other:
            assert same(other.partition("p").get(keys=list("abcd"))["x"], arrays)
        assert int(part.get(keys=[0])["y"][0][0]) == 0
        plane.checkpoint(tmp_path / "saved")
        part.drop()
        plane.restore(tmp_path / "saved")
        assert same(plane.partition("p").get(keys=list("abcd"))["x"], arrays)


def test_puts_and_reads_of_an_event_loop_use_the_device_too(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    arrays = values(3, MIB)

    async def run() -> None:
        async with aio.connect("a", run=PLANE, devices="required") as there:
            part = await there.partition("p", stages={"s": ["x"]})
            await part.put({"x": given(device, arrays)})
            batch = await part.claim("s", rows=3, timeout=10)
            assert same(batch["x"], arrays) and isinstance(batch["x"][0], TwinArray)
            await batch.ack()

    asyncio.run(run())
    all_free(plane)


def test_a_peer_without_a_device_takes_such_values_into_host_memory(
    cluster: Cluster, device: TwinDevice
) -> None:
    cluster.start("a")
    arrays = values(3)
    with cluster.connect("a") as plane:
        assert plane.stats()["devices"] == []
        part = plane.partition("p", free="drop")
        part.put({"x": given(device, arrays)}, key=[0, 1, 2])
        assert same(part.get(keys=[0, 1, 2])["x"], arrays)
    with pytest.raises(dataplane.DeviceMissing, match="--device-arena"):
        dataplane.connect("a", run=PLANE, devices="required")
    with pytest.raises(dataplane.InvalidCall, match="'auto', 'required' or 'off'"):
        dataplane.connect("a", run=PLANE, devices="maybe")


def started(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = peer_command("x", PLANE)
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def test_gpu_memory_that_is_not_there_is_said_at_once(run_dir: Path) -> None:
    environ = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    command = peer_command("x", PLANE)
    refused = subprocess.run(
        [*command, "--device-arena", "2GiB"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=environ,
    )
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "cupy" in refused.stderr or "this process sees none" in refused.stderr
    for text in ("gpu:2GiB", "twin:", "twin:12KiB", "many"):
        wrong = started(run_dir, "--device-arena", text)
        assert wrong.returncode == 2 and "Traceback" not in wrong.stderr, wrong.stderr
    for transport in ("cuda_ipc", "nccl"):
        alone = started(run_dir, "--transport", f"required:{transport}")
        assert alone.returncode == 2 and "--device-arena" in alone.stderr, alone.stderr
