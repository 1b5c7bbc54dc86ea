"""A bare engine between two processes: the ceiling of pulls over the transport that uses it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np

from bench.processes import die_with
from tests.perf.children import spawned
from tests.perf.transports.engines import ENGINES, Memory
from tests.perf.transports.shapes import Shape

PATIENCE_S = 60.0


class LoopFailed(RuntimeError):
    """The engine does not work between two processes here; the message says why."""


class Loop:
    """An owner and a reader, each with a region of `nbytes`, touched. A context manager."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._children: list[Any] = []
        try:
            owner = self._started(_owner, name, nbytes)
            card = _heard(owner)
            self._reader = self._started(_reader, name, nbytes)
            self._reader.send(card)
            _heard(self._reader)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends both processes."""
        for child, pipe in self._children:
            child.kill()
            child.join()
            child.close()
            pipe.close()
        self._children.clear()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the owner and of the reader."""
        return tuple(child.pid for child, _ in self._children)

    def read_s(self, shape: Shape) -> float:
        """Seconds until all values of one batch were there."""
        self._reader.send((shape.rows, shape.value_bytes))
        took: float = _heard(self._reader)
        return took

    def arrived_bytes(self) -> int:
        """How many bytes of the reader's region are the owner's; they are cleared."""
        self._reader.send(None)
        count: int = _heard(self._reader)
        return count

    def _started(self, run: Callable[..., None], name: str, nbytes: int) -> Connection:
        child, ours = spawned(run, name, nbytes)
        self._children.append((child, ours))
        return ours


def _heard(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise LoopFailed(f"the bare loop says nothing for {PATIENCE_S:g} s")
    try:
        said, failure = pipe.recv()
    except EOFError:
        raise LoopFailed("a process of the bare loop ended") from None
    if failure:
        raise LoopFailed(failure)
    return said


def _owner(pipe: Connection, name: str, nbytes: int, parent: int) -> None:
    die_with(parent)
    try:
        end = ENGINES[name](_region(nbytes, 1))
        pipe.send((end.card, ""))
        end.serve()
    except Exception as exc:
        pipe.send((None, repr(exc)))


def _reader(pipe: Connection, name: str, nbytes: int, parent: int) -> None:
    die_with(parent)
    try:
        memory = _region(nbytes, 0)
        end = ENGINES[name](memory)
        end.connect(pipe.recv())
        pipe.send((None, ""))
        while True:
            asked = pipe.recv()
            if asked is None:
                pipe.send((int(np.count_nonzero(memory == 1)), ""))
                memory[:] = 0
                continue
            began = time.perf_counter()
            end.read(*asked)
            pipe.send((time.perf_counter() - began, ""))
    except EOFError:
        return
    except Exception as exc:
        pipe.send((None, repr(exc)))


def _region(nbytes: int, fill: int) -> Memory:
    """Shared pages, as those of an arena: private ones may be huge, which are faster."""
    memory: Memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    memory[:] = fill
    return memory
