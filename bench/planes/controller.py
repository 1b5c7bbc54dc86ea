"""One controller process through which every byte of every stage passes: the best case of it.

Modelled design: verl's classic driver (`DataProto` in a single controller). It gathers the output
of all workers of a stage, holds the whole batch until that stage is complete, then sends each
worker of the next stage its slice, one stage after the other.

Why nothing of that design can be quicker on the same sockets: no Ray, no pickle, no
concatenation, no padding and no reordering (whole groups are dealt to the least loaded rank, so no
prompt goes to two ranks of a stage; verl's shuffled rows send it up to 5.25 times); a stage is sent
only its columns if so asked; rollout workers stream groups in as they finish; arrays go out from
where they landed, by sendmsg, and land by recv_into in memory that was mapped and touched before
the clock started, in the workers too; one blocking thread a connection (asyncio reaches 2.6 GB/s at
its best, raw sockets as much, and here several run at once without the GIL); unix sockets on the
controller's own host, TCP to the others; workers hold one group at a time. `dedup` sends a value
that the rows of a group share once; verl has no such thing.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.columns import SCORES, Field, group_bytes, rollout_fields
from bench.events import emit
from bench.planes.base import Array, Batch, Columns, Endpoint, Job, Moved, Plane, Service, Worker
from bench.planes.frames import (
    Frame,
    Landing,
    pack,
    receive_payload,
    receive_table,
    send,
    unpack,
)
from bench.trace import Prompt

_STAGES = ("reward", "train")
_ALIGNMENT_SLACK = 64 * 64  # of one row's values


def _reserve(job: Job, fields: Sequence[Field], prompts: Sequence[Prompt]) -> int:
    slack = sum(len(prompt.response_tokens) for prompt in prompts) * _ALIGNMENT_SLACK
    return slack + sum(group_bytes(tuple(fields), prompt, job.dedup) for prompt in prompts)


class ControllerPlane(Plane):
    """The runner's side: one service, on the first host."""

    name = "controller"
    dedup_variants = (False, True)
    _port = 0

    @property
    def _path(self) -> str:
        return f"{self.job.folder}/controller.sock"

    def services(self) -> list[Service]:
        job = msgspec.json.encode(self.job).decode()
        argv = [sys.executable, "-m", "bench.planes.controller", job, self._path]
        return [Service("controller", argv, speaks=True)]

    def reachable(self, ready: Mapping[str, dict[str, Any]]) -> bool:
        if "controller" in ready:
            self._port = int(ready["controller"]["port"])
        return self._port > 0

    def address(self, host: int) -> dict[str, Any]:
        return {"path": self._path} if host == 0 else {"port": self._port}

    def moved(self, done: Mapping[str, dict[str, Any]]) -> Moved:
        return msgspec.convert(done["controller"]["moved"], Moved)

    def close(self) -> None:
        """The runner holds nothing of it."""

    @classmethod
    def attach(cls, worker: Worker) -> Endpoint:
        return ControllerEndpoint(worker)


class ControllerBatch(Batch):
    """One group in the worker's receive buffer."""

    def __init__(self, prompt: int, columns: dict[str, list[Array]]) -> None:
        self.prompt = prompt
        self.added: dict[str, Sequence[Array]] = {}
        self._columns = columns

    def column(self, field: str) -> Sequence[Array]:
        return self._columns[field]

    def add(self, columns: Columns) -> None:
        self.added.update(columns)


class ControllerEndpoint(Endpoint):
    """A worker's connection to the controller."""

    def __init__(self, worker: Worker) -> None:
        job = worker.job
        self._dedup = job.dedup
        if "path" in worker.address:
            self._sock = socket.socket(socket.AF_UNIX)
            self._sock.connect(worker.address["path"])
        else:
            self._sock = socket.create_connection(("127.0.0.1", worker.address["port"]))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = set(job.stages().get(worker.role, ()))
        fields = [f for f in (*rollout_fields(job.task), *SCORES) if f.name in sent]
        sizes = [_reserve(job, fields, [prompt]) for prompt in job.generate()] if sent else [1]
        self._landing = Landing(max(sizes))
        send(self._sock, Frame("hello", name=worker.name))

    def put(self, prompt: int, columns: Columns) -> None:
        frame, parts = pack("rows", columns, self._dedup, prompt=prompt)
        send(self._sock, frame, parts)

    def finish(self) -> None:
        send(self._sock, Frame("end"))

    def batches(self, stage: str) -> Iterator[Batch]:
        while True:
            frame, nbytes = receive_table(self._sock)
            if frame.kind == "end":
                return
            room = self._landing.reuse(nbytes)
            receive_payload(self._sock, room)
            batch = ControllerBatch(frame.prompt, unpack(frame, room))
            yield batch
            done, parts = pack("rows", batch.added, self._dedup, prompt=frame.prompt)
            send(self._sock, done, parts)

    def close(self) -> None:
        self._sock.close()


