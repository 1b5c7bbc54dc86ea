"""Rows reach the stages through the data plane. No process knows which others exist or die."""

from argparse import Namespace
from contextlib import suppress

import torch
import torch.distributed as dist
from grpo import DO, GROUP_SIZE, GROUPS, ROWS, STAGES, Model, prompts

import dataplane


def live(stage: str, rank: int, args: Namespace) -> None:
    """Run one stage. All declare the same partition, which is sealed when it has all groups."""
    with dataplane.connect() as plane:
        count = args.steps * GROUPS
        part = plane.partition("rows", stages=STAGES, group_size=GROUP_SIZE, groups=count)
        {"feed": feed, "train": train}.get(stage, work)(part, stage, rank, args)


def feed(part: dataplane.Partition, stage: str, rank: int, args: Namespace) -> None:
    """Put the prompts of each step once they will be trained on at most `lag` steps later; 0 is
    synchronous. A feeder that restarts repeats its puts, which changes nothing."""
    for step in range(args.steps):
        keys = list(range(step * ROWS, (step + 1) * ROWS))
        groups = [key // GROUP_SIZE for key in keys]
        had = suppress(dataplane.RowsGone, dataplane.PartitionSealed)
        with had, part.admit(GROUPS, max_lag=args.lag, per_version=GROUPS):
            part.put({"prompt": prompts(step)}, key=keys, group=groups, replace=True)


def work(part: dataplane.Partition, stage: str, rank: int, args: Namespace) -> None:
    """Process the rows of a stage. Added fields are stored together with the ack. If this process
    is killed, its leased rows go to another worker, so every row is processed once."""
    model = Model()
    for batch in part.stream(stage, groups=GROUPS // 2, min=1):
        columns = {name: batch.torch(name) for name in STAGES[stage]}
        batch.add(**DO[stage](model, args.out, **columns))


def train(part: dataplane.Partition, stage: str, rank: int, args: Namespace) -> None:
    """Train step by step. The first trainer leases the keys of a step (`fields=[]`), so the step is
    repeated if a trainer is killed. Each trainer reads its own share of the rows."""
    model, share = Model(), ROWS // dist.get_world_size()
    model.load(args.out)  # after a trainer was killed, all continue from here
    part.advance(int(model.version))  # the killed trainer may not have done this
    leased = iter(part.stream(stage, groups=GROUPS, fields=[]) if rank == 0 else [])
    while True:
        batch = next(leased, None)
        keys = torch.tensor(sorted(batch.keys)) if batch else torch.full((ROWS,), -1)
        dist.broadcast(keys, src=0)
        if keys[0] < 0:
            return
        mine = part.get(keys[rank * share :][:share].tolist(), STAGES[stage])
        DO[stage](model, args.out, **{name: mine.torch(name) for name in mine.fields})
        if batch:
            batch.ack()
            part.advance(int(model.version))
