"""Real peers and real stage workers, as processes of their own."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import dataplane
from bench.ports import free_addresses

__all__ = ["free_addresses"]
PLANE = "test"
END_S = 40
"""A peer that has not ended so long after SIGINT hangs, however busy the machine is."""


def until(true: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll for something that no event tells; fails with what it waited for."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        select.select([], [], [], 0.01)


@dataclass
class Cluster:
    """Peers of one plane, each a "host" of its own, and workers attached to them."""

    run_dir: Path
    peers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    workers: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self,
        *names: str,
        arena: str = "256MiB",
        arenas: dict[str, str] | None = None,
        spill: str = "",
        metrics: dict[str, str] | None = None,
        tls: tuple[str, ...] = (),
        devices: dict[str, str] | None = None,
    ) -> None:
        """Peers with these names, all of them seeds of one roster when there are several. arenas:
        of those that have another. spill: DIR:SIZE for all of them. metrics: HOST:PORT of those
        that show theirs. tls: those with --bulk-tls. devices: the device arenas of those that have
        some."""
        addresses = free_addresses(len(names))
        for name, address in zip(names, addresses, strict=True):
            command = [sys.executable, "-m", "dataplane", "peer", "--name", name]
            command += ["--run", PLANE]
            command += ["--arena", (arenas or {}).get(name, arena)]
            command += ["--spill", spill] if spill else []
            command += ["--metrics", metrics[name]] if metrics and name in metrics else []
            command += ["--bulk-tls"] if name in tls else []
            command += ["--device-arena", devices[name]] if devices and name in devices else []
            if len(names) > 1:
                command += ["--listen", address, "--seeds", ",".join(addresses)]
            self._run(name, command)
        for name in names:
            self._await(name)

    def restart(self, name: str) -> None:
        """Kill a peer with -9 and start it again, at the same address."""
        self.peers[name].kill()
        self.peers[name].wait()
        self._run(name, self.peers[name].args)  # type: ignore[arg-type]
        self._await(name)

    def _run(self, name: str, command: list[str]) -> None:
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        with open(self.run_dir / f"{name}.log", "ab") as log:
            self.peers[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _await(self, name: str) -> None:
        path = self.run_dir / PLANE / f"{name}.sock"
        until(lambda: self._is_up(name, path), f"peer {name} is up", 60.0)

    def _is_up(self, name: str, path: Path) -> bool:
        assert self.peers[name].poll() is None, (self.run_dir / f"{name}.log").read_text()
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))
        except OSError:
            return False
        return True

    def connect(self, name: str) -> dataplane.Plane:
        return dataplane.connect(name, run=PLANE)

    def worker(self, code: str, **env: str) -> subprocess.Popen[str]:
        """A stage worker that runs `code`; it prints what the test reads."""
        worker = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "DATAPLANE_RUN": PLANE, **env},
        )
        self.workers.append(worker)
        return worker

    def end_workers(self) -> None:
        """Those of one test, where a file shares the peers."""
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.kill()
            worker.communicate()
        self.workers.clear()

    def stop(self) -> None:
        self.end_workers()
        for peer in self.peers.values():
            peer.send_signal(signal.SIGCONT)
            peer.send_signal(signal.SIGINT)  # at once; SIGTERM would hand everything over first
        codes: dict[str, int | str] = {}
        for name, peer in self.peers.items():
            try:
                codes[name] = peer.wait(END_S)
            except subprocess.TimeoutExpired:
                peer.send_signal(signal.SIGABRT)  # its log says where each of its threads was
                codes[name] = f"{peer.wait()}, it had not ended {END_S} s after SIGINT"
        for name, code in codes.items():  # now that all have ended
            if code not in (0, -signal.SIGKILL):
                raise AssertionError(f"peer {name}: {code}\n{self.log(name)}")
            assert "Traceback" not in self.log(name), self.log(name)

    def log(self, name: str) -> str:
        return (self.run_dir / f"{name}.log").read_text()


@pytest.fixture
def cluster(run_dir: Path) -> Iterator[Cluster]:
    running = Cluster(run_dir)
    yield running
    running.stop()


@pytest.fixture
def plane(cluster: Cluster) -> Iterator[dataplane.Plane]:
    """A client of the only peer of a plane."""
    cluster.start("a")
    with cluster.connect("a") as connected:
        yield connected


def line(worker: subprocess.Popen[str]) -> str:
    """The next line that a worker prints; fails when it ended instead."""
    assert worker.stdout is not None
    text = worker.stdout.readline()
    assert text, f"the worker ended with {worker.wait(10)}"
    return text.strip()
