"""What a test leaves behind: descriptors (sockets, memfds, pipes …), threads, child processes,
processes of its run directory, and files of ours in /dev/shm.

Runs in the test process, after every test. It looks at what is new since the test began, so what a
whole file or session shares is nobody's leak. What may stay is written down here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import uvloop

from dataplane.transport.witness import PROCESS_NAME

uvloop.new_event_loop().close()  # libuv keeps a pipe for signals from the first loop on
resource_tracker.ensure_running()  # multiprocessing starts it with its first process, and keeps it

FAILED = pytest.StashKey[bool]()
"""whether a test has failed already: its traceback keeps what it had"""

PATIENCE_S = 20.0
"""What ends on its own, such as a process that was killed, is waited for so long."""

SHARED_FILES = (
    "/dev/null",
    "/dev/urandom",
    "/proc/",
    "/sys/",
    os.path.join(sysconfig.get_path("purelib"), "matplotlib"),  # its fonts
)
"""Opened once by the interpreter or a library, and kept for all that follows."""
SHARED_THREADS = (
    "pyzmq-gc",  # frees messages that were sent without a copy
    "ThreadPoolExecutor-",  # of a loop that a whole file shares; a loop that closes ends its own
    "asyncio_",
)


@dataclass(frozen=True, slots=True)
class Open:
    """What this process has at one moment."""

    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[int]
    children: frozenset[int]
    shared_memory: frozenset[str]


def now() -> Open:
    return Open(
        frozenset(_descriptors()),
        frozenset(thread.ident or 0 for thread in threading.enumerate()),
        children(),
        frozenset(name for name in os.listdir("/dev/shm") if "dataplane" in name),
    )


def children() -> frozenset[int]:
    """The living ones, and those that ended and were not waited for."""
    return frozenset(_all_children()) - SHARED_CHILDREN


def left(before: Open) -> list[str]:
    """What is there now that was not before, in words; waits until it is gone."""
    return settled(lambda: _since(before))


def settled(look: Callable[[], list[str]]) -> list[str]:
    """What it still finds after a while; at once where it finds nothing."""
    end, pause_s = time.monotonic() + PATIENCE_S, 0.01
    while (found := look()) and time.monotonic() < end:
        began = time.monotonic()
        gc.collect()  # what only a cycle holds ends now, also what became one meanwhile
        # On a busy machine that takes long, with torch beside it, or where it waits for processes
        # that are part of what it finds; and what one collection ends may be left to the next.
        end += time.monotonic() - began
        select.select([], [], [], pause_s)
        pause_s = min(2 * pause_s, 1.0)
    return found


def running() -> frozenset[str]:
    """The processes of this machine."""
    return frozenset(filter(str.isdigit, os.listdir("/proc")))


def processes_of(run_dir: Path, before: frozenset[str]) -> list[str]:
    """Processes, whoever's child they are, that were started with this run directory. Not the
    witness of a dead peer: it ends by itself, after 15 s that no test should wait for.

    before: what ran before the directory was made, and so is none of them.
    """
    pids = _pids_of(run_dir, before)
    return [f"process {_named(pid)}" for pid in pids if not _is_witness(pid)]


def _is_witness(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == PROCESS_NAME
    except OSError:  # it ended meanwhile
        return True


def end_processes_of(run_dir: Path, before: frozenset[str]) -> None:
    """Kill what a failed test left running."""
    for pid in _pids_of(run_dir, before):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pids_of(run_dir: Path, before: frozenset[str]) -> list[int]:
    mark = b"DATAPLANE_RUN_DIR=" + os.fsencode(run_dir) + b"\0"
    found = []
    for pid in map(int, running() - before - {str(os.getpid())}):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if mark in Path(f"/proc/{pid}/environ").read_bytes() + b"\0":
                found.append(pid)
    return found


def _since(before: Open) -> list[str]:
    after = now()
    threads = [
        thread.name
        for thread in threading.enumerate()
        if thread.ident in after.threads - before.threads
        and not thread.name.startswith(SHARED_THREADS)
    ]
    return [
        *(f"descriptor {n} → {what}" for n, what in after.descriptors - before.descriptors),
        *(f"thread {name}" for name in threads),
        *(f"child {_named(pid)}" for pid in after.children - before.children),
        *(f"/dev/shm/{name}" for name in after.shared_memory - before.shared_memory),
    ]


def _descriptors() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith(SHARED_FILES):
                found.append((int(name), target))
    return found


def _all_children() -> Iterator[int]:
    """Children of every thread, as the kernel lists them. A look at each process of the machine
    would take longer than most tests."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread ended
            yield from map(int, Path(f"/proc/self/task/{thread}/children").read_bytes().split())


def _named(pid: int) -> str:
    """Its number and command line; that of a zombie is empty."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return f"{pid} ({' '.join(words).strip() or 'ended, nobody waited for it'})"
    return f"{pid} (ended)"


SHARED_CHILDREN = frozenset(_all_children())
"""Those that are there before the first test."""