class Connection:
    """One worker as the controller sees it. `received` and `sent` count payload bytes."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.sock = sock
        self.name = name
        self.remote = sock.family == socket.AF_INET
        self.received = self.sent = 0

    def send(self, frame: Frame, parts: Sequence[Any] = ()) -> None:
        self.sent += send(self.sock, frame, parts)


class Controller:
    """The whole batch, and the threads that fill it and send it on."""

    def __init__(self, job: Job, path: str) -> None:
        self._job = job
        prompts = job.generate()
        fields = (*rollout_fields(job.task), *SCORES)
        self._landing = Landing(_reserve(job, fields, prompts))
        self._landing_lock = threading.Lock()
        self._weight = [group_bytes(fields, prompt, job.dedup) for prompt in prompts]
        self._batch: list[dict[str, list[Array]]] = [{} for _ in prompts]
        self._connections: dict[str, Connection] = {}
        # Every event of every thread: "group" and "end" by worker, or the exception that ended it.
        self._events: queue.SimpleQueue[tuple[str, str] | BaseException] = queue.SimpleQueue()
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(path)
        self._tcp = socket.create_server(("127.0.0.1", 0))

    def run(self) -> Moved:
        """Serve one step."""
        self._unix.listen()
        emit("ready", port=self._tcp.getsockname()[1])
        self._accept(2 * self._job.hosts + self._job.trainers)
        self._wait("end", self._job.hosts)
        for stage in _STAGES:
            workers = [c for name, c in self._connections.items() if name.startswith(stage)]
            for worker, prompts in zip(workers, self._deal(len(workers)), strict=True):
                self._thread(self._dispatch, worker, stage, prompts)
            self._wait("group", len(self._batch))
        return self._moved()

    def _accept(self, workers: int) -> None:
        for listener in (self._unix, self._tcp):
            threading.Thread(target=self._greet, args=(listener,), daemon=True).start()
        self._wait("hello", workers)

    def _greet(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            name = receive_table(sock)[0].name
            connection = self._connections[name] = Connection(sock, name)
            self._events.put(("hello", name))
            self._thread(self._gather, connection)

    def _thread(self, target: Any, *args: Any) -> None:
        def guarded() -> None:
            try:
                target(*args)
            except BaseException as exc:
                self._events.put(exc)

        threading.Thread(target=guarded, daemon=True).start()

    def _wait(self, kind: str, count: int) -> None:
        """Until `count` events of this kind have come. What else comes is out of order: a bug."""
        while count:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if event[0] != kind:
                raise RuntimeError(f"{event[1]} said {event[0]} while {kind} was awaited")
            count -= 1

    def _gather(self, worker: Connection) -> None:
        """Merge what one worker sends into the batch."""
        producer = worker.name.startswith("rollout")
        while True:
            try:
                frame, nbytes = receive_table(worker.sock)
            except EOFError:
                return  # the runner sees a worker's death, and knows whether it was in order
            if frame.kind == "end":
                self._events.put(("end", worker.name))
                continue
            with self._landing_lock:
                room = self._landing.keep(nbytes)
            receive_payload(worker.sock, room)
            worker.received += sum(frame.parts)
            self._batch[frame.prompt].update(unpack(frame, room))
            if not producer:
                self._events.put(("group", worker.name))

    def _deal(self, workers: int) -> list[list[int]]:
        """Whole groups, each to the worker that has the fewest bytes so far."""
        hands: list[list[int]] = [[] for _ in range(workers)]
        loads = [0] * workers
        for prompt, weight in enumerate(self._weight):
            worker = loads.index(min(loads))
            hands[worker].append(prompt)
            loads[worker] += weight
        return hands

    def _dispatch(self, worker: Connection, stage: str, prompts: list[int]) -> None:
        fields = self._job.stages()[stage]
        for prompt in prompts:
            columns = {field: self._batch[prompt][field] for field in fields}
            worker.send(*pack("rows", columns, self._job.dedup, prompt=prompt))
        worker.send(Frame("end"))

    def _moved(self) -> Moved:
        local = [c for c in self._connections.values() if not c.remote]
        remote = [c for c in self._connections.values() if c.remote]
        return Moved(
            copied_in=sum(c.received for c in local),
            across=sum(c.received + c.sent for c in remote),
            copied_out=sum(c.sent for c in local),
        )


def main(job_json: str, path: str) -> None:
    """The controller's process: one step, then its counters, then the end."""
    from bench.processes import die_with

    job = msgspec.json.decode(job_json, type=Job)
    die_with(job.parent)
    moved = Controller(job, path).run()
    Path(path).unlink(missing_ok=True)
    emit("done", moved=msgspec.to_builtins(moved))


if __name__ == "__main__":
    main(*sys.argv[1:3])
