"""Peers on this machine, each of which stands for a host: started, awaited, damaged, ended.

Tests, `deploy/testbed` and the bench start their peers with this module. It imports `dataplane`
only where it needs it, because the other planes of the bench run without it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.peers import free_addresses, peer_command, token_file
from bench.processes import leashed, run_folder

if TYPE_CHECKING:
    from dataplane import Plane

END_S = 40.0
"""A peer that has not ended so long after SIGINT hangs, however busy the machine is."""
START_S = 60.0
POLL_S = 0.01


class Failed(AssertionError):
    """What was waited for did not come in time, or a peer ended badly."""


def until(true: Callable[[], bool], what: str, seconds: float = 20.0) -> float:
    """Poll for something that no event tells, and return how long it took. Failed, with `what`."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > seconds:
            raise Failed(f"not within {seconds:g} s: {what}")
        time.sleep(POLL_S)
    return time.monotonic() - began


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Variables of this process, and of those that it starts, while the body runs."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def members(plane: Plane) -> list[str]:
    """Addresses of the peers in the roster, as the peer of this client has them."""
    found: list[str] = plane.stats()["roster"]["members"]
    return found


def in_sync(plane: Plane, seconds: float = START_S) -> None:
    """Wait until every peer of the plane has a backup that has all it has."""
    until(lambda: plane.stats()["roster"]["unprotected"] == 0, "all backups are in sync", seconds)


@dataclass
class Cluster:
    """The peers of one run.

    run_dir: where their sockets and logs are; clients look there too ($DATAPLANE_RUN_DIR).
    options: what every peer is started with. leash: peers are killed when this process dies.
    addresses: by name, of peers that listen. seeds: what they are told as `--seeds`.
    """

    run_dir: Path
    run: str = "test"
    arena: str = "256MiB"
    options: Sequence[str] = ()
    leash: bool = False
    addresses: dict[str, str] = field(default_factory=dict)
    seeds: list[str] = field(default_factory=list)
    peers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _more: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def seed(self, *names: str) -> None:
        """Peers of these names have addresses from now on, and are the seeds of one roster."""
        self.seeds = free_addresses(len(names))
        self.addresses |= zip(names, self.seeds, strict=True)

    def launch(self, name: str, *more: str) -> None:
        """Start a peer, and do not wait until it serves. more: options of this one."""
        self._more[name] = more
        found = ["--arena", self.arena]
        if name in self.addresses:
            found += ["--listen", self.addresses[name], "--seeds", ",".join(self.seeds)]
        self.spawn(name, peer_command(name, self.run, *found, *self.options, *more))

    def spawn(self, name: str, command: list[str]) -> None:
        """Run a peer's command line; its log is `name`.log."""
        with self._log(name).open("ab") as log:
            self.peers[name] = subprocess.Popen(
                leashed(command) if self.leash else command,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )

    def start_all(self, *names: str) -> None:
        """Start peers that are seeds of one roster, and wait until all serve."""
        self.seed(*names)
        for name in names:
            self.launch(name)
        for name in names:
            self.await_up(name)

    def start_one(self, name: str, *more: str) -> None:
        self.launch(name, *more)
        self.await_up(name)

    def restart(self, name: str) -> None:
        """Kill a peer with -9 and start it again as it was, at the same address."""
        self.kill(name)
        self.start_one(name, *self._more[name])

    def await_up(self, name: str) -> None:
        """Wait until clients can connect to a peer. Failed, with its log, where it ended."""
        path = self.run_dir / self.run / f"{name}.sock"
        until(lambda: self.is_up(name, path), f"peer {name} is up", START_S)

    def is_up(self, name: str, path: Path) -> bool:
        """Whether the door at this path is open."""
        if (code := self.peers[name].poll()) is not None:
            raise Failed(f"peer {name} ended with {code}:\n{self.log(name)}")
        with socket.socket(socket.AF_UNIX) as door:
            return door.connect_ex(str(path)) == 0

    def connect(self, name: str, devices: str | None = None) -> Plane:
        import dataplane

        return dataplane.connect(name, run=self.run, devices=devices)

    def kill(self, name: str) -> None:
        self.peers[name].kill()
        self.peers[name].wait()

    def freeze(self, name: str) -> None:
        self.peers[name].send_signal(signal.SIGSTOP)

    def wake(self, name: str) -> None:
        self.peers[name].send_signal(signal.SIGCONT)

    def log(self, name: str) -> str:
        return self._log(name).read_text()

    def _log(self, name: str) -> Path:
        return self.run_dir / f"{name}.log"

    def keeper(self) -> str:
        """The peer that said last that it keeps the roster; "" where none did."""
        line = r"^(\S+ \S+) .*is now the roster keeper"
        said = {
            match[1]: name
            for name in self.peers
            for match in re.finditer(line, self.log(name), re.M)
        }
        return said[max(said)] if said else ""

    def stop(self) -> None:
        """End all in good order. Failed where one hangs, ended badly, or logged a traceback."""
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
            if code not in (0, -signal.SIGKILL) or "Traceback" in self.log(name):
                raise Failed(f"peer {name} ended with {code}\n{self.log(name)}")

    def end(self) -> None:
        """Kill all: they were damaged, and how they end shows nothing."""
        for peer in self.peers.values():
            peer.kill()  # also where it is stopped
            peer.wait()


@contextmanager
def running(
    names: Sequence[str], run: str, arena: str, *options: str, token: bool = False
) -> Iterator[Cluster]:
    """Peers of a run directory of their own, which serve and have backups in sync; killed when the
    body or this process ends. One alone does not listen. token: they have a cluster token."""
    with ExitStack() as stack:
        folder = stack.enter_context(run_folder())
        variables = {"DATAPLANE_RUN_DIR": str(folder)}
        if token:
            variables["DATAPLANE_TOKEN_FILE"] = str(token_file(folder))
        stack.enter_context(environment(**variables))
        cluster = Cluster(folder, run, arena, options, leash=True)
        stack.callback(cluster.end)
        if len(names) == 1:
            cluster.start_one(names[0])
        else:
            cluster.start_all(*names)
            with cluster.connect(names[0]) as plane:
                until(lambda: len(members(plane)) == len(names), "all are members", START_S)
                in_sync(plane)
        yield cluster


@contextmanager
def clients(
    names: Sequence[str],
    arena: str,
    *options: str,
    token: bool = False,
    devices: str | None = None,
) -> Iterator[list[Plane]]:
    """A client of each of these peers (see `running`). devices: as `connect` takes it."""
    run = f"perf-{os.getpid()}-{len(names)}"
    with running(names, run, arena, *options, token=token) as cluster, ExitStack() as stack:
        found = [cluster.connect(name, devices) for name in names]
        for client in found:
            stack.callback(client.close)
        yield found
