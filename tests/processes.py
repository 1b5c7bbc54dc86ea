"""Processes that tests start: none outlives its test, also where the test fails."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from typing import AnyStr


@contextlib.contextmanager
def ending(process: subprocess.Popen[AnyStr]) -> Iterator[subprocess.Popen[AnyStr]]:
    """Yield a process that was started; when the body ends, kill it if it runs, and reap it.

    `with subprocess.Popen(...)` waits for the process instead: for ever, where the body failed
    before it told the process to end.
    """
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                    pipe.close()


@contextlib.contextmanager
def all_ending(
    processes: list[subprocess.Popen[AnyStr]],
) -> Iterator[list[subprocess.Popen[AnyStr]]]:
    """As `ending`, of those that are in the list when the body ends."""
    try:
        yield processes
    finally:
        with contextlib.ExitStack() as stack:
            for process in processes:
                stack.enter_context(ending(process))
