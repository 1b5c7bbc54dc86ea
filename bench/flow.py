"""What the workers do, whatever the plane: rollout → reward → trainer ranks (GRPO).

Runs inside the worker processes. Each writes events: digests of what it wrote or read, so that the
runner can compare the trainer's rows with what was put, and at the end where its time went.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.columns import rollout_fields
from bench.events import emit
from bench.media import Source, digest
from bench.planes.base import Array, Batch, Endpoint, Worker

_NEVER_ZERO = 1e-6  # keeps a group of equal rewards at advantage 0


class Clock:
    """Seconds by activity. What nothing else claims is the plane's: putting, waiting, acking."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timing(self, activity: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[activity] += time.monotonic() - start


def main(worker: Worker, attach: Callable[[Worker], Endpoint]) -> None:
    """A worker's life: attach, wait for the start, work, say how it went."""
    body = {"rollout": rollout, "reward": reward, "train": train}[worker.role]
    endpoint = attach(worker)
    clock = Clock()
    work = body(worker, endpoint, clock)  # what it needs is made here, before the start
    next(work)
    emit("ready")
    if not sys.stdin.readline():
        raise SystemExit("the runner went away before the start")
    start = time.monotonic()
    for _ in work:
        pass
    end = time.monotonic()
    moved = msgspec.to_builtins(endpoint.moved())
    endpoint.close()
    emit("done", start=start, end=end, seconds=dict(clock.seconds), moved=moved)


def rollout(worker: Worker, endpoint: Endpoint, clock: Clock) -> Iterator[None]:
    """Every host's worker makes the groups of its share of the prompts."""
    job = worker.job
    fields = rollout_fields(job.task)
    mine = [p for p in job.generate() if p.index % job.hosts == worker.rank]
    clips = [p.clip for p in mine if p.clip]
    room = {"pixel_values": max((c.pixel_bytes for c in clips), default=0)}
    room["raw_frames"] = max((c.frame_bytes for c in clips), default=0)
    source = Source(job.seed, room)
    yield
    for prompt in mine:
        with clock.timing("generate"):
            columns = {field.name: source.column(field, prompt) for field in fields}
        with clock.timing("digest"):
            digests = {name: _digests(values) for name, values in columns.items()}
        with clock.timing("put"):
            endpoint.put(prompt.index, columns)
        rows = [(prompt.index, sample) for sample in range(len(prompt.response_tokens))]
        emit("produced", rows=rows, digests=digests)
    with clock.timing("put"):
        endpoint.finish()


def reward(worker: Worker, endpoint: Endpoint, clock: Clock) -> Iterator[None]:
    """Score rows as they come: a number and its place on the response's last token."""
    yield
    for batch in _timed(endpoint.batches("reward"), clock):
        with clock.timing("score"):
            for field in worker.job.stages()["reward"]:
                batch.column(field)
            scored = [score(response) for response in batch.column("responses")]
            columns = {
                "reward": [value for value, _ in scored],
                "token_level_scores": [tokens for _, tokens in scored],
            }
            digests = {name: _digests(values) for name, values in columns.items()}
            rows = batch.rows()
        with clock.timing("add"):
            batch.add(columns)
        emit("produced", rows=rows, digests=digests)


def score(response: Array) -> tuple[Array, Array]:
    """A verifier's stand-in: a reward in {0, 1} from the response's tokens."""
    value = np.float32(int(response.sum()) % 2)
    tokens = np.zeros(response.shape, np.float32)
    tokens[-1:] = value
    return np.array([value]), tokens


def train(worker: Worker, endpoint: Endpoint, clock: Clock) -> Iterator[None]:
    """Read every byte of whole groups, and compute the advantages that the step would use."""
    fields = worker.job.stages()["train"]
    yield
    for batch in _timed(endpoint.batches("train"), clock):
        with clock.timing("check"):
            digests = {name: _digests(batch.column(name)) for name in fields}
            rows = batch.rows()
        with clock.timing("advantages"):
            rewards = np.concatenate([value.reshape(-1) for value in batch.column("reward")])
            weights = advantages(rewards)
            mask = batch.column("response_mask")
            tokens = [w * m.astype(np.float32) for w, m in zip(weights, mask, strict=True)]
        emit("trained", rows=rows, digests=digests, tokens=sum(t.size for t in tokens))


def advantages(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """Group-relative advantages: (r − mean) / (std + 1e-6), as in GRPO (arXiv 2402.03300)."""
    centred: NDArray[np.float32] = rewards - rewards.mean()
    weights: NDArray[np.float32] = centred / (rewards.std() + np.float32(_NEVER_ZERO))
    return weights


def _timed(batches: Iterator[Batch], clock: Clock) -> Iterator[Batch]:
    while True:
        with clock.timing("claim"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _digests(values: Sequence[Array]) -> list[int]:
    """A digest a row. Rows that share their memory (address, shape, dtype) are read once."""
    read: dict[tuple[int, tuple[int, ...], str], int] = {}
    digests = []
    for value in values:
        place = (value.ctypes.data, value.shape, value.dtype.str)
        if place not in read:
            read[place] = digest(value)
        digests.append(read[place])
    return digests
