"""How rows come to the stages: over the plane. Nobody here knows who else there is, or dies."""

from pathlib import Path

import torch
import torch.distributed as dist
from model import Model, prompts
from stages import DO, GROUP_SIZE, GROUPS, ROWS, STAGES

import dataplane


def rows(plane: dataplane.Plane, steps: int) -> dataplane.Partition:
    """Every process declares them alike, whoever comes first; with all groups there they seal."""
    return plane.partition("rows", stages=STAGES, group_size=GROUP_SIZE, groups=steps * GROUPS)


def feed(steps: int, lag: int) -> None:
    """Prompts of a step, once at most `lag` steps' groups are not trained on: 0 is synchronous."""
    with dataplane.connect() as plane:
        part = rows(plane, steps)
        for step in range(steps):
            part.wait("train", below=lag * GROUPS + 1)
            keys = range(step * ROWS, (step + 1) * ROWS)
            columns = {"prompt": prompts(step, GROUPS).repeat_interleave(GROUP_SIZE, 0)}
            part.put(columns, key=list(keys), group=[key // GROUP_SIZE for key in keys])


def work(stage: str, out: Path, steps: int) -> None:
    """If this process is killed, its rows go to whoever is left; if not, what it adds is stored
    with the ack: every row is done once."""
    model = Model()
    torch.seed()  # the first weights are everybody's, the luck our own
    with dataplane.connect() as plane:
        for batch in rows(plane, steps).stream(stage, groups=GROUPS // 2, min=1):
            batch.add(**DO[stage](model, out, **columns_of(batch, stage)))


def train(rank: int, out: Path, steps: int) -> None:
    """The first trainer leases a whole step, so that it is done or is not, whoever is killed. It is
    given keys alone (`fields=[]`), and each trainer reads the rows of its own share."""
    model, share = Model(), ROWS // dist.get_world_size()
    with dataplane.connect() as plane:
        part = rows(plane, steps)
        leased = iter(part.stream("train", groups=GROUPS, fields=[]) if rank == 0 else [])
        while True:
            batch = next(leased, None)  # asking for the next acks the one before
            keys = torch.tensor(sorted(batch.keys)) if batch else torch.full((ROWS,), -1)
            dist.broadcast(keys, src=0)
            if keys[0] < 0:
                return
            mine = part.get(keys[rank * share :][:share].tolist(), STAGES["train"])
            DO["train"](model, out, **columns_of(mine, "train"))


def columns_of(some: dataplane.Batch | dataplane.Rows, stage: str) -> dict[str, torch.Tensor]:
    return {name: some.torch(name) for name in STAGES[stage]}
