"""How many group lives one shard carries: `group_life` of `bench perf`.

A life is what training makes of a prompt: 16 rows of 7 fields put, then claimed, added to and acked
by three stages. The clients are at another peer than the shard's primary, which is backed up and
speaks encrypted, as between hosts; counted is the processor time that the primary's process takes.
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.processes import die_with
from tests.cluster import clients
from tests.perf.children import processor_s, spawned

ROWS = 16
FIELDS = [f"f{n}" for n in range(7)]
VALUES = 64
"""float32 a value: what scores and masks of a short answer take."""
STAGES = {"reward": FIELDS[:2], "reference": FIELDS[:3], "train": [*FIELDS, "reward", "logp"]}
ADDED = {"reward": "reward", "reference": "logp", "train": None}
PROCESSES, THREADS = 4, 8
WARM_LIVES, LIVES = 4, 25
"""of each client"""
ARENA = "512MiB"
PARTITION = "lives"


def measure() -> list[float]:
    """Processor seconds of the primary for one life, one figure a repetition."""
    with clients("ab", ARENA, "--transport", "off", token=True) as found:
        primary, other = _roles(*found)
        pipes, children = [], []
        for nth in range(PROCESSES):
            child, ours = spawned(_worker, other.peer, other.name, nth)
            children.append(child)
            pipes.append(ours)
        pid, samples = primary.stats()["pid"], []
        for repetition in range(4):
            lives = LIVES if repetition else WARM_LIVES
            before = processor_s(pid)
            for pipe in pipes:
                pipe.send(lives)
            for pipe in pipes:
                pipe.recv()
            if repetition:
                samples.append((processor_s(pid) - before) / (lives * PROCESSES * THREADS))
        for pipe in pipes:
            pipe.send(0)
        for child in children:
            child.join()
        return samples


def _roles(one: Any, other: Any) -> tuple[Any, Any]:
    """The client at the partition's primary, and the one at its backup."""
    from dataplane.metadata.roster.roster import Roster

    one.partition(PARTITION, stages=STAGES, group_size=ROWS)
    addresses = [client.stats()["address"] for client in (one, other)]
    first = Roster.from_seeds(addresses).home(PARTITION) == addresses[0]
    return (one, other) if first else (other, one)


def _columns() -> dict[str, Any]:
    return {name: np.ones((ROWS, VALUES), np.float32) for name in FIELDS}


def _worker(pipe: Connection, peer: str, plane: str, nth: int, parent: int) -> None:
    die_with(parent)
    import dataplane

    with dataplane.connect(peer, run=plane) as client:
        part, done = client.partition(PARTITION), 0
        while lives := pipe.recv():
            threads = [
                threading.Thread(target=_live, args=(part, f"{nth} {one} {done}", lives))
                for one in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            done += lives
            pipe.send(True)


def _live(part: Any, name: str, lives: int) -> None:
    for life in range(lives):
        part.put(_columns(), group=f"{name} {life}", tags={"length": list(range(ROWS))})
        for stage, added in ADDED.items():
            with part.claim(stage, groups=1, timeout=60) as batch:
                if added:
                    batch.add({added: np.zeros((ROWS, 1), np.float32)})
