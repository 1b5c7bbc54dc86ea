"""Replaying recorded time at a given speed: which workers sleep, and how long a run takes
without a plane."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence

from bench.planes.base import Job
from bench.traces import Prompt

REFERENCE_SECONDS = 2e-5  # A: a token, forward, one worker
TRAIN_SECONDS = 6e-5  # A: a token, forward and backward, one trainer rank
OPTIMISER_SECONDS = 2.0  # A: a step


class Pace:
    """A worker's clock of recorded time. With speed 0 it never waits."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._zero = time.monotonic()

    def restart(self, at: float) -> None:
        """Count from `at`, on the monotonic clock."""
        self._zero = at

    def until(self, recorded: float) -> None:
        """Wait until this much recorded time has passed since the time given to `restart`."""
        if self._speed:
            self._sleep(self._zero + recorded / self._speed - time.monotonic())

    def spend(self, recorded: float, since: float | None = None) -> None:
        """Do work that takes this much recorded time. since: when it started, if not now."""
        if self._speed:
            spent = 0.0 if since is None else time.monotonic() - since
            self._sleep(recorded / self._speed - spent)

    @staticmethod
    def _sleep(seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


def reward_seconds(prompt: Prompt) -> float:
    return sum(sample.reward_seconds for sample in prompt.samples)


def reference_seconds(prompt: Prompt) -> float:
    return prompt.times.reference if prompt.times else REFERENCE_SECONDS * _tokens(prompt)


def train_seconds(prompt: Prompt) -> float:
    return prompt.times.train if prompt.times else TRAIN_SECONDS * _tokens(prompt)


def optimiser_seconds(prompts: Sequence[Prompt]) -> float:
    """The optimiser's seconds of a step with these prompts."""
    times = prompts[0].times if prompts else None
    return times.optimiser if times else OPTIMISER_SECONDS


def _tokens(prompt: Prompt) -> int:
    return len(prompt.samples) * prompt.prompt_tokens + sum(prompt.response_tokens)


class _Servers:
    """Workers of a stage: whoever is free first takes the next group."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count

    def serve(self, ready: float, seconds: float) -> float:
        end = max(ready, heapq.heappop(self._free)) + seconds
        heapq.heappush(self._free, end)
        return end


def ideal_seconds(job: Job) -> float:
    """How long a paced run takes if planes and checks cost nothing. 0 if the run waits for no
    recorded time."""
    return recorded_seconds(job) / job.pace if job.pace else 0.0


def recorded_seconds(job: Job) -> float:
    """Recorded time of all steps: rollout, tools, rewards, training, whatever the run's pace.

    Each step's rollout starts on every host when its last one is finished and the policy is out;
    groups go through the stages in the order in which they become ready.
    """
    crowd = job.crowd()
    reward, reference, train = (
        _Servers(crowd.get(role, 1)) for role in ("reward", "reference", "train")
    )
    replay = job.replay_of("train")
    together = replay.least if replay else 1
    rolled = [0.0] * job.hosts
    trained: list[float] = []
    for step in range(job.steps):
        prompts = job.of_step(step)
        behind = step - job.staleness - 1
        policy = trained[behind] if behind >= 0 else 0.0
        starts = [max(end, policy) for end in rolled]
        rolled = [start + _rollout(job, prompts, host) for host, start in enumerate(starts)]
        done = []
        for ready, prompt in _by_time(job, prompts, starts):
            scored = reward.serve(ready, reward_seconds(prompt))
            if not job.is_trained(prompt):
                continue
            referred = scored if job.task.survive is not None else ready
            if job.has_reference:
                referred = reference.serve(referred, reference_seconds(prompt))
            done.append((max(scored, referred), train_seconds(prompt)))
        done.sort()
        ends = []
        for at in range(0, len(done), together):
            groups = done[at : at + together]
            ends.append(train.serve(groups[-1][0], sum(seconds for _, seconds in groups)))
        trained.append(max([*ends, *rolled]) + optimiser_seconds(prompts))
    return trained[-1]


def _rollout(job: Job, prompts: Iterable[Prompt], host: int) -> float:
    mine = (prompt for prompt in prompts if prompt.index % job.hosts == host)
    return max((prompt.rollout_seconds for prompt in mine), default=0.0)


def _by_time(
    job: Job, prompts: Sequence[Prompt], starts: Sequence[float]
) -> list[tuple[float, Prompt]]:
    ready = [(starts[p.index % job.hosts] + p.rollout_seconds, p) for p in prompts]
    return sorted(ready, key=lambda pair: pair[0])
