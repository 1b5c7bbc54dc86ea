"""A device arena that is full, and who may write into it: over the twin in host memory."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

import dataplane
from dataplane_twin import TwinArray, TwinDevice
from tests.end_to_end.conftest import PLANE, Cluster, line, until
from tests.end_to_end.devices.twins import (
    HOLDING,
    MIB,
    all_free,
    given,
    on_device,
    same,
    values,
)


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


def test_what_a_full_device_has_no_room_for_goes_to_host_memory_and_stats_say_so(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", stages={"s": ["hidden"]})
    first = values(5, 4 * MIB)
    part.put({"hidden": given(device, first)}, key=list(range(5)))
    more = values(2, 4 * MIB, first=5)
    part.put({"hidden": given(device, more)}, key=[5, 6], timeout=10)
    found = part.get(keys=list(range(7)))
    kinds = [type(one) for one in found["hidden"]]
    assert kinds == [TwinArray] * 5 + [np.ndarray] * 2
    assert same(found["hidden"], first + more) and same(found.numpy("hidden"), first + more)
    assert on_device(plane)["overflowed_bytes"] == sum(one.nbytes for one in more)
    with pytest.raises(dataplane.ValueTooLarge):
        part.put({"hidden": given(device, values(1, 400 * MIB))}, timeout=10)
    assert on_device(plane)["granted_bytes"] == 0


def reserved(plane: dataplane.Plane) -> int:
    """How often clients asked for room."""
    return int(plane.stats()["messages"]["local"].get("Reserved", 0))


def test_room_that_is_kept_ahead_makes_the_next_put_one_exchange_in_both_memories(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    part = plane.partition("p", stages={"s": ["x", "y"]})
    for turn in range(8):
        arrays, beside = values(8, 4096, first=turn), values(8, 9000, first=turn)
        part.put({"x": given(device, arrays), "y": beside})
        with part.claim("s", rows=8, timeout=10) as batch:
            assert same(batch["x"], arrays) and same(batch["y"], beside)
            assert all(isinstance(one, TwinArray) for one in batch["x"])
    assert reserved(plane) == 2, "one in each memory, at first"
    part.put({"x": given(device, values(8, 200_000)), "y": values(8, 9000)})
    assert reserved(plane) == 3, "for more than any put of late"
    assert on_device(plane)["granted_bytes"] > 0
    part.drop()
    del batch
    all_free(plane)  # what nobody uses for a while goes back


def test_what_a_client_keeps_ahead_is_in_the_way_of_none_of_its_puts(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    """Groups may be opened in 70 % of 32 MiB: nothing else than all of that is room enough."""
    part = plane.partition("p", free="drop")
    part.put({"x": given(device, [np.zeros(3 * MIB, np.uint8)])}, key=["first"])
    assert on_device(plane)["granted_bytes"] == 3 * MIB, "as much again is kept"
    part.put({"x": given(device, [np.zeros(19 * MIB, np.uint8)])}, key=["second"])
    figures = on_device(plane)
    assert (figures["used_bytes"], figures["overflowed_bytes"]) == (22 * MIB, 0)
    part.put({"x": given(device, [np.zeros(MIB, np.uint8)])}, key=["third"])
    assert on_device(plane)["overflowed_bytes"] == MIB, "no room is kept where there is none"
    part.put({"y": given(device, [np.zeros(4 * MIB, np.uint8)])}, key=["first"])
    figures = on_device(plane)
    assert (figures["used_bytes"], figures["overflowed_bytes"]) == (26 * MIB, MIB)


def test_what_nobody_sees_on_a_device_any_more_goes_with_the_next_call(
    plane: dataplane.Plane, device: TwinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when releases that no call took along are told: that is set off by a minute here."""
    monkeypatch.setattr("dataplane.client.session.housekeeping.GATHER_S", 60.0)
    part = plane.partition("p", stages={"s": ["x"]})
    for _ in range(10):
        part.put({"x": given(device, values(1, 8 * MIB))})
        batch = part.claim("s", rows=1, timeout=10)
        views = list(batch["x"])
        batch.ack()
        assert len(views) == 1 and on_device(plane)["pinned_bytes"] >= 8 * MIB
        del batch, views
        until(lambda: on_device(plane)["pinned_bytes"] == 0, "the pin is back")
    assert on_device(plane)["overflowed_bytes"] == 0


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


@pytest.mark.parametrize("what", ["views", "copies", "room"])
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
    elif what == "room":
        worker = cluster.worker(
            HOLDING
            + """
    array = device.array(np.ones(1 << 20, np.uint8))
    while plane.stats()["devices"][0]["granted_bytes"] < 1 << 20:  # a second later it goes back
        part.put({"x": [array]})
        part.claim("s", rows=1, timeout=20).ack()
    os.kill(os.getpid(), signal.SIGKILL)
    """
        )
        assert worker.wait(20) == -signal.SIGKILL
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
    worker.kill()
    all_free(plane)
    assert on_device(plane)["quarantined_bytes"] == 0 and part.stats()["rows"] == 0
    part.put({"x": given(device, values(4, MIB))})


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


def test_values_on_a_device_outlive_the_refusal_of_small_ones_beside_them(
    plane: dataplane.Plane, device: TwinDevice
) -> None:
    """Where their shard has no room for the small ones: the message comes again, with both."""
    part = plane.partition("p", stages={"s": ["x"]}, free="drop")
    small = [np.full(1000, 7, np.uint8)] * 8
    for some in (small, small[:1]):  # until there is no room for one more
        refused = plane.stats()["metadata"]["refused_values"]
        while plane.stats()["metadata"]["refused_values"] == refused:
            part.put({"a": some})
    refused = plane.stats()["metadata"]["refused_values"]
    arrays = values(2)
    with dataplane.connect("a", run=PLANE, devices="required") as other:  # that does not know it
        other.partition("p").put(
            {"x": given(device, arrays), "score": small[:2]}, key=["one", "two"]
        )
        batch = other.partition("p").claim("s", rows=2, timeout=20)
        batch.add(y=given(device, arrays), more=small[:2])
        batch.ack()
    assert plane.stats()["metadata"]["refused_values"] >= refused + 2
    found = part.get(keys=["one", "two"])
    assert same(found["x"], arrays) and same(found["y"], arrays)
    assert found["more"][1].tolist() == found["score"][1].tolist() == [7] * 1000
