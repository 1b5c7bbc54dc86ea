"""The common part of both designs: costs, hosts, workers, recorded time and counters.

The same flow as bench/flow.py, in virtual time. A `Design` defines put, claim and add as
generators, which return when the operation is done.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import simpy

from bench import pace
from bench.columns import ADDED, all_fields, group_bytes, rollout_fields
from bench.planes.base import Job
from bench.sim.share import Loop, Shared
from bench.traces import Prompt

Steps = Generator[Any, Any, None]
Claimed = Generator[Any, Any, list[Prompt]]

_GENERATE = ("generate", "digest")
_READ = {"train": ("check", "advantages", "train")}


class Work(msgspec.Struct, frozen=True):
    """The rows and bytes of one activity."""

    rows: int = 0
    text_bytes: int = 0
    media_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.text_bytes + self.media_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            self.rows + other.rows,
            self.text_bytes + other.text_bytes,
            self.media_bytes + other.media_bytes,
        )


class Price(msgspec.Struct, frozen=True):
    """Processor seconds: per activity, per row, per byte of text and of media."""

    once: float = 0.0
    row: float = 0.0
    text_byte: float = 0.0
    media_byte: float = 0.0

    def of(self, work: Work) -> float:
        return (
            self.once
            + self.row * work.rows
            + self.text_byte * work.text_bytes
            + self.media_byte * work.media_bytes
        )


class Costs(msgspec.Struct, frozen=True):
    """Costs of one design, in processor seconds. `activities`: by role and activity of its workers.
    Of the peers or the controller: an `operation`, a `message` between peers (of both together), a
    `byte` that a service sends or receives, a byte of a `page` that a peer touches first. `watch`:
    the share of a core that the bench takes to watch the run. `end`: what the kernel takes to end a
    worker's process."""

    activities: dict[str, dict[str, Price]]
    operation: float
    message: float
    byte: float
    page: float
    watch: float
    end: float

    def of(self, role: str, names: tuple[str, ...], work: Work) -> float:
        """Processor seconds of these activities of a worker, for one batch."""
        prices = self.activities.get(role, {})
        return sum(prices[name].of(work) for name in names if name in prices)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run happens. One machine: all hosts share `cores` and have no links. A cluster:
    each host has its own cores and link; a service's operations share one core (one loop), its
    copies `copiers` cores. `factor`: on all processor seconds, for a band."""

    cores: float
    one_machine: bool
    factor: float = 1.0
    rivals: float = 0.0  # other programs that always want a core of one machine
    late_s: float = 0.0  # seconds that a woken thread waits if all cores of the machine are busy
    link_bytes_s: float = 0.0
    round_trip_s: float = 0.0
    copiers: int = 1
    crowd: float = float("inf")  # concurrent senders that a link handles without loss
    crowded: float = 1.0  # share of the link's rate with more senders


def work_of(job: Job, what: str, prompt: Prompt) -> Work:
    """The rows and bytes of a group that rollout has `written`, a stage (`reward`) gets, or a stage
    adds (`added reward`)."""
    if what == "written":
        fields = rollout_fields(job.task)
    elif what.startswith("added "):
        fields = ADDED.get(what.removeprefix("added "), ())
    else:
        names = set(job.stages()[what])
        fields = tuple(one for one in all_fields(job.task) if one.name in names)
    media = tuple(one for one in fields if one.shared)
    media_bytes = group_bytes(media, prompt, job.dedup)
    text_bytes = group_bytes(fields, prompt, job.dedup) - media_bytes
    return Work(len(prompt.samples), text_bytes, media_bytes)


class Plan:
    """The groups of each step, what each host puts and when, and their sizes."""

    def __init__(self, job: Job) -> None:
        self.job = job
        # By step and host: the groups that its rollout worker makes, in order of time.
        self.rolled_out: dict[tuple[int, int], list[Prompt]] = defaultdict(list)
        for prompt in sorted(job.generate(), key=lambda prompt: prompt.rollout_seconds):
            self.rolled_out[prompt.step, prompt.index % job.hosts].append(prompt)
        self._work: dict[tuple[str, int], Work] = {}

    def work_of(self, what: str, prompt: Prompt) -> Work:
        """Return the cached result of the function of this name."""
        at = (what, prompt.index)
        if at not in self._work:
            self._work[at] = work_of(self.job, what, prompt)
        return self._work[at]

    def stage_of(self, stage: str, step: int) -> list[Prompt]:
        """The groups of a step that a stage gets to see."""
        prompts = self.job.of_step(step)
        return [p for p in prompts if stage == "reward" or self.job.is_trained(p)]


class Hosts:
    """Cores and links of all hosts, in virtual time."""

    def __init__(self, env: simpy.Environment, place: Place, hosts: int) -> None:
        self._env, self._place = env, place
        one = Shared(env, place.cores, 1.0, rivals=place.rivals, late=place.late_s)
        self._loops: list[Loop] | list[Shared]
        if place.one_machine:
            self._loops = [Loop(env, one) for _ in range(hosts)]
            self._copiers = [one] * hosts
            self._workers: Shared | None = one
            return
        self._workers = None  # a core for each
        self._loops = [Shared(env, 1.0, 1.0) for _ in range(hosts)]
        self._copiers = [Shared(env, place.copiers, 1.0) for _ in range(hosts)]
        speed, incast = place.link_bytes_s, (place.crowd, place.crowded)
        self._out = [Shared(env, speed, speed) for _ in range(hosts)]
        self._in = [Shared(env, speed, speed, *incast) for _ in range(hosts)]

    def work(self, seconds: float) -> Any:
        """A worker of some host computes."""
        seconds *= self._place.factor
        return self._workers.use(seconds) if self._workers else self._env.timeout(seconds)

    def operate(self, host: int, seconds: float) -> Any:
        """The service of a host answers something."""
        return self._loops[host].use(self._place.factor * seconds)

    def copy(self, host: int, seconds: float) -> Any:
        """The service of a host moves bytes."""
        return self._copiers[host].use(self._place.factor * seconds)

    def travel(self, source: int, target: int, nbytes: float) -> list[Any]:
        """Events of the links that bytes pass; all of them must have happened."""
        if self._place.one_machine or source == target:
            return []
        return [self._out[source].use(nbytes), self._in[target].use(nbytes)]

    def round_trip(self) -> Any:
        return self._env.timeout(self._place.round_trip_s)

    def one_way(self) -> Any:
        return self._env.timeout(self._place.round_trip_s / 2)


@dataclass(slots=True)
class Outcome:
    """What a simulated run counted."""

    step_ends: list[float] = field(default_factory=list)
    claim_s: list[float] = field(default_factory=list)  # from ready and asked for to in hand
    peers: Counter[int] = field(default_factory=Counter)  # claims by how many peers each touched
    operations: int = 0  # requests to services
    messages: int = 0  # between services
    copied_bytes: float = 0.0  # that services send and receive
    touched_bytes: int = 0  # by peers: pages of arenas, the first time
    peak_bytes: list[int] = field(default_factory=list)  # of each service at its fullest

    @property
    def step_s(self) -> float:
        return self.step_ends[-1] / len(self.step_ends)


class Design(ABC):
    """A plane, as a model."""

    def __init__(self, model: Model) -> None:
        self.plan, self.job = model.plan, model.job
        self.costs, self.env = model.costs, model.env
        self.hosts, self.outcome = model.hosts, model.outcome

    @abstractmethod
    def put(self, host: int, prompt: Prompt) -> Steps:
        """A whole group."""

    def rolled(self, step: int) -> None:  # noqa: B027  # to `dataplane` it is one message
        """A rollout worker has put all its groups."""

    @abstractmethod
    def claim(self, step: int, stage: str, rank: int, most: int) -> Claimed:
        """Up to `most` whole groups; none when the stage has had all of the step."""

    @abstractmethod
    def answer(self, step: int, stage: str, rank: int, groups: Sequence[Prompt]) -> Steps:
        """Added fields, or a group's drop, and the end of the claim."""


