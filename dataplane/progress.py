"""A progress bar on standard error, for calls that a person waits for at a terminal.

If standard error is not a terminal, nothing is written. A separate thread draws the bar, so a
caller or an event loop never waits for the terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from dataplane.errors import duration
from dataplane.launch import settings

SHOW_AFTER_S = 0.5
"""Shorter calls show no bar."""
_REDRAW_S = 0.1
_JOIN_S = 1.0
"""A terminal that somebody paused may not take the last characters."""
_CELLS = 24
_CLEAR = "\r\x1b[K"


class Bar:
    """The progress of a call. Any thread may report it; another thread draws it."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._total = self._done = 0.0
        self._detail = ""
        self._began = time.monotonic()
        self._terminal: TextIO | None = None
        self._drawing = threading.Lock()
        self._over = threading.Event()

    def expect(self, total: float) -> None:
        """Report how much there is to do. Until then, the bar shows only the time."""
        self._total, self._done = total, 0.0

    def at(self, done: float, detail: str = "") -> None:
        """Report how much is done. detail: what the call does now."""
        self._done, self._detail = done, detail

    def advance(self, more: float, detail: str = "") -> None:
        """Report that this much more is done."""
        self.at(self._done + more, detail)

    def print(self, line: str) -> None:
        """Print a line of the command's own output, above the bar."""
        with self._drawing:
            if self._terminal is not None:
                _write(self._terminal, _CLEAR)
            print(line, flush=True)

    def show_on(self, terminal: TextIO) -> None:
        """Draw until `end`, then clear the line."""
        if self._over.wait(SHOW_AFTER_S):
            return
        self._terminal = terminal
        while True:
            with self._drawing:
                if not _write(terminal, self._line(terminal)):
                    return
            if self._over.wait(_REDRAW_S):
                _write(terminal, _CLEAR)
                return

    def end(self) -> None:
        self._over.set()

    def _line(self, terminal: TextIO) -> str:
        """The cursor returns to the first column, so a log line of this process overwrites the
        bar."""
        parts = [self._label, self._detail, duration(time.monotonic() - self._began)]
        if self._total:
            share = min(1.0, self._done / self._total)
            full = int(share * _CELLS)
            parts.insert(1, f"[{'#' * full}{'-' * (_CELLS - full)}] {share:4.0%}")
        text = "  ".join(part for part in parts if part)
        return f"{_CLEAR}{text[: _columns(terminal) - 1]}\r"


@contextlib.contextmanager
def bar(label: str) -> Iterator[Bar]:
    """A bar that is drawn while the body runs, if standard error is a terminal."""
    one, terminal = Bar(label), _terminal()
    if terminal is None:
        yield one
        return
    drawer = threading.Thread(
        target=one.show_on, args=(terminal,), name="dataplane-progress", daemon=True
    )
    drawer.start()
    try:
        yield one
    finally:
        one.end()
        drawer.join(_JOIN_S)


def _terminal() -> TextIO | None:
    if settings.of_variable("progress") is False or os.environ.get("TERM") == "dumb":
        return None
    try:
        return sys.stderr if sys.stderr.isatty() else None
    except (AttributeError, ValueError):  # there is none, or it is closed
        return None


def _write(terminal: TextIO, text: str) -> bool:
    """Whether the terminal is still there."""
    try:
        terminal.write(text)
        terminal.flush()
    except (OSError, ValueError):
        return False
    return True


def _columns(terminal: TextIO) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
