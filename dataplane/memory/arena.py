"""The host arena: a sealed memory file that the peer owns and passes to clients by descriptor.

A client maps it twice: once for reading, and once to write the extents that the peer grants. Only
granted extents are ever made writable, and views never use the mapping for writing. numpy's chain
of bases leads from each view to the pin that protects its bytes, and to the mapping.

The file exists while a process maps it, and leaves nothing on a file system, even if processes are
killed. Untouched pages use no memory. A view outlives its peer, and keeps the pages of the whole
arena: a starting peer therefore looks for arenas that dead peers left.

System calls on mapped memory use ctypes, which lets other threads run. Python's `mmap`
duplicates the descriptor for each mapping, cannot tell numpy what keeps a mapping alive, and
holds the interpreter lock while the kernel clears pages. Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import PeerLost, mixed_releases
from dataplane.memory import prefault

log = logging.getLogger(__name__)

LETTING_GO_S = 3.0
"""Seconds in which clients notice that their peer died (they check once a second) and unmap."""
_LOOK_S = 0.2
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ (\S+ \d+) *(.*)$")
"""A mapping without a file has no name, but ends the figures of the mapping before it."""
_RESIDENT = re.compile(r"^Rss: +(\d+) kB$")
_SHARES_NOTHING = re.compile(rb"^RssShmem:\s+0 kB$", re.MULTILINE)

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

MAP_UNIT_BYTES = mmap.PAGESIZE
"""Mappings begin and end at multiples of this; it may be larger than the arena's own pages."""
MAX_OPEN_RUNS = 1 << 14
"""The most runs of writable pages in one mapping. The kernel counts each run, and each gap, as a
mapping; a process may have 65,530 (`vm.max_map_count`)."""

ByteArray = npt.NDArray[np.uint8]