class Model:
    """One simulated run of a job at a place."""

    def __init__(
        self, plan: Plan, costs: Costs, place: Place, design: type[Design], seed: int = 0
    ) -> None:
        """seed: of which hosts serve which step."""
        self.places = random.Random(seed)
        self.plan, self.costs, self.env = plan, costs, simpy.Environment()
        self.job = job = plan.job
        self.hosts = Hosts(self.env, place, job.hosts)
        self.outcome = Outcome()
        self._trained = [self.env.event() for _ in range(job.steps)]
        self._trainers = Counter[int]()
        self._design = design(self)

    def run(self) -> Outcome:
        job = self.job
        for host in range(job.hosts):
            self.env.process(self._rollout(host))
            for stage in ("reward", "reference"):
                self.env.process(self._stage(stage, host))
        for rank in range(job.trainers):
            self.env.process(self._stage("train", rank))
        self.env.run()
        assert len(self.outcome.step_ends) == job.steps, "the model stands still"
        return self.outcome

    def _spend(self, recorded: float) -> Any:
        return self.env.timeout(recorded / self.job.pace if self.job.pace else 0.0)

    def _rollout(self, host: int) -> Steps:
        job = self.job
        for step in range(job.steps):
            behind = step - job.staleness - 1
            if behind >= 0:
                yield self._trained[behind]
            start = self.env.now
            for prompt in self.plan.rolled_out[step, host]:
                work = self.plan.work_of("written", prompt)  # made before it is due, as in flow.py
                yield self.hosts.work(self.costs.of("rollout", _GENERATE, work))
                due = start + (prompt.rollout_seconds / job.pace if job.pace else 0.0)
                if due > self.env.now:
                    yield self.env.timeout(due - self.env.now)
                yield from self._design.put(host, prompt)
            self._design.rolled(step)
        yield self.hosts.work(self.costs.end)

    def _stage(self, stage: str, rank: int) -> Steps:
        job = self.job
        _, most = job.groups_per_claim(stage)
        names = _READ.get(stage, ("read", stage))
        seconds = pace.STAGE_SECONDS[stage]
        for step in range(job.steps):
            while groups := (yield from self._design.claim(step, stage, rank, most)):
                work = sum((self.plan.work_of(stage, p) for p in groups), Work())
                yield self.hosts.work(self.costs.of(stage, names, work))
                yield self._spend(sum(map(seconds, groups)))
                yield from self._design.answer(step, stage, rank, groups)
            if stage == "train":
                yield self._spend(pace.OPTIMISER_SECONDS)
                self._stepped(step)
        yield self.hosts.work(self.costs.end)

    def _stepped(self, step: int) -> None:
        self._trainers[step] += 1
        if self._trainers[step] == self.job.trainers:
            self.outcome.step_ends.append(self.env.now)
            self._trained[step].succeed()
