"""`dataplane trace`: write the last steps to a file for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path

from dataplane import progress
from dataplane.cli_events import gathered
from dataplane.errors import InvalidCall, counted, few, sized
from dataplane.launch.rundir import Find

SHOWN = 8


def trace(arguments: argparse.Namespace, find: Find) -> int:
    """Write a trace of one step, or of the last steps. Raise InvalidCall if there is no step, or if
    the file cannot be written; then no partial file is left."""
    try:
        import perfetto.protos.perfetto.trace.perfetto_trace_pb2  # noqa: F401
    except Exception as exc:  # an older protobuf raises its own error for perfetto
        raise InvalidCall(
            f"`dataplane trace` cannot import the package perfetto ({exc}): install it with "
            "pip install 'dataplane-rl[trace]'"
        ) from exc
    from dataplane.timeline.trace import encode

    output = arguments.output
    with progress.bar("trace"):
        path = _target(output)
        events, steps = gathered(arguments, find)
        if not steps:
            raise InvalidCall(
                "no peer has recorded a put, so there is nothing to trace: put some rows, "
                "then run this command again"
            )
        data = encode(events, steps, time.time() - time.monotonic())
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
    if arguments.json:
        print(json.dumps({"path": output, "steps": steps, "nbytes": len(data)}), flush=True)
    else:
        print(
            f"wrote {output} ({counted(len(steps), 'step')}: {few(steps, SHOWN)}; "
            f"{sized(len(data))}); open it at https://ui.perfetto.dev",
            flush=True,
        )
    return 0


def _target(output: str) -> Path:
    """Return the file to write. Raise errors that are certain before the peers are asked."""
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
