"""Events from a process of the bench to the runner: one JSON object per line, on stdout."""

from __future__ import annotations

import sys
import threading
from typing import Any

import msgspec

_lock = threading.Lock()


def emit(event: str, **details: Any) -> None:
    """Write one event. Any other output of a process goes to stderr, which is its log."""
    line = msgspec.json.encode({"event": event, **details}) + b"\n"
    with _lock:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def parse(line: bytes) -> dict[str, Any] | None:
    """Parse the event of a line, or return None for any other line."""
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
