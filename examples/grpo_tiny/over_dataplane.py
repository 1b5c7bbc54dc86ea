"""How rows come to the stages: over the plane. Nobody here knows who else there is, or dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from model import prompts
from stages import GROUP_SIZE, GROUPS, ROWS, STAGES, WORKERS, Trainer, stage_of

import dataplane


def partition(plane: dataplane.Plane, steps: int) -> dataplane.Partition:
    """Every process declares it alike, whoever comes first. With all its groups there it seals."""
    return plane.partition("rows", stages=STAGES, group_size=GROUP_SIZE, groups=steps * GROUPS)


def feed(steps: int, lag: int, tick: Callable[[int], None]) -> None:
    """Prompts of a step, once no more than `lag` steps' groups are not trained on yet.

    So lag=0 is synchronous, and otherwise the groups under way are bounded. A group that takes far
    longer than the others may be overtaken, and then be older than `lag` steps.
    """
    with dataplane.connect() as plane:
        part = partition(plane, steps)
        for step in range(steps):
            wait(part, lag * GROUPS + 1, lambda step=step: tick(step))
            keys = np.arange(step * ROWS, (step + 1) * ROWS)
            part.put(
                {"prompt": prompts(step, GROUPS).repeat(GROUP_SIZE, 0)},
                key=keys.tolist(),
                group=(keys // GROUP_SIZE).tolist(),
            )
        wait(part, 1, lambda: tick(steps))


def wait(part: dataplane.Partition, below: int, tick: Callable[[], None]) -> None:
    """Until fewer than `below` groups are not trained on yet."""
    while True:
        tick()  # sees to workers that died
        try:
            return part.wait("train", below=below, timeout=0.5)
        except TimeoutError:
            pass


def work(stage: str, rank: int, out: Path, steps: int) -> None:
    """A worker's life. If it is killed, its rows go to whoever is left; if not, what it adds is
    stored with the ack, so that every row is done once."""
    with dataplane.connect() as plane:
        part = partition(plane, steps)
        if stage == "train":
            return train(part, rank, Trainer(out))
        do = stage_of(stage, out)
        for batch in part.stream(stage, groups=GROUPS // WORKERS[stage], min=1):
            batch.add(**do({name: batch.numpy(name) for name in STAGES[stage]}))


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
        trainer({name: rows.numpy(name) for name in STAGES["train"]})
