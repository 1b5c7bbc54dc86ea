"""Values on a device through real peers and client processes, over the twin in host memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dataplane
from dataplane import aio
from dataplane.errors import TransportMissing
from dataplane.memory.device_twin import TwinArray, TwinDevice
from tests.end_to_end.conftest import PLANE, Cluster, line, until
from tests.end_to_end.scrape import free_address, scrape
from tests.end_to_end.test_attacks_peers import in_sync

MIB = 1 << 20
HOLDING = """
    import signal
    import numpy as np
    import dataplane
    from dataplane.memory.device_twin import TwinDevice

    device = TwinDevice()
    plane = dataplane.connect("a")
    part = plane.partition("p")
"""


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    device = TwinDevice()
    yield device
    device.close()


@pytest.fixture
def plane(cluster: Cluster) -> Iterator[dataplane.Plane]:
    """A client of a peer with 32 MiB on a device."""
    cluster.start("a", arena="64MiB", devices={"a": "twin:32MiB"})
    with cluster.connect("a") as connected:
        yield connected


def values(count: int, nbytes: int = 20_000, first: int = 0) -> list[np.ndarray]:
    """Different arrays of about so many bytes."""
    return [
        np.arange(nbytes // 4 + row, dtype=np.float32) + row for row in range(first, first + count)
    ]


def given(device: TwinDevice, arrays: list[np.ndarray], stream: int = 0) -> list[TwinArray]:
    return [device.array(array, stream) for array in arrays]


def on_device(plane: dataplane.Plane) -> dict[str, Any]:
    (figures,) = plane.stats()["devices"]
    return dict(figures)


def all_free(plane: dataplane.Plane) -> None:
    until(
        lambda: on_device(plane)["free_bytes"] == on_device(plane)["size_bytes"],
        "all of the device arena is free",
    )


def same(found: Any, arrays: list[np.ndarray]) -> bool:
    pairs = list(zip(found, arrays, strict=True))
    plain = [(one.get() if isinstance(one, TwinArray) else one, two) for one, two in pairs]
    return all((a.dtype, a.tobytes()) == (b.dtype, b.tobytes()) for a, b in plain)


def test_values_stay_on_the_device_and_are_seen_there_without_a_copy(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", stages={"s": ["hidden", "n"]})
    arrays = values(8)
    ref = part.put({"hidden": given(device, arrays), "n": list(range(8))})
    assert ref.fields == ("hidden", "n")
    used = on_device(plane)["used_bytes"]
    assert used >= sum(array.nbytes for array in arrays)
    assert plane.stats()["arena"]["used_bytes"] < 4096, "the values are in the host arena as well"
    batch = part.claim("s", rows=8, timeout=10)
    hidden = batch["hidden"]
    assert all(isinstance(one, TwinArray) for one in hidden) and same(hidden, arrays)
    assert hidden[0].address == hidden[0].address, "a view is a copy"
    assert list(batch["n"]) == list(range(8))
    assert same(batch.numpy("hidden"), arrays), "what is wanted on the host is not what was put"
    assert same([t.numpy() for t in batch.torch("hidden")], arrays)
    batch.ack()
    view = hidden[3]
    del batch, hidden
    assert on_device(plane)["used_bytes"] == used, "freed under a view"
    assert np.array_equal(view.get(), arrays[3])
    del view
    all_free(plane)
    assert on_device(plane)["staged_bytes"] == 0


def test_a_client_without_the_device_gets_the_same_bytes_by_way_of_the_host(
    plane: dataplane.Plane, cluster: Cluster, device: TwinDevice
) -> None:
    part = plane.partition("p", stages={"s": ["hidden"]})
    arrays = values(6)
    part.put({"hidden": given(device, arrays)})
    with dataplane.connect("a", plane=PLANE, devices="off") as other:
        batch = other.partition("p").claim("s", rows=6, timeout=10)
        assert all(isinstance(one, np.ndarray) for one in batch["hidden"])
        assert same(batch["hidden"], arrays)
        assert other.stats()["arena"]["cached_bytes"] >= sum(a.nbytes for a in arrays)
        staged = on_device(other)["staged_bytes"]
        assert staged >= sum(a.nbytes for a in arrays)
        assert same(other.partition("p").get(keys=batch.keys)["hidden"], arrays)
        assert on_device(other)["staged_bytes"] == staged, "a copy that is there was made again"
        batch.ack()
        del batch
        all_free(other)
        until(lambda: other.stats()["arena"]["used_bytes"] == 0, "the copies are gone too")


def test_values_on_a_device_of_another_host_are_pulled(
    cluster: Cluster, device: TwinDevice
) -> None:
    address = free_address()
    both = {"a": "twin:32MiB", "b": "twin:32MiB"}
    cluster.start("a", "b", arena="64MiB", devices=both, metrics={"a": address})
    arrays = values(12, 200_000)
    far = dataplane.connect("b", plane=PLANE, devices="off")
    with cluster.connect("a") as a, far as b:
        part = a.partition("p", stages={"s": ["hidden", "text"]})
        part.put({"hidden": given(device, arrays), "text": [str(i) for i in range(12)]})
        small = a.partition("small", stages={"s": ["hidden"]})
        tiny = values(5, 100)
        small.put({"hidden": given(device, tiny)})
        batch = b.partition("p").claim("s", rows=12, timeout=20)
        assert same(batch["hidden"], arrays) and not isinstance(batch["hidden"][0], TwinArray)
        assert list(batch["text"]) == [str(i) for i in range(12)]
        batch.ack()
        few = b.partition("small").claim("s", rows=5, timeout=20)
        assert same(few["hidden"], tiny), "packs of small values are not what was put"
        few.ack()
        del batch, few
        all_free(a)
        staged = on_device(a)["staged_bytes"]
        assert staged >= sum(array.nbytes for array in arrays)
        path = on_device(a)["to_others"]
        assert (path["requested"], path["else"]) == ("auto", "host arena, then tcp")
        shown = scrape(address)
        assert shown.value("dataplane_device_staged_bytes_total", device="twin:0") == staged
        assert shown.value("dataplane_device_free_bytes", device="twin:0") == 32 * MIB


def test_values_go_from_the_device_of_one_peer_to_that_of_another_on_the_same_host(
    cluster: Cluster, device: TwinDevice
) -> None:
    both = {"a": "twin:32MiB", "b": "twin:30MiB"}
    cluster.start("a", "b", arena="64MiB", devices=both)
    arrays = values(12, 200_000)
    with cluster.connect("a") as a, cluster.connect("b") as b:
        part = a.partition("p", stages={"s": ["hidden", "text", "tiny"]}, free="drop")
        tiny = values(12, 100)
        columns = {"hidden": given(device, arrays), "text": [str(row) for row in range(12)]}
        part.put(columns | {"tiny": given(device, tiny)}, key=list(range(12)))
        batch = b.partition("p").claim("s", rows=12, timeout=20)
        order = [int(key) for key in batch.keys]
        assert all(isinstance(one, TwinArray) for one in batch["hidden"])
        assert same(batch["hidden"], [arrays[row] for row in order])
        assert same(batch["tiny"], [tiny[row] for row in order])
        assert list(batch["text"]) == [str(row) for row in order]
        assert on_device(a)["staged_bytes"] == 0, "something went by way of the host"
        (path,) = on_device(b)["to_others"]["peers"].values()
        assert path["transport"] == "cuda_ipc" and path["tried"]["cuda_ipc"]["exact"]
        command = [sys.executable, "-m", "dataplane", "probe", "--plane", PLANE]
        probed = subprocess.run(
            [*command, "--require", "cuda_ipc"], capture_output=True, text=True, check=False
        )
        assert probed.returncode == 0, probed.stdout + probed.stderr
        assert probed.stdout.count("between devices: cuda_ipc, because") == 2
        assert probed.stdout.count("device cuda_ipc: ") == 2
        cached = on_device(b)["cached_bytes"]
        assert cached >= sum(array.nbytes for array in arrays)
        again = b.partition("p").get(keys=list(range(12)))
        assert same(again["hidden"], arrays) and on_device(b)["cached_bytes"] == cached
        with dataplane.connect("b", plane=PLANE, devices="off") as other:
            plain = other.partition("p").get(keys=list(range(12)))
            assert all(isinstance(one, np.ndarray) for one in plain["hidden"])
            assert same(plain["hidden"], arrays)
        del batch, again, plain
        until(lambda: on_device(b)["pinned_bytes"] == 0, "nobody reads")
        own = b.partition("own", free="drop")
        own.put({"x": given(device, values(5, 4 * MIB))}, key=list(range(5)), timeout=20)
        for field in "yz":
            own.put({field: given(device, values(5, 900_000))}, key=list(range(5)), timeout=20)
        assert on_device(b)["cached_bytes"] < cached, "copies are in the way of values"
        assert same(b.partition("p").get(keys=[3, 4])["hidden"], arrays[3:5])


def test_ranks_that_are_required_bring_values_to_other_devices_and_say_what_is_missing(
    cluster: Cluster, device: TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nccl` with the twin's ranks, of which no two may be on one device either."""
    monkeypatch.setenv("DATAPLANE_TRANSPORT", "required:nccl")
    memory = {"a": "twin:32MiB", "b": "twin@1:32MiB", "c": "twin:32MiB"}
    cluster.start("a", "b", "c", arena="64MiB", devices=memory)
    arrays = values(6, 200_000)
    with cluster.connect("a") as a, cluster.connect("b") as b, cluster.connect("c") as c:
        a.partition("p", free="drop").put({"x": given(device, arrays)}, key=list(range(6)))
        rows = b.partition("p").get(keys=list(range(6)))
        assert all(one.device.identity == "twin:1" for one in rows["x"])
        assert same(rows["x"], arrays)
        ways = on_device(b)["to_others"]
        (path,) = ways["peers"].values()
        assert (path["transport"], ways["runs"]) == ("nccl", ["nccl"])
        assert path["tried"]["nccl"]["exact"] and on_device(a)["staged_bytes"] == 0
        with pytest.raises(TransportMissing, match="NCCL takes one rank a GPU"):
            c.partition("p").get(keys=[0, 1])


