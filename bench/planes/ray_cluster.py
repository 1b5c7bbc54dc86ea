"""A Ray cluster for one run: a node a host, and an actor that knows what is where.

Each host has a service (`python -m bench.planes.ray_cluster JSON`); its node's processes, object
store and actors are below it and end with it. Without links of their own, "hosts" are raylets at
different loopback addresses. Each has an object store of its own, and objects cross between them as
between machines, over TCP.
Ray is imported where it is used, so that the bench runs without it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec

from bench import links
from bench.peers import FIRST, free_ports
from bench.planes.base import Service
from bench.processes import die_with, emit, leashed

NAMESPACE = "bench"
BOARD = "board"
_CPUS = 4  # a raylet's logical processors: TransferQueue's controller and units take one each
_START_S = 120.0
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else a token file of another cluster of this user is asked for
    "RAY_gcs_server_port_wait_time_s": f"{_START_S:.0f}",  # 20 s, and a busy machine takes longer
    "RAY_NUM_REDIS_GET_RETRIES": f"{_START_S / 2:.0f}",  # of 2 s each, for the first node
}
"""Of every process here."""
_PAUSE_S = 0.05


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """What cluster to start. `storage_units`: TransferQueue's, 0 for a cluster without it."""

    hosts: int
    object_store_bytes: int
    folder: str
    parent: int
    groups: list[int] = []  # of each step of the job; without steps it runs until it is killed
    storage_units: int = 0
    port: int = 0
    host: int = 0  # whose node this process is about; the first also has the actors
    linked: bool = False  # whether hosts have links of their own

    def place(self, host: int) -> str:
        """A host's address. Of loopback 127.0.0.1 is none: Ray replaces it."""
        return links.address(host) if self.linked else f"127.0.0.{host + 2}"


def services(nodes: Nodes, env: dict[str, str] | None = None) -> list[Service]:
    """A service a host. The first, `ray`, says when the cluster stands and when the job is over."""
    whole = msgspec.structs.replace(nodes, port=free_ports(1)[0])
    settings = ENVIRONMENT | (env or {})
    started = []
    for host in range(nodes.hosts):
        spec = msgspec.json.encode(msgspec.structs.replace(whole, host=host)).decode()
        argv = [sys.executable, "-m", "bench.planes.ray_cluster", spec]
        name = f"ray-host{host}" if host else "ray"
        started.append(Service(name, argv, settings, speaks=host == 0, host=host))
    return started


def _node(nodes: Nodes, address: str) -> subprocess.Popen[bytes]:
    argv = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--disable-usage-stats",
    ]
    argv += [f"--node-ip-address={nodes.place(nodes.host)}", f"--num-cpus={_CPUS}"]
    argv += [f"--object-store-memory={nodes.object_store_bytes}"]
    # Of its own: nodes that start at once in one folder may take the same name for their sockets.
    argv += [f"--temp-dir={nodes.folder}/ray{nodes.host}"]
    # Its own choice goes up to 19,999, and it refuses a head's port that lies among them.
    argv += [f"--max-worker-port={FIRST - 1}"]
    if nodes.host == 0:
        argv += ["--head", f"--port={nodes.port}", "--include-dashboard=false"]
    else:
        argv += [f"--address={address}"]
    # This process's stdout is for events; what a node says there is advice. Errors go to the log.
    quiet = subprocess.DEVNULL
    return subprocess.Popen(leashed(argv), stdin=quiet, stdout=quiet)


def _connected(nodes: Nodes, address: str, node: subprocess.Popen[bytes]) -> None:
    """Wait until all nodes are alive; this process is a driver from the first on."""
    import ray

    deadline = time.monotonic() + _START_S
    _await_port(nodes, deadline, node)
    _init(address, nodes.place(0))
    while sum(one["Alive"] for one in ray.nodes()) < nodes.hosts:
        if time.monotonic() > deadline or node.poll() is not None:
            raise RuntimeError(
                f"{nodes.hosts} Ray nodes did not start within "
                f"{_START_S:.0f} s: use fewer hosts, or end other programs"
            )
        time.sleep(_PAUSE_S)


def _await_port(nodes: Nodes, deadline: float, node: subprocess.Popen[bytes] | None = None) -> None:
    """Until the cluster's first process listens. RuntimeError at the deadline, or if it ended."""
    place, port = nodes.place(0), nodes.port
    while True:
        try:
            socket.create_connection((place, port), timeout=1).close()
            return
        except OSError as exc:
            where = f"before listening on {place}:{port}"
            if node and node.poll() is not None:
                raise RuntimeError(
                    f"Ray's head node ended with exit code {node.returncode} {where}"
                ) from exc
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Ray's head node was not listening on {place}:{port} within {_START_S:.0f} s"
                ) from exc
        time.sleep(_PAUSE_S)


def attach(address: dict[str, Any]) -> Any:
    """Make this process a driver on its host's raylet; returns the board."""
    os.environ |= ENVIRONMENT
    import ray

    _init(address["cluster"], address["place"])
    return ray.get_actor(BOARD)


def _init(address: str, place: str) -> None:
    import ray

    ray.init(
        address=address,
        _node_ip_address=place,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="WARNING",
    )


def main(nodes: Nodes) -> None:
    """A service's life: a node; on the first host also the board and perhaps TransferQueue."""
    address = f"{nodes.place(0)}:{nodes.port}"
    if nodes.host:
        _await_port(nodes, time.monotonic() + _START_S)
        raise SystemExit(_node(nodes, address).wait())
    node = _node(nodes, address)
    try:
        _lead(nodes, address, node)
    finally:
        node.kill()  # what is below a node has asked the kernel to end with it
        node.wait()


def _lead(nodes: Nodes, address: str, node: subprocess.Popen[bytes]) -> None:
    """The first host's part: the actors, until the job is over."""
    import ray

    from bench.planes.ray_store import Board

    _connected(nodes, address, node)
    actor = ray.remote(Board).options(name=BOARD, num_cpus=0)
    board = actor.remote(nodes.groups)
    ray.get(board.ready.remote())
    if nodes.storage_units:
        import transfer_queue
        from omegaconf import OmegaConf

        backend = {"SimpleStorage": {"num_data_storage_units": nodes.storage_units}}
        transfer_queue.init(OmegaConf.create({"backend": backend}))
    emit("ready", cluster=address)
    ray.get(board.finished.remote())
    emit("done")
    threading.Event().wait()  # workers still say goodbye; the runner ends this after them


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Nodes)
    die_with(given.parent)
    main(given)
