"""Real runs, for the fit and for the check of what it predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

from bench.pace import ideal_seconds
from bench.run import Progress, Settings, execute, job_of
from bench.sim.central import Central
from bench.sim.costs import Costs
from bench.sim.decentral import Decentral
from bench.sim.fit import Seen, predict
from bench.sim.model import Design

DESIGNS: dict[str, type[Design]] = {"dataplane": Decentral, "controller": Central}
_TRIES = 2
_TIMEOUT_S = 60.0  # a run takes some ten seconds
T = TypeVar("T")
Bar = Callable[..., AbstractContextManager[Progress]]  # of a label, and a unit that is not rows


class RunFailed(Exception):
    """A run that the model needs was not ok; the message says why. Nothing can be said without."""


def paced(trace: str, hosts: int, prompts: int, steps: int, step_s: float) -> Settings:
    """Settings whose recorded time alone takes `step_s` a step."""
    settings = Settings(
        trace=trace,
        planes=tuple(DESIGNS),
        hosts=hosts,
        trainers=hosts,
        prompts=prompts,
        steps=steps,
    )
    recorded = ideal_seconds(job_of(replace(settings, pace=1.0), True, "")) / steps
    return replace(settings, pace=recorded / step_s)


def in_turn(*runs: Sequence[T]) -> list[T]:
    """All of them, each sequence spread evenly over the whole: what a machine is like for some
    minutes meets what is fitted on and what is judged alike."""
    placed = [((n + 0.5) / len(some), run) for some in runs for n, run in enumerate(some)]
    return [run for _, run in sorted(placed, key=lambda pair: pair[0])]


class Observer:
    """Makes real runs. One that fails is made once more, and both are in the report."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self.failed: list[str] = []  # what went wrong in runs that were made again

    def observe(self, settings: Settings, plane: str, nth: str) -> Seen:
        """A run, with dedup, so that both designs are compared at their best.

        nth: which of how many, for those who wait. Raises RunFailed when the second one fails too.
        """
        several = "s" if settings.hosts > 1 else ""
        label = f"{settings.trace} / {plane}, {settings.hosts} host{several}"
        for _ in range(_TRIES):
            with self._bar(f"{label} ({nth})") as shown:
                run = execute(settings, plane, True, shown)
            if run["status"] == "ok":
                return Seen(job_of(settings, True, ""), run)
            self.failed.append(f"{label}: {run['status']}: {run['error']}")
        raise RunFailed(self.failed[-1])


def check(
    settings: Settings,
    plane: str,
    costs: Costs,
    cores: int,
    rivals: float,
    runs: Sequence[Seen],
) -> dict[str, Any]:
    """What the model says beside what these runs took, of which it knows nothing. `rivals`: as many
    as the runs had that it was fitted on."""
    job = job_of(settings, True, "")
    predicted = predict(job, costs, DESIGNS[plane], cores, rivals)
    seen = [run.step_s for run in runs]
    middle, recorded = median(seen), ideal_seconds(job) / job.steps
    return {
        "plane": plane,
        "trace": settings.trace,
        "hosts": settings.hosts,
        "prompts": settings.prompts,
        "steps": settings.steps,
        "pace": settings.pace,
        "predicted_step_s": predicted,
        "median_step_s": middle,
        "steps_s": seen,
        "spread": (max(seen) - min(seen)) / middle,
        "others_cores": [run.others_cores() for run in runs],
        "accuracy": 1 - abs(predicted - middle) / middle,
        "recorded_step_s": recorded,  # when planes cost nothing
        "accuracy_of_recorded_time": 1 - abs(recorded - middle) / middle,
    }
