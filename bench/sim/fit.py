"""Fit prices to runs with few hosts: processor seconds as sums over operations and bytes.

Processor seconds, not wall time, because they hardly depend on other programs. The model then lets
these seconds compete for cores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bench.pace import ideal_seconds
from bench.planes.base import Job
from bench.report import others_cores
from bench.sim.central import Central
from bench.sim.decentral import Decentral
from bench.sim.model import Costs, Design, Model, Outcome, Place, Plan, Price, Work, work_of

DESIGNS: dict[str, type[Design]] = {"dataplane": Decentral, "controller": Central}
_SWEEPS = 3_000
_DRAWS = 4
_LATE_S = (0.0, 0.5e-3, 1e-3, 1.5e-3, 2e-3, 3e-3, 4e-3)
"""The kernel schedules waiting threads every 1 to 4 ms."""
_TICK_S = 0.01  # the kernel's unit of processor time


@dataclass(frozen=True, slots=True)
class Seen:
    """A successful run and its job."""

    job: Job
    run: Mapping[str, Any]

    @property
    def step_s(self) -> float:
        return float(self.run["step_ends"][-1]) / self.job.steps

    def cpu_s(self, role: str, activity: str) -> float:
        workers = self.run["workers"].items()
        mine = (worker for name, worker in workers if name.rpartition("-")[0] == role)
        return float(sum(worker["cpu_seconds"].get(activity, 0.0) for worker in mine))

    def service_cpu_s(self) -> float:
        if "controller" in self.run["workers"]:
            return float(self.run["workers"]["controller"]["cpu_seconds"]["controller"])
        seconds = self.run["cpu_seconds"].items()
        return float(sum(s for name, s in seconds if name.startswith("peer-")))

    def work(self, role: str) -> Work:
        groups = filter(self.job.is_trained, self.job.generate())
        what = "written" if role == "rollout" else role
        return sum((work_of(self.job, what, prompt) for prompt in groups), Work())


def fit(seen: Mapping[str, Sequence[Seen]], cores: int) -> tuple[dict[str, Costs], Place]:
    """Return the costs of each plane's design, and this machine's properties, from these runs.

    Processor time that no process of a run counted belongs to other programs (a share of every
    second) and to the kernel as it ends workers. late_s: the value that best predicts the steps."""
    runs = [each for runs in seen.values() for each in runs]
    columns = [[each.run["cpu_counted_seconds"], sum(each.job.crowd().values())] for each in runs]
    unknown = [others_cores(each.run) * each.run["cpu_counted_seconds"] for each in runs]
    rivals, end = least_squares(columns, unknown, max(unknown))
    place = Place(cores=cores, one_machine=True, rivals=rivals)
    costs = {"controller": priced(seen["controller"], place, end)}
    for plane in seen.keys() - costs.keys():
        costs[plane] = priced(seen[plane], place, end, costs["controller"].byte)

    def error(place: Place) -> float:
        cases = [check(each.job, costs[each.job.plane], place, [each]) for each in runs]
        off: float = sum(abs(case["predicted_step_s"] - case["median_step_s"]) for case in cases)
        return off

    return costs, min((replace(place, late_s=late_s) for late_s in _LATE_S), key=error)


def priced(
    seen: Sequence[Seen], place: Place, end: float = 0.0, byte: float | None = None
) -> Costs:
    """The costs of one design. end: the cost of a worker's end. byte: the cost of a byte that a
    service moves, if known from other runs. More prices would overfit so few runs."""
    # The runner's share of a core. It does not grow with the processes: after each look, the runner
    # pauses for nine times its duration (bench/usage.py).
    watch = median(each.run["cpu_seconds"]["runner"] / each.run["seconds"] for each in seen)
    activities = _activities(seen)
    free = Costs(activities, 0.0, 0.0, 0.0, 0.0, watch, end)
    columns, wanted = [], []
    for each in seen:
        did = simulate(each.job, free, place)
        known, unknown = (0.0, did.copied_bytes) if byte is None else (byte * did.copied_bytes, 0.0)
        columns.append([did.operations, did.messages, did.touched_bytes, unknown])
        wanted.append(each.service_cpu_s() - known)
    operation, message, page, moved = least_squares(columns, wanted)
    return Costs(activities, operation, message, byte or moved, page, watch, end)


def simulate(job: Job, costs: Costs, place: Place, seed: int = 0) -> Outcome:
    """Simulate the job on this machine. seed: selects which hosts serve which step."""
    watched = replace(place, cores=max(0.25, place.cores - costs.watch))
    return Model(Plan(job), costs, watched, DESIGNS[job.plane], seed).run()


def check(job: Job, costs: Costs, place: Place, runs: Sequence[Seen]) -> dict[str, Any]:
    """Compare these runs with the model's mean over several choices of which hosts serve which
    step."""
    draws = _DRAWS if job.hosts > 2 and job.plane == "dataplane" else 1
    drawn = [simulate(job, costs, place, seed) for seed in range(draws)]
    predicted = mean(run.step_s for run in drawn)
    seen = [run.step_s for run in runs]
    middle, recorded = median(seen), ideal_seconds(job) / job.steps
    return {
        "plane": job.plane,
        "trace": job.trace,
        "hosts": job.hosts,
        "prompts": job.prompts,
        "steps": job.steps,
        "pace": job.pace,
        "predicted_step_s": predicted,
        "median_step_s": middle,
        "steps_s": seen,
        "spread": (max(seen) - min(seen)) / middle,
        "others_cores": [others_cores(run.run) for run in runs],
        "recorded_step_s": recorded,  # when planes cost nothing
    }


def least_squares(columns: ArrayLike, wanted: ArrayLike, least: float = _TICK_S) -> list[float]:
    """Return x ≥ 0 with columns · x nearest to `wanted`, by coordinate descent. The error of a line
    is relative to its wanted value, or to `least` if that is larger."""
    weights = 1 / np.maximum(np.asarray(wanted, float), least)
    a, b = np.asarray(columns, float) * weights[:, None], wanted * weights
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0  # an empty column: its x stays 0
    a = a / scale
    gram, right = a.T @ a, a.T @ b
    x = np.zeros(a.shape[1])
    for _ in range(_SWEEPS):
        for i in range(len(x)):
            if gram[i, i]:
                x[i] = max(0.0, x[i] + (right[i] - gram[i] @ x) / gram[i, i])
    return [float(value) for value in x / scale]


def _activities(seen: Sequence[Seen]) -> dict[str, dict[str, Price]]:
    prices: dict[str, dict[str, Price]] = defaultdict(dict)
    names = {
        (role, activity)
        for each in seen
        for role, activities in each.run["latency_ms"].items()
        for activity in activities
    }
    for role, activity in sorted(names):
        columns = []
        for each in seen:
            work, told = each.work(role), each.run["latency_ms"].get(role, {}).get(activity, {})
            columns.append([told.get("times", 0), work.rows, work.text_bytes, work.media_bytes])
        wanted = [each.cpu_s(role, activity) for each in seen]
        prices[role][activity] = Price(*least_squares(columns, wanted))
    return dict(prices)
