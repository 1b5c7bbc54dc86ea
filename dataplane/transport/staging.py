"""Scattered small ranges as one stretch of memory, and back, without a Python call for each.

The stretch is a memfd that is mapped as well: one pwritev gathers a thousand ranges into it, one
preadv scatters them, and what lies between is a plain buffer for whoever takes only those.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np

from dataplane.transport.seam import Records
from dataplane.transport.stream import IOV_MAX, advance

STAGING_BYTES = 256 << 10
DIRECT_BYTES = 64 << 10
"""A range this long is worth calls of its own: several TLS records."""

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.pwritev, _libc.preadv):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _call.restype = ctypes.c_ssize_t


class Staging:
    """STAGING_BYTES of memory; one user at a time."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("bulk-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, STAGING_BYTES)
            self._view = memoryview(mmap.mmap(self._fd, STAGING_BYTES))
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """The memory goes when the last view of it does."""
        self._view.release()
        os.close(self._fd)

    def room(self, vectors: Records) -> memoryview:
        """As many bytes as the vectors have together; to be filled before `scatter`."""
        return self._view[: int(vectors["length"].sum())]

    def gather(self, vectors: Records) -> memoryview:
        """Copies from where the vectors point, and uses them up; valid until the next call."""
        room = self.room(vectors)
        self._move(_libc.pwritev, vectors)
        return room

    def scatter(self, vectors: Records) -> None:
        """Copies what is in `room` to where the vectors point, and uses them up."""
        self._move(_libc.preadv, vectors)

    def _move(self, call: Callable[..., int], vectors: Records) -> None:
        at = 0
        while len(vectors):
            moved = call(self._fd, vectors.ctypes.data, min(len(vectors), IOV_MAX), at)
            if moved <= 0:
                code = ctypes.get_errno()
                raise OSError(code, f"ranges could not be staged: {os.strerror(code)}")
            at += moved
            vectors = advance(vectors, moved)


def runs(vectors: Records) -> Iterator[Records]:
    """The vectors in order: each large one alone, small ones in groups that fit into a Staging."""
    begin = 0
    for large in [*np.flatnonzero(vectors["length"] >= DIRECT_BYTES).tolist(), len(vectors)]:
        yield from _groups(vectors[begin:large])
        if large < len(vectors):
            yield vectors[large : large + 1]
        begin = large + 1


def _groups(small: Records) -> Iterator[Records]:
    ends = np.cumsum(small["length"])
    begin = done = 0
    while begin < len(small):
        fitting = int(np.searchsorted(ends, np.uint64(done + STAGING_BYTES), side="right"))
        end = min(begin + IOV_MAX, fitting)
        yield small[begin:end]
        begin, done = end, int(ends[end - 1])
