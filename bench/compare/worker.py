"""The entry of the writer's and the reader's process: `python -m bench.compare.worker JSON`.

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

from bench.compare import batch
from bench.compare.contenders import CONTENDERS
from bench.compare.courier import Courier
from bench.events import emit
from bench.processes import die_with


class Hire(msgspec.Struct, frozen=True, kw_only=True):
    """Who this worker is."""

    plane: str
    role: str  # writer or reader
    address: dict[str, Any]
    parent: int


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do. `nbytes` and `rows` name a batch; `times`: so often, one after the other."""

    do: str
    nbytes: int = 0
    rows: int = 0
    seed: int = 0
    form: str = ""
    times: int = 1


def main(hire: Hire) -> None:
    courier = CONTENDERS[hire.plane].courier(hire.role, hire.address)
    emit("ready")
    held: list[Any] = []
    for line in sys.stdin:
        command = msgspec.json.decode(line, type=Command)
        if command.do == "leave":
            break
        said = perform(courier, command, held)
        emit("did", do=command.do, **said)
    held.clear()
    courier.close()
    emit("done")


def perform(courier: Courier, command: Command, held: list[Any]) -> dict[str, Any]:
    """What the command asks for, and what is to be told about it."""
    match command.do:
        case "load":
            columns = batch.batch(command.nbytes, command.seed, command.rows)
            courier.load(columns)
            return {"nbytes": batch.size_of(columns), "digest": str(batch.digest(columns))}
        case "put":
            return {"seconds": [_timed(courier.put) for _ in range(command.times)]}
        case "expect":
            courier.expect(command.rows, command.times)
            gc.collect()  # not while the next get is measured
        case "get":
            return {"seconds": [_get(courier, command.form, held) for _ in range(command.times)]}
        case "check":
            return {"digest": str(batch.digest(courier.rows(held[-1])))}
        case "floor":
            own = np.ones(command.nbytes, np.uint8)
            return {"seconds": [_timed(lambda: batch.read([own])) for _ in range(command.times)]}
        case "free":
            while held:
                courier.free(held.pop())
        case "forget":
            courier.forget()
        case unknown:
            raise ValueError(f"there is no command {unknown!r}")
    return {}


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _get(courier: Courier, form: str, held: list[Any]) -> float:
    """One get in one form. What was got stays until `free`, what was made of it does not."""
    began = time.perf_counter()
    got = courier.get()
    match form:
        case "handle":
            took = time.perf_counter() - began
        case "read":
            batch.read(courier.buffers(got))
            took = time.perf_counter() - began
        case "packed":
            packed = courier.tensordict(got)
            took = time.perf_counter() - began
            del packed
        case "cycle":
            batch.read(courier.buffers(got))
            courier.settle(got)
            took = time.perf_counter() - began
        case unknown:
            raise ValueError(f"there is no form {unknown!r}")
    held.append(got)
    return took


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Hire)
    die_with(given.parent)
    main(given)
