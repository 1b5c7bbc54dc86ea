"""One controller process through which every byte of every stage passes: the best case of it.

Two planes, which differ in one thing. `controller` has barriers, as verl's classic driver has
(`DataProto` in a single controller): a stage begins when the one before has all groups of the step,
and reward and reference run together. `controller-stream` has none: a group goes to its next stage
as soon as it is complete. `dataplane` streams as well, so a comparison with it changes one thing
too: whether bytes pass through one process. What follows from that is part of the comparison: a
controller sends a group to every stage, where a host of `dataplane` keeps what it has pulled.

The controller runs on a trainer's host. It sends more than it receives, so where rollout has its
own hosts, its link carries the least there. A stage has one queue of complete groups. The worker
with the fewest bytes takes from its front and has at most two groups: while it works on one, the
next one arrives as far as the socket's buffers hold it. `dataplane` claims no group ahead.

Why nothing of that design can be quicker on the same sockets: no Ray, no pickle, no
concatenation, no padding and no reordering (whole groups are dealt, so no prompt goes to two ranks
of a stage; verl's shuffled rows send it up to 5.25 times); a stage is sent only the columns that it
reads; rollout workers stream groups in as they finish; arrays go out from where they landed, by
sendmsg, and land by recv_into in memory that was mapped and touched before the clock started, in
the workers too; one blocking thread a connection and direction (asyncio reaches 2.6 GB/s at its
best, raw sockets as much, and here several run at once without the GIL); unix sockets on the
controller's own host, TCP to the others; workers hold one group at a time. `dedup` sends a value
that the rows of a group share once; verl has no such thing.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.columns import Field, all_fields, group_bytes
from bench.planes.base import (
    Array,
    Batch,
    Columns,
    Endpoint,
    Group,
    Job,
    Moved,
    Plane,
    Service,
    Worker,
)
from bench.planes.frames import (
    Frame,
    Landing,
    pack,
    receive_into,
    receive_table,
    send,
    unpack,
)
from bench.processes import die_with, emit
from bench.traces import Prompt

_ALIGNMENT_SLACK = 64 * 64  # of one row's values
IN_FLIGHT = 2
"""Groups that a worker has: one to work on, one on the way."""


def _host(job: Job) -> int:
    """The controller's."""
    return job.host_of("train", 0)


def _reserve(job: Job, fields: Sequence[Field], prompts: Sequence[Prompt]) -> int:
    slack = sum(len(prompt.response_tokens) for prompt in prompts) * _ALIGNMENT_SLACK
    return slack + sum(group_bytes(tuple(fields), prompt, job.dedup) for prompt in prompts)


class ControllerEndpoint(Endpoint):
    """A worker's connection to the controller."""

    def __init__(self, worker: Worker) -> None:
        job = worker.job
        self._dedup = job.dedup
        if "path" in worker.address:
            self._sock = socket.socket(socket.AF_UNIX)
            self._sock.connect(worker.address["path"])
        else:
            self._sock = socket.create_connection(tuple(worker.address["address"]))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = set(job.stages().get(worker.role, ()))
        fields = [f for f in all_fields(job.task) if f.name in sent]
        sizes = [_reserve(job, fields, [prompt]) for prompt in job.generate()] if sent else [1]
        self._landing = Landing(max(sizes))
        send(self._sock, Frame("hello", name=worker.name))

    def put(self, step: int, prompt: int, columns: Columns) -> None:
        frame, parts = pack("rows", columns, self._dedup, step=step, prompt=prompt)
        send(self._sock, frame, parts)

    def finish(self, step: int) -> None:
        send(self._sock, Frame("end", step=step))

    def batches(self, step: int, stage: str) -> Iterator[Batch]:
        while True:
            frame, nbytes = receive_table(self._sock)
            if frame.kind == "end":
                return
            self._landing.rewind()  # the batch before is done with
            room = receive_into(self._sock, self._landing.keep(nbytes))
            batch = Group(unpack(frame, room))
            yield batch
            if batch.dropped:
                send(self._sock, Frame("drop", step=step, prompt=frame.prompt))
                continue
            done, parts = pack("rows", batch.added, self._dedup, step=step, prompt=frame.prompt)
            send(self._sock, done, parts)

    def close(self) -> None:
        self._sock.close()


class ControllerPlane(Plane):
    """The runner's side of both: one service, on the first trainer's host."""

    endpoint = ControllerEndpoint
    _port = 0

    @property
    def _path(self) -> str:
        return f"{self.job.folder}/controller.sock"

    def services(self) -> list[Service]:
        job = msgspec.json.encode(self.job).decode()
        argv = [sys.executable, "-m", "bench.planes.controller", job, self._path]
        return [Service("controller", argv, speaks=True, host=_host(self.job))]

    def reachable(self, ready: Mapping[str, dict[str, Any]]) -> bool:
        if "controller" in ready:
            self._port = int(ready["controller"]["port"])
        return self._port > 0

    def address(self, host: int) -> dict[str, Any]:
        if host == _host(self.job):
            return {"path": self._path}
        return {"address": [self.job.address_of(_host(self.job)), self._port]}

    def moved(self, done: Mapping[str, dict[str, Any]]) -> Moved:
        return msgspec.convert(done["controller"]["moved"], Moved)


