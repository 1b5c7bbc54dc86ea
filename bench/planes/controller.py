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
    Buffer,
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
            room = receive_into(self._sock, self._landing.reuse(nbytes))
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

    def load(self) -> tuple[bool, int]:
        """By which the least busy worker is found: whether it has no room, and its bytes."""
        return len(self.unanswered) == IN_FLIGHT, sum(self.unanswered.values())

    def send(self, frame: Frame, parts: Sequence[Any] = ()) -> None:
        self.sent += send(self.sock, frame, parts)


class Event(NamedTuple):
    """A frame was taken in: its sender's role, or `end` and `hello`. prompt: what it was about."""

    kind: str
    step: int
    prompt: int = -1


class Stock:
    """The whole batch of one step, and the memory that it lands in."""

    def __init__(self, job: Job, step: int, landing: Landing) -> None:
        fields = all_fields(job.task)
        prompts = job.of_step(step)
        self._groups: dict[int, dict[str, list[Array]]] = {p.index: {} for p in prompts}
        self.weights = {p.index: group_bytes(fields, p, job.dedup) for p in prompts}
        self._landing = landing
        self._lock = threading.Lock()

    def keep(self, nbytes: int) -> Buffer:
        with self._lock:
            return self._landing.keep(nbytes)

    def merge(self, prompt: int, columns: dict[str, list[Array]]) -> None:
        """Take these columns of a group, unless it was dropped."""
        if prompt in self._groups:
            self._groups[prompt] |= columns

    def drop(self, prompt: int) -> None:
        del self._groups[prompt]

    def groups(self) -> list[int]:
        """Those that were not dropped."""
        return list(self._groups)

    def is_complete(self, prompt: int, fields: Sequence[str]) -> bool:
        """Whether a group has these fields; a dropped group never does."""
        return self._groups.get(prompt, {}).keys() >= set(fields)

    def columns(self, prompt: int, fields: Sequence[str]) -> dict[str, list[Array]]:
        return {field: self._groups[prompt][field] for field in fields}


class Line:
    """One stage of one step: a queue of complete groups, and the workers that take them."""

    def __init__(self, fields: Sequence[str], workers: Sequence[Connection], stock: Stock) -> None:
        self.is_open = self.is_closed = False  # closed: the workers know that no group follows
        self._fields = fields
        self._workers = workers
        self._stock = stock
        self._waiting: deque[int] = deque()
        self._taken: set[int] = set()  # groups that were queued

    def offer(self, prompts: Iterable[int]) -> None:
        """Queue each group once, when it has all that the stage needs."""
        for prompt in prompts:
            if prompt not in self._taken and self._stock.is_complete(prompt, self._fields):
                self._taken.add(prompt)
                self._waiting.append(prompt)

    def answered(self, prompt: int) -> None:
        """A worker is done with a group."""
        for worker in self._workers:
            worker.unanswered.pop(prompt, None)

    def send(self, step: int, no_more: bool) -> None:
        """Send waiting groups to workers that have room. `no_more`: rollout is over, so once every
        group that is left was sent, the workers hear that none follows."""
        while self._waiting:
            worker = min(self._workers, key=Connection.load)
            if len(worker.unanswered) == IN_FLIGHT:
                return
            prompt = self._waiting.popleft()
            worker.unanswered[prompt] = self._stock.weights[prompt]
            worker.outbox.put((step, prompt))
        if no_more and not self.is_closed and self._taken.issuperset(self._stock.groups()):
            self.is_closed = True
            for worker in self._workers:
                worker.outbox.put((step, None))

    @property
    def is_done(self) -> bool:
        return self.is_closed and not any(worker.unanswered for worker in self._workers)