class Arena:
    """A memory file with a descriptor for writers and one for readers.

    `rw_fd` maps writable; `ro_fd` was opened read-only, so that neither PROT_WRITE nor a later
    mprotect is possible. `view` is the peer's own mapping of all of it.
    """

    def __init__(self, rw_fd: int, ro_fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.rw_fd = rw_fd
        self.ro_fd = ro_fd
        self._map = mmap.mmap(rw_fd, size_bytes)
        self.address = int(np.frombuffer(self._map, np.uint8).__array_interface__["data"][0])
        """the start of the peer's own mapping"""
        _want_huge_pages(self.address, size_bytes)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size_bytes: int, name: str) -> Arena:
        """Create an arena. The size is rounded up to whole pages. `name` is shown in /proc."""
        size_bytes = -(-size_bytes // MAP_UNIT_BYTES) * MAP_UNIT_BYTES
        rw_fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        ro_fd = -1
        try:
            os.ftruncate(rw_fd, size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(rw_fd, fcntl.F_ADD_SEALS, seals)
            ro_fd = os.open(f"/proc/self/fd/{rw_fd}", os.O_RDONLY | os.O_CLOEXEC)
            return cls(rw_fd, ro_fd, size_bytes)
        except BaseException:
            os.close(rw_fd)
            if ro_fd >= 0:
                os.close(ro_fd)
            raise

    def __repr__(self) -> str:
        return f"<Arena {self.size_bytes} B {'closed' if self.rw_fd < 0 else 'open'}>"

    def prefault(self, start: int, length: int) -> subprocess.Popen[bytes]:
        """Start a process that allocates pages before a client writes. The caller waits for its
        end or kills it. Raises OSError if it cannot start."""
        first = start // MAP_UNIT_BYTES * MAP_UNIT_BYTES
        nbytes = min(start + length, self.size_bytes) - first
        asked = (self.rw_fd, first, nbytes)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", prefault.__file__, *map(str, asked)],
            stdin=subprocess.DEVNULL,
            pass_fds=(self.rw_fd,),
        )

    def close(self) -> None:
        """Close the descriptors. The peer's mapping ends with its last slice."""
        if self.rw_fd < 0:
            return
        os.close(self.rw_fd)
        os.close(self.ro_fd)
        self.rw_fd = self.ro_fd = -1
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # a slice still exists; the mapping ends with it


def create_arena(size_bytes: int, name: str, least_bytes: int) -> Arena:
    """Create an arena, smaller by what processes still map of earlier arenas of this name whose
    peers crashed; at least `least_bytes`. Waits up to LETTING_GO_S for processes that are about to
    unmap theirs."""
    deadline = time.monotonic() + LETTING_GO_S
    while (mapped := still_mapped_bytes(name)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    if mapped:
        log.warning(
            "arena: reduced by %d bytes, because other processes still map the arena "
            "of a crashed peer of the same name",
            mapped,
        )
    return Arena.create(max(least_bytes, size_bytes - mapped), name)


def still_mapped_bytes(name: str, proc: Path = Path("/proc")) -> int:
    """The bytes of memory files of this name that living processes map. A file that several
    processes map counts once, with the largest figure of one of them. Pages that no process has
    touched are not visible from outside."""
    marks = f"/memfd:{name} (deleted)"
    resident: dict[str, int] = {}
    for process in proc.iterdir():
        if process.name.isdigit():
            for file, nbytes in _mapped(process, marks).items():
                resident[file] = max(nbytes, resident.get(file, 0))
    return sum(resident.values())


def _mapped(process: Path, marks: str) -> dict[str, int]:
    """Return how many bytes of files with this mark a process has in memory, by device and
    inode."""
    try:
        # Reading maps takes ten times as long, and holds up the process if it has many mappings.
        if _SHARES_NOTHING.search((process / "status").read_bytes()):
            return {}
        if marks not in (process / "maps").read_text():
            return {}
        lines = (process / "smaps").read_text().splitlines()
    except OSError:
        return {}  # another user's process, or one that has exited
    found: dict[str, int] = {}
    file: str | None = None
    for line in lines:
        if mapping := _MAPPING.match(line):
            file = mapping[1] if mapping[2] == marks else None
        elif file is not None and (size := _RESIDENT.match(line)):
            found[file] = found.get(file, 0) + 1024 * int(size[1])
    return found


class _Mapping:
    """A shared mapping of the arena. It ends with the last reference to it, and not at exit: views
    may be used after that.

    writable: no page can be accessed before `_open`, and forks do not inherit the mapping.
    """

    __slots__ = ("__weakref__", "address", "length")

    def __init__(self, fd: int, length: int, *, writable: bool) -> None:
        access = _PROT_NONE if writable else mmap.PROT_READ
        address: int = _libc.mmap(None, length, access, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            raise _os_error(f"cannot map {length} bytes of the arena")
        self.address, self.length = address, length
        end = weakref.finalize(self, _unmap, address, length, os.getpid())
        end.atexit = False
        _want_huge_pages(address, length)
        if writable and _libc.madvise(address, length, _MADV_DONTFORK):
            raise _os_error("cannot hide a mapping of the arena from forked children")

    def array_interface(self, *, read_only: bool) -> dict[str, Any]:
        """Describe all of it by numpy's array interface, version 3."""
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.length,),
            "data": (self.address, read_only),
        }

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The array interface for writers. Readers get an array from a pin."""
        return self.array_interface(read_only=False)


class Pin:
    """The chunks that the peer pins for a reply. They are released with the reply's last view.

    `np.asarray(pin)` is the arena as read-only uint8, whose base is the pin:
    `np.ndarray(shape, dtype, buffer=base, offset=offset)` makes views that keep it. A pin is not
    a buffer, so numpy refuses to make views writable.
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
        return self._mapping.array_interface(read_only=True)


class ReadMap:
    """The whole arena, readable. `fd` belongs to the caller."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._mapping: _Mapping | None = _Mapping(fd, size_bytes, writable=False)

    def __repr__(self) -> str:
        return f"<ReadMap {self.size_bytes} B>"

    def pin(self, number: int, gone: Callable[[], object] | None = None) -> Pin:
        """Return the pin of a reply. number: 0 if the peer pinned nothing. gone: called once the
        last view of the reply is gone, from any thread or by the garbage collector, but not when
        the process exits."""
        return Pin(self._mapping, number, gone)

    def close(self) -> None:
        """Release the arena. It stays mapped as long as views exist."""
        self._mapping = None


class _WriteMap:
    """The whole arena. Only open pages can be accessed. Arrays from it keep it mapped."""

    __slots__ = ("address", "bytes", "open", "present", "runs")

    def __init__(self, fd: int, size_bytes: int) -> None:
        mapping = _Mapping(fd, size_bytes, writable=True)
        self.address, self.bytes = mapping.address, np.asarray(mapping)
        self.open = bytearray(-(-size_bytes // MAP_UNIT_BYTES))
        """1 for each page that may be written"""
        self.present = bytearray(len(self.open))
        """1 for each page that was populated once; asking the kernel again costs 20 us per MiB"""
        self.runs = 0
        """the number of runs of open pages"""


class WriteMaps:
    """Granted extents. They stay writable, because the peer often grants the same ones again, and a
    page that this process has written causes no fault.

    Thread-safe. `fd` is the arena's writable descriptor. It belongs to the caller and must stay
    open while this object is used.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size_bytes = os.fstat(fd).st_size
        self._lock = threading.Lock()
        self._current: _WriteMap | None = None

    def __repr__(self) -> str:
        pages = 0 if self._current is None else self._current.open.count(1)
        return f"<WriteMaps {len(self)} runs, {pages * MAP_UNIT_BYTES} B>"

    def __len__(self) -> int:
        """The number of runs of writable pages."""
        return 0 if self._current is None else self._current.runs

    def view(self, offset: int, length: int) -> ByteArray:
        """Return the writable bytes of a granted extent, or of a part of one. They stay mapped as
        long as arrays of them exist."""
        return self._opened(offset, length)[0].bytes[offset : offset + length]

    def populate(self, offset: int, length: int) -> bool:
        """Allocate the pages of a granted extent before it is written, from any thread, without
        the interpreter lock. Return False if the kernel cannot, which only costs speed."""
        writable, first, last = self._opened(offset, length)
        if writable.present.find(0, first, last) >= 0:
            address = writable.address + first * MAP_UNIT_BYTES
            if not _populate(address, (last - first) * MAP_UNIT_BYTES):
                return False
            writable.present[first:last] = b"\1" * (last - first)
        return True

    def close(self) -> None:
        """Release the arena. Arrays that still exist stay mapped. Later calls raise PeerLost."""
        with self._lock:
            self._fd, self._current = -1, None

    def _opened(self, offset: int, length: int) -> tuple[_WriteMap, int, int]:
        """Open these bytes. Return the mapping that has them, their first page, and the page after
        their last."""
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
                if current is None or current.runs == MAX_OPEN_RUNS:
                    self._current = current = _WriteMap(self._fd, self._size_bytes)
                _open(current, first, last)
        return current, first, last


def _open(writable: _WriteMap, first: int, last: int) -> None:
    """Make pages writable. Some of them may be writable already."""
    around = slice(max(first - 1, 0), last + 1)
    before = _runs(writable.open[around])
    address = writable.address + first * MAP_UNIT_BYTES
    length = (last - first) * MAP_UNIT_BYTES
    if _libc.mprotect(address, length, mmap.PROT_READ | mmap.PROT_WRITE):
        raise _os_error(f"cannot make {length} bytes of the arena writable")
    writable.open[first:last] = b"\1" * (last - first)
    writable.runs += _runs(writable.open[around]) - before


def _runs(pages: bytearray) -> int:
    """Return the number of runs of ones."""
    return pages.startswith(b"\1") + pages.count(b"\0\1")


def _no_arena() -> PeerLost:
    return PeerLost(
        "cannot map the peer's arena, because the peer has exited: connect again with "
        "dataplane.connect()"
    )


def _want_huge_pages(address: int, length: int) -> None:
    """Ask for huge pages for a shared mapping. The kernel grants them if its `shmem_enabled` is
    `advise`; otherwise nothing changes."""
    _libc.madvise(address, length, _MADV_HUGEPAGE)


def _unmap(address: int, length: int, pid: int) -> None:
    """Unmap a mapping that process `pid` made. Do nothing in a fork, which has no mapping at this
    address, or its own."""
    if os.getpid() == pid:
        _libc.munmap(address, length)


def _populate(address: int, length: int) -> bool:
    """Allocate the pages for writing. Return False, and do nothing, if this kernel cannot."""
    if not length or _libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS):
        return False
    raise _os_error(f"cannot prefault {length} bytes of the arena")


def _os_error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
