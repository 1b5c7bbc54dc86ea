"""What a test started has ended after it, whatever became of the test."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.processes import all_ending, ending

WAITS = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.stdin.read()"


def waiting() -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", WAITS], stdin=pipe, stdout=pipe)


def test_a_process_ends_with_the_body_that_failed() -> None:
    process = waiting()
    with pytest.raises(ZeroDivisionError), ending(process):
        process.send_signal(signal.SIGSTOP)
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
    assert process.stdin is not None and process.stdin.closed


def test_those_that_were_started_in_the_body_end_too() -> None:
    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(ZeroDivisionError), all_ending(started):
        started += [waiting(), waiting()]
        raise ZeroDivisionError
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
