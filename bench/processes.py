"""The processes and files of a run: started together, watched, and always removed.

Each process has its own session and log file, and asks the kernel to be killed when the runner
dies. No process outlives a run, even if the runner was killed with -9. A process tells the runner
events: one JSON object per line, on stdout.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

_PR_SET_PDEATHSIG = 1
_TICK_S = 0.1
_LOG_LINES = 12
_FAREWELL_S = 5.0
_DYING_S = 2.0
_CHECKOUT = Path(__file__).resolve().parent.parent
_FOLDER = "bench-"
_LOCK = "lock"
_emitting = threading.Lock()


class ProcessDied(RuntimeError):
    def __init__(self, name: str, returncode: int, log: str, services: str = "") -> None:
        told = f"{name} ended with {_how(returncode)}; its last log lines:\n{log or '  (none)'}"
        super().__init__(told + services)
        self.returncode = returncode
        self.log = log


def _how(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"


@contextmanager
def run_folder() -> Iterator[Path]:
    """A folder for a run's sockets and logs, removed when the body ends. Also removes the folders
    of runners that were killed with -9, whose locks no process holds."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_LOCK}"):
        with suppress(OSError), lock.open() as left:  # OSError: its runner lives, or removes it
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as name, Path(name, "new").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        Path(held.name).rename(Path(name, _LOCK))  # others see it only when it is locked
        yield Path(name)


def emit(event: str, **details: Any) -> None:
    """Write one event. Any other output of a process goes to stderr, which is its log."""
    line = msgspec.json.encode({"event": event, **details}) + b"\n"
    with _emitting:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse the event of a line, or return None for any other line."""
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies. Called in a child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        raise SystemExit("the runner has ended")


@dataclass(slots=True)
class Member:
    """One process. `done`: it has reported that it finished, so it may exit."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    speaks: bool
    pending: bytes = b""
    done: bool = False

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LOG_LINES:])


@dataclass(slots=True)
class Crew:
    """All processes of one run. A context manager that ends them, however it is left."""

    folder: Path
    members: dict[str, Member] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __enter__(self) -> Crew:
        return self

    def start(
        self,
        name: str,
        argv: Iterable[str],
        env: Mapping[str, str] | None = None,
        speaks: bool = True,
    ) -> None:
        """Start a process. One that speaks writes events to stdout; stderr is its log."""
        log = self.folder / f"{name}.log"
        path = os.pathsep.join(filter(None, [str(_CHECKOUT), os.environ.get("PYTHONPATH")]))
        with log.open("wb") as out:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if speaks else out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": path, **(env or {})},
                start_new_session=True,
            )
        self.members[name] = member = Member(name, process, log, speaks)
        if process.stdout:
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ, member)

    def pids(self) -> dict[str, int]:
        return {
            m.name: m.process.pid
            for m in list(self.members.values())
            if m.process.returncode is None
        }

    def account(self) -> str:
        """The processes that were stopped by SIGSTOP or a debugger, and the ends of all logs."""
        import psutil  # imported here: workers start faster without it

        states = {name: psutil.Process(pid).status() for name, pid in self.pids().items()}
        stopped = [name for name, state in states.items() if state in ("stopped", "tracing-stop")]
        told = [f"\n{name} is suspended, and nothing has resumed it" for name in stopped]
        return "".join(told) + _logs(self.members.values())

    def endings(self, killed: bool) -> list[str]:
        """A sentence for each process that exited early, or with an exit code other than 0. killed:
        the kernel killed one, which takes a moment to exit if it has gigabytes."""
        deadline, members = time.monotonic() + _DYING_S, self.members.values()
        if killed:
            while all(m.process.poll() != -signal.SIGKILL for m in members):
                if time.monotonic() > deadline:
                    break
                time.sleep(_TICK_S / 10)
        ended = [m for m in members if m.process.poll() is not None]
        return [
            f"{m.name} ended with {_how(m.process.returncode)}"
            for m in ended
            if m.process.returncode or not m.done
        ]

    def tell(self, name: str, line: str) -> None:
        """Send a worker the line that it waits for."""
        stdin = self.members[name].process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # dead already: the next events() says so
            stdin.write(f"{line}\n".encode())
            stdin.flush()

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """The events of one tick. Raises ProcessDied if a process exited early."""
        said: list[tuple[str, dict[str, Any]]] = []
        ended = [m for m in self.members.values() if m.process.poll() is not None]
        timeout = 0 if any(not m.done for m in ended) else _TICK_S
        for key, _ in self._selector.select(timeout):
            said += self._read(key.data)
        # These ended before the read, so all of their events have been read by now.
        for member in ended:
            code = member.process.returncode
            if code or not member.done:
                # A worker's error often has its cause in what the plane's services logged.
                services = [m for m in self.members.values() if not m.speaks and m is not member]
                raise ProcessDied(member.name, code, member.tail(), _logs(services))
        return said

    def _read(self, member: Member) -> list[tuple[str, dict[str, Any]]]:
        stdout = member.process.stdout
        assert stdout is not None
        said: list[tuple[str, dict[str, Any]]] = []
        while chunk := stdout.read(1 << 20):
            *lines, member.pending = (member.pending + chunk).split(b"\n")
            said += [(member.name, event) for line in lines if (event := _parse(line))]
        if chunk == b"":
            self._selector.unregister(stdout)
        member.done |= any(event["event"] == "done" for _, event in said)
        return said

    def __exit__(self, *_: object) -> None:
        """End all processes: interrupt services that write no events, then kill every session."""
        running = [m for m in self.members.values() if m.process.returncode is None]
        services = [m for m in running if not m.speaks]
        for member in services:
            # Not Popen.terminate: it reaps, and the pid could then be another process's below.
            os.kill(member.process.pid, signal.SIGINT)
        deadline = time.monotonic() + _FAREWELL_S
        while not all(_is_zombie(m) for m in services) and time.monotonic() < deadline:
            time.sleep(_TICK_S / 10)
        for member in running:  # the whole session: a service's own children too
            with suppress(ProcessLookupError):
                os.killpg(member.process.pid, signal.SIGKILL)
        for member in running:
            member.process.wait()
        for member in self.members.values():
            for stream in (member.process.stdin, member.process.stdout):
                if stream:
                    with suppress(BrokenPipeError):
                        stream.close()
        self._selector.close()


def _logs(members: Iterable[Member]) -> str:
    return "".join(f"\n{m.name}:\n{tail}" for m in members if (tail := m.tail()))


def _is_zombie(member: Member) -> bool:
    ended = os.waitid(os.P_PID, member.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended is not None


def leashed(argv: list[str]) -> list[str]:
    """A command line that runs another program under `die_with`."""
    return [sys.executable, "-m", "bench.processes", str(os.getpid()), *argv]


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