def test_a_peer_whose_device_is_full_reads_others_by_way_of_the_host(
    cluster: Cluster, device: TwinDevice
) -> None:
    both = {"a": "twin:32MiB", "b": "twin:4MiB"}
    cluster.start("a", "b", arena="64MiB", devices=both)
    arrays = values(2, 3 * MIB)
    with cluster.connect("a") as a, cluster.connect("b") as b:
        part = a.partition("p", free="drop")
        part.put({"x": given(device, arrays)}, key=[0, 1])
        for _ in range(2):
            found = b.partition("p").get(keys=[0, 1])
            assert same(found["x"], arrays)
        cluster.peers["a"].kill()
        cluster.peers["a"].wait()
        assert same(found["x"], arrays)


def test_a_client_on_another_device_of_the_host_gets_copies_made_by_that_device(
    cluster: Cluster, device: TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start("a", arena="64MiB", devices={"a": "twin:2x16MiB"})
    arrays = values(4, 200_000)
    with cluster.connect("a") as first:
        part = first.partition("p", stages={"s": ["x"], "t": ["y"]})
        part.put({"x": given(device, arrays)}, key=list(range(4)))
        monkeypatch.setattr("dataplane.client.devices._current_gpu", lambda: 1)
        with dataplane.connect("a", plane=PLANE, devices="required") as second:
            batch = second.partition("p").claim("s", rows=4, timeout=10)
            entry = batch["x"][0]
            assert isinstance(entry, TwinArray) and entry.device.identity == "twin:1"
            assert same(batch["x"], arrays) and same(batch.numpy("x"), arrays)
            assert same(batch["x"][1:3], arrays[1:3])
            there = TwinDevice("twin:1")
            second.partition("p").put({"y": given(there, arrays)}, key=list(range(4)))
            own = second.partition("p").claim("t", rows=4, timeout=10)
            assert same(own["y"], arrays)
            figures = second.stats()["devices"]
            assert [one["staged_bytes"] for one in figures] == [0, 0]
            assert all(one["pinned_bytes"] >= 4 * 200_000 for one in figures)
            batch.ack()
            own.ack()
            del batch, own
            for number in (0, 1):
                until(
                    lambda number=number: (  # type: ignore[misc]
                        second.stats()["devices"][number]["free_bytes"] == 16 * MIB
                    ),
                    "all is free",
                )
            assert same([entry], arrays[:1]), "a copy changed with what it was made of"
            there.close()


def test_a_second_copy_of_a_value_on_a_device_survives_its_peer(
    cluster: Cluster, device: TwinDevice
) -> None:
    cluster.start("a", "b", "c", arena="64MiB", devices=dict.fromkeys("abc", "twin:32MiB"))
    arrays = values(4, 50_000)
    with cluster.connect("c") as c:
        with cluster.connect("b") as b:
            in_sync(b)
            part = b.partition("p", stages={"s": ["hidden"]}, replicas=2, free="drop")
            part.put({"hidden": given(device, arrays)}, key=list("wxyz"))
        cluster.peers["b"].kill()
        cluster.peers["b"].wait()
        until(lambda: len(c.stats()["roster"]["members"]) == 2, "the peer is known as lost", 60.0)
        assert same(c.partition("p").get(keys=list("wxyz"))["hidden"], arrays)


def test_a_full_device_is_back_pressure_or_overflows_where_that_is_asked_for(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", stages={"s": ["hidden"]})
    first = values(5, 4 * MIB)
    part.put({"hidden": given(device, first)}, key=list(range(5)))
    more = values(2, 4 * MIB, first=5)
    with pytest.raises(dataplane.BackPressure, match='twin:0.*overflow="host"') as full:
        part.put({"hidden": given(device, more)}, key=[5, 6], timeout=0.5)
    assert full.value.details["arena_bytes"] == 32 * MIB
    part.put({"hidden": given(device, more)}, key=[5, 6], overflow="host", timeout=10)
    found = part.get(keys=list(range(7)))
    kinds = [type(one) for one in found["hidden"]]
    assert kinds == [TwinArray] * 5 + [np.ndarray] * 2
    assert same(found["hidden"], first + more) and same(found.numpy("hidden"), first + more)
    with pytest.raises(dataplane.ValueTooLarge):
        part.put({"hidden": given(device, values(1, 40 * MIB))}, timeout=10)
    with pytest.raises(dataplane.InvalidCall, match="overflow"):
        part.put({"hidden": given(device, more)}, overflow="disk")
    assert on_device(plane)["granted_bytes"] == 0


def test_a_put_waits_for_room_on_the_device_until_somebody_frees_some(
    plane: dataplane.Plane, cluster: Cluster, device: TwinDevice
) -> None:
    part = plane.partition("p", stages={"s": ["hidden"]})
    part.put({"hidden": given(device, values(5, 4 * MIB))})
    more = values(1, 4 * MIB, first=9)
    putting = threading.Thread(
        target=lambda: part.put({"hidden": given(device, more)}, key=["late"], timeout=30)
    )
    putting.start()
    until(lambda: plane.stats()["waiting_puts"] == 1, "the put waits")
    batch = part.claim("s", rows=5, timeout=10)
    batch.ack()
    del batch
    putting.join(30)
    assert not putting.is_alive()
    assert same(part.get(keys=["late"])["hidden"], more)


def test_dropping_most_rows_of_a_group_frees_their_part_of_the_device(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", free="drop")
    part.put({"x": given(device, [np.zeros(MIB, np.uint8)] * 8)}, key=list(range(8)), group="g")
    assert on_device(plane)["used_bytes"] == 8 * MIB
    part.drop(keys=list(range(1, 8)))
    assert on_device(plane)["used_bytes"] == MIB


def test_a_put_is_behind_what_its_stream_was_asked_for_and_in_nobodys_way(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", stages={"s": ["x"]})
    slow = device.stream()
    array = np.zeros(MIB, np.uint8)
    late = TwinArray(device, array, slow)
    go_on = device.hold(slow)
    device.ask(slow, lambda: array.fill(7))
    putting = threading.Thread(target=lambda: part.put({"x": [late]}, key=["late"], timeout=30))
    putting.start()
    until(lambda: on_device(plane)["granted_bytes"] == MIB, "room is granted")
    assert on_device(plane)["used_bytes"] == 0 and part.stats()["rows"] == 0
    part.put({"x": given(device, [np.ones(4096, np.uint8)])}, key=["at once"], timeout=10)
    go_on()
    putting.join(30)
    assert same(part.get(keys=["late"])["x"], [np.full(MIB, 7, np.uint8)])


def test_room_that_a_stream_may_still_write_into_is_given_to_nobody(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", free="drop")
    slow = device.stream()
    go_on = device.hold(slow)
    late = TwinArray(device, np.full(MIB, 7, np.uint8), slow)
    with pytest.raises(dataplane.DeadlineExceeded):
        part.put({"x": [late]}, timeout=0.3)
    until(lambda: not plane._session.bell.rung, "the housekeeper looked")
    assert on_device(plane)["granted_bytes"] == MIB
    go_on()
    all_free(plane)
    assert part.stats()["rows"] == 0


@pytest.mark.parametrize("what", ["views", "copies"])
def test_a_client_killed_with_views_or_in_the_middle_of_a_put_leaves_the_pool_exact(
    plane: dataplane.Plane, cluster: Cluster, device: TwinDevice, what: str
) -> None:
    part = plane.partition("p", stages={"s": ["x"]}, free="acked")
    if what == "views":
        part.put({"x": given(device, values(4, MIB))})
        worker = cluster.worker(
            HOLDING
            + """
    batch = part.claim("s", rows=4, timeout=20)
    views = list(batch["x"])
    batch.ack()
    print(type(views[0]).__name__, flush=True)
    signal.pause()
    """
        )
        assert line(worker) == "TwinArray"
        assert on_device(plane)["pinned_bytes"] >= 4 * MIB
    else:
        worker = cluster.worker(
            HOLDING
            + """
    device.hold()
    import threading
    array = device.array(np.ones(3 << 20, np.uint8))
    threading.Thread(target=lambda: part.put({"x": [array]})).start()
    print("copying", flush=True)
    signal.pause()
    """
        )
        line(worker)
        until(lambda: on_device(plane)["granted_bytes"] == 3 * MIB, "it copies")
    os.kill(worker.pid, signal.SIGKILL)
    all_free(plane)
    assert on_device(plane)["quarantined_bytes"] == 0 and part.stats()["rows"] == 0
    part.put({"x": given(device, values(4, MIB))})


def test_every_dtype_and_shape_comes_back_as_it_was(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", free="drop")
    arrays = [
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
    assert [message.split(":")[0] for message in told] == ["'mixed'", "'score'"]


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
        with dataplane.connect("a", plane=PLANE, devices="off") as other:
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
        async with aio.connect("a", plane=PLANE, devices="required") as there:
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
        dataplane.connect("a", plane=PLANE, devices="required")
    with pytest.raises(dataplane.InvalidCall, match="auto, required or off"):
        dataplane.connect("a", plane=PLANE, devices="maybe")


def started(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dataplane", "peer", "--name", "x", "--plane", PLANE]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def test_gpu_memory_that_is_not_there_is_said_at_once(run_dir: Path) -> None:
    environ = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-m", "dataplane", "peer", "--name", "x", "--plane", PLANE]
    refused = subprocess.run(
        [*command, "--device-arena", "2GiB"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=environ,
    )
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "cupy" in refused.stderr or "no GPU" in refused.stderr
    for text in ("gpu:2GiB", "twin:", "twin:12KiB", "many"):
        wrong = started(run_dir, "--device-arena", text)
        assert wrong.returncode == 2 and "Traceback" not in wrong.stderr, wrong.stderr
    for transport in ("cuda_ipc", "nccl"):
        alone = started(run_dir, "--transport", f"required:{transport}")
        assert alone.returncode == 2 and "--device-arena" in alone.stderr, alone.stderr


def test_a_client_that_outlives_its_peer_leaves_no_device_open(
    cluster: Cluster, device: TwinDevice
) -> None:
    cluster.start("a", arena="64MiB", devices={"a": "twin:32MiB"})
    closed, open_ = cluster.connect("a"), cluster.connect("a")
    part = closed.partition("p", free="drop")
    arrays = values(2)
    part.put({"x": given(device, arrays)}, key=[0, 1])
    views = [plane.partition("p").get(keys=[0, 1])["x"][0] for plane in (closed, open_)]
    closed.close()
    cluster.peers["a"].kill()
    cluster.peers["a"].wait()
    until(lambda: not closed._keeper._thread.is_alive(), "the housekeeper saw it")  # type: ignore[union-attr]
    until(lambda: not open_._keeper._thread.is_alive(), "the other as well")  # type: ignore[union-attr]
    assert len(views) == 2
    open_.close()
