"""The same stages under a single controller, for comparison, as in verl's classic driver. Every
byte passes through it, it waits for all rows of a stage, and a worker that dies ends the run."""

from argparse import Namespace

import numpy as np
import torch
from grpo import DO, STAGES, Model, prompts


def live(stage: str, rank: int, args: Namespace) -> None:
    if stage == "feed":
        return feed(args)
    model, (_, pipe) = Model(), args.pipes[stage, rank]
    while (rows := pipe.recv()) is not None:
        made = DO[stage](model, args.out, **{n: torch.from_numpy(c) for n, c in rows.items()})
        pipe.send({name: column.numpy() for name, column in made.items()})


def feed(args: Namespace) -> None:
    """Send each worker of a stage its share of the rows, and wait for all workers."""
    for step in range(args.steps):
        rows = {"prompt": prompts(step).numpy()}
        for stage, wanted in STAGES.items():
            workers = [pipe for (name, _), (pipe, _) in args.pipes.items() if name == stage]
            for n, pipe in enumerate(workers):
                pipe.send({name: np.split(rows[name], len(workers))[n] for name in wanted})
            parts = [pipe.recv() for pipe in workers]
            rows |= {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for pipe, _ in args.pipes.values():
        pipe.send(None)
