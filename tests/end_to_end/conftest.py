"""Real peers and real stage workers, as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import dataplane
from bench.peers import free_addresses, peer_command
from tests import cluster as peers
from tests.cluster import in_sync, until

__all__ = ["free_addresses", "in_sync", "peer_command", "until"]
PLANE = "test"


@dataclass
class Cluster(peers.Cluster):
    """Peers of one plane, each a "host" of its own, and workers attached to them."""

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
        if len(names) > 1:
            self.seed(*names)
        for name in names:
            options = ["--arena", (arenas or {}).get(name, arena)]
            options += ["--spill", spill] if spill else []
            options += ["--metrics", metrics[name]] if metrics and name in metrics else []
            options += ["--bulk-tls"] if name in tls else []
            options += ["--device-arena", devices[name]] if devices and name in devices else []
            self.launch(name, *options)
        for name in names:
            self.await_up(name)

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
        super().stop()


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
