"""What both designs have in common: the hosts, the workers' lives, recorded time, what is counted.

The same flow as bench/flow.py, in virtual time. A design says what a put, a claim and an add are
(`Design`); it is told when things are done by returning from its generators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import simpy

from bench import pace
from bench.sim.costs import Costs, Place, Work
from bench.sim.plan import Plan
from bench.sim.share import Loop, Shared
from bench.traces import Prompt

Steps = Generator[Any, Any, None]
Claimed = Generator[Any, Any, list[Prompt]]

_GENERATE = ("generate", "digest")
_READ = {"train": ("check", "advantages", "train")}
_REWARD_ROWS = 64  # a reward worker takes up to so many rows at once, as bench.planes does


class Hosts:
    """Cores and links of all hosts, in virtual time."""

    def __init__(self, env: simpy.Environment, place: Place, hosts: int) -> None:
        self._env, self._place = env, place
        one = Shared(env, place.cores, 1.0, rivals=place.rivals)
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
        return self._workers.use(seconds) if self._workers else self._env.timeout(seconds)

    def operate(self, host: int, seconds: float) -> Any:
        """The service of a host answers something."""
        return self._loops[host].use(seconds)

    def copy(self, host: int, seconds: float) -> Any:
        """The service of a host moves bytes."""
        return self._copiers[host].use(seconds)

    def travel(self, source: int, target: int, nbytes: float) -> list[Any]:
        """Events of the links that bytes pass; all of them must have happened."""
        if self._place.one_machine or source == target:
            return []
        return [self._out[source].use(nbytes), self._in[target].use(nbytes)]

    def round_trip(self) -> Any:
        return self._env.timeout(self._place.round_trip_s)


class Outcome:
    """What a simulated run counted."""

    def __init__(self) -> None:
        self.step_ends: list[float] = []
        self.claim_s: list[float] = []  # from rows ready and asked for to rows in hand
        self.peers: Counter[int] = Counter()  # claims by how many peers each touched
        self.crossings = 0  # claims that another host met
        self.across_bytes = 0.0  # between hosts
        self.peak_bytes: list[int] = []  # held by each service at its fullest

    @property
    def step_s(self) -> float:
        return self.step_ends[-1] / len(self.step_ends)


class Design(ABC):
    """A plane, as a model."""

    name: ClassVar[str]

    def __init__(self, model: Model) -> None:
        self.plan, self.job = model.plan, model.job
        self.costs, self.env = model.costs, model.env
        self.hosts, self.outcome = model.hosts, model.outcome

    @abstractmethod
    def put(self, host: int, prompt: Prompt, share: float, last: bool) -> Steps:
        """A share of a group's bytes; with the last one the group is there."""

    @abstractmethod
    def rolled(self, step: int) -> None:
        """A rollout worker has put all its groups."""

    @abstractmethod
    def claim(self, step: int, stage: str, rank: int, most: int) -> Claimed:
        """Up to `most` whole groups; none when the stage has had all of the step."""

    @abstractmethod
    def answer(self, step: int, stage: str, rank: int, groups: Sequence[Prompt]) -> Steps:
        """Added fields, or a group's drop, and the end of the claim."""


class Model:
    """One simulated run of a job at a place."""

    def __init__(self, plan: Plan, costs: Costs, place: Place, design: type[Design]) -> None:
        self.plan, self.costs, self.env = plan, costs, simpy.Environment()
        self.job = job = plan.job
        self.hosts = Hosts(self.env, place, job.hosts)
        self.outcome = Outcome()
        self._trained = [self.env.event() for _ in range(job.steps)]
        self._trainers = Counter[int]()
        self.fresh = place.one_machine  # services that start with the run; a cluster's are old
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
            pieces = self.plan.pieces(step, host)
            left = Counter(p.prompt.index for p in pieces)
            for piece in pieces:
                due = start + (piece.at / job.pace if job.pace else 0.0)
                if due > self.env.now:
                    yield self.env.timeout(due - self.env.now)
                prompt = piece.prompt
                share = (len(piece.samples) or len(prompt.samples)) / len(prompt.samples)
                share = share / 2 if piece.kind != "group" else 1.0  # opening and rows: both ways
                left[prompt.index] -= 1
                yield from self._write(host, prompt, share, last=not left[prompt.index])
            self._design.rolled(step)

    def _write(self, host: int, prompt: Prompt, share: float, last: bool) -> Steps:
        work = self.plan.work_of("written", prompt)
        yield self.hosts.work(share * self.costs.of("rollout", _GENERATE, work))
        yield from self._design.put(host, prompt, share, last)

    def _stage(self, stage: str, rank: int) -> Steps:
        job = self.job
        most = max(1, _REWARD_ROWS // job.samples) if stage == "reward" else 1
        names = _READ.get(stage, ("read", stage))
        seconds = {
            "reward": pace.reward_seconds,
            "reference": pace.reference_seconds,
            "train": pace.train_seconds,
        }[stage]
        for step in range(job.steps):
            while groups := (yield from self._design.claim(step, stage, rank, most)):
                work = sum((self.plan.work_of(stage, p) for p in groups), Work())
                yield self.hosts.work(self.costs.of(stage, names, work))
                yield self._spend(sum(map(seconds, groups)))
                yield from self._design.answer(step, stage, rank, groups)
            if stage == "train":
                yield self._spend(pace.OPTIMISER_SECONDS)
                self._stepped(step)

    def _stepped(self, step: int) -> None:
        self._trainers[step] += 1
        if self._trainers[step] == self.job.trainers:
            self.outcome.step_ends.append(self.env.now)
            self._trained[step].succeed()
