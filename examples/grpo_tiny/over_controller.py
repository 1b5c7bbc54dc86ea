"""The same by way of a controller, to compare with: a single driver, as verl's classic one.

It gathers all rows of a stage before the next one begins, every byte passes through it, and it
knows every worker by name, so that one that dies ends the run.
"""

from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from model import Model, prompts
from stages import DO, GROUP_SIZE, GROUPS, STAGES

Ends = dict[tuple[str, int], Connection]


def work(stage: str, out: Path, pipe: Connection) -> None:
    model = Model()
    torch.seed()  # the first weights are everybody's, the luck our own
    while (rows := pipe.recv()) is not None:
        made = DO[stage](model, out, **{name: torch.from_numpy(c) for name, c in rows.items()})
        pipe.send({name: column.numpy() for name, column in made.items()})


def feed(steps: int, pipes: Ends) -> None:
    """Each worker of a stage gets its share of the rows, and all of them are waited for."""
    for step in range(steps):
        rows = {"prompt": prompts(step, GROUPS).repeat_interleave(GROUP_SIZE, 0).numpy()}
        for stage, wanted in STAGES.items():
            workers = [pipe for (name, _), pipe in pipes.items() if name == stage]
            for n, pipe in enumerate(workers):
                pipe.send({name: np.split(rows[name], len(workers))[n] for name in wanted})
            parts = [pipe.recv() for pipe in workers]
            rows |= {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for pipe in pipes.values():
        pipe.send(None)
