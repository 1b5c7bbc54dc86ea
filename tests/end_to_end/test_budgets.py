"""Byte budgets: a partition on one host (`host_bytes=`) and one client (`--client-bytes`)."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import dataplane
from tests.end_to_end.conftest import Cluster, line, until

MIB = 1 << 20
ROW = np.arange(MIB // 8)


def budget(plane: dataplane.Plane, name: str = "p") -> tuple[int, int]:
    found = plane.stats()["budgets"][name]
    return found["used_bytes"], found["limit_bytes"]


def test_a_full_partition_waits_and_others_do_not(plane: dataplane.Plane) -> None:
    part = plane.partition("p", {"s": ["x"]}, host_bytes=3 * MIB)
    other = plane.partition("q", {"s": ["x"]})
    part.put({"x": [ROW] * 3})
    assert budget(plane) == (3 * MIB, 3 * MIB)
    waiting = threading.Thread(target=part.put, args=({"x": [ROW] * 2},))
    waiting.start()
    until(lambda: plane.stats()["waiting_for_budgets"] == 1, "the put waits")
    other.put({"x": [ROW] * 20})
    for _ in range(5):
        with part.claim("s", rows=1, timeout=20) as batch:
            np.testing.assert_array_equal(batch["x"][0], ROW)
            assert budget(plane)[0] <= 3 * MIB
        del batch
    waiting.join()
    until(lambda: budget(plane)[0] == 0, "the last view is gone")


def test_what_waits_in_vain_is_told_who_holds_the_bytes(plane: dataplane.Plane) -> None:
    part = plane.partition("p", {"s": ["x"]}, host_bytes=2 * MIB)
    part.put({"x": [ROW] * 2})
    batch = part.claim("s", rows=1, timeout=20)
    with pytest.raises(dataplane.BackPressure, match=r"'p'.*has leased 1 of them") as told:
        part.put({"x": [ROW]}, timeout=0.5)
    assert told.value.details["limit_bytes"] == told.value.details["used_bytes"] == 2 * MIB
    assert told.value.details["holders"][0]["rows"] == 1
    batch.ack()


def test_a_deadlock_is_told_long_before_the_deadline(plane: dataplane.Plane) -> None:
    part = plane.partition("p", {"s": ["x", "y"]}, host_bytes=MIB)
    part.put({"x": [ROW]})
    with pytest.raises(dataplane.BackPressure, match="every client waits"):
        part.put({"x": [ROW]}, timeout=100)


def test_a_row_larger_than_the_budget_is_refused_at_once(plane: dataplane.Plane) -> None:
    part = plane.partition("p", {"s": ["x"]}, host_bytes=MIB)
    with pytest.raises(dataplane.ValueTooLarge, match="host_bytes"):
        part.put({"x": [np.concatenate((ROW, ROW))]})
    part.put({"x": [ROW]})


def test_what_is_there_may_be_finished_in_a_full_partition(plane: dataplane.Plane) -> None:
    part = plane.partition("p", {"s": ["x"], "t": ["x", "y"]}, host_bytes=2 * MIB)
    part.put({"x": [ROW] * 2}, key=["a", "b"])
    part.put({"y": [ROW]}, key=["a"], timeout=20)
    with part.claim("s", rows=2, timeout=20) as batch:
        batch.add(z=[ROW] * 2)
    assert budget(plane) == (5 * MIB, 2 * MIB)
    del batch
    part.drop()
    until(lambda: plane.stats()["arena"]["used_bytes"] == 0, "all of it came back")
    assert plane.stats()["budgets"] == {}


def test_several_producers_never_exceed_it_together(plane: dataplane.Plane) -> None:
    rows, producers = 12, 4
    part = plane.partition("p", {"s": ["x"]}, host_bytes=2 * MIB)
    small = ROW[: len(ROW) // 4]

    def produce() -> None:
        for _ in range(rows):
            part.put({"x": [small]}, timeout=60)

    threads = [threading.Thread(target=produce) for _ in range(producers)]
    for thread in threads:
        thread.start()
    most = 0
    for _ in range(rows * producers):
        with part.claim("s", rows=1, timeout=60):
            most = max(most, budget(plane)[0])
    for thread in threads:
        thread.join()
    assert 0 < most <= 2 * MIB


def test_a_budget_is_part_of_the_definition(plane: dataplane.Plane) -> None:
    plane.partition("p", {"s": ["x"]}, host_bytes=MIB)
    with pytest.raises(dataplane.PartitionConflict, match="host_bytes"):
        plane.partition("p", {"s": ["x"]}, host_bytes=2 * MIB)
    with pytest.raises(dataplane.InvalidCall, match="host_bytes"):
        plane.partition("q", {"s": ["x"]}, host_bytes=0)
    with pytest.raises(dataplane.InvalidCall, match="spread"):
        plane.partition("q", {"s": ["x"]}, host_bytes=MIB, place="spread")


def test_it_comes_back_from_a_checkpoint(plane: dataplane.Plane, tmp_path: Path) -> None:
    part = plane.partition("p", {"s": ["x"]}, host_bytes=4 * MIB)
    part.put({"x": [ROW] * 2})
    plane.checkpoint(tmp_path / "c")
    part.drop()
    plane.restore(tmp_path / "c")
    assert budget(plane) == (2 * MIB, 4 * MIB)


def test_the_rows_of_another_host_count_where_their_bytes_lie(cluster: Cluster) -> None:
    cluster.start("a", "b", arena="64MiB")
    with cluster.connect("a") as here, cluster.connect("b") as there:
        part = here.partition("p", {"s": ["x"]}, host_bytes=2 * MIB)
        far = there.partition("p")
        part.put({"x": [ROW]}, key=["k"])
        far.put({"x": [ROW]}, key=["l"])
        far.put({"y": [ROW]}, key=["k"])  # to a row that a keeps: continues it
        until(lambda: budget(here)[0] == MIB, "what a wrote")
        with pytest.raises(dataplane.BackPressure, match="host 'b'"):
            far.put({"x": [ROW]}, key=["n"], timeout=0.3)
        part.put({"x": [ROW]}, key=["o"])


# one client


def with_limit(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> dataplane.Plane:
    monkeypatch.setenv("DATAPLANE_CLIENT_BYTES", "4MiB")
    cluster.start("a", arena="64MiB")
    return cluster.connect("a")


READER = """
    import dataplane
    plane = dataplane.connect("a")
    part = plane.partition("p")
    held = [part.get(keys=[k], fields=["x"])["x"][0] for k in range(4)]
    print("full", flush=True)
    try:
        part.get(keys=[4], fields=["x"], timeout=0.5)["x"]
    except dataplane.BackPressure as told:
        print(told.details["holders"][0]["held_bytes"], "Let views" in str(told), flush=True)
    held.clear()
    print(len(part.get(keys=[4], fields=["x"])["x"]), flush=True)
    input()
