"""The same by way of a controller, to compare with: a single driver, as verl's classic one.

It gathers all rows of a stage before the next one begins, every byte passes through it, and it
knows every worker by name, so that one that dies ends the run.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from model import prompts
from stages import GROUP_SIZE, GROUPS, ROWS, STAGES, Columns, Trainer, stage_of


def feed(pipes: Mapping[str, list[Connection]], steps: int, tick: Callable[[int], None]) -> None:
    for step in range(steps):
        tick(step)
        rows = {"prompt": prompts(step, GROUPS).repeat(GROUP_SIZE, 0)}
        for stage in STAGES:
            rows |= ask(pipes[stage], {name: rows[name] for name in STAGES[stage]})
    for pipe in sum(pipes.values(), []):
        pipe.close()


def ask(pipes: list[Connection], rows: Columns) -> Columns:
    """Each worker of a stage gets its share, and all of them are waited for."""
    share = ROWS // len(pipes)
    for n, pipe in enumerate(pipes):
        send(pipe, {name: column[n * share :][:share] for name, column in rows.items()})
    parts = [receive(pipe) for pipe in pipes]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def work(stage: str, out: Path, pipe: Connection) -> None:
    do = Trainer(out) if stage == "train" else stage_of(stage, out)
    while True:
        try:
            rows = receive(pipe)
        except EOFError:
            return
        send(pipe, do(rows))


def send(pipe: Connection, columns: Columns) -> None:
    file = io.BytesIO()
    np.savez(file, **columns)
    pipe.send_bytes(file.getbuffer())


def receive(pipe: Connection) -> Columns:
    return dict(np.load(io.BytesIO(pipe.recv_bytes()), allow_pickle=False))
