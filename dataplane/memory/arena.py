"""The host arena: one sealed memory file, owned by the peer and passed to clients by descriptor.

It exists as long as a process maps it, and leaves nothing on a file system, whichever process is
killed. Untouched pages use no memory. A view outlives its peer, and keeps the pages of the whole
arena: a starting peer therefore looks for arenas that dead peers left.

System calls on mapped memory use ctypes, which lets other threads run meanwhile. Python's `mmap`
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
import time
from pathlib import Path

import numpy as np

from dataplane.memory import prefault

log = logging.getLogger(__name__)

LETTING_GO_S = 3.0
"""Clients look once a second whether their peer is there, and then drop what nobody views."""
_LOOK_S = 0.2
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ (\S+ \d+) *(.*)$")
"""Memory of no file has no name, and ends the figures of the file before it all the same."""
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
        """Where the peer's own mapping begins."""
        want_huge_pages(self.address, size_bytes)
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
            pass  # somebody still looks into it; it ends with that view


def map_to_read(fd: int, length: int) -> int:
    """Map the arena for reading. Return the address of a shared mapping."""
    return _shared(fd, length, mmap.PROT_READ)


def map_to_write(fd: int, length: int) -> int:
    """Map the arena for writing. Return the address of a shared mapping that is inaccessible
    until `let_write`. Forks do not inherit it."""
    address = _shared(fd, length, _PROT_NONE)
    if _libc.madvise(address, length, _MADV_DONTFORK):
        error = _os_error("cannot hide a mapping of the arena from forked children")
        _libc.munmap(address, length)
        raise error
    return address


def let_write(address: int, length: int) -> None:
    """Make a part of such a mapping writable. What is writable already stays so."""
    if _libc.mprotect(address, length, mmap.PROT_READ | mmap.PROT_WRITE):
        raise _os_error(f"cannot make {length} bytes of the arena writable")


def _shared(fd: int, length: int, access: int) -> int:
    address: int = _libc.mmap(None, length, access, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        raise _os_error(f"cannot map {length} bytes of the arena")
    want_huge_pages(address, length)
    return address


def want_huge_pages(address: int, length: int) -> None:
    """Ask for huge pages for a shared mapping. The kernel grants them if its `shmem_enabled` is
    `advise`; otherwise nothing changes."""
    _libc.madvise(address, length, _MADV_HUGEPAGE)


def unmap(address: int, length: int, pid: int) -> None:
    """Unmap a mapping that process `pid` made. A fork of it has none there, or its own."""
    if os.getpid() == pid:
        _libc.munmap(address, length)


def populate(address: int, length: int) -> bool:
    """Allocate the pages for writing. Return False if this kernel cannot; nothing was done then."""
    if not length or _libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS):
        return False
    raise _os_error(f"cannot prefault {length} bytes of the arena")


def _os_error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")


def arena_beside(size_bytes: int, name: str, least_bytes: int) -> Arena:
    """Create an arena, smaller by what processes still map of earlier arenas of this name whose
    peers crashed; at least `least_bytes`. Waits a moment for processes that are about to unmap
    theirs."""
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
    processes map counts once, with the largest figure of one of them. Pages that none of them
    has touched are not visible from outside."""
    marks = f"/memfd:{name} (deleted)"
    resident: dict[str, int] = {}
    for process in proc.iterdir():
        if process.name.isdigit():
            for file, nbytes in _mapped(process, marks).items():
                resident[file] = max(nbytes, resident.get(file, 0))
    return sum(resident.values())


def _mapped(process: Path, marks: str) -> dict[str, int]:
    """Device and inode -> bytes that one process has in memory, of files with this mark."""
    try:
        # Reading maps takes ten times as long, and holds up the process if it has many mappings.
        if _SHARES_NOTHING.search((process / "status").read_bytes()):
            return {}
        if marks not in (process / "maps").read_text():
            return {}
        lines = (process / "smaps").read_text().splitlines()
    except OSError:
        return {}  # another user's, or gone meanwhile
    found: dict[str, int] = {}
    file: str | None = None
    for line in lines:
        if mapping := _MAPPING.match(line):
            file = mapping[1] if mapping[2] == marks else None
        elif file is not None and (size := _RESIDENT.match(line)):
            found[file] = found.get(file, 0) + 1024 * int(size[1])
    return found
