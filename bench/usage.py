"""What each process takes: processor seconds, and memory, sampled about ten times a second.

A process counts with its proportional set size without shared memory. Arenas (memfds, and Ray's
object stores in /dev/shm) count once, for the first process that has them, with their resident
pages. RSS is never summed. A host with a limit counts with what the kernel charges it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bench.limits import HostCgroup

INTERVAL_S = 0.1
_REST = 9  # times what a look at the processes took, before the next one
_MAX_POINTS = 2_000  # of a curve; a longer run keeps every second one, and so on
_ARENAS = ("/memfd:", "/dev/shm/plasma")
_NATIVE = ("raylet", "gcs_server")  # Ray's own programs; its actors call themselves ray::Name


def process_bytes(pid: int) -> int:
    """Private and file-backed PSS of a process; 0 once it has exited."""
    try:
        with Path(f"/proc/{pid}/smaps_rollup").open() as rollup:
            fields = dict(line.split(":", 1) for line in rollup if ":" in line and "kB" in line)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    kilobytes = {name: int(value.split()[0]) for name, value in fields.items()}
    return max(0, kilobytes.get("Pss", 0) - kilobytes.get("Pss_Shmem", 0)) * 1024


def memfds(pid: int) -> dict[tuple[int, int], int]:
    """Memory files that a process has open: (device, inode) → bytes of pages that exist."""
    held: dict[tuple[int, int], int] = {}
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed in between
                if str(descriptor.readlink()).startswith(_ARENAS):
                    stat = descriptor.stat()
                    held[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return held


def descendants(pid: int) -> list[int]:
    """Child processes and all their descendants, as far as the kernel lists them."""
    found = [pid]
    for parent in found:  # grows while it is walked
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return found[1:]


class Sampler:
    """Records the curve and the peak of every process and arena."""

    def __init__(
        self, pids: Callable[[], dict[str, int]], limits: Sequence[HostCgroup] = ()
    ) -> None:
        self._pids = pids
        self._limits = limits
        self._stop = threading.Event()
        self._looking = threading.Lock()  # `sample` is also called by others
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._points: list[tuple[float, dict[str, int], list[int]]] = []
        self._latest: dict[str, int] = {}
        self._processes_due = 0.0
        self._interval_s = INTERVAL_S
        self.peak_bytes: dict[str, int] = {}
        self.peak_host_bytes = [0] * len(limits)
        self.sampling_seconds = 0.0  # of a processor

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def curve(self, start: float) -> dict[str, Any]:
        """Bytes over the seconds since `start` (monotonic): a list a process and a limited host.

        None where a process did not run; processes are looked at less often where that is dear, and
        keep their figure until the next time. `hosts` is what the kernel charged each host for.
        """
        names = sorted({name for _, now, _ in self._points for name in now})
        return {
            "seconds": [round(at - start, 3) for at, _, _ in self._points],
            "processes": {name: [now.get(name) for _, now, _ in self._points] for name in names},
            "hosts": [
                [held[host] for _, _, held in self._points] for host in range(len(self._limits))
            ],
        }

    def _run(self) -> None:
        while True:
            start, worked = time.monotonic(), time.thread_time()
            self.sample(processes=start >= self._processes_due)
            cost = time.monotonic() - start
            self.sampling_seconds += time.thread_time() - worked
            if self._stop.wait(max(self._interval_s - cost, 0)):
                return

    def sample(self, processes: bool = True) -> None:
        """Sample the hosts' counters and, unless told not to, all processes."""
        with self._looking:
            held = [limit.held_bytes() for limit in self._limits]
            self.peak_host_bytes = list(map(max, held, self.peak_host_bytes))
            if processes:
                start = time.monotonic()
                self._look()
                end = time.monotonic()
                # Walking the page tables of many gigabytes takes time that belongs to the run.
                self._processes_due = end + _REST * (end - start)
            self._points.append((time.monotonic(), self._latest, held))
            if len(self._points) > _MAX_POINTS:
                self._points = self._points[::2]
                self._interval_s *= 2

    def _look(self) -> None:
        """Every process, with its descendants under its name."""
        arenas: dict[tuple[int, int], tuple[str, int]] = {}
        now: dict[str, int] = {}
        for name, pid in self._pids().items():
            now[name] = 0
            for member in (pid, *descendants(pid)):
                now[name] += process_bytes(member)
                for arena, nbytes in memfds(member).items():
                    arenas.setdefault(arena, (f"arena of {name}", nbytes))
        for owner, nbytes in arenas.values():
            now[owner] = now.get(owner, 0) + nbytes
        self._latest = now
        for name, nbytes in now.items():
            self.peak_bytes[name] = max(nbytes, self.peak_bytes.get(name, 0))


def cpu_seconds(members: Mapping[str, int]) -> dict[str, float]:
    """User and system seconds so far of these processes and their descendants, ended ones too.

    The names are those of actors' classes, of Ray's own programs, or else of the members.
    """
    spent = Counter[str]()
    for name, pid in members.items():
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    spent[_name(process, name)] += sum(process.cpu_times()[:4])  # of ended ones too
    return dict(spent)


def _name(process: psutil.Process, member: str) -> str:
    program = Path((process.cmdline() or [member])[0]).name
    if program.startswith("ray::"):
        return program.removeprefix("ray::").split("(")[0].split(".")[0]
    return program if program in _NATIVE else member


def between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds by name since `before`."""
    return {name: max(0.0, spent - before.get(name, 0.0)) for name, spent in after.items()}


def machine_seconds() -> float:
    """Processor seconds that all processes of this machine, and its hypervisor, have used."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
