"""Large copies, and the first touch of pages, shared among a few threads: one core cannot fill the
memory bus.

A copy is a (target, source) pair of arrays of equal shape. Threads take them in turn from one
iterator; what is too small to be shared is done while the next large one is looked for. The threads
live as long as one call.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.memory.extents import Extent
from dataplane.memory.mapping import WriteMaps

Copy = tuple[npt.NDArray[Any], npt.NDArray[Any]]
_Item = TypeVar("_Item")

SHARED_BYTES = 64 << 10
"""Copies of fewer bytes take no longer than handing them to a thread."""
MAX_THREADS = 4
"""Enough to fill the memory of most machines; the other cores belong to whoever puts."""
POPULATE_BYTES = 64 << 10
"""Of fewer, pages come in as they are written."""
_THREAD_BYTES = 16 << 20
"""What makes a thread worth starting."""
_PAGE_BYTES = 4096


def carry_out(copies: Iterable[Copy], nbytes: int) -> None:
    """Do all of them, `nbytes` in sum."""
    threads = _threads(nbytes)
    if threads < 2:
        for target, source in copies:
            target[...] = source
    else:
        _share(threads, lambda one: np.copyto(*one), _pieces(copies, -(-nbytes // threads)))


def populate(writes: WriteMaps, spaces: Iterable[Extent], nbytes: int) -> None:
    """Bring in the pages of these spaces, which have `nbytes` in sum."""
    if nbytes < POPULATE_BYTES:
        return
    threads = _threads(nbytes)
    if threads < 2:
        for space in spaces:
            writes.populate(*space)
        return
    pieces = (
        (at, min(_THREAD_BYTES, first + length - at))
        for first, length in spaces
        for at in range(first, first + length, _THREAD_BYTES)
    )
    _share(threads, lambda one: writes.populate(*one), pieces)


def _threads(nbytes: int) -> int:
    """One for every 16 MiB, four at most, and no more than this process may use cores."""
    wanted = min(MAX_THREADS, nbytes // _THREAD_BYTES)
    return wanted if wanted < 2 else min(wanted, len(os.sched_getaffinity(0)))


def _share(threads: int, do: Callable[[_Item], Any], items: Iterator[_Item]) -> None:
    """All of the threads have ended when this returns or raises: nobody writes any more."""
    turn = threading.Lock()

    def work() -> None:
        nonlocal items
        try:
            while True:
                with turn:
                    item = next(items, None)
                if item is None:
                    return
                do(item)
        except BaseException:
            items = iter(())  # nobody begins another
            raise

    with ThreadPoolExecutor(threads - 1, "dataplane-copy") as pool:
        others = []
        with contextlib.suppress(RuntimeError):  # no thread is to be had: a limit, or the exit
            for _ in range(threads - 1):
                others.append(pool.submit(work))
        work()
    for other in others:
        other.result()


def _pieces(copies: Iterable[Copy], most: int) -> Iterator[Copy]:
    """Cut so that no thread is left with a long one at the end. Long runs are worth keeping: from
    some length on (the C library's choice) they bypass the caches."""
    for target, source in copies:
        while len(target) == 1 and target.ndim > 1:
            target, source = target[0], source[0]  # noqa: PLW2901
        if target.nbytes <= most:
            yield target, source
            continue
        rows = -(-len(target) // -(-target.nbytes // most))
        if target.ndim == 1:
            rows = -(-rows // _PAGE_BYTES) * _PAGE_BYTES
        for first in range(0, len(target), rows):
            yield target[first : first + rows], source[first : first + rows]
