"""From runs with one or two hosts to prices: processor seconds as sums of what was done.

Processor seconds, not seconds on the clock: they hardly depend on who else wants the cores, so what
is fitted here is what the model then makes compete for them. What no processor takes, and how many
strangers wait for each core that some got, is chosen by step times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from bench.planes.base import Job
from bench.schedule import schedule
from bench.sim.costs import Costs, Place, Price, Work, read, written
from bench.sim.model import Design, Model
from bench.sim.plan import Plan

_SWEEPS = 3_000
_COARSE_S, _FINE_S, _MOST_DELAY_S = 0.008, 0.002, 0.064
_PRESSURES = (1.0, 2.0, 4.0, 8.0)
_QUIET_CORES = 0.1  # strangers who take less are not worth asking how many they are
_ARENA = "arena of "


@dataclass(frozen=True, slots=True)
class Seen:
    """A run that was ok, and the job that it was."""

    job: Job
    run: Mapping[str, Any]

    @property
    def step_s(self) -> float:
        return float(self.run["step_ends"][-1]) / self.job.steps

    def times(self, role: str, activity: str) -> int:
        told = self.run["latency_ms"].get(role, {}).get(activity, {})
        return int(told.get("times", 0))

    def cpu_s(self, role: str, activity: str) -> float:
        """Of all workers of a role."""
        workers = self.run["workers"].items()
        mine = (worker for name, worker in workers if name.rpartition("-")[0] == role)
        return float(sum(worker["cpu_seconds"].get(activity, 0.0) for worker in mine))

    def service_cpu_s(self) -> float:
        """Of the controller, or of all peers."""
        if "controller" in self.run["workers"]:
            return float(self.run["workers"]["controller"]["cpu_seconds"]["controller"])
        seconds = self.run["cpu_seconds"].items()
        return float(sum(s for name, s in seconds if name.startswith("peer-")))

    def others_cores(self) -> float:
        """Cores that strangers of this machine took meanwhile, on average."""
        workers = self.run["workers"].values()
        told = self.run["cpu_seconds"]
        ours = sum(sum(worker["cpu_seconds"].values()) for worker in workers)
        ours += sum(seconds for name, seconds in told.items() if name != "machine")
        return float(max(0.0, (told["machine"] - ours) / self.run["seconds"]))

    def touched_bytes(self) -> int:
        """Pages of arenas that came into being between the start and the end."""
        curve = self.run["memory_curve"]
        started = sum(1 for at in curve["seconds"] if at <= 0)
        return sum(
            self.run["peak_memory_bytes"][name] - max(filter(None, held[:started]), default=0)
            for name, held in curve["processes"].items()
            if name.startswith(_ARENA)
        )

    def crossings(self) -> float:
        """Claims that another host met, as far as can be expected: whoever asks first gets a
        group, wherever it is. Each worker's last claim of a step only learns that it is over."""
        hosts, workers = self.job.hosts, 2 * self.job.hosts + self.job.trainers
        return (self.claims() - workers * self.job.steps) * (hosts - 1) / hosts

    def parts(self) -> float:
        """Peers that had a part in crossings: who asked, who had the group and, where that is a
        third one, the home. Homes are spread over the hosts."""
        hosts = self.job.hosts
        return self.crossings() * (2 + max(0, hosts - 2) / hosts)

    def claims(self) -> int:
        return sum(self.times(role, "claim") for role in ("reward", "reference", "train"))

    def work(self, role: str) -> Work:
        """What the workers of a role dealt with in all."""
        groups = (p for p in self.job.generate() if self.job.fate(p) == "trained")
        if role == "rollout":
            return sum((written(self.job, p) for p in groups), Work())
        return sum((read(self.job, role, p) for p in groups), Work())

    def operations(self) -> int:
        """Requests to services: puts, claims and answers."""
        puts = len(schedule(self.job, self.job.generate(), takes_pieces=True))
        return puts + 2 * self.claims()


