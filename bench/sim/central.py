"""The single controller as a model: whole batches in, then stage after stage out, on one host."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from bench.sim.model import Claimed, Design, Model, Steps, Work
from bench.traces import Prompt

_AT = 0  # the controller's host


class Central(Design):
    """One controller; see bench/planes/controller.py, whose steps these are."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._rolled = Counter[int]()
        self._gathered = [self.env.event() for _ in range(self.job.steps)]
        self._dealt: dict[tuple[int, str], Any] = {}
        self._hands: dict[tuple[int, str, int], deque[Prompt]] = {}
        self._opened: dict[tuple[int, str], float] = {}
        for step in range(self.job.steps):
            for stage in ("reward", "reference", "train"):
                self._dealt[step, stage] = self.env.event()
        self._answers: Counter[tuple[int, str]] = Counter()
        self._answered: dict[tuple[int, str], Any] = {}
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
        asked = self.env.now
        yield self._dealt[step, stage]
        hand = self._hands[step, stage, rank]
        host = self.job.host_of(stage, rank)
        if not hand:
            yield from self._move(_AT, host, 0, self.costs.of(stage, ("claim",), Work()))
            return []
        prompt = hand.popleft()
        work = self.plan.work_of(stage, prompt)
        yield from self._move(_AT, host, work.nbytes, self.costs.of(stage, ("claim",), work))
        self.outcome.peers[1] += 1
        self.outcome.claim_s.append(self.env.now - max(asked, self._opened[step, stage]))
        return [prompt]

    def answer(self, step: int, stage: str, rank: int, groups: Sequence[Prompt]) -> Steps:
        host = self.job.host_of(stage, rank)
        for prompt in groups:
            own = self.costs.of(stage, ("add",), self.plan.work_of(stage, prompt))
            nbytes = self.plan.work_of(f"added {stage}", prompt).nbytes
            yield from self._move(host, _AT, nbytes, own)
            self._hold(step, nbytes)
        self._answers[step, stage] -= len(groups)
        if not self._answers[step, stage]:
            self._answered[step, stage].succeed()

    def _serve(self) -> Steps:
        """The controller's life: step by step, phase by phase."""
        for step in range(self.job.steps):
            yield self._gathered[step]
            for phase in self.job.phases():
                yield self.env.all_of([self._deal(step, stage) for stage in phase])

    def _deal(self, step: int, stage: str) -> Any:
        """Whole groups, each to the worker with the fewest bytes; the event of the last answer."""
        workers = self.job.trainers if stage == "train" else self.job.hosts
        loads = [(0, rank) for rank in range(workers)]
        hands: list[deque[Prompt]] = [deque() for _ in range(workers)]
        groups = self.plan.stage_of(stage, step)
        for prompt in groups:
            load, rank = loads[0]
            hands[rank].append(prompt)
            heapq.heapreplace(loads, (load + self.plan.work_of("train", prompt).nbytes, rank))
        for rank, hand in enumerate(hands):
            self._hands[step, stage, rank] = hand
        self._answers[step, stage] = len(groups)
        self._answered[step, stage] = answered = self.env.event()
        if not groups:
            answered.succeed()
        self._opened[step, stage] = self.env.now
        self._dealt[step, stage].succeed()
        return answered

    def _move(self, source: int, target: int, nbytes: float, worker_s: float) -> Steps:
        """A message, in whichever direction: both ends copy while the links carry."""
        self.outcome.operations += 1
        self.outcome.copied_bytes += nbytes
        yield self.hosts.operate(_AT, self.costs.service(1))
        ends = [self.hosts.copy(_AT, self.costs.service(0, nbytes)), self.hosts.work(worker_s)]
        yield self.env.all_of([*ends, *self.hosts.travel(source, target, nbytes)])
        if source != target:
            yield self.hosts.round_trip()

    def _hold(self, step: int, nbytes: int) -> None:
        """The batch of a step is let go of when the one that takes its memory begins."""
        self._held[step] += nbytes
        kept = range(step - self.job.staleness, step + 1)
        total = sum(self._held[s] for s in kept)
        self.outcome.peak_bytes[0] = max(self.outcome.peak_bytes[0], total)
