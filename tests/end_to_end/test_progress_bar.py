"""The progress bar: what a terminal shows, and that nothing else is shown anything."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest

from dataplane import cli, progress
from tests.end_to_end.conftest import Cluster
from tests.processes import ending

CLEAR = "\r\x1b[K"


class Terminal:
    """A pseudo-terminal. `stream`: for standard error; `read`: what it has shown."""

    def __init__(self, ours: int, theirs: int) -> None:
        self._ours = ours
        self.stream = os.fdopen(theirs, "w")
        self._text = ""
        os.set_blocking(ours, False)

    def read(self) -> str:
        with contextlib.suppress(BlockingIOError, OSError):  # nothing yet; nobody writes any more
            while data := os.read(self._ours, 1 << 16):
                self._text += data.decode()
        return self._text

    def shows(self, pattern: str, seconds: float = 10) -> bool:
        until = time.monotonic() + seconds
        while not (found := re.search(pattern, self.read())) and time.monotonic() < until:
            time.sleep(0.01)
        return bool(found)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    one = Terminal(ours, theirs)
    yield one
    one.stream.close()
    os.close(ours)


@contextlib.contextmanager
def shown_on(stream: TextIO, after_s: float = 0.0, **variables: str) -> Iterator[None]:
    """Standard error of this process is `stream`, and calls show a bar after so long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(progress, "SHOW_AFTER_S", after_s)
        for name, value in ({"TERM": "xterm"} | variables).items():
            patch.setenv(name, value)
        yield


def test_a_terminal_shows_how_far_a_call_is_and_then_a_clear_line(terminal: Terminal) -> None:
    with shown_on(terminal.stream), progress.bar("restore") as bar:
        bar.expect(8)
        bar.advance(2, "partition 'step-12'")
        assert terminal.shows(r"restore  \[#{6}-{18}\]  25%  partition 'step-12'  \d.*s\r")
    assert terminal.shows(re.escape(CLEAR) + "$")


def test_a_line_of_the_command_replaces_the_bar(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    with shown_on(terminal.stream), progress.bar("clean") as bar:
        assert terminal.shows("clean")
        bar.print("ended run 'a'")
        assert capsys.readouterr().out == "ended run 'a'\n"


def test_no_bar_is_shown_for_a_short_call_or_where_none_is_wanted(terminal: Terminal) -> None:
    for after_s, variables in (
        (60.0, {}),
        (0.0, {"DATAPLANE_PROGRESS": "0"}),
        (0.0, {"TERM": "dumb"}),
    ):
        with shown_on(terminal.stream, after_s, **variables), progress.bar("checkpoint"):
            assert not terminal.shows(".", 0.05)
    assert terminal.read() == ""


def test_nothing_is_written_where_standard_error_is_no_terminal(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        with shown_on(log), progress.bar("checkpoint") as bar:
            bar.expect(2)
            time.sleep(0.05)
        assert log.tell() == 0


def test_checkpoint_restore_export_and_clean_show_a_bar(
    cluster: Cluster, tmp_path: Path, terminal: Terminal
) -> None:
    cluster.start("a")
    with cluster.connect("a") as plane:
        part = plane.partition("step-12", {"train": ["tokens"]})
        part.put({"tokens": [np.arange(1_000) for _ in range(8)]})
        with shown_on(terminal.stream):
            plane.checkpoint(tmp_path / "kept")
            part.drop()
            plane.restore(tmp_path / "kept")
            files = [str(tmp_path / name) for name in ("kept", "files")]
            assert cli.main(["checkpoint", "export", *files]) == 0
    code = (
        "import sys; from dataplane import cli, progress; progress.SHOW_AFTER_S = 0;"
        "sys.exit(cli.main(['clean', '--force']))"
    )
    clean = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=terminal.stream,
        text=True,
        env={**os.environ, "TERM": "xterm"},
    )
    with ending(clean):
        out, _ = clean.communicate(timeout=60)
    assert out.startswith("ended run") and "\x1b" not in out
    for label in ("checkpoint  ", "restore  ", "export  ", r"clean  \[#+-*\] +\d+%"):
        assert terminal.shows(label), terminal.read()
