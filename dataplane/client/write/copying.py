"""The copies of a client: one from the caller's memory into chunks, and one out of chunks if a
tensor needs its rows contiguous.

Runs in the client. A small chunk is joined first, then copied whole. In a large chunk, a column
whose rows are one array is copied whole, any other column value by value. Padding is written too,
so that equal chunks have equal bytes.

One core cannot fill the memory bus, so a few threads share large copies, and the first touch of
pages. The threads draw work from one iterator, and end with the call.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.client.write.chunks import NewChunk, spaces_of
from dataplane.memory.arena import ByteArray, WriteMaps
from dataplane.memory.extents import Extent
from dataplane.wire.objects import Buffer

Copy = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Target and source, of equal shape."""
_Item = TypeVar("_Item")

SHARED_BYTES = 64 << 10
"""Smaller copies are faster than a hand-off to a thread."""
MAX_THREADS = 4
"""Enough to saturate the memory bus of most machines. The caller needs the other cores."""
POPULATE_BYTES = 64 << 10
"""Smaller spaces are not pre-faulted; the copy itself touches their pages."""
_THREAD_BYTES = 16 << 20
"""A thread starts only for at least this many bytes."""
_PAGE_BYTES = 4096
JOINED_BYTES = 64 << 10
"""Smaller columns are joined before they are copied."""
JOINED_VALUE_BYTES = 512
"""So are columns whose values are smaller than this on average."""


def copy_chunks(chunks: Sequence[NewChunk], writes: WriteMaps) -> None:
    """Copy these chunks to their places in the arena."""
    spaces = spaces_of(chunks)
    nbytes = sum([length for _, length in spaces])
    populate(writes, spaces, nbytes)
    carry_out(_copies(chunks, spaces, writes), nbytes)


def _copies(
    chunks: Sequence[NewChunk], spaces: Sequence[Extent], writes: WriteMaps
) -> Iterator[Copy]:
    """Do small copies at once, and yield large ones. spaces: from `spaces_of`."""
    following = iter(chunks)
    for base, length in spaces:
        space = memoryview(writes.view(base, length))  # type: ignore[arg-type]
        at = 0
        while at < length:
            chunk = next(following)
            nbytes = chunk.nbytes
            if nbytes < JOINED_BYTES or chunk.data is not None:
                space[at : at + nbytes] = b"".join(chunk.image())
            else:
                yield from _copy_columns(space[at : at + nbytes], chunk)
            at += chunk.space


def _copy_columns(memory: memoryview, chunk: NewChunk) -> Iterator[Copy]:
    written = len(chunk.head)
    memory[:written] = chunk.head
    for column, start in chunk.places():
        end = start + column.nbytes
        memory[written:start] = bytes(start - written)
        written = end
        rows, spec = column.source, column.spec
        is_vectors = spec.kind == "array" and len(spec.shape) == 1 and type(rows) is list
        if is_vectors and column.nbytes < SHARED_BYTES * column.count:
            np.concatenate(rows, out=np.frombuffer(memory[start:end], rows[0].dtype))
        else:
            yield from _copy(memory[start:end], column.buffers())


def _copy(memory: memoryview, buffers: list[Buffer]) -> Iterator[Copy]:
    """Copy these buffers one after the other, and yield large copies."""
    if memory.nbytes < JOINED_BYTES or memory.nbytes < JOINED_VALUE_BYTES * len(buffers):
        memory[:] = b"".join(buffers)
        return
    at = 0
    for buffer in buffers:
        source = memoryview(buffer)
        nbytes = source.nbytes
        if nbytes >= SHARED_BYTES:
            target = np.frombuffer(memory[at : at + nbytes], np.uint8)
            yield target, np.frombuffer(buffer, np.uint8)
        elif nbytes:
            memory[at : at + nbytes] = source.cast("B")
        at += nbytes


def is_stored(chunk: NewChunk, stored: ByteArray) -> bool:
    """Whether `stored` has the bytes of a deduplicated chunk."""
    at = 0
    for buffer in chunk.image():
        source = np.frombuffer(buffer, np.uint8)
        if not np.array_equal(source, stored[at : at + source.nbytes]):
            return False
        at += source.nbytes
    return True


# copies by several threads


def carry_out(copies: Iterable[Copy], nbytes: int) -> None:
    """Carry out these copies, which have `nbytes` in total."""
    threads = _threads(nbytes)
    if threads < 2:
        for target, source in copies:
            target[...] = source
    else:
        _share(threads, lambda one: np.copyto(*one), _pieces(copies, -(-nbytes // threads)))


def populate(writes: WriteMaps, spaces: Iterable[Extent], nbytes: int) -> None:
    """Pre-fault the pages of these spaces, which have `nbytes` in total."""
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
    """Return the number of threads: one per 16 MiB, at most MAX_THREADS or one per usable core."""
    wanted = min(MAX_THREADS, nbytes // _THREAD_BYTES)
    return wanted if wanted < 2 else min(wanted, len(os.sched_getaffinity(0)))


def _share(threads: int, do: Callable[[_Item], Any], items: Iterator[_Item]) -> None:
    """Do all items in this thread and others. The others have ended when this returns or raises."""
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
            items = iter(())  # no thread begins another item
            raise

    with ThreadPoolExecutor(threads - 1, "dataplane-copy") as pool:
        others = []
        with contextlib.suppress(RuntimeError):  # no thread can start: a limit, or the exit
            for _ in range(threads - 1):
                others.append(pool.submit(work))
        work()
    for other in others:
        other.result()


def _pieces(copies: Iterable[Copy], most: int) -> Iterator[Copy]:
    """Cut the copies, so that no thread has a long one left at the end. Pieces stay long, because a
    copy above a certain length (the C library's choice) bypasses the caches."""
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
