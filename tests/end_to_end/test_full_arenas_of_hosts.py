"""A full arena: the error of a put names what keeps the rows, wherever their shard is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

import numpy as np
import pytest

from dataplane import BackPressure, Partition, aio
from dataplane.peer.host import LEASE_S
from tests.cluster import members
from tests.end_to_end.conftest import PLANE, Cluster, in_sync

MIB = 1 << 20
STAGES = {"judge": ["x"], "train": ["x", "score"]}


@pytest.fixture
def hosts(cluster: Cluster) -> Iterator[Cluster]:
    cluster.start("a", "b", arena="16MiB")
    with cluster.connect("a") as plane:
        in_sync(plane)
    yield cluster


def served_by(peer: str, cluster: Cluster, **definition: object) -> str:
    """Declare a partition that this peer serves, and return its name."""
    with cluster.connect(peer) as plane:
        for i in range(64):
            part = plane.partition(f"p{i}", **(definition or {"stages": STAGES}))  # type: ignore[arg-type]
            if part.name in plane.stats()["partitions"]:
                return part.name
            part.drop()
    raise AssertionError("64 names, and this peer serves none of them")


def full(part: Partition, timeout: float = 2.0) -> str:
    """Put 1 MiB rows until one does not fit, and return the error of that one."""
    with pytest.raises(BackPressure) as caught:
        for i in range(40):
            part.put({"x": [np.full(MIB, i, np.uint8)]}, timeout=timeout)
    return str(caught.value)


def refused(part: Partition, timeout: float = 1.5) -> str:
    """The error of one put. It came in time: a client waits 1 s longer, then raises another one."""
    with pytest.raises(BackPressure) as caught:
        part.put({"x": [np.zeros(MIB, np.uint8)]}, timeout=timeout)
    return str(caught.value)


@pytest.mark.parametrize("server", ["a", "b"])
def test_the_error_names_the_stage_that_nobody_runs_and_the_bytes(
    hosts: Cluster, server: str
) -> None:
    name = served_by(server, hosts)
    with hosts.connect("a") as here, hosts.connect("b") as there:
        part = here.partition(name)
        said = full(part)
        rows = part.stats()["rows"]
        assert f"partition {name!r} has {rows} rows with {rows}.0 MiB on this host: " in said
        assert f"{rows} rows are ready for stage 'judge', but no client has ever claimed" in said
        assert "Run the stage 'judge', or leave it out" in said and "peers serve" not in said
        with there.partition(name).claim("judge", rows=2, timeout=20) as batch:
            said = full(part)
            assert "2 rows have been leased by pid" in said and "for stage 'judge'" in said
            assert "lack `score`, which stage 'train' needs" in said
            batch.add(score=[1.0, 1.0])
        said = full(part)
        assert "2 rows are ready for stage 'train', but no client has ever claimed" in said
        assert f"{rows - 2} rows are ready for stage 'judge'" in said  # which is at work
        assert "Run the stage 'train', or leave it out" in said


def test_an_asynchronous_put_says_the_same(hosts: Cluster) -> None:
    name = served_by("b", hosts)

    async def produce() -> None:
        async with aio.connect("a", run=PLANE) as plane:
            part = await plane.partition(name)
            for i in range(40):
                await part.put({"x": [np.full(MIB, i, np.uint8)]}, timeout=2)

    with pytest.raises(BackPressure, match=f"{name!r} has .* for stage 'judge', but no client"):
        asyncio.run(produce())


def test_rows_of_another_peer_that_stay_until_they_are_dropped_are_named(hosts: Cluster) -> None:
    name = served_by("b", hosts, free="drop")
    with hosts.connect("a") as here:
        said = full(here.partition(name))
    assert f"partition {name!r} has" in said and "which stay until they are dropped" in said
    assert "Drop rows that are no longer needed" in said


def test_second_copies_that_fill_the_arena_of_a_backup_are_named(cluster: Cluster) -> None:
    cluster.start("a", "b", arenas={"a": "16MiB", "b": "64MiB"})
    with cluster.connect("b") as there:
        in_sync(there)
        name = served_by("b", cluster, stages=STAGES, replicas=2)
        said = full(there.partition(name))
    assert "the arena of peer 'a' has only" in said
    assert f"partition {name!r} has" in said and "stage 'judge', but no client has ever" in said


def test_the_line_of_a_put_that_waits_names_the_stage(
    hosts: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    name = served_by("b", hosts)
    with hosts.connect("a") as here, caplog.at_level(logging.WARNING):
        full(here.partition(name), timeout=11)
    line = next(one for one in caplog.messages if "has waited 10 s" in one)
    assert f"partition {name!r} has" in line and "stage 'judge', but no client has ever" in line


def test_a_put_ends_in_time_where_the_peer_of_its_partition_is_stopped(hosts: Cluster) -> None:
    name = served_by("b", hosts)
    with hosts.connect("a") as here:
        part = here.partition(name)
        full(part)
        hosts.freeze("b")
        said = refused(part)
        hosts.wake("b")
    assert (
        "values on this host belong to partitions that peer 'b' serves, but that peer did" in said
    )
    assert "Check peer 'b' with `dataplane status`; or give" in said


def test_a_put_ends_in_time_where_the_peer_of_its_partition_is_dead(hosts: Cluster) -> None:
    name = served_by("b", hosts)
    with hosts.connect("a") as here:
        part = here.partition(name)
        full(part)
        hosts.kill("b")
        said = refused(part)
    taken_over = f"partition {name!r} has" in said and "ready for stage 'judge'" in said
    assert taken_over or "partitions that peer 'b' serves, but that peer did not answer" in said


def test_a_wait_for_space_ends_in_time_also_where_the_peer_could_not_serve_at_first(
    cluster: Cluster,
) -> None:
    """Its backup was stopped, so the request waited first until the roster had lost that."""
    cluster.options = ["--lost-after", "4"]
    cluster.start("a", "b", arena="16MiB")
    with cluster.connect("a") as here:
        in_sync(here)
        part = here.partition(served_by("a", cluster))
        full(part)
        cluster.freeze("b")
        time.sleep(2 * LEASE_S)
        said = refused(part, 8.0)
        assert len(members(here)) == 1
    cluster.kill("b")
    assert "ready for stage 'judge'" in said
