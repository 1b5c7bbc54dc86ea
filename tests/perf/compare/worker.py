"""The entry of the writer's and the reader's process: `python -m tests.perf.compare.worker JSON`.

It does one command after the other, a JSON object a line on stdin, and answers with an event. Only
what a figure is about lies between two readings of the clock.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import msgspec
import numpy as np

from bench.planes.base import Worker
from bench.processes import die_with, emit
from tests.perf.compare import batch, ends
from tests.perf.compare.ends import End


class Hire(Worker, frozen=True, kw_only=True):
    """Who this worker is."""

    job: ends.Job


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do. `nbytes` and `seed` name a batch; `times`: so often, one after the other."""

    do: str
    nbytes: int = 0
    seed: int = 0
    form: str = ""
    times: int = 1


def main(hire: Hire) -> None:
    end = ends.end(hire)
    emit("ready")
    held: list[Any] = []
    for line in sys.stdin:
        command = msgspec.json.decode(line, type=Command)
        if command.do == "leave":
            break
        said = perform(end, command, held, hire.job.rows)
        emit("did", do=command.do, **said)
    held.clear()
    end.close()
    emit("done")


def perform(end: End, command: Command, held: list[Any], rows: int = 0) -> dict[str, Any]:
    """What the command asks for, and what is to be told about it."""
    match command.do:
        case "load":
            columns = batch.batch(command.nbytes, command.seed, rows)
            end.load(columns)
            return {"nbytes": batch.size_of(columns), "digest": str(batch.digest(columns))}
        case "put":
            seconds = [_timed(end.put) for _ in range(command.times)]
            end.tell()
            return {"seconds": seconds}
        case "expect":
            end.expect(command.times)
            gc.collect()  # not while the next get is measured
        case "get":
            return {"seconds": [_get(end, command.form, held) for _ in range(command.times)]}
        case "check":
            return {"digest": str(batch.digest(end.rows(held[-1])))}
        case "floor":
            own = np.ones(command.nbytes, np.uint8)
            return {"seconds": [_timed(lambda: batch.read([own])) for _ in range(command.times)]}
        case "free":
            for _ in held:
                end.free()
            held.clear()
        case unknown:
            raise ValueError(f"there is no command {unknown!r}")
    return {}


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _get(end: End, form: str, held: list[Any]) -> float:
    """One get, with every byte read or the handle alone. What was got stays until `free`."""
    began = time.perf_counter()
    got = end.get()
    if form == "read":
        batch.read(end.buffers(got))
    took = time.perf_counter() - began
    held.append(got)
    return took


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Hire)
    die_with(given.job.parent)
    main(given)
