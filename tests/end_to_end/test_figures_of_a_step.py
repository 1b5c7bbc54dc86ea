"""`plane.metrics()`: what a client did since it was last asked, flat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import dataplane
from dataplane import aio
from dataplane.timeline.why import MAX_LINKS, figures
from dataplane.wire.events import Kind
from tests.end_to_end.conftest import PLANE, Cluster
from tests.timeline.steps import STEP, Steps

ROW_BYTES = 8 * 1024


def test_a_steps_figures_are_of_what_was_done_since_the_last_ones(cluster: Cluster) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"train": ["x"]})
        part.put({"x": np.zeros((6, 1024))})
        with part.claim("train", rows=4) as batch:
            batch.add(loss=np.zeros((4, 1024)))
        part.get(fields=["x"])
        first = plane.metrics()
        assert all(type(value) is float for value in first.values())
        assert first["put/rows"] == 6
        assert first["put/bytes"] == 6 * ROW_BYTES
        assert first["stage/train/claims"] == 1
        assert first["stage/train/rows"] == 4
        assert first["stage/train/bytes"] == 4 * ROW_BYTES
        assert first["stage/train/added_bytes"] == 4 * ROW_BYTES
        assert first["stage/train/behind_rows"] == 2
        assert first["copy/bytes"] == 10 * ROW_BYTES
        assert first["get/rows"] == 2
        assert 0 < first["arena/used"] < 1
        second = plane.metrics()
        assert second.keys() == first.keys()
        assert second["put/rows"] == second["stage/train/rows"] == second["copy/bytes"] == 0
        assert second["stage/train/behind_rows"] == 2
        for _ in range(2):
            part.claim("train", rows=2).release()
        third = plane.metrics()
        assert (third["stage/train/released_rows"], third["stage/train/redelivered_rows"]) == (4, 2)


def test_figures_of_one_step_say_why_it_took_so_long_and_how_stale_it_was(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_LINGER", "0.5")
    with dataplane.connect() as plane:
        part = plane.partition("p", {"train": ["x"]}, group_size=1, groups=2)
        for group in range(2):
            part.put({"x": [1]}, group=group)
        for version in (1, 2):
            part.claim("train", groups=1).ack()
            part.advance(version)
        figures = plane.metrics("p")
        assert figures["step/why"].startswith("p took ")
        assert 0 <= figures["step/idle_share"] <= 1
        assert figures["step/seconds"] > 0
        assert [figures[f"step/staleness_p{n}"] for n in (50, 90, 99)] == [0.0, 1.0, 1.0]
        assert not [name for name in plane.metrics() if name.startswith("step/")]


def test_figures_of_one_step_tell_who_waited_for_what_and_the_bytes_between_hosts() -> None:
    events = Steps(slow_link=50.0, room_s=2.0).play()
    told = figures(events, STEP)
    pulls = [e for e in events if (e.kind, e.by, e.peer) == (Kind.PULL, "b", "a")]
    assert told["step/link/b/a/bytes"] == sum(e.nbytes for e in pulls)
    speeds = [told[f"step/link/{host}/a/bytes_per_s"] for host in "bcd"]
    assert min(speeds) == speeds[0]
    assert told["step/put/wait_s/room_open"] == pytest.approx(4 * 2.0)
    trainer = [e for e in events if (e.kind, e.stage) == (Kind.CLAIM_WAIT, "train")]
    waited = told["step/stage/train/wait_s/no_rows"]
    assert waited == pytest.approx(sum(e.seconds for e in trainer))


def test_pairs_of_hosts_beyond_the_limit_are_told_together() -> None:
    events = Steps(hosts=MAX_LINKS + 6, groups=2 * (MAX_LINKS + 6)).play()
    told = figures(events, STEP)
    links = [name for name in told if name.startswith("step/link/") and name.endswith("/bytes")]
    assert len(links) == MAX_LINKS + 1
    pulled = sum(e.nbytes for e in events if e.kind is Kind.PULL)
    assert sum(float(told[name]) for name in links) == pulled


def test_a_claim_that_ends_in_a_timeout_has_waited_too(cluster: Cluster) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("p", {"train": ["x"]})
        with pytest.raises(dataplane.ClaimTimeout):
            part.claim("train", rows=1, timeout=0.2)
        figures = plane.metrics()
        assert 0.2 <= figures["stage/train/wait_s"] <= figures["seconds"]
        assert figures["stage/train/claims"] == 0
        share = figures["stage/train/wait_s"] / figures["seconds"]
        assert figures["stage/train/idle_share"] == pytest.approx(share)


def test_what_is_brought_from_another_host_is_counted_from_the_second_call_on(
    cluster: Cluster,
) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as a, cluster.connect("b") as b:
        part = a.partition("p", {"train": ["x"]})
        assert b.metrics()["peer/pulled_bytes"] == 0
        part.put({"x": np.zeros((6, 1024))})
        assert len(b.partition("p").claim("train", rows=6)["x"]) == 6
        assert b.metrics()["peer/pulled_bytes"] >= 6 * ROW_BYTES


def test_aio_tells_the_same(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> dict[str, float]:
        async with aio.connect("a", run=PLANE) as plane:
            part = await plane.partition("p", {"train": ["x"]})
            await part.put({"x": [1, 2]})
            return await plane.metrics()

    cluster.start("a")
    monkeypatch.setenv("DATAPLANE_RUN_DIR", str(cluster.run_dir))
    assert asyncio.run(main())["put/rows"] == 2
