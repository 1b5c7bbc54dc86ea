"""A client's mappings of the arena: all of it for reading, granted extents for writing.

Runs in the client. Views that a user holds keep the pin alive that protects their bytes, and the
mapping under them: numpy's chain of bases leads from each view to the pin. A writable mapping is
never made of anything but granted extents, and no view comes from one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import PeerLost, ProtocolError
from dataplane.memory.arena import MAP_UNIT_BYTES, map_shared, populate, unmap

MAX_WINDOWS = 64
MAX_WINDOW_BYTES = 1 << 30
"""Windows that touch become one, up to this size."""

ByteArray = npt.NDArray[np.uint8]


class _Mapping:
    """A mapping that ends with the last reference to it. Not at exit: views may outlive that."""

    __slots__ = ("__weakref__", "address", "length")

    def __init__(self, fd: int, offset: int, length: int, *, writable: bool) -> None:
        self.address = map_shared(fd, offset, length, writable=writable)
        self.length = length
        end = weakref.finalize(self, unmap, self.address, length, os.getpid())
        end.atexit = False


def _bytes_at(mapping: _Mapping, *, read_only: bool) -> dict[str, Any]:
    """All of it, as numpy's array interface (version 3) tells it."""
    return {
        "version": 3,
        "typestr": "|u1",
        "shape": (mapping.length,),
        "data": (mapping.address, read_only),
    }


def _no_arena() -> PeerLost:
    return PeerLost("the peer of this arena went away; connect again with dataplane.connect()")


class Pin:
    """What the peer holds for one reply. It goes when the last view of that reply is gone.

    Watch it with `weakref.finalize`. It is no buffer, so numpy refuses to make views writable.
    """

    __slots__ = ("__weakref__", "_mapping", "number")

    def __init__(self, mapping: _Mapping | None, number: int) -> None:
        self.number = number
        self._mapping = mapping

    def __repr__(self) -> str:
        return f"<Pin {self.number}>"

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self._mapping is None:
            raise _no_arena()
        return _bytes_at(self._mapping, read_only=True)


class ReadMap:
    """The whole arena, readable. `fd` is only used here and stays the caller's."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._mapping: _Mapping | None = _Mapping(fd, 0, size_bytes, writable=False)

    def __repr__(self) -> str:
        return f"<ReadMap {self.size_bytes} B>"

    def pin(self, number: int) -> Pin:
        """The pin of a reply; 0 where the peer pinned nothing."""
        return Pin(self._mapping, number)

    def close(self) -> None:
        """Let go of the arena: it stays mapped for as long as there are views."""
        self._mapping = None

    def base_array(self, pin: Pin) -> ByteArray:
        """The arena as read-only uint8 array whose base is the pin.

        `np.ndarray(shape, dtype, buffer=base, offset=offset)` makes views that keep the pin.
        """
        return np.asarray(pin)


class _Window:
    """A writable mapping of `start..end` of the arena; arrays from it keep it mapped."""

    __slots__ = ("__weakref__", "end", "mapping", "present", "start")

    def __init__(self, fd: int, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.mapping = _Mapping(fd, start, end - start, writable=True)
        self.present = np.zeros((end - start) // MAP_UNIT_BYTES, np.bool_)
        """Pages brought in once; asking the kernel again costs 20 us a MiB."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return _bytes_at(self.mapping, read_only=False)


class WriteMaps:
    """Windows of granted extents, kept mapped: the peer tends to grant the same ones again.

    For several threads. `fd` is the arena's writable descriptor and stays the caller's, open for
    as long as this is used. The least recently used window ends when there are too many.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size_bytes = os.fstat(fd).st_size
        self._lock = threading.Lock()
        self._windows: OrderedDict[int, _Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def __repr__(self) -> str:
        mapped = sum(window.mapping.length for window in list(self._windows.values()))
        return f"<WriteMaps {len(self)} windows, {mapped} B>"

    def view(self, offset: int, length: int) -> ByteArray:
        """Writable bytes of a granted extent, or of a part. It stays mapped while held."""
        window = self._window(offset, length)
        base = np.asarray(window)
        return np.ndarray((length,), np.uint8, buffer=base, offset=offset - window.start)

    def populate(self, offset: int, length: int) -> bool:
        """Bring the pages of a granted extent in before it is written, from any thread: Python
        goes on elsewhere. False where the kernel cannot, which costs speed only."""
        window = self._window(offset, length)
        first = (offset - window.start) // MAP_UNIT_BYTES
        last = -(-(offset + length - window.start) // MAP_UNIT_BYTES)
        if not window.present[first:last].all():
            address = window.mapping.address + first * MAP_UNIT_BYTES
            if not populate(address, (last - first) * MAP_UNIT_BYTES):
                return False
            window.present[first:last] = True
        return True

    def close(self) -> None:
        """Let go of all windows; those under arrays that are still held end with these. No more
        are opened: PeerLost."""
        with self._lock:
            self._fd = -1
            self._windows.clear()

    def _window(self, offset: int, length: int) -> _Window:
        if offset < 0 or length < 0 or offset + length > self._size_bytes:
            raise ProtocolError(
                f"an extent of {length} bytes at {offset} is not in an arena of "
                f"{self._size_bytes} bytes"
            )
        start = offset // MAP_UNIT_BYTES * MAP_UNIT_BYTES
        end = -(-max(offset + length, start + 1) // MAP_UNIT_BYTES) * MAP_UNIT_BYTES
        with self._lock:
            for window in reversed(self._windows.values()):
                if window.start <= start and end <= window.end:
                    self._windows.move_to_end(window.start)
                    return window
            return self._open(start, end)

    def _open(self, start: int, end: int) -> _Window:
        """A new window, which takes the place of those that it touches."""
        if self._fd < 0:
            raise _no_arena()
        for window in list(self._windows.values()):
            touches = window.start <= end and start <= window.end
            both = max(end, window.end) - min(start, window.start)
            if touches and both <= MAX_WINDOW_BYTES:
                start, end = min(start, window.start), max(end, window.end)
                del self._windows[window.start]
        window = _Window(self._fd, start, end)
        self._windows[start] = window
        while len(self._windows) > MAX_WINDOWS:
            self._windows.popitem(last=False)
        return window
