"""`dataplane trace`: write the last steps to a file for ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import msgspec

from dataplane.cli_events import gathered
from dataplane.errors import InvalidCall, counted, few, sized
from dataplane.launch.rundir import LivingPeer
from dataplane.timeline.trace import encode

SHOWN = 8


class Written(msgspec.Struct, frozen=True):
    """A written trace: its path, its steps and its size in bytes."""

    path: str
    steps: list[str]
    nbytes: int


def write(peer: LivingPeer, step: str | None, last: int, output: str) -> Written:
    """Write a trace of one step, or of the last steps. Raise InvalidCall if there is no step, or if
    the file cannot be written; then no partial file is left."""
    path = _target(output)
    events, names = gathered(peer, step, last)
    if not names:
        raise InvalidCall(
            "no peer has recorded a put, so there is nothing to trace: put some rows, "
            "then run this command again"
        )
    data = encode(events, names, time.time() - time.monotonic())
    partial = path.with_name(f".dataplane-trace-{os.getpid()}-{time.monotonic_ns()}")
    try:
        with partial.open("xb") as file:
            file.write(data)
        partial.replace(path)
    except OSError as exc:
        raise _unwritable(output, exc.strerror or str(exc)) from exc
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return Written(output, names, len(data))


def _target(output: str) -> Path:
    """The file to write. What is sure to fail fails before the peers are asked."""
    path = Path(os.path.realpath(output))
    if path.exists() and not path.is_file():
        raise _unwritable(output, "it exists and is not a regular file")
    if not path.parent.is_dir():
        raise _unwritable(output, f"the directory {str(path.parent)!r} does not exist")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _unwritable(output, f"no permission to write in {str(path.parent)!r}")
    return path


def _unwritable(output: str, why: str) -> InvalidCall:
    return InvalidCall(f"cannot write the trace to {output}: {why}. Pass another path with -o")


def show(written: Written, as_json: bool) -> int:
    if as_json:
        print(json.dumps(msgspec.to_builtins(written)), flush=True)
    else:
        steps = few(written.steps, SHOWN)
        print(
            f"wrote {written.path} ({counted(len(written.steps), 'step')}: {steps}; "
            f"{sized(written.nbytes)}); open it at https://ui.perfetto.dev",
            flush=True,
        )
    return 0
