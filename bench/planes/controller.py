"""One controller process through which every byte of every stage passes.

`controller` has barriers between stages, as verl's classic driver has. `controller-stream` has
none, as `dataplane`, so those two differ in one thing. The controller is as fast as the design can
be. It needs no Ray, pickle, copy or padding, and has dedup, which verl's driver lacks. It sends
whole groups, and of these only the fields that a stage reads. The next group is in flight while a
worker has one. Each connection has a blocking thread per direction. Memory is touched before the
clock starts. The controller is on a trainer's host, because it sends more than it receives, and
uses unix sockets there.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.columns import Field, all_fields, group_bytes
from bench.planes.base import Batch, Columns, Endpoint, Group, Job, Moved, Plane, Service, Worker
from bench.planes.dealing import Event, Step, Taker, Takers, deal
from bench.planes.frames import Frame, Landing, pack, receive_into, receive_table, send, unpack
from bench.processes import die_with, emit
from bench.traces import Prompt

_ALIGNMENT_SLACK = 64 * 64  # of one row's values


def _host(job: Job) -> int:
    return job.host_of("train", 0)


def _reserve(job: Job, fields: Sequence[Field], prompts: Sequence[Prompt]) -> int:
    slack = sum(len(prompt.response_tokens) for prompt in prompts) * _ALIGNMENT_SLACK
    return slack + sum(group_bytes(tuple(fields), prompt, job.dedup) for prompt in prompts)


class ControllerEndpoint(Endpoint):
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

    @property
    def _path(self) -> str:
        return f"{self.job.folder}/controller.sock"

    def services(self) -> list[Service]:
        job = msgspec.json.encode(self.job).decode()
        argv = [sys.executable, "-m", "bench.planes.controller", job, self._path]
        return [Service("controller", argv, speaks=True, host=_host(self.job))]

    def reachable(self, ready: Mapping[str, Any]) -> bool:
        return "controller" in ready

    def address(self, host: int, ready: Mapping[str, Any]) -> dict[str, Any]:
        if host == _host(self.job):
            return {"path": self._path}
        return {"address": [self.job.address_of(_host(self.job)), ready["controller"]["port"]]}

    def moved(self, done: Mapping[str, dict[str, Any]]) -> Moved:
        return msgspec.convert(done["controller"]["moved"], Moved)


class Connection(Taker):
    """One worker as the controller sees it. `received` and `sent` count payload bytes."""

    outbox: queue.SimpleQueue[tuple[int, int | None] | None]  # None ends its thread

    def __init__(self, sock: socket.socket, name: str, job: Job) -> None:
        self.sock = sock
        self.role, rank = name.split("-")
        super().__init__(int(rank), queue.SimpleQueue())
        self.host = job.host_of(self.role, self.rank)
        self.remote = sock.family == socket.AF_INET
        self.received = self.sent = 0

    def send(self, frame: Frame, parts: Sequence[Any] = ()) -> None:
        self.sent += send(self.sock, frame, parts)


class Controller:
    """The batches of the steps in flight. One thread assigns groups to workers, others move
    bytes."""

    def __init__(self, job: Job, path: str, barriers: bool) -> None:
        self._job = job
        self._barriers = barriers
        fields = all_fields(job.task)
        reserve = max(_reserve(job, fields, job.of_step(step)) for step in range(job.steps))
        in_flight = min(job.steps, job.staleness + 1)
        # Under a memory limit, touch pages only for rows: else the kernel might kill it before the
        # first.
        touch = not job.memory_limit_bytes
        self._landings = [Landing(reserve, touch) for _ in range(in_flight)]
        self._steps: dict[int, Step] = {}
        self._lock = threading.Lock()  # of the steps and their landings
        self._connections: list[Connection] = []
        self._workers = {stage: Takers() for stage in job.stages()}
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
            if absent:
                continue
            with self._lock:
                steps = dict(self._steps)
            for number in deal(steps, event, self._barriers):
                del self._steps[number]
                left -= 1
        self.cpu_seconds = time.process_time() - cpu_start
        for connection in self._connections:
            connection.outbox.put(None)
        for sender in self._senders:
            sender.join()
        return self._moved()

    def _step(self, number: int) -> Step:
        """Return a step. A new one takes the memory of a step that the policy shows as trained."""
        with self._lock:
            if number not in self._steps:
                self._landing(number).rewind()
                self._steps[number] = Step(number, self._job, self._workers)
            return self._steps[number]

    def _landing(self, step: int) -> Landing:
        return self._landings[step % len(self._landings)]

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
                self._workers[connection.role].add(connection)
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
                        room = self._landing(frame.step).keep(nbytes)
                    receive_into(worker.sock, room)
                    worker.received += sum(frame.parts)
                    if frame.prompt in step.groups:
                        step.groups[frame.prompt] |= unpack(frame, room)
            self._events.put(Event(worker.role, frame.step, frame.prompt))

    def _post(self, worker: Connection) -> None:
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
        remote = [c for c in self._connections if c.remote]
        hosts, at = range(self._job.hosts), _host(self._job)
        pulled = [sum(c.sent for c in remote if c.host == host) for host in hosts]
        pulled[at] += sum(c.received for c in remote)
        sent = [sum(c.received for c in remote if c.host == host) for host in hosts]
        sent[at] += sum(c.sent for c in remote)
        return Moved(pulled, sent)


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
