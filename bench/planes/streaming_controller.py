"""The controller without barriers: a group goes to its next stage as soon as it is complete.

Same process, sockets, frames, memory and workers as `controller`; only the order of work differs.
A comparison with `dataplane`, which streams as well, therefore changes one thing: whether bytes
pass through one process.

A stage has one queue of complete groups. Each worker takes from its front and has at most two
groups at a time: it works on one while the next one arrives. The memory of a group returns when its
step ends, as with `controller`.
"""

from __future__ import annotations

import queue
import sys
from collections import deque
from collections.abc import Sequence

from bench.planes.base import Job
from bench.planes.controller import (
    Connection,
    Controller,
    ControllerPlane,
    Event,
    Stock,
    main,
)
from bench.planes.frames import Frame, pack

_IN_FLIGHT = 2
"""Groups that a worker has: one to work on, one on the way."""
_TOLD = "told "
"""Prefix of an event: a worker of this stage was sent the end of the step."""


class StreamingControllerPlane(ControllerPlane):
    """The runner's side: one service, on the first host."""

    name = "controller-stream"
    module = "bench.planes.streaming_controller"


class Line:
    """One stage of one step: a queue of complete groups, and the workers that take them."""

    def __init__(self, fields: Sequence[str], workers: Sequence[Connection]) -> None:
        self.fields = fields
        self.workers = workers
        self.unanswered: list[set[int]] = [set() for _ in workers]  # groups that each has
        self.waiting: deque[int] = deque()
        self.taken: set[int] = set()  # groups that were queued
        self.is_closed = False  # no group follows
        self.workers_told = 0  # that know it

    def offer(self, prompt: int, stock: Stock) -> None:
        """Queue a group once, when it has all that the stage needs."""
        if prompt not in self.taken and stock.is_complete(prompt, self.fields):
            self.taken.add(prompt)
            self.waiting.append(prompt)

    def answered(self, prompt: int) -> None:
        """A worker is done with a group."""
        for groups in self.unanswered:
            groups.discard(prompt)

    def due(self) -> tuple[Connection, int] | None:
        """The next group, and the least busy worker if that has room."""
        worker, groups = min(
            zip(self.workers, self.unanswered, strict=True), key=lambda pair: len(pair[1])
        )
        if not self.waiting or len(groups) == _IN_FLIGHT:
            return None
        prompt = self.waiting.popleft()
        groups.add(prompt)
        return worker, prompt

    @property
    def is_done(self) -> bool:
        return self.workers_told == len(self.workers) and not any(self.unanswered)


class StreamingController(Controller):
    """One thread decides what goes where; each worker has a thread that sends to it."""

    def __init__(self, job: Job, path: str) -> None:
        super().__init__(job, path)
        self._outboxes: dict[str, queue.SimpleQueue[tuple[int, int | None]]] = {}
        self._later: list[Event] = []  # of steps that have not begun

    def perform(self, step: int, stock: Stock) -> None:
        """Every group through its stages, until all workers have answered and know the end."""
        stages = self._job.stages().items()
        lines = {stage: Line(fields, self.workers_of(stage)) for stage, fields in stages}
        told = {_TOLD + stage: line for stage, line in lines.items()}
        rolling = self._job.hosts
        early = [event for event in self._later if event.step == step]
        self._later = [event for event in self._later if event.step != step]
        while not all(line.is_done for line in lines.values()):
            event = early.pop(0) if early else self._event()
            if event.step != step:
                self._later.append(event)
                continue
            if event.kind == "end":
                rolling -= 1
            elif event.kind in told:
                told[event.kind].workers_told += 1
            elif event.kind in lines:
                lines[event.kind].answered(event.prompt)
            for line in lines.values():
                if event.prompt >= 0:
                    line.offer(event.prompt, stock)
                self._send_due(step, line)
                if not (rolling or line.waiting or line.is_closed):
                    self._close(step, line, stock)

    def _send_due(self, step: int, line: Line) -> None:
        while due := line.due():
            worker, prompt = due
            self._outbox(worker).put((step, prompt))

    def _close(self, step: int, line: Line, stock: Stock) -> None:
        """Tell a stage's workers that no group follows, once each group that is left was sent."""
        if line.taken.issuperset(stock.groups()):
            line.is_closed = True
            for worker in line.workers:
                self._outbox(worker).put((step, None))

    def _outbox(self, worker: Connection) -> queue.SimpleQueue[tuple[int, int | None]]:
        name = f"{worker.role}-{worker.rank}"
        if name not in self._outboxes:
            self._outboxes[name] = queue.SimpleQueue()
            self._thread(self._post, worker, self._outboxes[name])
        return self._outboxes[name]

    def _post(self, worker: Connection, outbox: queue.SimpleQueue[tuple[int, int | None]]) -> None:
        """Send one worker what is put into its outbox; None ends a step."""
        fields = self._job.stages()[worker.role]
        while True:
            step, prompt = outbox.get()
            if prompt is None:
                worker.send(Frame("end", step=step))
                self._events.put(Event(_TOLD + worker.role, step))
                continue
            columns = self._stock(step).columns(prompt, fields)
            worker.send(*pack("rows", columns, self._job.dedup, step=step, prompt=prompt))


if __name__ == "__main__":
    main(StreamingController, *sys.argv[1:3])
