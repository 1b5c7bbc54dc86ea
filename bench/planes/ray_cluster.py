"""A Ray cluster for one run: one node per host, and an actor that knows where values are.

Each host has a node as a service; its processes, object store and actors are below it and end with
it. On the first host `python -m bench.planes.ray_cluster JSON` is the driver that makes the actors.
Without links, hosts are raylets at different loopback addresses, and objects cross over TCP. Ray is
imported where it is used, so that the bench runs without it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import msgspec

from bench.machine import memory_bytes
from bench.peers import FIRST, free_ports
from bench.planes.base import Job, Service
from bench.processes import die_with, emit, leashed

NAMESPACE = "bench"
BOARD = "board"
_CPUS = 4  # a raylet's logical processors: TransferQueue's controller and units take one each
_START_S = 120.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # otherwise Ray reads this user's token file of another cluster
    "RAY_gcs_server_port_wait_time_s": f"{_START_S:.0f}",  # 20 s, and a busy machine takes longer
    "RAY_NUM_REDIS_GET_RETRIES": f"{_START_S / 2:.0f}",  # of 2 s each, for the first node
}
"""Environment variables of every process here."""
_PAUSE_S = 0.05
_SMALLEST_STORE = 80 << 20  # Ray takes no less than 75 MiB
_OWN_SHARE = 0.3  # of a host's memory: what Ray's store takes by itself


def place(job: Job, host: int) -> str:
    """Return the address of a host. No host gets 127.0.0.1, because Ray replaces it."""
    return job.address_of(host) if job.link else f"127.0.0.{host + 2}"


def store_bytes(job: Job) -> int:
    """The size of each node's object store: with a limit, as large as a peer's arena, else Ray's
    own choice for the node's part of this machine."""
    if job.memory_limit_bytes:
        return max(_SMALLEST_STORE, job.arena_bytes)
    return max(int(_OWN_SHARE * memory_bytes()) // job.hosts, job.arena_bytes)


def services(job: Job, units: int = 0, env: dict[str, str] | None = None) -> list[Service]:
    """One node per host, and `ray`, which reports when the cluster is ready and when the job is
    over. units: storage units of TransferQueue; 0: none."""
    port = free_ports(1)[0]
    settings = ENVIRONMENT | (env or {})
    spec = msgspec.json.encode(job).decode()
    driver = [sys.executable, "-m", "bench.planes.ray_cluster", spec, str(port), str(units)]
    started = [
        Service(f"ray-host{host}", leashed(_node(job, host, port)), settings, host=host)
        for host in range(job.hosts)
    ]
    return [*started, Service("ray", driver, settings, speaks=True)]


def _node(job: Job, host: int, port: int) -> list[str]:
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    argv += [f"--node-ip-address={place(job, host)}", f"--num-cpus={_CPUS}"]
    argv += [f"--object-store-memory={store_bytes(job)}", "--disable-usage-stats"]
    # A separate folder: nodes that start at once in one folder may choose the same socket names.
    argv += [f"--temp-dir={job.folder}/ray{host}"]
    # Its own choice goes up to 19,999, and it refuses a head's port that lies among them.
    argv += [f"--max-worker-port={FIRST - 1}"]
    if host:
        return [*argv, f"--address={place(job, 0)}:{port}"]
    return [*argv, "--head", f"--port={port}", "--include-dashboard=false"]


def attach(address: dict[str, Any]) -> tuple[Any, Any]:
    """Make this process a driver on its host's raylet; returns Ray and the board."""
    os.environ |= ENVIRONMENT
    ray = _connected(address["cluster"], address["place"])
    return ray, ray.get_actor(BOARD)


def _connected(address: str, place: str) -> Any:
    import ray

    told = {"address": address, "_node_ip_address": place, "namespace": NAMESPACE}
    ray.init(**told, log_to_driver=False, logging_level="WARNING")
    return ray


def main(job: Job, port: int, units: int) -> None:
    """Run the driver, with the board and perhaps TransferQueue, until the job is over."""
    from bench.planes.ray_store import Board

    deadline, address = time.monotonic() + _START_S, f"{place(job, 0)}:{port}"
    ray = _connected(address, place(job, 0))
    while sum(one["Alive"] for one in ray.nodes()) < job.hosts:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{job.hosts} Ray nodes did not start within "
                f"{_START_S:.0f} s: use fewer hosts, or end other programs"
            )
        time.sleep(_PAUSE_S)
    actor = ray.remote(Board).options(name=BOARD, num_cpus=0)
    board = actor.remote([len(job.of_step(step)) for step in range(job.steps)])
    ray.get(board.ready.remote())
    if units:
        import transfer_queue
        from omegaconf import OmegaConf

        backend = {"SimpleStorage": {"num_data_storage_units": units}}
        transfer_queue.init(OmegaConf.create({"backend": backend}))
    emit("ready", cluster=address)
    ray.get(board.finished.remote())
    emit("done")
    threading.Event().wait()  # workers still disconnect; the runner ends this process after them


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Job)
    die_with(given.parent)
    main(given, *map(int, sys.argv[2:]))
