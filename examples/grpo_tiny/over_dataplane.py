"""How rows come to the stages: over the plane. Nobody here knows who else there is, or dies."""

from argparse import Namespace
from contextlib import suppress

import torch
import torch.distributed as dist
from grpo import DO, GROUP_SIZE, GROUPS, ROWS, STAGES, Model, prompts

import dataplane


def live(stage: str, rank: int, args: Namespace) -> None:
    """Every process declares the rows alike, whoever is first; with all groups there they seal."""
    with dataplane.connect() as plane:
        count = args.steps * GROUPS
        part = plane.partition("rows", stages=STAGES, group_size=GROUP_SIZE, groups=count)
        {"feed": feed, "train": train}.get(stage, work)(part, stage, rank, args)


def feed(part: dataplane.Partition, stage: str, rank: int, args: Namespace) -> None:
    """Prompts of a step, once they will be trained on at most `lag` steps later; 0 is synchronous.
    Who starts again repeats what was put before, which changes nothing."""
    for step in range(args.steps):
        keys = list(range(step * ROWS, (step + 1) * ROWS))
        groups = [key // GROUP_SIZE for key in keys]
        had = suppress(dataplane.RowsGone, dataplane.PartitionSealed)
        with had, part.admit(GROUPS, max_lag=args.lag, per_version=GROUPS):
            part.put({"prompt": prompts(step)}, key=keys, group=groups, replace=True)


def work(part: dataplane.Partition, stage: str, rank: int, args: Namespace) -> None:
    """If this process is killed, its rows go to whoever is left; if not, what it adds is stored
    with the ack: every row is done once."""
    model = Model()
    for batch in part.stream(stage, groups=GROUPS // 2, min=1):
        columns = {name: batch.torch(name) for name in STAGES[stage]}
        batch.add(**DO[stage](model, args.out, **columns))


def train(part: dataplane.Partition, stage: str, rank: int, args: Namespace) -> None:
    """The first trainer leases a whole step, so that it is done or is not, whoever is killed. It is
    given keys alone (`fields=[]`), and each trainer reads the rows of its own share."""
    model, share = Model(), ROWS // dist.get_world_size()
    model.load(args.out)  # where a trainer was killed, all go on from there
    part.advance(int(model.version))  # which it may not have said any more
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
