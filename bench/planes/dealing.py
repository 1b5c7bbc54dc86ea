"""Which worker of a controller gets which group, and when. It does no I/O: `bench sim` models a
controller with the same code.

A stage has one queue of complete groups. The worker with the fewest bytes takes from its front, and
has at most IN_FLIGHT groups.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.columns import all_fields, group_bytes
from bench.planes.base import Job

IN_FLIGHT = 2
"""Groups per worker: one in work, one in flight."""


class Event(NamedTuple):
    """A received frame. kind: its sender's role, `end` or `hello`. prompt: its group."""

    kind: str
    step: int
    prompt: int = -1


class Taker:
    """A worker of a stage. Its orders, (step, prompt), are put into `outbox`; one without a prompt
    ends a step. unanswered: bytes of the groups that it has, by prompt."""

    def __init__(self, rank: int, outbox: Any) -> None:
        self.rank = rank
        self.outbox = outbox
        self.unanswered: dict[int, int] = {}

    def load(self) -> tuple[bool, int, int]:
        """The order from the least busy worker: whether it is full, its bytes, its rank."""
        return len(self.unanswered) == IN_FLIGHT, sum(self.unanswered.values()), self.rank


class Takers:
    """The workers of a stage."""

    def __init__(self) -> None:
        self.all: list[Taker] = []
        self._loads: list[tuple[bool, int, int, Taker]] = []  # a heap, also with outdated loads

    def add(self, worker: Taker) -> None:
        self.all.append(worker)
        self.changed(worker)

    def changed(self, worker: Taker) -> None:
        """Note the load of a worker that got or answered a group."""
        heapq.heappush(self._loads, (*worker.load(), worker))

    def least_busy(self) -> Taker:
        """The worker with the smallest load. Drops outdated loads from the top of the heap."""
        while self._loads[0][:3] != self._loads[0][3].load():
            heapq.heappop(self._loads)
        return self._loads[0][3]


class Line:
    """One stage of one step: a queue of complete groups, and the workers that take them."""

    def __init__(self, fields: Sequence[str], workers: Takers, step: Step) -> None:
        self.is_open = self.is_closed = False  # closed: the workers know that no group follows
        self._fields = set(fields)
        self._workers = workers
        self._step = step
        self._waiting: deque[int] = deque()
        self._taken: set[int] = set()  # groups that were queued
        self._sent: dict[int, Taker] = {}  # the worker of each

    def offer(self, prompts: Iterable[int]) -> None:
        """Queue each group once, when it has all that the stage needs."""
        for prompt in prompts:
            columns = self._step.groups.get(prompt, {})  # a dropped group has none
            if prompt not in self._taken and columns.keys() >= self._fields:
                self._taken.add(prompt)
                self._waiting.append(prompt)

    def answered(self, prompt: int) -> None:
        """Note that a worker has finished a group."""
        worker = self._sent.pop(prompt)
        del worker.unanswered[prompt]
        self._workers.changed(worker)

    def send(self, no_more: bool) -> None:
        """Send waiting groups to workers that have room. `no_more`: rollout is over, so after the
        last group the workers are told that none follows."""
        while self._waiting:
            worker = self._workers.least_busy()
            if len(worker.unanswered) == IN_FLIGHT:
                return
            prompt = self._waiting.popleft()
            worker.unanswered[prompt] = self._step.weights[prompt]
            self._workers.changed(worker)
            self._sent[prompt] = worker
            worker.outbox.put((self._step.number, prompt))
        if no_more and not self.is_closed and self._taken.issuperset(self._step.groups):
            self.is_closed = True
            for worker in self._workers.all:
                worker.outbox.put((self._step.number, None))

    @property
    def is_done(self) -> bool:
        return self.is_closed and not self._sent


class Step:
    """One step: its batch, and a line for each stage."""

    def __init__(self, number: int, job: Job, workers: Mapping[str, Takers]) -> None:
        fields, prompts = all_fields(job.task), job.of_step(number)
        self.number = number
        self.weights = {p.index: group_bytes(fields, p, job.dedup) for p in prompts}
        self.groups: dict[int, dict[str, Any]] = {p.index: {} for p in prompts}
        """The columns of each prompt's group, without groups that were dropped."""
        self.lines = {
            stage: Line(reads, workers[stage], self) for stage, reads in job.stages().items()
        }
        self._job = job
        self._rolling = job.hosts  # rollout workers that still put

    def take(self, event: Event) -> None:
        if event.kind == "end":
            self._rolling -= 1
        elif event.kind in self.lines:
            self.lines[event.kind].answered(event.prompt)

    def deal(self, changed: Sequence[int], before: Step | None, barriers: bool) -> None:
        """Queue and send ready groups. changed: groups with new fields. before: the previous step,
        if it is not done. With barriers, a stage begins when everything before it is done; without,
        when its workers have received all of the previous step."""
        if barriers and (before or self._rolling):
            return
        for stages in self._job.phases():
            for stage in stages:
                line = self.lines[stage]
                if before is None or before.lines[stage].is_closed:
                    line.offer(changed if line.is_open else list(self.groups))
                    line.is_open = True
                    line.send(no_more=not self._rolling)
            if barriers and not all(self.lines[stage].is_done for stage in stages):
                return

    @property
    def is_done(self) -> bool:
        return all(line.is_done for line in self.lines.values())


def deal(steps: Mapping[int, Step], event: Event, barriers: bool) -> list[int]:
    """Continue every step after an event. Return the numbers of finished steps."""
    before, done = None, []
    for number, step in sorted(steps.items()):
        step.deal([event.prompt] if number == event.step else [], before, barriers)
        if step.is_done:
            done.append(number)
        else:
            before = step
    return done
