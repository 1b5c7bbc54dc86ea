"""Spilling: which chunks of a full arena move to a file, their position in it, and the file itself.

Runs in the peer. The oldest chunks move first. Pinned chunks never move. A chunk keeps its
number and stays in the file until it is freed. A reader gets a copy in the arena, which is cached
like a copy of another host's chunk (`PulledCopies`). `Spilled` does no I/O.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from dataplane.memory.admission import Admission
from dataplane.memory.allocator import Allocator
from dataplane.memory.chunks import SPILLED, Chunks, Freed
from dataplane.memory.extents import Bytes, Extent, Numbers, Set, coalesce, page_up
from dataplane.wire.packed import U8

DISK = 0
"""The incarnation of copies of spilled chunks. No peer has it."""


_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_SUFFIX = ".spill"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Chunks being moved: `sources` in the arena, `places` in the file, their padded `lengths`."""

    chunks: Numbers
    sources: Bytes
    places: Bytes
    lengths: Bytes

    @property
    def start(self) -> int:
        """The start of the one extent of the file that has all the places."""
        return int(self.places[0])

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())


class Spilled:
    """A spill file of at most `size_bytes`, a multiple of a page.

    A freed extent of the file is reused only after `cleared`, so that clearing never destroys
    newer bytes.
    """

    def __init__(self, size_bytes: int, chunks: Chunks) -> None:
        self.size_bytes = size_bytes
        self.spilled_bytes = 0
        """Of living chunks in the file, padding included."""
        self._chunks = chunks
        self._allocator = Allocator(size_bytes)
        self._left: list[Extent] = []
        self.on_left: Callable[[], None] = lambda: None
        """called when there are extents to clear"""

    def __repr__(self) -> str:
        return f"<Spilled {self.spilled_bytes} of {self.size_bytes} B>"

    @property
    def has_left(self) -> bool:
        """Whether extents of the file wait to be cleared."""
        return bool(self._left)

    def choose(self, nbytes: int, pinned: Numbers) -> Move | None:
        """Choose the oldest unpinned chunks, about this many bytes, and space for them in the
        file. None if there are none, or no space. `settle` or `give_up` ends the move."""
        chunks = self._chunks.by_age(below=Admission.PULL)
        read = np.isin(chunks, pinned)
        chunks = chunks[~read]
        extents = self._chunks.extents(chunks)
        ends = np.cumsum(extents["length"])
        enough = int(np.searchsorted(ends, nbytes)) + 1
        fitting = int(np.searchsorted(ends, self._allocator.largest_free, "right"))
        upto = min(enough, fitting, len(chunks))
        if not upto:
            return None
        lengths = extents["length"][:upto]
        places = np.uint64(self._allocate(int(ends[upto - 1]))) + ends[:upto] - lengths
        return Move(chunks[:upto], extents["offset"][:upto], places, lengths)

    def settle(self, move: Move, pinned: Numbers) -> Freed:
        """Note that the bytes are in the file. Chunks that are still alive and unpinned are in the
        file from now on. Return the extents of the arena that they left."""
        stay = ~self._chunks.alive(move.chunks)
        stay |= np.isin(move.chunks, pinned)
        self._leave(move.places[stay], move.lengths[stay])
        going = ~stay
        self.spilled_bytes += int(move.lengths[going].sum())
        return self._chunks.move(move.chunks[going], move.places[going], SPILLED)

    def give_up(self, move: Move) -> None:
        """Note that the bytes could not be written: the chunks stay where they are."""
        self._leave(move.places, move.lengths)

    def freed(self, freed: Freed) -> None:
        """Note that chunks in the file were freed."""
        self.spilled_bytes -= sum([length for _, length, _ in freed])
        self._left += [(place, length) for place, length, _ in freed]
        self.on_left()

    def take_left(self) -> Set:
        """Drain the extents to clear, with neighbours merged."""
        left = np.array(self._left, U8)
        self._left.clear()
        return coalesce(left[:, 0], left[:, 0] + left[:, 1])

    def cleared(self, starts: Bytes, ends: Bytes) -> None:
        """Note that these extents are cleared and may be reused."""
        self._allocator.free(list(zip(starts.tolist(), (ends - starts).tolist(), strict=True)))

    def _allocate(self, nbytes: int) -> int:
        """Allocate exactly `nbytes` of the file. The caller knows that they fit."""
        taken = page_up(nbytes)
        start = self._allocator.allocate(taken)
        assert start is not None, (taken, self._allocator)
        if taken > nbytes:
            self._allocator.free([(start + nbytes, taken - nbytes)])
        return start

    def _leave(self, places: Bytes, lengths: Bytes) -> None:
        if len(places):
            self._left += zip(places.tolist(), lengths.tolist(), strict=True)
            self.on_left()


class SpillFile:
    """A new file in `folder`, which belongs to this user (mode 0700). Its name is a hash, and it is
    removed with the peer. `arena` is the peer's view.

    Blocking I/O, for threads. The file uses only the disk space of its values: space is allocated
    before it is written, and released when values are freed. Its lock shows whether its peer lives.
    The next peer that spills to the same directory removes files of dead ones.
    """

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
        """Write extents of the arena, one after the other, to `start` of the file. Raises OSError
        if the disk is full or fails; the bytes in the file are then undefined."""
        os.posix_fallocate(self._fd, start, nbytes)
        at = start
        for source, length in zip(sources.tolist(), lengths.tolist(), strict=True):
            done = 0
            while done < length:
                done += os.pwrite(self._fd, self._arena[source + done : source + length], at + done)
            at += length
        self._forget_pages(start, nbytes)

    def read(self, places: Bytes, lengths: Bytes, dest: Bytes) -> None:
        """Read extents of the file into the arena. Raises OSError if the disk fails."""
        columns = (places.tolist(), lengths.tolist(), dest.tolist())
        for place, length, to in zip(*columns, strict=True):
            done = 0
            while done < length:
                part = self._arena[to + done : to + length]
                count = os.preadv(self._fd, [part], place + done)
                if not count:
                    raise OSError(f"the spill file {self.path} ends before byte {place + length}")
                done += count
            self._forget_pages(place, length)

    def clear(self, starts: Bytes, ends: Bytes) -> None:
        """Return whole pages of these extents to the disk. A file system that cannot do that keeps
        them for reuse; the file stays within its size limit."""
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            _libc.fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, start, end - start)

    def empty(self) -> None:
        """Return all pages to the disk."""
        with suppress(OSError):
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Close and remove the file."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _forget_pages(self, start: int, nbytes: int) -> None:
        """Drop spilled pages from the page cache, which the system charges to this peer.
        A system that ignores this drops them when memory is short."""
        _libc.sync_file_range(self._fd, start, nbytes, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
        with suppress(OSError):
            os.posix_fadvise(self._fd, start, nbytes, os.POSIX_FADV_DONTNEED)


def remove_leftovers(folder: Path) -> None:
    """Remove the files whose peers are dead."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                pass  # its peer lives
            finally:
                os.close(fd)