class Connection:
    """One worker as the controller sees it. `received` and `sent` count payload bytes."""

    def __init__(self, sock: socket.socket, name: str, job: Job) -> None:
        self.sock = sock
        self.role, rank = name.split("-")
        self.rank = int(rank)
        self.host = job.host_of(self.role, self.rank)
        self.remote = sock.family == socket.AF_INET
        self.received = self.sent = 0
        self.outbox: queue.SimpleQueue[tuple[int, int | None] | None] = queue.SimpleQueue()
        """(step, prompt) of each group to send; no prompt ends a step, and None the thread."""
        self.unanswered: dict[int, int] = {}
        """Bytes of the groups that it has, by prompt."""

    def load(self) -> tuple[bool, int, int]:
        """By which the least busy worker is found: whether it has no room, its bytes, its rank."""
        return len(self.unanswered) == IN_FLIGHT, sum(self.unanswered.values()), self.rank

    def send(self, frame: Frame, parts: Sequence[Any] = ()) -> None:
        self.sent += send(self.sock, frame, parts)


class Event(NamedTuple):
    """A frame was taken in: its sender's role, or `end` and `hello`. prompt: what it was about."""

    kind: str
    step: int
    prompt: int = -1


class Line:
    """One stage of one step: a queue of complete groups, and the workers that take them."""

    def __init__(self, fields: Sequence[str], workers: Sequence[Connection], step: Step) -> None:
        self.is_open = self.is_closed = False  # closed: the workers know that no group follows
        self._fields = set(fields)
        self._workers = workers
        self._step = step
        self._waiting: deque[int] = deque()
        self._taken: set[int] = set()  # groups that were queued

    def offer(self, prompts: Iterable[int]) -> None:
        """Queue each group once, when it has all that the stage needs."""
        for prompt in prompts:
            columns = self._step.groups.get(prompt, {})  # a dropped group has none
            if prompt not in self._taken and columns.keys() >= self._fields:
                self._taken.add(prompt)
                self._waiting.append(prompt)

    def answered(self, prompt: int) -> None:
        """A worker is done with a group."""
        for worker in self._workers:
            worker.unanswered.pop(prompt, None)

    def send(self, no_more: bool) -> None:
        """Send waiting groups to workers that have room. `no_more`: rollout is over, so once every
        group that is left was sent, the workers hear that none follows."""
        while self._waiting:
            worker = min(self._workers, key=Connection.load)
            if len(worker.unanswered) == IN_FLIGHT:
                return
            prompt = self._waiting.popleft()
            worker.unanswered[prompt] = self._step.weights[prompt]
            worker.outbox.put((self._step.number, prompt))
        if no_more and not self.is_closed and self._taken.issuperset(self._step.groups):
            self.is_closed = True
            for worker in self._workers:
                worker.outbox.put((self._step.number, None))

    @property
    def is_done(self) -> bool:
        return self.is_closed and not any(worker.unanswered for worker in self._workers)


class Step:
    """One step: its batch, the memory that the batch lands in, and a line for each stage."""

    def __init__(
        self, number: int, job: Job, workers: Mapping[str, Sequence[Connection]], landing: Landing
    ) -> None:
        fields, prompts = all_fields(job.task), job.of_step(number)
        self.number = number
        self.weights = {p.index: group_bytes(fields, p, job.dedup) for p in prompts}
        self.groups: dict[int, dict[str, list[Array]]] = {p.index: {} for p in prompts}
        """The columns of each prompt's group, without groups that were dropped."""
        self.landing = landing
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
        """Queue and send what can go on. changed: groups that got something. before: the step
        before this one, if it is not done. With barriers a stage begins when all that is before it
        is done; without, when its workers have had all of the step before."""
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


