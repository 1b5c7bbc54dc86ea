"""A batch that nobody finishes: its rows come back, and its process or its peer logs it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

import dataplane.aio
from dataplane import Partition, Plane
from tests.end_to_end.conftest import PLANE, Cluster, line, until

FORGOTTEN = "without ack, release or drop"
HELD = "had not acked, released or dropped"
"""So says the peer, of a client that is gone."""


@pytest.fixture
def plane(cluster: Cluster) -> Iterator[Plane]:
    cluster.start("a")
    with cluster.connect("a") as connected:
        yield connected


@pytest.fixture
def part(plane: Plane) -> Partition:
    part = plane.partition("p", stages={"train": ["x"], "log": ["x"]})
    part.put({"x": [0, 1, 2, 3]})
    return part


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if FORGOTTEN in r.getMessage()]


def test_a_forgotten_ack_is_told_once_a_stage_and_counted(
    part: Partition, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        batch = part.claim("train", rows=2, timeout=10)
    other = part.claim("log", rows=1, timeout=10)
    del other
    until(lambda: len(told(caplog)) == 2, "both stages were told")
    assert told(caplog) == [
        f"partition 'p', stage {stage!r}: a batch of {rows} was garbage-collected {FORGOTTEN}, so "
        "the stage will receive its rows again. Call batch.ack() when you are done with the batch, "
        "or use `with part.claim(…) as batch:`. Logged once per stage and cause"
        for stage, rows in (("train", "2 rows"), ("log", "1 row"))
    ]
    assert all(r.levelno == logging.WARNING for r in caplog.records if FORGOTTEN in r.message)
    train = part.stats()["stages"]["train"]
    # each batch dies after the next claim, so two pairs of rows go round
    assert (train["released_rows"], train["redelivered_rows"]) == (18, 16)
    batch.ack()
    train = part.stats()["stages"]["train"]
    assert (train["released_rows"], train["redelivered_rows"], train["acked_rows"]) == (18, 16, 2)


def test_a_stream_that_is_left_is_told_and_one_in_a_with_is_not(
    part: Partition, caplog: pytest.LogCaptureFixture
) -> None:
    with part.stream("log", rows=2, timeout=10) as stream:
        for _ in stream:
            break
    for _ in part.stream("train", rows=2, timeout=10):
        break
    until(lambda: bool(told(caplog)), "the stream was told")
    (one,) = told(caplog)
    assert one.startswith("partition 'p', stage 'train': a loop ended and left a batch of 2 rows")


def test_a_loader_that_is_left_is_told_of_its_batch_and_not_of_what_it_prefetched(
    part: Partition, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in part.loader("train", rows=1, prefetch=2, timeout=10):
        break
    until(lambda: bool(told(caplog)), "the loader was told")
    assert ["left a batch of 1 row" in one for one in told(caplog)] == [True]


def test_a_plan_that_is_left_is_told_and_one_at_its_end_or_in_a_with_is_not(
    part: Partition, caplog: pytest.LogCaptureFixture
) -> None:
    part.seal()
    with pytest.raises(KeyError), part.plan("log", rank=0, ranks=1, timeout=10) as plan:
        raise KeyError(len(plan))
    for _ in part.plan("log", rank=0, ranks=1, timeout=10):
        pass
    # zip asks its first argument first, so the plan never hears that the loop is over
    plan = part.plan("train", rank=0, ranks=1, minibatches=2, timeout=10)
    for _ in zip(range(2), plan, strict=False):
        pass
    del plan
    until(lambda: bool(told(caplog)), "the plan was told")
    (one,) = told(caplog)
    assert one.startswith(
        "partition 'p', stage 'train': a plan of 4 rows was left before the end of its loop "
    )


def test_what_was_finished_or_dropped_is_not_told(
    plane: Plane, part: Partition, caplog: pytest.LogCaptureFixture
) -> None:
    for finish in ("ack", "release", "drop"):
        getattr(part.claim("train", rows=1, timeout=10), finish)()
    with part.claim("train", rows=1, timeout=10):
        pass
    held = part.claim("log", rows=1, timeout=10)
    part.drop()
    del held
    plane.partition("p", stages={"train": ["x"]}).put({"x": [1]})  # takes along what is due
    assert not told(caplog)


def test_an_awaiting_client_is_told_as_well(
    part: Partition, caplog: pytest.LogCaptureFixture
) -> None:
    async def forget() -> None:
        async with await dataplane.aio.connect("a", run=PLANE) as plane:
            there = await plane.partition("p")
            for _ in range(4):
                await there.claim("train", rows=2, timeout=10)

    asyncio.run(forget())
    assert len(told(caplog)) == 1
    until(lambda: part.stats()["stages"]["train"]["released_rows"] == 8, "all rows are back")


EXITING = """
import os, sys, dataplane
plane = dataplane.connect("a", run="test")
part = plane.partition("p")
held = part.claim("train", rows=2, timeout=10)
stream = iter(part.stream("log", rows=2, timeout=10))
next(stream)
if (child := os.fork()) == 0:
    del held, stream
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_the_log_of_one_cause_does_not_hide_another(
    part: Partition, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        part.claim("train", rows=2, timeout=10)
        for _ in part.stream("train", rows=1, timeout=10):
            break
    until(lambda: part.stats()["stages"]["train"]["released_rows"] == 6, "all rows are back")
    assert ["was garbage-collected" in one for one in told(caplog)] == [True, False]
    assert "a loop ended and left a batch" in told(caplog)[1]


KILLED = """
import dataplane, time
held = dataplane.connect("a").partition("p").claim("train", rows=2, timeout=10)
print(len(held), flush=True)
time.sleep(60)
"""
HANDS_BACK = """
import dataplane
part = dataplane.connect("a").partition("p")
with part.claim("train", rows=2, timeout=10):
    pass
part.claim("train", rows=1, timeout=10).release()
for batch in part.loader("train", rows=1, prefetch=2, timeout=10):
    batch.ack()
    break
part.claim("log", rows=4, timeout=10).drop()
"""


def test_an_exit_with_a_part_of_a_batch_in_hand_prints_no_traceback(plane: Plane) -> None:
    code = f"""
import dataplane
part = dataplane.connect("a", run={PLANE!r}).partition("p", stages={{"train": ["x"]}})
part.put({{"x": [0, 1, 2]}})
batch = part.claim("train", rows=3)
batch.drop(rows=[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    train = plane.partition("p").stats()["stages"]["train"]
    assert (train["ready_rows"], train["released_rows"]) == (2, 2)


def test_exits_and_forks_with_a_batch_in_hand_are_logged_by_the_peer(
    part: Partition, cluster: Cluster
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=60, check=True
    )
    assert FORGOTTEN not in done.stderr and "Traceback" not in done.stderr, done.stderr
    until(lambda: part.stats()["stages"]["train"]["released_rows"] == 2, "its rows are back")
    log = [one for one in cluster.log("a").splitlines() if HELD in one]
    for stage in ("train", "log"):
        (one,) = [one for one in log if f"stage '{stage}'" in one]
        assert "partition 'p'" in one and "closed its client while holding 2 rows" in one
        assert "on host a, `" in one and "Call batch.ack() once the rows are processed" in one


def test_who_is_killed_with_a_batch_in_hand_is_logged_once_a_minute(
    part: Partition, cluster: Cluster
) -> None:
    def released(rows: int) -> bool:
        return bool(part.stats()["stages"]["train"]["released_rows"] == rows)

    for n in range(1, 4):
        worker = cluster.worker(KILLED)
        assert line(worker) == "2"
        worker.kill()
        until(partial(released, 2 * n), "all are back")
    (one,) = [one for one in cluster.log("a").splitlines() if HELD in one]
    assert "exited without closing its client while holding 2 rows" in one


EXITS_WITH_BATCHES_AHEAD = """
import time
import dataplane
part = dataplane.connect("a").partition("p")
made = []
loader = part.loader("train", rows=1, prefetch=2, timeout=10, collate=made.append)
loop = iter(loader)
next(loop)
other = iter(part.loader("log", rows=1, prefetch=2, timeout=10, collate=made.append))
while len(made) < 5:
    time.sleep(0.01)
"""


def test_batches_that_were_claimed_ahead_are_not_told_as_forgotten(
    part: Partition, cluster: Cluster
) -> None:
    """The batch that the loop had got is, with its own row."""
    worker = cluster.worker(EXITS_WITH_BATCHES_AHEAD)
    assert worker.wait(60) == 0
    until(lambda: HELD in cluster.log("a"), "the peer told of the batch")
    (one,) = [said for said in cluster.log("a").splitlines() if HELD in said]
    assert "closed its client while holding 1 row that" in one
    assert "stage 'train'" in one
    stages = part.stats()["stages"]
    assert [(at["ready_rows"], at["released_rows"]) for at in stages.values()] == [(4, 3), (4, 2)]


def test_a_batch_that_was_handed_back_is_not_logged_by_the_peer(
    part: Partition, cluster: Cluster
) -> None:
    worker = cluster.worker(HANDS_BACK)
    assert worker.wait(60) == 0
    assert part.stats()["stages"]["train"]["released_rows"] >= 1  # 2 if one was fetched ahead
    assert HELD not in cluster.log("a")
