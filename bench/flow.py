"""The work of the workers, on any plane: rollout → reward and reference → trainer ranks (GRPO).

`python -m bench.flow JSON` is a worker's process. Each writes events: digests of what it wrote or
read, so that the runner can compare the trainer's rows with what was put, and at the end a summary
of its time.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench import pace
from bench.columns import Array, Source, digest, rollout_fields
from bench.planes import PLANES
from bench.planes.base import Batch, Columns, Endpoint, Job, Worker
from bench.processes import die_with, emit

_LOG_PROB_OF_TOKEN = np.float32(-1e-5)
_NEVER_ZERO = 1e-6  # keeps a group of equal rewards at advantage 0


class Clock:
    """Seconds by activity. Time that no other activity claims belongs to the plane."""

    def __init__(self) -> None:
        self.cpu_seconds: dict[str, float] = defaultdict(float)  # of all threads
        self.spans_ms: dict[str, list[float]] = defaultdict(list)  # durations, a few per group

    @contextmanager
    def timing(self, activity: str) -> Iterator[None]:
        start, cpu_start = time.monotonic(), time.process_time()
        try:
            yield
        finally:
            self.cpu_seconds[activity] += time.process_time() - cpu_start
            self.spans_ms[activity].append(round((time.monotonic() - start) * 1e3, 3))


class Orders:
    """What the runner tells a worker, a line at a time on stdin: `policy N AT` when the trainers
    have finished N steps, at AT on the monotonic clock; `rolled N` when rollout has finished step
    N."""

    def __init__(self) -> None:
        self._version = self._rolled = -1
        self._since = 0.0

    def wait_for_policy(self, version: int) -> float:
        """Wait until the trainers have finished `version` steps. Return when that happened."""
        while self._version < version:
            self._hear()
        return self._since

    def wait_for_rollout(self, step: int) -> None:
        while self._rolled < step:
            self._hear()

    def _hear(self) -> None:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit("the runner has ended")
        match line.split():
            case ["policy", version, at]:
                self._version, self._since = int(version), float(at)
            case ["rolled", step]:
                self._rolled = int(step)


@dataclass(frozen=True, slots=True)
class Work:
    worker: Worker
    endpoint: Endpoint
    clock: Clock = field(default_factory=Clock)
    orders: Orders = field(default_factory=Orders)

    @property
    def job(self) -> Job:
        return self.worker.job

    def wait(self, recorded: float, since: float | None = None) -> None:
        """With a pace, sleep until this recorded time has passed since `since` (default: now)."""
        if self.job.pace:
            spent = 0.0 if since is None else time.monotonic() - since
            time.sleep(max(0.0, recorded / self.job.pace - spent))

    def spend(self, recorded: float, came: float) -> None:
        """Work on a batch for this recorded time. In a recorded job, it includes the bench's own
        work since the batch arrived."""
        self.wait(recorded, came if self.job.is_recorded else None)

    def batches(self, step: int) -> Iterator[Batch]:
        """The stage's batches. The wait for each counts as `claim`."""
        if self.job.phased:
            with self.clock.timing("phase"):
                self.orders.wait_for_rollout(step)
        batches = self.endpoint.batches(step, self.worker.role)
        while True:
            with self.clock.timing("claim"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            del batch  # a plane may hold the bytes while the batch is referenced


def digests(values: Sequence[Array]) -> list[int]:
    """One digest per row. Rows that share their memory (address, shape, dtype) are read once."""
    read: dict[tuple[int, tuple[int, ...], str], int] = {}
    found = []
    for value in values:
        place = (value.ctypes.data, value.shape, value.dtype.str)
        if place not in read:
            read[place] = digest(value)
        found.append(read[place])
    return found


def main(worker: Worker) -> None:
    """Run a worker: attach, wait for the start, work, and report."""
    roles = {"rollout": rollout, "reward": reward, "reference": reference, "train": train}
    endpoint = PLANES[worker.job.plane].endpoint
    work = Work(worker, endpoint(worker))
    body = roles[worker.role](work)
    next(body)  # prepare before the start
    emit("ready")
    work.orders.wait_for_policy(0)
    start = time.monotonic()
    for _ in body:
        pass
    end = time.monotonic()
    work.endpoint.close()
    spent = {name: dict(getattr(work.clock, name)) for name in ("cpu_seconds", "spans_ms")}
    emit("done", start=start, end=end, **spent)


def rollout(work: Work) -> Iterator[None]:
    """Make the groups of this worker's share of the prompts, and put each when its slowest row is
    done. All rows of a worker are written at once, as an engine with continuous batching does.

    A step starts when the trainers are at most `staleness` steps behind it.
    """
    job = work.job
    mine = [p for p in job.generate() if p.index % job.hosts == work.worker.rank]
    mine.sort(key=lambda prompt: prompt.rollout_seconds)
    fields = rollout_fields(job.task)
    source = Source(job.seed, max((prompt.media_bytes for prompt in mine), default=0))
    yield
    finished = 0.0
    for step in range(job.steps):
        with work.clock.timing("policy"):
            policy = work.orders.wait_for_policy(step - job.staleness)
        start = max(policy, finished)  # without the runner's delay
        emit("rolling", step=step, at=start)
        for prompt in (prompt for prompt in mine if prompt.step == step):
            with work.clock.timing("generate"):
                columns = {field.name: source.column(field, prompt) for field in fields}
            with work.clock.timing("digest"):
                told = {name: digests(values) for name, values in columns.items()}
            with work.clock.timing("rollout"):  # includes the bench's own work above
                work.wait(prompt.rollout_seconds, start)
            with work.clock.timing("put"):
                work.endpoint.put(step, prompt.index, columns)
            rows = [(prompt.index, sample) for sample in range(len(prompt.samples))]
            emit("produced", rows=rows, digests=told)
        with work.clock.timing("finish"):
            work.endpoint.finish(step)
        finished = time.monotonic()
        emit("rolled", step=step)


def reward(work: Work) -> Iterator[None]:
    """Score groups as they arrive: a number, and its position on the response's last token."""
    prompts = work.job.generate()

    def scored(batch: Batch) -> Columns:
        rewards = [prompts[prompt].samples[sample].reward for prompt, sample in batch.rows()]
        scores = [np.zeros(response.shape, np.float32) for response in batch.column("responses")]
        for reward, score in zip(rewards, scores, strict=True):
            score[-1:] = reward  # on the last token, as outcome rewards are given
        told = [np.array([reward], np.float32) for reward in rewards]
        return {"reward": told, "token_level_scores": scores}

    return _annotate(work, scored)


def reference(work: Work) -> Iterator[None]:
    """Stand in for a reference model: compute log-probs that depend on the tokens."""

    def log_probs(batch: Batch) -> Columns:
        tokens = batch.column("responses")
        return {"ref_log_prob": [t.astype(np.float32) * _LOG_PROB_OF_TOKEN for t in tokens]}

    return _annotate(work, log_probs)


def _annotate(work: Work, fields_of: Callable[[Batch], Columns]) -> Iterator[None]:
    """Read whole groups and add fields to them. The reward stage then drops useless groups."""
    job, role = work.job, work.worker.role
    prompts = job.generate()
    fields = job.stages()[role]
    yield
    for step in range(job.steps):
        for batch in work.batches(step):
            came = time.monotonic()
            with work.clock.timing("read"):
                for field in fields:
                    batch.column(field)
                rows = batch.rows()
            here = sorted({prompt for prompt, _ in rows})
            with work.clock.timing(role):
                columns = fields_of(batch)
                told = {name: digests(values) for name, values in columns.items()}
                work.spend(sum(pace.STAGE_SECONDS[role](prompts[prompt]) for prompt in here), came)
            with work.clock.timing("add"):
                batch.add(columns)
            emit("produced", rows=rows, digests=told)
            useless = [p for p in here if not job.is_trained(prompts[p])]
            if role == "reward" and useless:
                with work.clock.timing("drop"):
                    batch.drop(useless)
                emit("filtered", prompts=useless)
            del batch  # release its bytes before the wait for the next batch


def train(work: Work) -> Iterator[None]:
    """Read every byte of whole groups as they arrive, and compute the advantages of the step."""
    job = work.job
    prompts = job.generate()
    fields = job.stages()["train"]
    together, _ = job.groups_per_claim("train")  # groups that a recorded trainer works on at once
    yield
    for step in range(job.steps):
        seconds, groups, came = 0.0, 0, time.monotonic()
        for batch in work.batches(step):
            came = time.monotonic()
            with work.clock.timing("check"):
                told = {name: digests(batch.column(name)) for name in fields}
                rows = batch.rows()
            with work.clock.timing("advantages"):
                rewards = np.concatenate([value.reshape(-1) for value in batch.column("reward")])
                weights = advantages(rewards)
                masks = (m.astype(np.float32) for m in batch.column("response_mask"))
                tokens = [w * m for w, m in zip(weights, masks, strict=True)]
            seconds, groups = seconds + pace.train_seconds(prompts[rows[0][0]]), groups + 1
            if groups >= together:
                with work.clock.timing("train"):
                    work.spend(seconds, came)
                seconds, groups = 0.0, 0
            size = sum(map(len, tokens))
            emit("trained", rows=rows, digests=told, tokens=size)
            del batch, masks  # as above
        with work.clock.timing("train"):
            if groups:  # the last groups
                work.spend(seconds, came)
            work.wait(pace.optimiser_seconds(job.of_step(step)))
        emit("stepped", step=step, at=time.monotonic())


def advantages(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """Group-relative advantages: (r − mean) / (std + 1e-6), as in GRPO (arXiv 2402.03300)."""
    centred: NDArray[np.float32] = rewards - rewards.mean()
    weights: NDArray[np.float32] = centred / (rewards.std() + np.float32(_NEVER_ZERO))
    return weights


if __name__ == "__main__":
    started = msgspec.json.decode(sys.argv[1], type=Worker)
    die_with(started.job.parent)
    main(started)
    # An interpreter takes 40 to 80 ms of a core to take itself apart, while trainers are still at
    # the last step. So a finished worker exits at once.
    atexit._run_exitfuncs()  # handlers of the plane: Ray's worker disconnects
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
