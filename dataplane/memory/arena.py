"""The host arena: one sealed memory file, owned by the peer and handed to clients by descriptor.

It lives as long as somebody maps it and leaves nothing on a file system, whoever is killed. Pages
that nobody touched take no memory: they are brought in only as far as the caller asks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading

import numpy as np

from dataplane.memory.pages import MAP_UNIT_BYTES, populate, want_huge_pages


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
        self._mapped = threading.Lock()
        """held by whoever brings pages in: it must not end under him"""

    @classmethod
    def create(cls, size_bytes: int, name: str) -> Arena:
        """A new arena; the size is rounded up to whole pages. `name` shows in /proc."""
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

    def prefault(self, start: int, length: int) -> bool:
        """Bring pages in before anybody writes; other threads run meanwhile. False where the
        kernel cannot, or it is closed, which costs speed only."""
        first = start // MAP_UNIT_BYTES * MAP_UNIT_BYTES
        with self._mapped:
            if self.rw_fd < 0:
                return False
            return populate(self.address + first, min(start + length, self.size_bytes) - first)

    def close(self) -> None:
        """Close the descriptors. The peer's mapping goes when the last slice of it does."""
        with self._mapped:
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
