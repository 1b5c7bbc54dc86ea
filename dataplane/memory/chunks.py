"""The table of chunks: where the bytes of each chunk are, and how many references it has.

Runs in the peer. A number names a chunk: its index in these columns, and a generation. An index is
reused with the next generation, so an outdated number is recognised. Counts are derived from
the references of shards, pins and the cache. Releasing a chunk that is no longer alive is a no-op.
A chunk keeps its number when its bytes move from the arena to the spill file. A second table says
which live chunk has the bytes of a digest, so that the images of a prompt are stored once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from dataplane.errors import RowsGone
from dataplane.memory.extents import Bytes, Extent, Mask, Numbers, Records
from dataplane.wire.packed import DIGEST, EXTENT, U8

Counts = npt.NDArray[np.integer] | int

SPILLED = 3
"""In place of a class: the bytes are in the spill file, and no class is charged."""
POOL = 4
"""A chunk in the n-th pool, counted from 1, has n * POOL added to its class."""
INDEX = (1 << 32) - 1
"""The bits of a number that are the index of the chunk; the others are its generation."""

_SWEEP_ABOVE = 1024
_NEW = 64
_RAW = np.dtype((np.void, DIGEST.itemsize))

Freed = list[tuple[int, int, int]]
"""Extents that chunks left: offset, length, and the class that was charged."""


class Chunks:
    """Columns by index. Python reads and writes single entries: most messages name few chunks, and
    the fixed cost of numpy would exceed the work."""

    def __init__(self) -> None:
        self.live = 0
        """Chunks that have references."""
        self._spare: list[int] = []  # indexes to reuse
        self._number = array("Q")  # of the living chunk, or of the next one
        self._offset = array("Q")
        self._length = array("Q")
        self._refs = array("q")
        self._admission = array("B")
        self._born = array("q")
        self._births = 0

    def __repr__(self) -> str:
        return f"<Chunks {self.live} live of {len(self._refs)} known>"

    def add(self, extents: Sequence[Extent], admission: int) -> Numbers:
        """Add chunks with one reference each. Return their numbers."""
        self._births += 1
        self.live += len(extents)
        if len(self._spare) < len(extents):
            self._grow(len(extents))
        added, spare, births = array("Q"), self._spare, self._births
        offsets, lengths, counted = self._offset, self._length, self._refs
        admissions, born, numbers = self._admission, self._born, self._number
        for offset, length in extents:
            index = spare.pop()
            offsets[index] = offset
            lengths[index] = length
            counted[index] = 1
            admissions[index] = admission
            born[index] = births
            added.append(numbers[index])
        return np.frombuffer(added, U8)

    def _grow(self, least: int) -> None:
        """Add at least `least` entries. Adding several at once is cheaper."""
        known = len(self._refs)
        more = max(least, _NEW, known // 8)
        self._number.extend([1 << 32 | index for index in range(known, known + more)])
        for column in (self._offset, self._length, self._refs, self._admission, self._born):
            column.frombytes(bytes(more * column.itemsize))
        self._spare[:0] = range(known + more - 1, known - 1, -1)  # the lowest is used first

    def alive(self, chunks: Numbers) -> Mask:
        """Return per number whether this chunk still has references."""
        return np.array([self._is_alive(number) for number in chunks.tolist()], np.bool_)

    def hold(self, chunks: Numbers, counts: Counts = 1) -> list[Extent]:
        """Add references; a chunk may be listed several times. Return its extent for each, padding
        included. Raises RowsGone, and changes nothing, if any is dead."""
        refs, offsets, lengths = self._refs, self._offset, self._length
        places: list[Extent] = []
        for index, count in zip(self._living(chunks), _each(counts), strict=False):
            refs[index] += count
            places.append((offsets[index], lengths[index]))
        return places

    def release(self, chunks: Numbers, counts: Counts = 1) -> Freed:
        """Remove references. Chunks without references are freed. Dead chunks are ignored."""
        freed: Freed = []
        refs, numbers, known = self._refs, self._number, len(self._refs)
        offsets, lengths, admissions = self._offset, self._length, self._admission
        for number, count in zip(chunks.tolist(), _each(counts), strict=False):
            index = number & INDEX
            if index >= known or numbers[index] != number:
                continue
            left = refs[index] - count
            if left > 0:
                refs[index] = left
            elif refs[index] > 0:
                freed.append((offsets[index], lengths[index], admissions[index]))
                refs[index] = 0
                generation = (number >> 32) % INDEX + 1  # never 0, so that no number is 0
                numbers[index] = generation << 32 | index
                self._spare.append(index)
        self.live -= len(freed)
        return freed

    def places(self, chunks: Numbers) -> list[Extent]:
        """Return the extents of these chunks, padding included. Raises RowsGone if any is dead."""
        return [(self._offset[n], self._length[n]) for n in self._living(chunks)]

    def extents(self, chunks: Numbers) -> Records:
        """Return `places` as EXTENT records."""
        return np.array(self.places(chunks), EXTENT)

    def refs(self, chunks: Numbers) -> npt.NDArray[np.int64]:
        """Return the refcount of each chunk. Raises RowsGone if any is dead."""
        return np.array([self._refs[n] for n in self._living(chunks)], np.int64)

    def counts_of(self, indexes: slice) -> npt.NDArray[np.int64]:
        """Return a view of the refcounts at these indexes, for a caller that knows which chunks are
        its own. Drop the view before chunks are added."""
        return np.frombuffer(self._refs, np.int64)[indexes]

    def kinds(self, chunks: Numbers) -> npt.NDArray[np.uint8]:
        """Return the class of each chunk, with SPILLED and POOL; 0 for a dead chunk."""
        kinds = [self._admission[n & INDEX] if self._is_alive(n) else 0 for n in chunks.tolist()]
        return np.array(kinds, np.uint8)

    def by_age(self, below: int) -> Numbers:
        """Return the living chunks charged to a class below this one, the oldest first."""
        refs, born = np.frombuffer(self._refs, np.int64), np.frombuffer(self._born, np.int64)
        found = np.flatnonzero((refs > 0) & (np.frombuffer(self._admission, np.uint8) < below))
        found = found[np.argsort(born[found], kind="stable")]
        return np.frombuffer(self._number, np.uint64)[found]

    def move(self, chunks: Numbers, offsets: Bytes, admission: int) -> Freed:
        """Move these distinct chunks. Return where they were before."""
        indexes = self._living(chunks)
        left = [(self._offset[n], self._length[n], self._admission[n]) for n in indexes]
        for index, offset in zip(indexes, offsets.tolist(), strict=True):
            self._offset[index] = offset
            self._admission[index] = admission
        return left

    def _is_alive(self, number: int) -> bool:
        index = number & INDEX
        return index < len(self._refs) and self._number[index] == number and self._refs[index] > 0

    def _living(self, chunks: Numbers) -> list[int]:
        """Return the indexes of these chunks. Raises RowsGone if any is dead."""
        named: list[int] = chunks.tolist()
        refs, numbers, known = self._refs, self._number, len(self._refs)
        found = [number & INDEX for number in named]
        pairs = zip(found, named, strict=True)
        living = [n for n, name in pairs if n < known and numbers[n] == name and refs[n] > 0]
        if gone := len(named) - len(living):
            raise RowsGone(
                f"values were freed before this call could read them ({gone} of {len(named)}): "
                "read or claim the rows again",
                gone=gone,
                asked=len(named),
            )
        return living


def _each(counts: Counts) -> Iterable[int]:
    return repeat(counts) if isinstance(counts, int) else counts.tolist()


class Digests:
    """Digest to chunk, per partition. A match says that bytes are probably equal; the client
    compares them.

    Holds no references. The entry of a dead chunk is ignored at once, because its number changed,
    and is removed before dead entries outnumber living ones.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._entries: dict[str, dict[bytes, int]] = {}
        self._count = 0
        self._sweep_at = _SWEEP_ABOVE

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<Digests {self._count} of {len(self._entries)} partitions>"

    def lookup(self, partition: str, digests: Records) -> Numbers:
        """Return the chunk of each DIGEST, 0 if unknown. Pin the chunks before another call."""
        found = np.zeros(len(digests), U8)
        entries = self._entries.get(partition)
        if entries:
            found = np.fromiter(map(entries.get, _raw(digests), repeat(0)), U8, len(digests))
            found[~self._chunks.alive(found)] = 0
        return found

    def enter(self, partition: str, digests: Records, chunks: Numbers) -> None:
        """Allow these chunks to be shared. The newest chunk of a digest is offered."""
        entries = self._entries.setdefault(partition, {})
        before = len(entries)
        entries.update(zip(_raw(digests), chunks.tolist(), strict=True))
        self._count += len(entries) - before
        if self._count > self._sweep_at:
            self._sweep()

    def drop(self, partition: str) -> None:
        """Forget a partition."""
        self._count -= len(self._entries.pop(partition, ()))

    def _sweep(self) -> None:
        for partition, entries in list(self._entries.items()):
            packed = np.fromiter(entries.values(), U8, len(entries))
            alive = self._chunks.alive(packed).tolist()
            living = {
                digest: value
                for (digest, value), lives in zip(entries.items(), alive, strict=True)
                if lives
            }
            if living:
                self._entries[partition] = living
            else:
                del self._entries[partition]
        self._count = sum(map(len, self._entries.values()))
        self._sweep_at = max(_SWEEP_ABOVE, 2 * self._count)


def _raw(digests: Records) -> list[bytes]:
    raw: list[bytes] = np.ascontiguousarray(digests).view(_RAW).tolist()
    return raw