def fit(
    seen: Mapping[str, Sequence[Seen]], designs: Mapping[str, type[Design]], cores: int
) -> tuple[dict[str, Costs], float]:
    """The costs of each design, from runs of it, and the rivals that these runs had on average.

    Strangers who got a core's worth of time may be one that always wants a core, or many who queue
    for it: the same pressure for all runs, the one that explains their step times best.
    """
    prices = {name: priced(runs) for name, runs in seen.items()}
    others = float(np.mean([each.others_cores() for runs in seen.values() for each in runs]))
    pressures = _PRESSURES if others > _QUIET_CORES else _PRESSURES[:1]

    def delayed(pressure: float) -> tuple[float, dict[str, Costs]]:
        told = {
            name: _delayed(prices[name], seen[name], designs[name], cores, pressure)
            for name in prices
        }
        wrong = (_error(seen[name], told[name], designs[name], cores, pressure) for name in told)
        return sum(wrong), told

    tried = {pressure: delayed(pressure) for pressure in pressures}
    best = min(tried, key=lambda pressure: tried[pressure][0])
    return tried[best][1], best * others


def priced(seen: Sequence[Seen]) -> Costs:
    """The costs of one design but for its delays."""
    operation, crossing, moved, touched, idle = _service(seen)
    return Costs(
        activities=_activities(seen),
        operation=operation,
        crossing=crossing,
        moved_byte=moved,
        touched_byte=touched,
        idle=idle,
        watch=float(np.median([_watched(each) for each in seen])),
    )


def _delayed(
    costs: Costs, seen: Sequence[Seen], design: type[Design], cores: int, pressure: float
) -> Costs:
    """With the delays that step times ask for: that of a hand-over where there is one host, that
    of a crossing where there are more."""
    alone = [each for each in seen if each.job.hosts == 1]
    several = [each for each in seen if each.job.hosts > 1]
    for name, runs in (("delay_s", alone or several), ("crossing_delay_s", several)):
        low, high = 0.0, _MOST_DELAY_S
        for step in (_COARSE_S, _FINE_S):
            delays = np.arange(low, high + step / 2, step)
            tried = [msgspec.structs.replace(costs, **{name: float(delay)}) for delay in delays]
            costs = min(tried, key=lambda told: _error(runs, told, design, cores, pressure))
            best = getattr(costs, name)
            low, high = max(0.0, best - _COARSE_S), min(best + _COARSE_S, _MOST_DELAY_S)
    return costs


def predict(job: Job, costs: Costs, design: type[Design], cores: int, rivals: float = 0.0) -> float:
    """Seconds of a step when the job runs on this machine, all hosts on the same cores.

    rivals: strangers beside it who want a core all the time.
    """
    services = job.hosts if design.name == "dataplane" else 1
    taken = costs.watch + costs.idle * services
    place = Place(cores=cores, one_machine=True, rivals=rivals).less(taken)
    return Model(Plan(job), costs, place, design).run().step_s


def least_squares(columns: ArrayLike, wanted: ArrayLike) -> list[float]:
    """x ≥ 0 with the least |columns · x − wanted|², by going to the best of one x at a time."""
    a, b = np.asarray(columns, float), np.asarray(wanted, float)
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0  # a column of nothing: its x stays 0
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
        columns = [_features(each, role, activity) for each in seen]
        wanted = [each.cpu_s(role, activity) for each in seen]
        prices[role][activity] = Price(*least_squares(columns, wanted))
    return dict(prices)


def _features(seen: Seen, role: str, activity: str) -> list[float]:
    work = seen.work(role)
    return [seen.times(role, activity), work.rows, work.text_bytes, work.media_bytes]


def _service(seen: Sequence[Seen]) -> list[float]:
    """An operation, a part in a crossing, a moved byte, a byte touched anew, a second of idling."""
    columns = []
    for each in seen:
        peers = "controller" not in each.run["workers"]
        moved = each.run["moved"]["across"] if peers else each.run["bytes_moved"]
        parts, touched = (each.parts(), each.touched_bytes()) if peers else (0.0, 0)
        idle = each.run["seconds"] * each.job.hosts if peers else 0.0
        columns.append([each.operations(), parts, moved, touched, idle])
    return least_squares(columns, [each.service_cpu_s() for each in seen])


def _watched(seen: Seen) -> float:
    """The share of a core that the runner takes. More processes do not make it more: its looks at
    them rest nine times as long as they took (bench/memory.py)."""
    return float(seen.run["cpu_seconds"]["runner"] / seen.run["seconds"])


def _error(
    seen: Sequence[Seen], costs: Costs, design: type[Design], cores: int, pressure: float
) -> float:
    """The mean relative error over the runs that were fitted on."""
    errors = (
        abs(
            predict(each.job, costs, design, cores, pressure * each.others_cores()) / each.step_s
            - 1
        )
        for each in seen
    )
    return sum(errors) / max(1, len(seen))
