"""A client's mappings of the arena: one for reading, and one in which granted extents can be
written.

Runs in the client. Views that a user holds keep the pin that protects their bytes, and the
mapping under them: numpy's chain of bases leads from each view to the pin. Only granted extents
are ever made writable, and views never use that mapping.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import PeerLost, mixed_releases
from dataplane.memory.arena import (
    MAP_UNIT_BYTES,
    let_write,
    map_to_read,
    map_to_write,
    populate,
    unmap,
)

MAX_STRETCHES = 1 << 14
"""So many are open in one mapping at most: for the kernel each, and each gap, is a mapping of its
own, of which a process has 65,530 (`vm.max_map_count`)."""

ByteArray = npt.NDArray[np.uint8]


class _Mapping:
    """A mapping that ends with the last reference to it. Not at exit: views may outlive that."""

    __slots__ = ("__weakref__", "address", "length")

    def __init__(self, map_it: Callable[[int, int], int], fd: int, length: int) -> None:
        self.address, self.length = map_it(fd, length), length
        end = weakref.finalize(self, unmap, self.address, length, os.getpid())
        end.atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For who writes; who reads has it from a pin."""
        return _bytes_at(self, read_only=False)


def _bytes_at(mapping: _Mapping, *, read_only: bool) -> dict[str, Any]:
    """All of it, as numpy's array interface (version 3) tells it."""
    return {
        "version": 3,
        "typestr": "|u1",
        "shape": (mapping.length,),
        "data": (mapping.address, read_only),
    }


def _no_arena() -> PeerLost:
    return PeerLost(
        "cannot map the peer's arena, because the peer has exited: connect again with "
        "dataplane.connect()"
    )


class Pin:
    """What the peer pins for one reply. It is released when the last view of that reply is gone.

    `np.asarray(pin)` is the arena as read-only uint8, whose base is the pin:
    `np.ndarray(shape, dtype, buffer=base, offset=offset)` makes views that keep it. A pin is no
    buffer, so numpy refuses to make views writable.
    """

    __slots__ = ("__weakref__", "_gone", "_mapping", "number")

    def __init__(
        self, mapping: _Mapping | None, number: int, gone: Callable[[], object] | None
    ) -> None:
        self.number = number
        self._mapping = mapping
        self._gone = gone

    def __del__(self) -> None:
        if self._gone is not None and not sys.is_finalizing():
            self._gone()

    def __repr__(self) -> str:
        return f"<Pin {self.number}>"

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self._mapping is None:
            raise _no_arena()
        return _bytes_at(self._mapping, read_only=True)


class ReadMap:
    """The whole arena, readable. `fd` belongs to the caller."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._mapping: _Mapping | None = _Mapping(map_to_read, fd, size_bytes)

    def __repr__(self) -> str:
        return f"<ReadMap {self.size_bytes} B>"

    def pin(self, number: int, gone: Callable[[], object] | None = None) -> Pin:
        """The pin of a reply; 0 if the peer pinned nothing. gone: called once the last view of
        the reply is gone, from any thread or by the garbage collector, but not when the process
        exits."""
        return Pin(self._mapping, number, gone)

    def close(self) -> None:
        """Release the arena. It stays mapped as long as views exist."""
        self._mapping = None


class _Writable:
    """The whole arena, of which only what is open can be touched; arrays from it keep it mapped."""

    __slots__ = ("address", "bytes", "open", "present", "stretches")

    def __init__(self, fd: int, size_bytes: int) -> None:
        mapping = _Mapping(map_to_write, fd, size_bytes)
        self.address, self.bytes = mapping.address, np.asarray(mapping)
        self.open = bytearray(-(-size_bytes // MAP_UNIT_BYTES))
        """1 for a page that may be written"""
        self.present = bytearray(len(self.open))
        """1 for a page that was brought in once; asking the kernel again costs 20 us a MiB."""
        self.stretches = 0


class WriteMaps:
    """Granted extents, kept writable: the peer tends to grant the same ones again, and a page that
    this process has written before causes no fault.

    Thread-safe. `fd` is the arena's writable descriptor. It belongs to the caller and must stay
    open while this object is used.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size_bytes = os.fstat(fd).st_size
        self._lock = threading.Lock()
        self._current: _Writable | None = None

    def __repr__(self) -> str:
        pages = 0 if self._current is None else self._current.open.count(1)
        return f"<WriteMaps {len(self)} stretches, {pages * MAP_UNIT_BYTES} B>"

    def __len__(self) -> int:
        """How many stretches are open."""
        return 0 if self._current is None else self._current.stretches

    def view(self, offset: int, length: int) -> ByteArray:
        """The writable bytes of a granted extent, or of a part. They stay mapped while held."""
        return self._opened(offset, length)[0].bytes[offset : offset + length]

    def populate(self, offset: int, length: int) -> bool:
        """Allocate the pages of a granted extent before it is written, from any thread, without
        the interpreter lock. Return False if the kernel cannot, which only costs speed."""
        writable, first, last = self._opened(offset, length)
        if writable.present.find(0, first, last) >= 0:
            address = writable.address + first * MAP_UNIT_BYTES
            if not populate(address, (last - first) * MAP_UNIT_BYTES):
                return False
            writable.present[first:last] = b"\1" * (last - first)
        return True

    def close(self) -> None:
        """Release the arena. Mappings of arrays that are still held stay. Later calls raise
        PeerLost."""
        with self._lock:
            self._fd, self._current = -1, None

    def _opened(self, offset: int, length: int) -> tuple[_Writable, int, int]:
        """The mapping, in which this is open, and the first and last of its pages."""
        if offset < 0 or length < 0 or offset + length > self._size_bytes:
            raise mixed_releases(
                f"{length} bytes at offset {offset} are outside the arena of {self._size_bytes} "
                "bytes"
            )
        first, last = offset // MAP_UNIT_BYTES, -(-(offset + length) // MAP_UNIT_BYTES)
        with self._lock:
            if self._fd < 0:
                raise _no_arena()
            current = self._current
            if current is None or current.open.find(0, first, last) >= 0:
                if current is None or current.stretches == MAX_STRETCHES:
                    self._current = current = _Writable(self._fd, self._size_bytes)
                _open(current, first, last)
        return current, first, last


def _open(writable: _Writable, first: int, last: int) -> None:
    """These pages, of which some may be open."""
    around = slice(max(first - 1, 0), last + 1)
    before = _runs(writable.open[around])
    address = writable.address + first * MAP_UNIT_BYTES
    let_write(address, (last - first) * MAP_UNIT_BYTES)
    writable.open[first:last] = b"\1" * (last - first)
    writable.stretches += _runs(writable.open[around]) - before


def _runs(pages: bytearray) -> int:
    """How many stretches of 1 there are."""
    return pages.startswith(b"\1") + pages.count(b"\0\1")
