"""A plan for the ranks of a trainer: in step whatever the rows weigh, and over for all with one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import aio
from tests.end_to_end.conftest import PLANE, Cluster, line, until
from tests.end_to_end.test_attacks_peers import Addressed, hosts
from tests.end_to_end.test_succession import planes

__all__ = ["hosts", "planes"]


def filled(plane: dataplane.Plane, n: int, name: str = "p", **how: Any) -> dataplane.Partition:
    part = plane.partition(name, {"train": ["x"]}, **how)
    lengths = [1 + 7 * i % 20 for i in range(n)]
    values = [np.full(length, i) for i, length in enumerate(lengths)]
    part.put({"x": values}, key=list(range(n)), group=[i // 4 for i in range(n)],
             tags={"length": lengths})  # fmt: skip
    part.seal()
    return part


def trained(plan: Any) -> list[tuple[int, int, list[Any], list[Any]]]:
    """(epoch, mini-batch, keys of its rows, steps) of each."""
    seen = []
    for mini in plan:
        keys, steps = [], []
        for micro in mini:
            real = [key for key, here in zip(micro.keys, micro.mask, strict=True) if here]
            for value, key in zip(micro["x"], micro.keys, strict=True):
                assert set(np.asarray(value).tolist()) == {key}
            keys += real
            steps.append(sum(map(len, micro["x"])))
        seen.append((mini.epoch, mini.number, keys, steps))
    return seen


def test_every_row_has_its_turn_in_every_epoch_and_ranks_stay_in_step(alone: Cluster) -> None:
    how: dict[str, Any] = {"ranks": 2, "minibatches": 2, "budget": {"length": 30}, "epochs": 2}
    with (
        alone.connect("a") as plane,
        alone.connect("a") as second,
        alone.connect("a") as third,
    ):
        part = filled(plane, 18)
        # two processes of a replica pass the same rank
        plans = [
            part.plan("train", rank=0, **how),
            second.partition("p").plan("train", rank=1, **how),
            third.partition("p").plan("train", rank=1, **how),
        ]
        mine, others = map(trained, plans[:2])  # the end of a loop acks
        with plans[2]:
            same = trained(plans[2])
            told = part.stats()["stages"]["train"]["plan"]
            assert part.stats()["rows"] == 18, "rows stay until all have acked"
            with pytest.raises(dataplane.ClaimTimeout):
                part.wait("train", below=1, timeout=0.1)
        assert same == others
        for epoch in range(2):
            rows = [key for seen in (mine, others) for at, _, keys, _ in seen if at == epoch
                    for key in keys]  # fmt: skip
            assert Counter(rows) == Counter(range(18))
        assert [len(steps) for *_, steps in mine] == [len(steps) for *_, steps in others]
        assert all(tokens <= 30 for seen in (mine, others) for *_, s in seen for tokens in s)
        assert mine[0][2] != mine[2][2], "another epoch, another order"
        assert (told["ranks"], told["acked"], told["working"], told["absent"]) == (2, 1, [1], [])
        assert [plan.state for plan in plans] == ["acked"] * 3
        part.wait("train", below=1)
        assert part.stats()["rows"] == 0
        with pytest.raises(dataplane.StreamEnd):
            part.plan("train", rank=0, **how)


def test_whole_groups_stay_at_one_rank_and_what_is_added_is_stored(alone: Cluster) -> None:
    with alone.connect("a") as plane, alone.connect("a") as other:
        part = filled(plane, 24, group_size=4, free="drop")
        how: dict[str, Any] = {"ranks": 2, "minibatches": 2, "unit": "groups", "balance": "length"}
        one, two = (
            each.partition("p").plan("train", rank=rank, **how)
            for rank, each in enumerate((plane, other))
        )
        with one, two:
            for plan in (one, two):
                for (micro,) in plan:
                    real = [k for k, here in zip(micro.keys, micro.mask, strict=True) if here]
                    assert set(Counter(int(key) // 4 for key in real).values()) <= {4}
                    with pytest.raises(dataplane.InvalidCall, match="an entry of fields"):
                        micro.fetch(5)  # type: ignore[arg-type]
                    micro.add(loss=[float(key) for key in micro.keys])
        rows = part.get()
        assert [float(loss) for loss in rows["loss"]] == [float(key) for key in rows.keys]


def test_what_cannot_be_is_said_in_one_sentence(alone: Cluster) -> None:
    with alone.connect("a") as plane, alone.connect("a") as other:
        part = plane.partition("q", {"train": ["x"]})
        part.put({"x": [1, 2]}, tags={"length": [1, None]})
        with pytest.raises(dataplane.ClaimTimeout, match="2 of 2 rows ready; the partition is not"):
            part.plan("train", rank=0, ranks=2, timeout=0.3)
        part.seal()
        with pytest.raises(dataplane.InvalidRows, match="tag 'length'.*1 row has no valid"):
            part.plan("train", rank=0, ranks=2, balance="length")
        with pytest.raises(dataplane.InvalidCall, match="expected a value from 0 to 1"):
            part.plan("train", rank=2, ranks=2)
        with pytest.raises(dataplane.InvalidCall, match="exceeds the limit of 262144 parts"):
            part.plan("train", rank=0, ranks=2, minibatches=10**9)
        with pytest.raises(dataplane.InvalidRows, match="only 2 rows, fewer than ranks=2"):
            part.plan("train", rank=0, ranks=2, minibatches=2, remainder="drop")
        plan = part.plan("train", rank=np.int64(0), ranks=2)  # type: ignore[arg-type]
        with pytest.raises(dataplane.PartitionConflict, match=r"ranks=2 \(this call: 4\)"):
            other.partition("q").plan("train", rank=0, ranks=4)
        with pytest.raises(dataplane.InvalidCall, match="already takes part .* as rank 0"):
            part.plan("train", rank=0, ranks=2)
        plan.ack()
        with pytest.raises(
            dataplane.ClaimTimeout,
            match=r"rank 0 has already acked .* [0-9.]+ s ago .* yet to join: 1; .* by its plan",
        ):
            part.plan("train", rank=0, ranks=2, timeout=0.3)
        plan.ack()
        with pytest.raises(dataplane.LeaseExpired, match="this plan was acked"):
            plan.release()
        with pytest.raises(ZeroDivisionError), other.partition("q").plan("train", rank=1, ranks=2):
            raise ZeroDivisionError
        both = [each.partition("q").plan("train", rank=r, ranks=2)
                for r, each in enumerate((plane, other))]  # fmt: skip
        both[1].release()
        loop = iter(both[0])
        with pytest.raises(dataplane.LeaseExpired, match="rank 1 of 2 exited or released"):
            list(next(loop))
        del both, loop
        # one that nobody keeps, without `with`, is released
        part.plan("train", rank=0, ranks=1)
        until(lambda: part.stats()["leases"] == 0, "it is released")


def test_a_loop_that_ends_acks_and_one_that_is_left_releases(alone: Cluster) -> None:
    with alone.connect("a") as plane:
        part = filled(plane, 8)
        how: dict[str, Any] = {"rank": 0, "ranks": 1, "minibatches": 2}
        plan = part.plan("train", **how)
        for mini in plan:
            for _micro in mini:
                break
            break
        assert plan.state == "released"
        with pytest.raises(dataplane.LeaseExpired, match="this plan was released"):
            list(mini)
        plan = part.plan("train", **how)
        with pytest.raises(ZeroDivisionError):
            fails_within(plan)
        assert plan.state == "released"
        with part.plan("train", **how) as plan:
            for _mini in plan:
                break
            assert plan.state == "leased"
            trained(plan)
            assert plan.state == "leased"
            plan.release()
        plan = part.plan("train", **how)
        seen = trained(plan)
        assert plan.state == "acked" and len(seen) == 2
        assert part.stats()["rows"] == 0


def fails_within(plan: Any) -> None:
    for _mini in plan:
        raise ZeroDivisionError


def test_a_loop_over_a_mini_batch_may_end_and_begin_again(alone: Cluster) -> None:
    """Each time while the next micro-batch is fetched, at another moment of that."""
    with alone.connect("a") as plane:
        part = filled(plane, 16)
        with part.plan("train", rank=0, ranks=1, minibatches=2) as plan:
            minis = iter(plan)
            mini = next(minis)
            for turn in range(400):
                assert len(next(iter(mini))) == 8
                time.sleep(turn % 20 * 2e-4)
            assert plan.state == "leased"
        part.wait("train", below=1)


def test_a_mini_batch_is_not_read_after_its_loop_has_acked_the_plan(alone: Cluster) -> None:
    with alone.connect("a") as plane:
        kept = list(filled(plane, 8).plan("train", rank=0, ranks=1, minibatches=2))
        with pytest.raises(dataplane.LeaseExpired, match="use each mini-batch inside the loop"):
            list(kept[0])


def test_rows_that_are_dropped_meanwhile_become_padding(alone: Cluster) -> None:
    with alone.connect("a") as plane:
        part = filled(plane, 8)
        with part.plan("train", rank=0, ranks=1, minibatches=4) as plan:
            keys = trained(plan)[0][2]
            part.drop(keys=keys + [k for k in range(8) if k not in keys][:1])
            seen = trained(plan)
        assert sorted(len(keys) for _, _, keys, _ in seen) == [0, 1, 2, 2]
        assert part.stats()["rows"] == 0


def test_a_plan_without_blocking(alone: Cluster) -> None:
    seen: list[Any] = []

    async def rank(number: int) -> None:
        async with aio.connect("a", run="test") as plane:
            part = await plane.partition("p")
            plan = await part.plan("train", rank=number, ranks=2, minibatches=3)
            async for mini in plan:
                async for micro in mini:
                    await micro.add(y=micro.keys)
                    seen.extend(k for k, h in zip(micro.keys, micro.mask, strict=True) if h)
            assert plan.state == "acked"

    async def both() -> None:
        await asyncio.gather(rank(0), rank(1))

    with alone.connect("a") as plane:
        part = filled(plane, 7, free="drop")
        asyncio.run(both())
        assert sorted(seen) == list(range(7))
        assert sorted(part.get()["y"]) == list(range(7))
        assert part.stats()["stages"]["train"]["acked_rows"] == 7


def test_a_backup_takes_over_in_the_middle(
    hosts: Addressed, planes: dict[str, dataplane.Plane]
) -> None:
    filled(planes["b"], 16, replicas=2)
    how: dict[str, Any] = {"ranks": 2, "minibatches": 4}
    both = [planes[name].partition("p").plan("train", rank=rank, **how)
            for rank, name in enumerate("ac")]  # fmt: skip
    loops = [iter(plan) for plan in both]
    seen = [key for loop in loops for micro in next(loop) for key in micro.keys]
    both[0].ack()
    hosts.kill("b")
    left = itertools.islice(loops[1], 3)  # which does not ask whether there are more
    seen += [key for mini in left for micro in mini for key in micro.keys]
    assert len(set(seen)) == len(seen) == 2 + 8
    both[1].release()
    both = [planes[name].partition("p").plan("train", rank=rank, **how)
            for rank, name in enumerate("ac")]  # fmt: skip
    assert sorted(key for plan in both for *_, keys, _ in trained(plan) for key in keys) == list(
        range(16)
    )
    with pytest.raises(dataplane.StreamEnd):
        planes["c"].partition("p").plan("train", rank=0, **how)


@pytest.mark.parametrize("outcome", ["ack", "release"])
def test_a_plan_whose_ack_was_lost_with_the_peer_of_its_shard_still_ends(
    hosts: Addressed, planes: dict[str, dataplane.Plane], outcome: str
) -> None:
    """The ack was never applied, which the client cannot know."""

    async def work() -> None:
        async with aio.connect("a", run=PLANE) as client:
            plan = await (await client.partition(name)).plan("train", rank=0, ranks=1)
            hosts.freeze("b")
            with pytest.raises(dataplane.DeadlineExceeded):
                await plan.ack(timeout=0.5)
            hosts.kill("b")
            await getattr(plan, outcome)(timeout=20)

    name = hosts.homed("b")
    part = filled(planes["c"], 16, name, replicas=2)
    asyncio.run(work())
    counts = part.stats()["stages"]["train"]
    ended = (counts["acked_rows"], counts["ready_rows"], counts["leased_rows"])
    assert ended == ((16, 0, 0) if outcome == "ack" else (0, 16, 0))


RANKS = """
    import datetime, os, signal, sys, tempfile
    import torch
    import torch.distributed as dist
    import dataplane

    RANKS, KILLED = 8, 3
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where gloo says things, in several writes

    def say(what):
        os.write(out, f"{what}\\n".encode())

    stores = [tempfile.mktemp() for _ in range(2)]

    def train(rank, part, turn):
        wait = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{stores[turn]}", rank=rank,
                                world_size=RANKS, timeout=wait)
        rows, steps = 0, 0
        try:
            with part.plan("train", rank=rank, ranks=RANKS, minibatches=2,
                           budget={"length": 40}, seed=7) as plan:
                for mini in plan:
                    for micro in mini:
                        if turn == 0 and rank == KILLED and steps == 2:
                            os.kill(os.getpid(), signal.SIGKILL)
                        count = torch.tensor([float(micro.mask.sum()), 1.0])
                        try:
                            dist.all_reduce(count)
                        except RuntimeError:  # its neighbours hear of it, and the plan tells all
                            dist.destroy_process_group()
                            while True:
                                micro.fetch("x")
                        rows, steps = rows + int(count[0]), steps + 1
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return rows, steps

    def run(rank, turn):
        torch.set_num_threads(1)
        with dataplane.connect("a") as plane:
            part = plane.partition("p")
            if turn == 0:
                try:
                    train(rank, part, 0)
                except dataplane.LeaseExpired as exc:
                    say(f"rank {rank}: {exc}")
            rows, steps = train(rank, part, 1)
            say(f"rank {rank} saw {rows} rows in {steps} steps")

    def fork(rank, turn):
        child = os.fork()
        if not child:
            run(rank, turn)
            os._exit(0)
        return child

    children = [fork(rank, 0) for rank in range(RANKS)]
    os.waitpid(children[KILLED], 0)
    children[KILLED] = fork(KILLED, 1)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
"""


def test_of_ranks_in_collectives_one_is_killed_and_the_next_plan_goes_on_with_everything(
    alone: Cluster,
) -> None:
    with alone.connect("a") as plane:
        part = filled(plane, 70)
        trainer = alone.worker(RANKS)
        said = [line(trainer) for _ in range(15)]
        told = [one for one in said if "has ended" in one]
        assert len(told) == 7
        assert all("rank 3 of 8 exited or released" in one for one in told)
        saw = {one.split(" saw ")[1] for one in said if one not in told}
        assert len(saw) == 1, saw
        assert saw.pop().startswith("70 rows in ")
        assert trainer.wait(20) == 0
        assert part.stats()["rows"] == 0
