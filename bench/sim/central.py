"""The controller with barriers as a model: whole batches in, then stage after stage out, on one
host. Which worker gets which group is decided by the controller's own code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import simpy

from bench.columns import ADDED, rollout_fields
from bench.planes.dealing import Event, Step, Taker, Takers, deal
from bench.sim.model import Claimed, Design, Model, Steps, Work
from bench.traces import Prompt

_AT = 0  # the controller's host


class Central(Design):
    def __init__(self, model: Model) -> None:
        super().__init__(model)
        crowd = self.job.crowd()
        self._workers = {stage: Takers() for stage in self.job.stages()}
        for stage, workers in self._workers.items():
            for rank in range(crowd[stage]):
                workers.add(Taker(rank, simpy.Store(self.env)))
        self._steps = {step: Step(step, self.job, self._workers) for step in range(self.job.steps)}
        self._held: Counter[int] = Counter()  # by step
        self.outcome.peak_bytes = [0]

    def put(self, host: int, prompt: Prompt) -> Steps:
        work = self.plan.work_of("written", prompt)
        yield from self._move(host, _AT, work.nbytes, self.costs.of("rollout", ("put",), work))
        self._hold(prompt.step, work.nbytes)
        group = self._steps[prompt.step].groups[prompt.index]
        group |= dict.fromkeys(field.name for field in rollout_fields(self.job.task))

    def rolled(self, step: int) -> None:
        self._deal(Event("end", step))

    def claim(self, step: int, stage: str, rank: int, most: int) -> Claimed:
        host = self.job.host_of(stage, rank)
        _, index = yield self._workers[stage].all[rank].outbox.get()
        asked_and_ready = self.env.now
        if index is None:
            yield from self._move(_AT, host, 0, self.costs.of(stage, ("claim",), Work()))
            return []
        prompt = self.job.generate()[index]
        work = self.plan.work_of(stage, prompt)
        yield from self._move(_AT, host, work.nbytes, self.costs.of(stage, ("claim",), work))
        self.outcome.peers[1] += 1
        self.outcome.claim_s.append(self.env.now - asked_and_ready)
        return [prompt]

    def answer(self, step: int, stage: str, rank: int, groups: Sequence[Prompt]) -> Steps:
        host = self.job.host_of(stage, rank)
        for prompt in groups:
            own = self.costs.of(stage, ("add",), self.plan.work_of(stage, prompt))
            nbytes = self.plan.work_of(f"added {stage}", prompt).nbytes
            yield from self._move(host, _AT, nbytes, own)
            self._hold(step, nbytes)
            if self.job.is_trained(prompt):
                added = dict.fromkeys(field.name for field in ADDED.get(stage, ()))
                self._steps[step].groups[prompt.index] |= added
            else:
                del self._steps[step].groups[prompt.index]
            self._deal(Event(stage, step, prompt.index))

    def _deal(self, event: Event) -> None:
        self._steps[event.step].take(event)
        for done in deal(self._steps, event, barriers=True):
            del self._steps[done]

    def _move(self, source: int, target: int, nbytes: float, worker_s: float) -> Steps:
        """A message, in whichever direction. A socket holds little, so its ends take turns."""
        self.outcome.operations += 1
        self.outcome.copied_bytes += nbytes
        yield self.hosts.operate(_AT, self.costs.operation)
        yield self.hosts.work(worker_s)
        copy = self.hosts.copy(_AT, self.costs.byte * nbytes)
        yield self.env.all_of([copy, *self.hosts.travel(source, target, nbytes)])
        if source != target:
            yield self.hosts.round_trip()

    def _hold(self, step: int, nbytes: int) -> None:
        """Add bytes of a step. A step's memory is freed when a later step that reuses it begins."""
        self._held[step] += nbytes
        kept = range(step - self.job.staleness, step + 1)
        total = sum(self._held[s] for s in kept)
        self.outcome.peak_bytes[0] = max(self.outcome.peak_bytes[0], total)
