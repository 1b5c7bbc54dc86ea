"""How much memory each process of a run takes, sampled about ten times a second by the runner.

A process counts with its proportional set size without shared memory; arenas (memfds) count once,
with the pages that the kernel holds for them, whoever maps them. Never summed RSS.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

INTERVAL_S = 0.1
ARENA = "arena"


def process_bytes(pid: int) -> int:
    """Private and file-backed PSS of a process; 0 once it is gone."""
    try:
        with Path(f"/proc/{pid}/smaps_rollup").open() as rollup:
            fields = dict(line.split(":", 1) for line in rollup if ":" in line and "kB" in line)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    kilobytes = {name: int(value.split()[0]) for name, value in fields.items()}
    return max(0, kilobytes.get("Pss", 0) - kilobytes.get("Pss_Shmem", 0)) * 1024


def memfds(pid: int) -> dict[tuple[int, int], int]:
    """The memfds that a process has open: (device, inode) → bytes of pages that exist."""
    held: dict[tuple[int, int], int] = {}
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if str(descriptor.readlink()).startswith("/memfd:"):
                    stat = descriptor.stat()
                    held[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
            except FileNotFoundError:
                continue  # closed in between
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    return held


def children(pid: int) -> list[int]:
    """Child processes, where the kernel tells them."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in listed.split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


class Sampler:
    """Keeps the peak of every process, of the arenas and of their sum at one instant."""

    def __init__(self, pids: Callable[[], dict[str, int]]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self.peak_bytes: dict[str, int] = {}
        self.peak_total_bytes = 0
        self.samples = 0
        self.sampling_seconds = 0.0

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            start = time.monotonic()
            self.sample()
            cost = time.monotonic() - start
            self.sampling_seconds += cost
            # Walking the page tables of many gigabytes takes time that belongs to the run.
            if self._stop.wait(max(INTERVAL_S - cost, 9 * cost)):
                return

    def sample(self) -> None:
        """One look at all processes, and their children under their parent's name."""
        arenas: dict[tuple[int, int], int] = {}
        now: dict[str, int] = {}
        for name, pid in self._pids().items():
            now[name] = 0
            for member in (pid, *children(pid)):
                now[name] += process_bytes(member)
                arenas |= memfds(member)
        if arenas:
            now[ARENA] = sum(arenas.values())
        for name, nbytes in now.items():
            self.peak_bytes[name] = max(nbytes, self.peak_bytes.get(name, 0))
        self.peak_total_bytes = max(self.peak_total_bytes, sum(now.values()))
        self.samples += 1


def oom_kills() -> int:
    """How often the kernel's OOM killer has struck on this machine (memory cgroups included)."""
    try:
        with Path("/proc/vmstat").open() as counters:
            return next((int(x.split()[1]) for x in counters if x.startswith("oom_kill ")), 0)
    except FileNotFoundError:
        return 0
