"""The work of the workers, on any plane: rollout → reward and reference → trainer ranks (GRPO).

Runs inside the worker processes. Each writes events: digests of what it wrote or read, so that
the runner can compare the trainer's rows with what was put, and at the end a summary of its
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench import pace
from bench.events import emit
from bench.planes.base import Array, Batch, Columns, Endpoint, Worker
from bench.rollout import rollout
from bench.traces import Prompt
from bench.work import Work, digests

_LOG_PROB_OF_TOKEN = np.float32(-1e-5)
_NEVER_ZERO = 1e-6  # keeps a group of equal rewards at advantage 0


def main(worker: Worker, attach: Callable[[Worker], Endpoint]) -> None:
    """Run a worker: attach, wait for the start, work, and report."""
    roles = {"rollout": rollout, "reward": reward, "reference": reference, "train": train}
    work = Work(worker, attach(worker), pace.Pace(worker.job.pace))
    body = roles[worker.role](work)
    next(body)  # what it needs is made here, before the start
    emit("ready")
    work.orders.wait_for_policy(0)
    start = time.monotonic()
    for _ in body:
        pass
    end = time.monotonic()
    moved = msgspec.to_builtins(work.endpoint.moved())
    work.endpoint.close()
    clock = work.clock
    spent = {name: dict(getattr(clock, name)) for name in ("seconds", "cpu_seconds", "spans_ms")}
    emit("done", start=start, end=end, moved=moved, **spent)


def reward(work: Work) -> Iterator[None]:
    """Score groups as they arrive: a number, and its position on the response's last token."""
    prompts = work.job.generate()

    def scores(batch: Batch) -> Columns:
        rewards = [prompts[prompt].samples[sample].reward for prompt, sample in batch.rows()]
        responses = batch.column("responses")
        return {
            "reward": [np.array([reward], np.float32) for reward in rewards],
            "token_level_scores": [
                at_the_end(reward, response)
                for reward, response in zip(rewards, responses, strict=True)
            ],
        }

    return _annotate(work, scores, pace.reward_seconds)


def reference(work: Work) -> Iterator[None]:
    """Stand in for a reference model: compute log-probs that depend on the tokens."""

    def log_probs(batch: Batch) -> Columns:
        tokens = batch.column("responses")
        return {"ref_log_prob": [t.astype(np.float32) * _LOG_PROB_OF_TOKEN for t in tokens]}

    return _annotate(work, log_probs, pace.reference_seconds)


def _annotate(
    work: Work, fields_of: Callable[[Batch], Columns], seconds: Callable[[Prompt], float]
) -> Iterator[None]:
    """A stage that reads whole groups and adds fields to them.

    The reward stage then drops the groups that dynamic sampling has no use for.
    """
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
                work.spend(sum(seconds(prompts[prompt]) for prompt in here), came)
            with work.clock.timing("add"):
                batch.add(columns)
            emit("produced", rows=rows, digests=told)
            useless = [p for p in here if not job.is_trained(prompts[p])]
            if role == "reward" and useless:
                with work.clock.timing("drop"):
                    batch.drop(useless)
                emit("filtered", prompts=useless)
            del batch  # while the next one is waited for, this one's bytes are nobody's


def at_the_end(reward: float, response: Array) -> Array:
    """The reward on the last token of the response, as outcome rewards are given."""
    scores = np.zeros(response.shape, np.float32)
    scores[-1:] = reward
    return scores


def train(work: Work) -> Iterator[None]:
    """Read every byte of whole groups as they arrive, and compute the advantages of the step."""
    job = work.job
    prompts = job.generate()
    fields = job.stages()["train"]
    yield
    for step in range(job.steps):
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
            with work.clock.timing("train"):
                work.spend(pace.train_seconds(prompts[rows[0][0]]), came)
            size = sum(map(len, tokens))
            emit("trained", rows=rows, digests=told, tokens=size)
            del batch, masks  # as above
        with work.clock.timing("train"):
            work.pace.spend(pace.optimiser_seconds(job.of_step(step)))
        emit("stepped", step=step, at=time.monotonic())


def advantages(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """Group-relative advantages: (r − mean) / (std + 1e-6), as in GRPO (arXiv 2402.03300)."""
    centred: NDArray[np.float32] = rewards - rewards.mean()
    weights: NDArray[np.float32] = centred / (rewards.std() + np.float32(_NEVER_ZERO))
    return weights
