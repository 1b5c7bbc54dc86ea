"""This project's plane: one peer a host, workers attached to their own host's peer.

Several peers on one machine stand for several hosts: they share no memory, and bytes between them
go over TCP. Only the public surface is used; `dataplane` is imported where it is needed, so that
workers of other planes do not load it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from bench.columns import DEDUP, Array
from bench.peers import free_ports, peer_command, token_file
from bench.planes.base import Batch, Columns, Endpoint, Job, Moved, Plane, Service, Worker
from bench.processes import leashed


def _connect(address: dict[str, Any]) -> Any:
    import dataplane

    os.environ["DATAPLANE_RUN_DIR"] = address["run_dir"]
    return dataplane.connect(address["peer"], run=address["plane"])


class DataplaneBatch(Batch):
    def __init__(self, batch: Any) -> None:
        self.claimed = batch

    def column(self, field: str) -> Sequence[Array]:
        values: Sequence[Array] = self.claimed[field]
        return values

    def add(self, columns: Columns) -> None:
        self.claimed.add(**columns)

    def drop(self, prompts: Collection[int]) -> None:
        self.claimed.drop(groups=list(prompts))


class DataplaneEndpoint(Endpoint):
    def __init__(self, worker: Worker) -> None:
        job = worker.job
        self._plane = _connect(worker.address)
        self._job = job
        self._partition = cache(self._declared)
        self._dedup = [name for name in DEDUP if job.dedup]
        self._partition(0)  # the start signal comes when all workers have attached to it

    def _declared(self, step: int) -> Any:
        job = self._job
        return self._plane.partition(
            f"step-{step}", stages=job.stages(), group_size=job.samples, free="acked"
        )

    def put(self, step: int, prompt: int, columns: Columns) -> None:
        shared = [name for name in self._dedup if name in columns]
        self._partition(step).put(dict(columns), group=prompt, dedup=shared)

    def batches(self, step: int, stage: str) -> Iterator[Batch]:
        # A trainer takes one group at a time, see `flow`.
        least, most = (1, 1) if stage == "train" else self._job.groups_per_claim(stage)
        for batch in self._partition(step).stream(stage, groups=most, min=least):
            yield DataplaneBatch(batch)
            del batch  # free its memory before the wait for the next batch

    def close(self) -> None:
        self._plane.close()


class DataplanePlane(Plane):
    """The runner's side: `dataplane peer` processes, and a client of each for its counters."""

    endpoint = DataplaneEndpoint

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._plane_name = f"bench-{job.parent}"
        ports = enumerate(free_ports(job.hosts))
        self._addresses = [f"tcp://{job.address_of(host)}:{port}" for host, port in ports]
        self._token = str(token_file(Path(job.folder))) if job.link else None
        self._clients: list[Any] = []

    def services(self) -> list[Service]:
        env = {"DATAPLANE_RUN_DIR": self.job.folder}
        env |= {"DATAPLANE_TOKEN_FILE": self._token} if self._token else {}
        shared = ["--seeds", ",".join(self._addresses), "--arena", str(self.job.arena_bytes)]
        services = []
        for host, address in enumerate(self._addresses):
            argv = peer_command(f"host{host}", self._plane_name, "--listen", address, *shared)
            services.append(Service(f"peer-host{host}", leashed(argv), env, host=host))
        return services

    def reachable(self, ready: Mapping[str, Any]) -> bool:
        """Connects to the peers one by one; each that answers is kept for its counters."""
        from dataplane.errors import ConnectError

        while len(self._clients) < self.job.hosts:
            try:
                self._clients.append(_connect(self.address(len(self._clients), ready)))
            except ConnectError:
                return False
        return True

    def address(self, host: int, ready: Mapping[str, Any]) -> dict[str, Any]:
        return {"peer": f"host{host}", "plane": self._plane_name, "run_dir": self.job.folder}

    def moved(self, done: Mapping[str, dict[str, Any]]) -> Moved:
        """Bytes that peers pulled from each other, or got with a grant."""
        stats = [client.stats() for client in self._clients]
        return Moved([int(told["pulled_bytes"]) + int(told["carried_bytes"]) for told in stats])

    def rolled(self, step: int) -> None:
        self._clients[0].partition(f"step-{step}").seal()

    def close(self) -> None:
        for client in self._clients:
            with suppress(Exception):  # its peer may be what died
                client.close()
