"""Recorded seconds of each stage, and the shortest time of a paced run without a plane."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from bench.planes.base import Job
from bench.traces import Prompt

REFERENCE_SECONDS = 2e-5  # A: a token, forward, one worker
TRAIN_SECONDS = 6e-5  # A: a token, forward and backward, one trainer rank
OPTIMISER_SECONDS = 2.0  # A: a step


def reward_seconds(prompt: Prompt) -> float:
    return sum(sample.reward_seconds for sample in prompt.samples)


def reference_seconds(prompt: Prompt) -> float:
    return prompt.times.reference if prompt.times else REFERENCE_SECONDS * _tokens(prompt)


def train_seconds(prompt: Prompt) -> float:
    return prompt.times.train if prompt.times else TRAIN_SECONDS * _tokens(prompt)


STAGE_SECONDS = {"reward": reward_seconds, "reference": reference_seconds, "train": train_seconds}


def optimiser_seconds(prompts: Sequence[Prompt]) -> float:
    times = prompts[0].times if prompts else None
    return times.optimiser if times else OPTIMISER_SECONDS


def _tokens(prompt: Prompt) -> int:
    return len(prompt.samples) * prompt.prompt_tokens + sum(prompt.response_tokens)


def _serve(free: list[float], ready: float, seconds: float) -> float:
    """The end of work by the first free worker. `free`: a heap of when each worker is free."""
    end = max(ready, free[0]) + seconds
    heapq.heapreplace(free, end)
    return end


def ideal_seconds(job: Job) -> float:
    """How long a paced run takes if planes and checks cost nothing. 0 without a pace."""
    return recorded_seconds(job) / job.pace if job.pace else 0.0


def recorded_seconds(job: Job) -> float:
    """Recorded time of all steps: rollout, tools, rewards, training, whatever the run's pace.

    Each step's rollout starts on every host when its last one is finished and the policy is out;
    groups go through the stages in the order in which they become ready.
    """
    free = {role: [0.0] * count for role, count in job.crowd().items()}
    together, _ = job.groups_per_claim("train")
    rolled = [0.0] * job.hosts
    trained: list[float] = []
    for step in range(job.steps):
        prompts = job.of_step(step)
        behind = step - job.staleness - 1
        policy = trained[behind] if behind >= 0 else 0.0
        starts = [max(end, policy) for end in rolled]
        rolled, done = starts.copy(), []
        put = [(starts[p.index % job.hosts] + p.rollout_seconds, p) for p in prompts]
        for ready, prompt in sorted(put, key=lambda pair: pair[0]):
            rolled[prompt.index % job.hosts] = ready  # the latest comes last
            scored = _serve(free["reward"], ready, reward_seconds(prompt))
            if not job.is_trained(prompt):
                continue
            referred = scored if job.task.survive is not None else ready
            if job.has_reference:
                referred = _serve(free["reference"], referred, reference_seconds(prompt))
            done.append((max(scored, referred), train_seconds(prompt)))
        done.sort()
        ends = []
        for at in range(0, len(done), together):
            groups = done[at : at + together]
            seconds = sum(seconds for _, seconds in groups)
            ends.append(_serve(free["train"], groups[-1][0], seconds))
        trained.append(max([*ends, *rolled]) + optimiser_seconds(prompts))
    return trained[-1]
