"""Real peers and real stage workers, as processes of their own."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

import dataplane
from bench.peers import free_addresses, peer_command
from tests import cluster as peers
from tests.cluster import environment, in_sync, until
from tests.leaks import FAILED

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


@pytest.fixture(scope="module")
def peer() -> Iterator[Cluster]:
    """The only peer of a plane, for the tests of a file one after the other."""
    with running("a") as started:
        yield started


@pytest.fixture(scope="module")
def two_peers() -> Iterator[Cluster]:
    """The peers of a plane of two hosts, likewise."""
    with running("a", "b") as started:
        yield started


@pytest.fixture
def alone(peer: Cluster, no_launcher: None, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """`peer` for one test. What the test leaves there goes with it."""
    with lent(peer, request.node):
        yield peer


@pytest.fixture
def pair(
    two_peers: Cluster, no_launcher: None, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """`two_peers` for one test, likewise."""
    with lent(two_peers, request.node):
        yield two_peers


@pytest.fixture
def plane(alone: Cluster) -> Iterator[dataplane.Plane]:
    """A client of the only peer of a plane."""
    with alone.connect("a") as connected:
        yield connected


@contextmanager
def lent(cluster: Cluster, test: pytest.Item) -> Iterator[None]:
    with environment(DATAPLANE_RUN_DIR=str(cluster.run_dir)):
        yield
        cluster.end_workers()
        with contextlib.ExitStack() as clients, contextlib.ExitStack() as ignored:
            planes = [clients.enter_context(cluster.connect(name)) for name in cluster.peers]
            if test.stash.get(FAILED, False):  # its traceback keeps what it had
                ignored.enter_context(contextlib.suppress(AssertionError))
            drop_everything(*planes)


def drop_everything(*planes: dataplane.Plane) -> None:
    """What a test leaves behind goes, and every byte with it (but for cached copies)."""
    for name in planes[0].partitions():
        planes[0].partition(name).drop()

    def empty(plane: dataplane.Plane) -> bool:
        if not held(plane):
            return True
        gc.collect()  # views that only a cycle holds
        return False

    for plane in {plane.peer: plane for plane in planes}.values():
        with contextlib.suppress(AssertionError):
            until(partial(empty, plane), "everything came back", 5)
        assert not held(plane), f"peer {plane.peer} still holds {held(plane)}"


def held(plane: dataplane.Plane) -> dict[str, int]:
    """What a peer holds beyond its cache, waits for, or has leased; without what is 0."""
    stats = plane.stats()
    arena = stats["arena"]
    found = {name: arena[name] for name in ("quarantined_bytes", "pinned_bytes")}
    found |= {name: stats[name] for name in ("waiting_claims", "waiting_puts")}
    found["partitions"] = len(stats["partitions"])
    found["used_bytes"] = arena["used_bytes"] - arena["cached_bytes"]
    return {name: amount for name, amount in found.items() if amount}


@contextmanager
def running(
    *names: str,
    alone: str = "",
    arena: str = "256MiB",
    arenas: dict[str, str] | None = None,
    metrics: dict[str, str] | None = None,
) -> Iterator[Cluster]:
    """Peers for as long as the body runs: `names` are one plane, `alone` has none beside it."""
    with tempfile.TemporaryDirectory(prefix="dp-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATAPLANE_RUN_DIR", folder)
        cluster = Cluster(Path(folder))
        try:
            if alone:
                cluster.start(alone, arena=arena)
            cluster.start(*names, arena=arena, arenas=arenas, metrics=metrics)
            yield cluster
        finally:
            cluster.stop()


def line(worker: subprocess.Popen[str]) -> str:
    """The next line that a worker prints; fails when it ended instead."""
    assert worker.stdout is not None
    text = worker.stdout.readline()
    assert text, f"the worker ended with {worker.wait(10)}"
    return text.strip()
