"""The controller with barriers as a model: whole batches in, then stage after stage out, on one
host. The steps are those of bench/planes/controller.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import simpy

from bench.planes.controller import IN_FLIGHT
from bench.sim.model import Claimed, Design, Model, Steps, Work
from bench.traces import Prompt

_AT = 0  # the controller's host


class _Line:
    """One stage of one step: a queue of groups, and those that each worker has."""

    def __init__(self, env: simpy.Environment, workers: int) -> None:
        self.done = env.event()
        self.inboxes = [simpy.Store(env) for _ in range(workers)]
        """Of each worker: groups with the time at which they were dealt, then None."""
        self._env = env
        self._waiting: deque[tuple[Prompt, int]] = deque()
        self._hands: list[dict[int, int]] = [{} for _ in range(workers)]
        self._is_closed = False

    def open(self, groups: Sequence[tuple[Prompt, int]]) -> None:
        """Deal these groups, each with its bytes."""
        self._waiting.extend(groups)
        self._deal()

    def answered(self, rank: int, prompt: Prompt) -> None:
        del self._hands[rank][prompt.index]
        self._deal()

    def _deal(self) -> None:
        """To the worker with the fewest bytes, while one has room."""
        while self._waiting:
            loads = [(len(hand) == IN_FLIGHT, sum(hand.values())) for hand in self._hands]
            rank = loads.index(min(loads))
            if loads[rank][0]:
                return
            prompt, nbytes = self._waiting.popleft()
            self._hands[rank][prompt.index] = nbytes
            self.inboxes[rank].put((self._env.now, prompt))
        if not self._is_closed:
            self._is_closed = True
            for inbox in self.inboxes:
                inbox.put(None)
        if not any(self._hands):
            self.done.succeed()


class Central(Design):
    """One controller."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        job, steps = self.job, range(self.job.steps)
        self._rolled = Counter[int]()
        self._gathered = [self.env.event() for _ in steps]
        self._lines = {
            (step, stage): _Line(self.env, job.trainers if stage == "train" else job.hosts)
            for step in steps
            for stage in job.stages()
        }
        self._held: Counter[int] = Counter()  # by step
        self.outcome.peak_bytes = [0]
        self.env.process(self._serve())

    def put(self, host: int, prompt: Prompt) -> Steps:
        work = self.plan.work_of("written", prompt)
        yield from self._move(host, _AT, work.nbytes, self.costs.of("rollout", ("put",), work))
        self._hold(prompt.step, work.nbytes)

    def rolled(self, step: int) -> None:
        self._rolled[step] += 1
        if self._rolled[step] == self.job.hosts:
            self._gathered[step].succeed()

    def claim(self, step: int, stage: str, rank: int, most: int) -> Claimed:
        host, asked = self.job.host_of(stage, rank), self.env.now
        dealt = yield self._lines[step, stage].inboxes[rank].get()
        if dealt is None:
            yield from self._move(_AT, host, 0, self.costs.of(stage, ("claim",), Work()))
            return []
        at, prompt = dealt
        work = self.plan.work_of(stage, prompt)
        yield from self._move(_AT, host, work.nbytes, self.costs.of(stage, ("claim",), work))
        self.outcome.peers[1] += 1
        self.outcome.claim_s.append(self.env.now - max(asked, at))
        return [prompt]

    def answer(self, step: int, stage: str, rank: int, groups: Sequence[Prompt]) -> Steps:
        host = self.job.host_of(stage, rank)
        for prompt in groups:
            own = self.costs.of(stage, ("add",), self.plan.work_of(stage, prompt))
            nbytes = self.plan.work_of(f"added {stage}", prompt).nbytes
            yield from self._move(host, _AT, nbytes, own)
            self._hold(step, nbytes)
            self._lines[step, stage].answered(rank, prompt)

    def _serve(self) -> Steps:
        """The controller's life: step by step, phase by phase."""
        for step in range(self.job.steps):
            yield self._gathered[step]
            for phase in self.job.phases():
                for stage in phase:
                    groups = self.plan.stage_of(stage, step)
                    weights = [self.plan.work_of("train", prompt).nbytes for prompt in groups]
                    self._lines[step, stage].open(list(zip(groups, weights, strict=True)))
                yield self.env.all_of([self._lines[step, stage].done for stage in phase])

    def _move(self, source: int, target: int, nbytes: float, worker_s: float) -> Steps:
        """A message, in whichever direction. A socket holds little, so its ends take turns."""
        self.outcome.operations += 1
        self.outcome.copied_bytes += nbytes
        yield self.hosts.operate(_AT, self.costs.service(1))
        yield self.hosts.work(worker_s)
        copy = self.hosts.copy(_AT, self.costs.service(0, nbytes))
        yield self.env.all_of([copy, *self.hosts.travel(source, target, nbytes)])
        if source != target:
            yield self.hosts.round_trip()

    def _hold(self, step: int, nbytes: int) -> None:
        """The batch of a step is let go of when the one that takes its memory begins."""
        self._held[step] += nbytes
        kept = range(step - self.job.staleness, step + 1)
        total = sum(self._held[s] for s in kept)
        self.outcome.peak_bytes[0] = max(self.outcome.peak_bytes[0], total)