class Step:
    """One step: a line for each stage, and how many rollout workers still put."""

    def __init__(self, number: int, job: Job, lines: dict[str, Line], stock: Stock) -> None:
        self.lines = lines
        self._number, self._job, self._stock = number, job, stock
        self._rolling = job.hosts

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
                    line.offer(changed if line.is_open else self._stock.groups())
                    line.is_open = True
                    line.send(self._number, no_more=not self._rolling)
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
        self._stocks: dict[int, Stock] = {}
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}
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
        absent, early = sum(self._job.crowd().values()), list[Event]()
        while absent:
            if (event := self._event()).kind == "hello":
                absent -= 1
            else:
                early.append(event)
        cpu_start = time.process_time()
        self._serve(early)
        self.cpu_seconds = time.process_time() - cpu_start
        for connection in self._connections.values():
            connection.outbox.put(None)
        for sender in self._senders:
            sender.join()
        return self._moved()

    def _serve(self, early: list[Event]) -> None:
        """Every group through its stages. early: events that were taken in before all workers had
        come."""
        steps: dict[int, Step] = {}
        left = self._job.steps
        while left:
            event = early.pop(0) if early else self._event()
            if event.step not in steps:
                stock = self._stock(event.step)
                lines = {
                    stage: Line(fields, self._workers_of(stage), stock)
                    for stage, fields in self._job.stages().items()
                }
                steps[event.step] = Step(event.step, self._job, lines, stock)
            steps[event.step].take(event)
            before = None
            for number, step in sorted(steps.items()):
                changed = [event.prompt] if number == event.step else []
                step.deal(changed, before, self._barriers)
                if step.is_done:
                    del steps[number], self._stocks[number]
                    left -= 1
                else:
                    before = step

    def _stock(self, step: int) -> Stock:
        """The step's batch. Whoever it takes the memory from was trained: the policy said so."""
        with self._lock:
            if step not in self._stocks:
                landing = self._landings[step % len(self._landings)]
                landing.rewind()
                self._stocks[step] = Stock(self._job, step, landing)
            return self._stocks[step]

    def _workers_of(self, stage: str) -> list[Connection]:
        """By rank."""
        found = (c for c in self._connections.values() if c.role == stage)
        return sorted(found, key=lambda connection: connection.rank)

    def _greet(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                name = receive_table(sock)[0].name
            except EOFError:
                continue  # a worker that died: the runner sees that
            connection = self._connections[name] = Connection(sock, name, self._job)
            self._events.put(Event("hello", 0))
            self._thread(self._gather, connection)
            if connection.role in self._job.stages():
                self._senders.append(self._thread(self._post, connection))

    def _thread(self, target: Any, *args: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                target(*args)
            except BaseException as exc:
                self._events.put(exc)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _event(self) -> Event:
        event = self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def _gather(self, worker: Connection) -> None:
        """Merge what one worker sends into the batch."""
        while True:
            try:
                frame, nbytes = receive_table(worker.sock)
            except EOFError:
                return  # the runner sees a worker's death, and knows whether it was in order
            stock = self._stock(frame.step)
            match frame.kind:
                case "end":
                    self._events.put(Event("end", frame.step))
                    continue
                case "drop":
                    stock.drop(frame.prompt)
                case "rows":
                    room = receive_into(worker.sock, stock.keep(nbytes))
                    worker.received += sum(frame.parts)
                    stock.merge(frame.prompt, unpack(frame, room))
            self._events.put(Event(worker.role, frame.step, frame.prompt))

    def _post(self, worker: Connection) -> None:
        """Send one worker what is put into its outbox."""
        fields = self._job.stages()[worker.role]
        while order := worker.outbox.get():
            step, prompt = order
            if prompt is None:
                worker.send(Frame("end", step=step))
                continue
            columns = self._stock(step).columns(prompt, fields)
            worker.send(*pack("rows", columns, self._job.dedup, step=step, prompt=prompt))

    def _moved(self) -> Moved:
        local = [c for c in self._connections.values() if not c.remote]
        remote = [c for c in self._connections.values() if c.remote]
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