"""


def test_a_reader_that_keeps_its_views_waits_and_stalls_nobody(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with with_limit(cluster, monkeypatch) as plane:
        part = plane.partition("p", {"s": ["x"]}, free="drop")
        part.put({"x": [ROW] * 6}, key=list(range(6)))
        reader = cluster.worker(READER)
        assert line(reader) == "full"
        for _ in range(3):
            with part.claim("s", rows=2, timeout=20):
                pass
        assert line(reader) == f"{4 * MIB} True"
        assert line(reader) == "1"


def test_a_claim_of_more_than_a_client_may_hold_is_told_at_once_and_takes_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with with_limit(cluster, monkeypatch) as plane:
        part = plane.partition("p", {"s": ["x"]}, free="drop")
        for _ in range(3):
            part.put({"x": [ROW] * 2})
        with pytest.raises(dataplane.ValueTooLarge, match="--client-bytes"):
            part.claim("s", rows=5, timeout=60)
        seen = 0
        for _ in range(3):
            with part.claim("s", rows=2, timeout=20) as batch:
                seen += len(batch)
        assert seen == 6


def test_a_put_larger_than_what_a_client_may_hold_goes_in_by_parts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with with_limit(cluster, monkeypatch) as plane:
        part = plane.partition("p", {"s": ["x"]})
        part.put({"x": [ROW] * 20}, timeout=60)
        assert part.stats()["rows"] == 20
