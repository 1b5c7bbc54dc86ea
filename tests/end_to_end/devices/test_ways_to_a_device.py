"""Values on a device through real peers and client processes, over the twin in host memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import dataplane
from dataplane.errors import TransportMissing
from dataplane_twin import TwinArray, TwinDevice
from tests.end_to_end.conftest import PLANE, Cluster, in_sync, until
from tests.end_to_end.devices.twins import (
    MIB,
    all_free,
    given,
    on_device,
    same,
    values,
)
from tests.end_to_end.scrape import free_address, scrape


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
    with dataplane.connect("a", run=PLANE, devices="off") as other:
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
    far = dataplane.connect("b", run=PLANE, devices="off")
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
        assert same(few["hidden"], tiny), "small values are not what was put"
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
        command = [sys.executable, "-m", "dataplane", "probe", "--run", PLANE]
        probed = subprocess.run(
            [*command, "--require", "cuda_ipc"], capture_output=True, text=True, check=False
        )
        assert probed.returncode == 0, probed.stdout + probed.stderr
        assert probed.stdout.count("device values: cuda_ipc, because") == 2
        assert probed.stdout.count("device cuda_ipc: ") == 2
        cached = on_device(b)["cached_bytes"]
        assert cached >= sum(array.nbytes for array in arrays)
        again = b.partition("p").get(keys=list(range(12)))
        assert same(again["hidden"], arrays) and on_device(b)["cached_bytes"] == cached
        with dataplane.connect("b", run=PLANE, devices="off") as other:
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
        with pytest.raises(TransportMissing, match="NCCL allows one rank per GPU"):
            c.partition("p").get(keys=[0, 1])


def test_a_client_on_another_device_of_the_host_gets_copies_made_by_that_device(
    cluster: Cluster, device: TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start("a", arena="64MiB", devices={"a": "twin@0,1:16MiB"})
    arrays = values(4, 200_000)
    with cluster.connect("a") as first:
        part = first.partition("p", stages={"s": ["x"], "t": ["y"]})
        part.put({"x": given(device, arrays)}, key=list(range(4)))
        monkeypatch.setattr("dataplane.gpu.cuda.current_gpu", lambda: 1)
        with dataplane.connect("a", run=PLANE, devices="required") as second:
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
            empty = [np.zeros((3, 0), np.float32)]
            part.put({"hidden": given(device, empty)}, key=["empty"])  # alone in its range
        cluster.peers["b"].kill()
        cluster.peers["b"].wait()
        until(lambda: len(c.stats()["roster"]["members"]) == 2, "the peer is known as lost", 60.0)
        assert same(c.partition("p").get(keys=list("wxyz"))["hidden"], arrays)
        assert c.partition("p").get(keys=["empty"])["hidden"][0].shape == (3, 0)
