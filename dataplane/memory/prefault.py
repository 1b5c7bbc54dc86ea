"""Allocate pages of a memory file from a process of its own: `prefault.py FD START LENGTH`.

The first touch of a page that the machine has not used before takes long. The kernel holds the
address-space lock (mmap_lock) of the process that touches, and every malloc there may wait for it.
A peer therefore leaves this to a child. The child must import nothing that takes long to load.
"""

import ctypes
import mmap
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def prefault(fd: int, start: int, length: int) -> None:
    """Allocate the pages; their contents stay. `start` is a multiple of the page size."""
    pages = mmap.mmap(fd, length, offset=start)
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        with suppress(OSError):  # this kernel cannot, which costs speed only
            pages.madvise(advice)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prefault(*map(int, sys.argv[1:]))
