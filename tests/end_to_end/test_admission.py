"""Producers that may run so far ahead of the trainer, and no further: on several hosts."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

import dataplane
from tests.end_to_end.conftest import PLANE, Cluster, line, until

STAGES = {"train": ["tokens"]}
HOLDER = f"""
    import dataplane, time
    part = dataplane.connect("b", run={PLANE!r}).partition("p")
    with part.admit(4, per_version=2):
        part.put({{"tokens": [[1], [2]]}}, group="theirs")
        print("permitted", flush=True)
        time.sleep(1000)
"""


def begin(part: dataplane.Partition, *groups: str) -> None:
    for group in groups:
        part.put({"tokens": [[1], [2]]}, group=group)


def test_a_killed_producers_permits_return_and_the_trainers_advance_lets_others_begin(
    cluster: Cluster,
) -> None:
    cluster.start("a", "b")
    with cluster.connect("a") as here, cluster.connect("b") as there:
        part = here.partition("p", stages=STAGES, group_size=2)
        with part.admit(1, per_version=2):
            for _ in range(5):  # more than there are places, and none is used
                with part.admit(1, per_version=2, timeout=30):
                    pass
        holder = cluster.worker(HOLDER)
        assert line(holder) == "permitted"
        with (
            pytest.raises(dataplane.ClaimTimeout, match=f"3 by permits of pid {holder.pid} on"),
            part.admit(1, per_version=2, timeout=0.5),
        ):
            pass
        holder.kill()
        with part.admit(3, per_version=2, timeout=30) as permits:
            assert (permits.n, permits.version) == (3, 0)
            begin(part, "a", "b")
        assert part.stats()["admission"]["permits"] == 0
        for _ in range(2):
            part.claim("train", groups=1, timeout=30).ack()
        begun: list[int] = []

        def produce() -> None:
            far = there.partition("p")
            with far.admit(3, per_version=2) as permits:
                begun.append(permits.version)
                begin(far, "c", "d", "e")

        producer = threading.Thread(target=produce)
        producer.start()
        until(lambda: here.stats()["partitions"] or there.stats()["partitions"], "it is there")
        assert not begun
        part.advance(1)
        producer.join(30)
        assert begun == [1]
        told = there.partition("p").stats()["admission"]
        assert (told["version"], told["unfinished_groups"], told["permits"]) == (1, 4, 0)
        figures = here.metrics() | there.metrics()  # of the shard's host only
        assert (figures["admission/version"], figures["admission/lag"]) == (1, 0)


def test_whoever_waits_is_told_of_the_seal_and_of_the_drop(cluster: Cluster) -> None:
    cluster.start("a")
    asyncio.run(_sealed_and_dropped())


async def _sealed_and_dropped() -> None:
    async with dataplane.aio.connect("a") as plane:
        for end, error in (("seal", dataplane.PartitionSealed), ("drop", dataplane.PartitionGone)):
            part = await plane.partition(end, stages=STAGES, group_size=2)

            async def wait(part: dataplane.aio.Partition = part) -> None:
                async with part.admit(1, max_lag=0, per_version=2):
                    pass

            async with part.admit(2, max_lag=0, per_version=2):
                with pytest.raises(dataplane.ClaimTimeout, match="only this process can"):
                    async with part.admit(1, max_lag=0, per_version=2, timeout=0.2):
                        pass
                waiting = asyncio.create_task(wait())
                while not (await plane.stats())["waits"]:
                    await asyncio.sleep(0.01)
                await getattr(part, end)()
                with pytest.raises(error):
                    await waiting


def test_a_permit_that_is_given_out_after_its_call_was_given_up_goes_back(cluster: Cluster) -> None:
    """The peer was stopped, and does not know yet when it goes on that nobody waits."""
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages=STAGES, group_size=2)
        cluster.peers["a"].send_signal(signal.SIGSTOP)
        with (
            pytest.raises(dataplane.DeadlineExceeded),
            part.admit(1, max_lag=0, per_version=1, timeout=0.5),
        ):
            pass
        cluster.peers["a"].send_signal(signal.SIGCONT)
        with part.admit(1, max_lag=0, per_version=1, timeout=60):
            pass


def test_the_first_call_of_admit_says_what_earlier_groups_wait_for(cluster: Cluster) -> None:
    cluster.start("a")
    stages = {"judge": ["tokens"], "train": ["tokens", "reward"]}
    with cluster.connect("a") as plane:
        part = plane.partition("p", stages, group_size=2)
        begin(part, "g")
        part.put({"tokens": [[1]]}, group="h")
        with (
            pytest.raises(
                dataplane.ClaimTimeout,
                match="this call wants 1 of 2 slots; taken: 2 by unfinished groups; group 'g' has "
                "all its rows, but lacks `reward`, which stage 'train' needs; group 'h' has 1 of 2",
            ),
            part.admit(1, max_lag=1, per_version=1, timeout=0.2),
        ):
            pass
