"""The same by way of a controller, to compare with: a single driver, as verl's classic one.

It gathers all rows of a stage before the next one begins, every byte passes through it, and it
knows every worker by name, so that one that dies ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from model import prompts
from stages import GROUP_SIZE, GROUPS, ROWS, STAGES, Columns, Stage, Trainer


def feed(pipes: Mapping[str, list[Connection]], steps: int, tick: Callable[[int], None]) -> None:
    for step in range(steps):
        tick(step)
        rows = {"prompt": torch.from_numpy(prompts(step, GROUPS).repeat(GROUP_SIZE, 0))}
        for stage in STAGES:
            rows |= ask(pipes[stage], {name: rows[name] for name in STAGES[stage]})
    for pipe in sum(pipes.values(), []):
        pipe.send(None)


def ask(pipes: list[Connection], rows: Columns) -> Columns:
    """Each worker of a stage gets its share, and all of them are waited for."""
    share = ROWS // len(pipes)
    for n, pipe in enumerate(pipes):
        pipe.send({name: column[n * share :][:share].numpy() for name, column in rows.items()})
    parts = [pipe.recv() for pipe in pipes]
    return {name: torch.cat([torch.from_numpy(p[name]) for p in parts]) for name in parts[0]}


def work(stage: str, out: Path, pipe: Connection) -> None:
    do = Trainer(out) if stage == "train" else Stage(stage, out)
    while (rows := pipe.recv()) is not None:
        made = do({name: torch.from_numpy(column) for name, column in rows.items()})
        pipe.send({name: column.numpy() for name, column in made.items()})
