"""System calls on mapped memory, through ctypes, which lets other threads run meanwhile.

Python's `mmap` copies the descriptor for each mapping, cannot tell numpy what keeps a mapping
alive, and holds the interpreter lock while the kernel clears pages. Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
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

MAP_UNIT_BYTES = mmap.PAGESIZE
"""Mappings begin and end at multiples of this; it may be larger than the arena's own pages."""


def map_shared(fd: int, offset: int, length: int, *, writable: bool) -> int:
    """The address of a shared mapping. A writable one is not inherited by forks."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address: int = _libc.mmap(None, length, access, mmap.MAP_SHARED, fd, offset)
    if address == _FAILED:
        raise _os_error(f"cannot map {length} bytes at {offset}")
    if writable and _libc.madvise(address, length, _MADV_DONTFORK):
        error = _os_error("cannot keep a mapping from forks")
        _libc.munmap(address, length)
        raise error
    want_huge_pages(address, length)
    return address


def want_huge_pages(address: int, length: int) -> None:
    """Of a shared mapping. The kernel gives them where its `shmem_enabled` says `advise`; else, and
    where it has none at all, nothing changes."""
    _libc.madvise(address, length, _MADV_HUGEPAGE)


def unmap(address: int, length: int, pid: int) -> None:
    """End a mapping that process `pid` made; a fork of it has none, or its own, there."""
    if os.getpid() == pid:
        _libc.munmap(address, length)


def populate(address: int, length: int) -> bool:
    """Bring the pages in for writing. False where this kernel cannot, and nothing was done."""
    if not length or _libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS):
        return False
    raise _os_error(f"cannot bring {length} bytes of pages in")


def _os_error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
