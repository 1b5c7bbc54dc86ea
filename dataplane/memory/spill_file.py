"""The file that a peer spills to: private, named by a hash, gone with the peer.

Blocking I/O, for threads of the peer. The file takes as much of the disk as there is in it: room
is allocated before it is written and given back when its values were freed. Its lock tells whether
its peer lives; the next peer that spills to the same directory removes what dead ones left.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import xxhash

from dataplane.memory.extents import Bytes

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_SUFFIX = ".spill"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class SpillFile:
    """A new file in `folder`, which is this user's own (mode 0700). `arena` is the peer's view."""

    def __init__(self, folder: Path, name: str, arena: memoryview) -> None:
        remove_leftovers(folder)
        self.path = folder / f"{xxhash.xxh3_128_hexdigest(name.encode())}{_SUFFIX}"
        self._arena = arena
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __repr__(self) -> str:
        return f"<SpillFile {self.path} {'closed' if self._fd < 0 else 'open'}>"

    def write(self, start: int, nbytes: int, sources: Bytes, lengths: Bytes) -> None:
        """Stretches of the arena, one behind the other, to `start` of the file. OSError where the
        disk is full, or fails; what was written of it then means nothing."""
        os.posix_fallocate(self._fd, start, nbytes)
        at = start
        for source, length in zip(sources.tolist(), lengths.tolist(), strict=True):
            done = 0
            while done < length:
                done += os.pwrite(self._fd, self._arena[source + done : source + length], at + done)
            at += length
        self._forget_pages(start, nbytes)

    def read(self, places: Bytes, lengths: Bytes, dest: Bytes) -> None:
        """Stretches of the file into the arena. OSError where the disk fails."""
        columns = (places.tolist(), lengths.tolist(), dest.tolist())
        for place, length, to in zip(*columns, strict=True):
            done = 0
            while done < length:
                part = self._arena[to + done : to + length]
                count = os.preadv(self._fd, [part], place + done)
                if not count:
                    raise OSError(f"{self.path} ends before byte {place + length}")
                done += count
            self._forget_pages(place, length)

    def clear(self, starts: Bytes, ends: Bytes) -> None:
        """Give these stretches back to the disk, whole pages of them. A file system that cannot
        leaves them to be written again: the file's size limit holds all the same."""
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            _libc.fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, start, end - start)

    def empty(self) -> None:
        """Give everything back, likewise."""
        with suppress(OSError):
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """The file is removed."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _forget_pages(self, start: int, nbytes: int) -> None:
        """The system shall not keep what was spilled in memory as well, charged to this peer.
        Advice: where it cannot be taken, pages go when memory is short."""
        _libc.sync_file_range(self._fd, start, nbytes, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
        with suppress(OSError):
            os.posix_fadvise(self._fd, start, nbytes, os.POSIX_FADV_DONTNEED)


def remove_leftovers(folder: Path) -> None:
    """Remove the files whose peers are dead."""
    for path in _spill_files(folder):
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                pass  # its peer lives
            finally:
                os.close(fd)


def _spill_files(folder: Path) -> Iterable[Path]:
    return sorted(folder.glob(f"*{_SUFFIX}"))
