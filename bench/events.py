"""What a process of the bench tells the runner: one JSON object a line, on its stdout."""

from __future__ import annotations

import sys
import threading
from typing import Any

import msgspec

_lock = threading.Lock()


def emit(event: str, **details: Any) -> None:
    """One line. Whatever else a process has to say goes to stderr, which is its log."""
    line = msgspec.json.encode({"event": event, **details}) + b"\n"
    with _lock:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def parse(line: bytes) -> dict[str, Any] | None:
    """The event of a line, or None for a line that is none."""
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
