"""This project's plane: one peer a host, workers attached to their own host's peer.

Several peers on one machine stand for several hosts: they share no memory, and bytes between them
go over TCP. Only the public surface is used; `dataplane` is imported where it is needed, so that
the bench runs without it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from bench.columns import DEDUP
from bench.planes.base import Array, Batch, Columns, Endpoint, Job, Moved, Plane, Service, Worker
from bench.processes import leashed

_REWARD_ROWS = 64
_PARTITION = "step-0"


def _host_name(host: int) -> str:
    return f"host{host}"


def free_ports(count: int) -> list[int]:
    """Ports that are free now. All are held until all are known, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


class DataplanePlane(Plane):
    """The runner's side: `dataplane peer` processes, and a client of each for its counters."""

    name = "dataplane"
    dedup_variants = (True,)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._plane_name = f"bench-{job.parent}"
        self._addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(job.hosts)]
        self._clients: list[Any] = []

    def services(self) -> list[Service]:
        return [self._peer(host) for host in range(self.job.hosts)]

    def _peer(self, host: int) -> Service:
        options = {
            "--plane": self._plane_name,
            "--name": _host_name(host),
            "--listen": self._addresses[host],
            "--seeds": ",".join(self._addresses),
            "--arena": str(self.job.arena_bytes),
        }
        argv = [sys.executable, "-m", "dataplane", "peer"]
        for name, value in options.items():
            argv += [name, value]
        env = {"DATAPLANE_RUN_DIR": self.job.folder}
        return Service(f"peer-{_host_name(host)}", leashed(argv), env)

    def reachable(self, ready: Mapping[str, dict[str, Any]]) -> bool:
        """Connects to the peers one by one; each that answers is kept for its counters."""
        from dataplane.errors import ConnectError

        while len(self._clients) < self.job.hosts:
            try:
                self._clients.append(_connect(self.address(len(self._clients))))
            except ConnectError:
                return False
        return True

    def address(self, host: int) -> dict[str, Any]:
        return {"peer": _host_name(host), "plane": self._plane_name, "run_dir": self.job.folder}

    def moved(self, done: Mapping[str, dict[str, Any]]) -> Moved:
        """Clients copy into the arena and know what; peers pull; what is read is never copied."""
        return Moved(
            copied_in=sum(event["moved"]["copied_in"] for event in done.values()),
            across=sum(client.stats()["pulled_bytes"] for client in self._clients),
        )

    def close(self) -> None:
        for client in self._clients:
            with suppress(Exception):  # its peer may be what died
                client.close()

    @classmethod
    def attach(cls, worker: Worker) -> Endpoint:
        return DataplaneEndpoint(worker)


def _connect(address: dict[str, Any]) -> Any:
    import dataplane

    os.environ["DATAPLANE_RUN_DIR"] = address["run_dir"]
    return dataplane.connect(address["peer"], plane=address["plane"])


class DataplaneBatch(Batch):
    """A claimed batch."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.added = 0  # bytes

    def column(self, field: str) -> Sequence[Array]:
        values: Sequence[Array] = self._batch[field]
        return values

    def add(self, columns: Columns) -> None:
        self._batch.add(**columns)
        self.added += sum(value.nbytes for values in columns.values() for value in values)


class DataplaneEndpoint(Endpoint):
    """A worker's client."""

    def __init__(self, worker: Worker) -> None:
        job = worker.job
        self._plane = _connect(worker.address)
        self._partition = self._plane.partition(
            _PARTITION,
            stages=job.stages(),
            group_size=job.task.samples,
            groups=job.prompts,
            free="acked",
        )
        self._dedup = [name for name in DEDUP if job.dedup]
        self._samples = min(job.task.samples, _REWARD_ROWS)
        self._copied = 0

    def put(self, prompt: int, columns: Columns) -> None:
        shared = [name for name in self._dedup if name in columns]
        self._partition.put(dict(columns), group=prompt, dedup=shared)
        for name, values in columns.items():
            self._copied += sum(v.nbytes for v in (values[:1] if name in shared else values))

    def finish(self) -> None:
        """Nothing to do: the partition seals itself at its last group."""

    def batches(self, stage: str) -> Iterator[Batch]:
        many = {"groups": 1}
        if stage != "train":  # from one group's rows on: a full batch may never fit into the arena
            many = {"rows": _REWARD_ROWS, "min": self._samples}
        for batch in self._partition.stream(stage, **many):
            taken = DataplaneBatch(batch)
            yield taken
            self._copied += taken.added

    def moved(self) -> Moved:
        return Moved(copied_in=self._copied)

    def close(self) -> None:
        self._plane.close()
