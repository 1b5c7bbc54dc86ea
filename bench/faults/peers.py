"""Peers of one plane on this machine, with a cluster token, for as long as a body runs.

The first of them keeps the roster, or etcd does, and then any of them may be its authority.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import dataplane
from bench.ports import free_addresses
from bench.processes import leashed
from dataplane import Plane
from dataplane.launch.token import new_token

PLANE = "faults"
KEEPER, OTHER, VICTIM = NAMES = ("a", "b", "c")
START_S = 60.0
ARENA = "128MiB"


class NeverCame(Exception):
    """What a scenario waited for did not come about in time."""


def until(true: Callable[[], bool], what: str, seconds: float) -> float:
    """Wait for it, and return how long that took. NeverCame."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > seconds:
            raise NeverCame(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - began


@dataclass(slots=True)
class Peers:
    """Each is a host of its own, with its own arena. roster: as `--roster` takes it, or ""."""

    folder: Path
    addresses: dict[str, str]
    roster: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "dataplane", "peer", "--name", name, "--run", PLANE]
        command += ["--arena", ARENA, "--listen", self.addresses[name]]
        command += ["--seeds", ",".join(self.addresses.values())]
        command += ["--roster", self.roster] if self.roster else []
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(leashed(command), stdout=log, stderr=log)

    def connect(self, name: str) -> Plane:
        return dataplane.connect(name, run=PLANE)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def freeze(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)

    def wake(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)

    def is_up(self, name: str) -> bool:
        if self.processes[name].poll() is not None:
            raise NeverCame(f"peer {name} ended:\n{self._log(name)}")
        try:
            with socket.socket(socket.AF_UNIX) as door:
                door.connect(str(self.folder / "run" / PLANE / f"{name}.sock"))
        except OSError:
            return False
        return True

    def authority(self) -> str:
        """Which of them makes the rosters now: who said so last."""
        said = {
            match[1]: name
            for name in self.processes
            for match in re.finditer(
                r"^(\S+ \S+) .*is now the roster keeper", self._log(name), re.M
            )
        }
        return said[max(said)]

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@contextmanager
def three_peers(roster: str = "") -> Iterator[Peers]:
    with several_peers(NAMES, roster) as peers:
        yield peers


@contextmanager
def several_peers(names: Sequence[str], roster: str = "") -> Iterator[Peers]:
    """With every backup in sync."""
    with tempfile.TemporaryDirectory(prefix="dp-") as name:
        folder = Path(name)
        token = folder / "token"
        token.touch(0o600)
        token.write_text(new_token())
        addresses = free_addresses(len(names))
        peers = Peers(folder, dict(zip(names, addresses, strict=True)), roster)
        with _environment(DATAPLANE_RUN_DIR=str(folder / "run"), DATAPLANE_TOKEN_FILE=str(token)):
            (folder / "run").mkdir(0o700)
            try:
                for peer in names:
                    peers.start(peer)
                for peer in names:
                    until(lambda peer=peer: peers.is_up(peer), f"peer {peer} is up", START_S)
                with peers.connect(KEEPER) as plane:
                    whole(plane, len(names))
                yield peers
            finally:
                peers.end()


def is_protected(plane: Plane) -> bool:
    return plane.stats()["roster"]["unprotected"] == 0


def whole(plane: Plane, count: int) -> None:
    """Waits until so many are members and every backup is in sync."""
    until(lambda: members(plane) == count, f"{count} are members", START_S)
    until(lambda: is_protected(plane), "every backup is in sync", START_S)


def members(plane: Plane) -> int:
    return len(plane.stats()["roster"]["members"])


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before: Mapping[str, str] = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]
