"""Peers on the hosts of a network, one each, with a cluster token, for as long as a body runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dataplane
from bench.links import Network
from bench.processes import leashed
from dataplane import Plane
from dataplane.launch.token import new_token

PLANE = "testbed"
PORT = 7101
ARENA = "64MiB"
PATIENCE_S = 60.0


class NeverCame(Exception):
    """What was waited for did not come about in time."""


def until(true: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> float:
    """Wait for it, and return how long that took. NeverCame."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > seconds:
            raise NeverCame(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - began


class Peers:
    """Peer `host0` keeps the roster. Clients reach them through files, whatever is cut."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        hosts = range(self.network.hosts)
        seeds = [f"tcp://{self.network.address(host)}:{PORT}" for host in hosts]
        for host in hosts:
            command = [sys.executable, "-m", "dataplane", "peer", "--name", name(host)]
            command += ["--run", PLANE, "--arena", ARENA, "--listen", seeds[host]]
            command += ["--seeds", ",".join(seeds)]
            argv = self.network.wrap(host, leashed(command))
            with (self._folder / f"{name(host)}.log").open("wb") as log:
                self._processes.append(subprocess.Popen(argv, stdout=log, stderr=log))
        for host in hosts:
            until(lambda host=host: self._answers(host), f"peer {name(host)} is up")
        with self.connect(0) as plane:
            until(lambda: is_protected(plane), "every backup is in sync")

    def connect(self, host: int) -> Plane:
        return dataplane.connect(name(host), run=PLANE)

    def log(self, host: int) -> str:
        return (self._folder / f"{name(host)}.log").read_text()

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _answers(self, host: int) -> bool:
        if self._processes[host].poll() is not None:
            raise NeverCame(f"peer {name(host)} ended:\n{self.log(host)}")
        with socket.socket(socket.AF_UNIX) as door:
            path = self._folder / "run" / PLANE / f"{name(host)}.sock"
            return door.connect_ex(str(path)) == 0


def name(host: int) -> str:
    return f"host{host}"


def is_protected(plane: Plane) -> bool:
    return bool(plane.stats()["roster"]["unprotected"] == 0)


def members(plane: Plane) -> list[str]:
    """Addresses, as the peer of this client has them."""
    found: list[str] = plane.stats()["roster"]["members"]
    return found


@contextmanager
def peers(network: Network) -> Iterator[Peers]:
    """A peer on every host, with every backup in sync."""
    with tempfile.TemporaryDirectory(prefix="dp-") as folder:
        token = Path(folder, "token")
        token.touch(0o600)
        token.write_text(new_token())
        Path(folder, "run").mkdir(0o700)
        os.environ["DATAPLANE_RUN_DIR"] = f"{folder}/run"
        os.environ["DATAPLANE_TOKEN_FILE"] = str(token)
        running = Peers(network, Path(folder))
        try:
            running.start()
            yield running
        finally:
            running.end()
