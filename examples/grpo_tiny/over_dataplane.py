"""How rows come to the stages: over the plane. Nobody here knows who else there is, or dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from model import prompts
from stages import GROUP_SIZE, GROUPS, ROWS, STAGES, WORKERS, Stage, Trainer

import dataplane


def partition(plane: dataplane.Plane, steps: int) -> dataplane.Partition:
    """Every process declares it alike, whoever comes first. With all its groups there it seals."""
    return plane.partition("rows", stages=STAGES, group_size=GROUP_SIZE, groups=steps * GROUPS)


def feed(steps: int, lag: int, tick: Callable[[int], None]) -> None:
    """Prompts of a step, once no more than `lag` steps' groups are not trained on yet: 0 is
    synchronous. `tick` sees to workers that died."""
    with dataplane.connect() as plane:
        part = partition(plane, steps)
        for step in range(steps + 1):
            while True:
                tick(step)
                try:
                    part.wait("train", below=lag * GROUPS + 1 if step < steps else 1, timeout=0.5)
                    break
                except TimeoutError:
                    pass
            if step < steps:
                keys = np.arange(step * ROWS, (step + 1) * ROWS)
                rows = {"prompt": prompts(step, GROUPS).repeat(GROUP_SIZE, 0)}
                part.put(rows, key=keys.tolist(), group=(keys // GROUP_SIZE).tolist())


def work(stage: str, rank: int, out: Path, steps: int) -> None:
    """A worker's life. If it is killed, its rows go to whoever is left; if not, what it adds is
    stored with the ack, so that every row is done once."""
    with dataplane.connect() as plane:
        part = partition(plane, steps)
        if stage == "train":
            return train(part, rank, Trainer(out))
        do = Stage(stage, out)
        for batch in part.stream(stage, groups=GROUPS // WORKERS[stage], min=1):
            batch.add(**do({name: batch.torch(name) for name in STAGES[stage]}))


def train(part: dataplane.Partition, rank: int, trainer: Trainer) -> None:
    """The first trainer leases a whole step, so that it is done or is not, whoever is killed. It is
    given keys alone (`fields=[]`), and each trainer reads the rows of its own share."""
    share = ROWS // WORKERS["train"]
    leased = iter(part.stream("train", groups=GROUPS, fields=[])) if rank == 0 else None
    while True:
        keys = torch.full((ROWS,), -1)
        if leased and (batch := next(leased, None)):  # asking for the next acks the one before
            keys = torch.tensor(sorted(batch.keys))  # type: ignore[type-var]
        dist.broadcast(keys, src=0)
        if keys[0] < 0:
            return
        rows = part.get(keys[rank * share :][:share].tolist(), STAGES["train"])
        trainer({name: rows.torch(name) for name in STAGES["train"]})
