"""Processes that a measurement starts in its own interpreter, and the processor time they take."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

_SPAWN = multiprocessing.get_context("spawn")


def spawned(run: Callable[..., None], *args: object) -> tuple[BaseProcess, Connection]:
    """Start a process that runs `run(pipe, *args, parent)`. Return it and our end of the pipe.

    The process ignores Ctrl-C, which a terminal sends to the whole group: the measuring process
    ends it instead, so that it prints no traceback.
    """
    ours, theirs = _SPAWN.Pipe()
    child = _SPAWN.Process(target=run, args=(theirs, *args, os.getpid()), daemon=True)
    resource_tracker.ensure_running()  # else the first start does it, and unblocks the signal
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits it
    try:
        child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    theirs.close()
    return child, ours


def processor_s(pid: int) -> float:
    """Return the processor time of one process so far, in nanosecond steps."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) numbers its clock