class Controller:
    """The batches of the steps in flight. One thread decides what goes where; each connection has a
    thread that receives, and each worker of a stage one that sends to it."""

    def __init__(self, job: Job, path: str, barriers: bool) -> None:
        self._job = job
        self._barriers = barriers
        fields = all_fields(job.task)
        reserve = max(_reserve(job, fields, job.of_step(step)) for step in range(job.steps))
        in_flight = min(job.steps, job.staleness + 1)
        # Under a memory limit pages come with the rows: else it might die before the first of them.
        touch = not job.memory_limit_bytes
        self._landings = [Landing(reserve, touch) for _ in range(in_flight)]
        self._steps: dict[int, Step] = {}
        self._lock = threading.Lock()  # of the steps and their landings
        self._connections: list[Connection] = []
        self._workers: dict[str, list[Connection]] = {stage: [] for stage in job.stages()}
        self._senders: list[threading.Thread] = []
        # Events of all threads, or the exception that ended one.
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self.cpu_seconds = 0.0  # of all steps
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(path)
        self._tcp = socket.create_server((job.address_of(_host(job)), 0))

    def run(self) -> Moved:
        """Serve all steps. Rollout may be ahead by the staleness."""
        self._unix.listen()
        emit("ready", port=self._tcp.getsockname()[1])
        for listener in (self._unix, self._tcp):
            self._thread(self._greet, listener)
        absent, left, cpu_start = sum(self._job.crowd().values()), self._job.steps, 0.0
        while left:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if event.kind == "hello":
                absent -= 1
                cpu_start = time.process_time()
            else:
                self._step(event.step).take(event)
            if not absent:
                left -= self._deal(event)
        self.cpu_seconds = time.process_time() - cpu_start
        for connection in self._connections:
            connection.outbox.put(None)
        for sender in self._senders:
            sender.join()
        return self._moved()

    def _deal(self, event: Event) -> int:
        """Let every step go on after an event. Return how many steps are done."""
        with self._lock:
            steps = sorted(self._steps.items())
        before, done = None, 0
        for number, step in steps:
            step.deal([event.prompt] if number == event.step else [], before, self._barriers)
            if step.is_done:
                del self._steps[number]
                done += 1
            else:
                before = step
        return done

    def _step(self, number: int) -> Step:
        """The step that it takes its memory from was trained: the policy said so."""
        with self._lock:
            if number not in self._steps:
                landing = self._landings[number % len(self._landings)]
                landing.rewind()
                self._steps[number] = Step(number, self._job, self._workers, landing)
            return self._steps[number]

    def _greet(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                name = receive_table(sock)[0].name
            except EOFError:
                continue  # a worker that died: the runner sees that
            connection = Connection(sock, name, self._job)
            self._connections.append(connection)
            if connection.role in self._workers:
                self._workers[connection.role].append(connection)
                self._senders.append(self._thread(self._post, connection))
            self._events.put(Event("hello", 0))
            self._thread(self._gather, connection)

    def _thread(self, target: Any, *args: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                target(*args)
            except BaseException as exc:
                self._events.put(exc)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _gather(self, worker: Connection) -> None:
        """Merge what one worker sends into the batch."""
        while True:
            try:
                frame, nbytes = receive_table(worker.sock)
            except EOFError:
                return  # the runner sees a worker's death, and knows whether it was in order
            step = self._step(frame.step)
            match frame.kind:
                case "end":
                    self._events.put(Event("end", frame.step))
                    continue
                case "drop":
                    del step.groups[frame.prompt]
                case "rows":
                    with self._lock:
                        room = step.landing.keep(nbytes)
                    receive_into(worker.sock, room)
                    worker.received += sum(frame.parts)
                    if frame.prompt in step.groups:
                        step.groups[frame.prompt] |= unpack(frame, room)
            self._events.put(Event(worker.role, frame.step, frame.prompt))

    def _post(self, worker: Connection) -> None:
        """Send one worker what is put into its outbox."""
        fields = self._job.stages()[worker.role]
        while order := worker.outbox.get():
            step, prompt = order
            if prompt is None:
                worker.send(Frame("end", step=step))
                continue
            group = self._steps[step].groups[prompt]
            columns = {field: group[field] for field in fields}
            worker.send(*pack("rows", columns, self._job.dedup, step=step, prompt=prompt))

    def _moved(self) -> Moved:
        local = [c for c in self._connections if not c.remote]
        remote = [c for c in self._connections if c.remote]
        hosts, at = range(self._job.hosts), _host(self._job)
        pulled = [sum(c.sent for c in remote if c.host == host) for host in hosts]
        pulled[at] += sum(c.received for c in remote)
        sent = [sum(c.received for c in remote if c.host == host) for host in hosts]
        sent[at] += sum(c.sent for c in remote)
        return Moved(
            copied_in=sum(c.received for c in local),
            across=sum(pulled),
            copied_out=sum(c.sent for c in local),
            pulled=pulled,
            sent=sent,
        )


def main(job_json: str, path: str) -> None:
    """The controller's process: all steps, then its counters, then the end."""
    job = msgspec.json.decode(job_json, type=Job)
    die_with(job.parent)
    controller = Controller(job, path, barriers=job.plane == "controller")
    moved = msgspec.to_builtins(controller.run())
    Path(path).unlink(missing_ok=True)
    emit("done", moved=moved, cpu_seconds={"controller": controller.cpu_seconds})


if __name__ == "__main__":
    main(*sys.argv[1:3])
