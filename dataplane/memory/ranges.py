"""The table of ranges: which address ranges hold live values, and how many references each has.

Runs in the peer. A range is named by (id, generation). Ids are reused with the next generation,
so an outdated name is recognised. Counts are derived from the references of shards, pins and the
cache. Releasing a name that is no longer alive is a no-op. A range keeps its name when its bytes
move from the arena to the spill file. A second table says which live range holds the bytes of a
digest, so that the images of a prompt are stored once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from dataplane.errors import RowsGone
from dataplane.memory.extents import Bytes, Extent, Mask, Records
from dataplane.wire.packed import DIGEST, EXTENT, RANGE, U8, ids_of, ranges_of

Counts = npt.NDArray[np.integer] | int

SPILLED = 3
"""Stands for the class of ranges whose bytes are in the spill file, charged to none."""
POOL = 4
"""Times n, and added to the class of ranges whose bytes are in the n-th pool, from 1."""

_SWEEP_ABOVE = 1024
_NEW_IDS = 64
_RAW = np.dtype((np.void, DIGEST.itemsize))
_LAST_GENERATION = (1 << 32) - 1

Freed = list[tuple[int, int, int]]
"""Extents that ranges left: offset, length, and the class that was charged."""


class Ranges:
    """Columns by range id. They are read and written one by one: most messages name a few ranges,
    for which numpy's fixed cost would be most of the work."""

    def __init__(self) -> None:
        self.live = 0
        """Ranges that have references."""
        self._spare: list[int] = []  # ids to use again
        self._offset = array("Q")
        self._length = array("Q")
        self._generation = array("I")
        self._refs = array("q")
        self._admission = array("B")
        self._born = array("q")
        self._births = 0

    def __repr__(self) -> str:
        return f"<Ranges {self.live} live of {len(self._refs)} ids>"

    def add(self, extents: Sequence[Extent], admission: int) -> Records:
        """Add ranges with one reference each. Return their RANGE records."""
        self._births += 1
        self.live += len(extents)
        if len(self._spare) < len(extents):
            self._grow(len(extents))
        names, spare, births = array("Q"), self._spare, self._births
        offsets, lengths, counted = self._offset, self._length, self._refs
        admissions, born, generations = self._admission, self._born, self._generation
        for offset, length in extents:
            number = spare.pop()
            offsets[number] = offset
            lengths[number] = length
            counted[number] = 1
            admissions[number] = admission
            born[number] = births
            names.append(number | generations[number] << 32)
        return np.frombuffer(names, RANGE)

    def _grow(self, least: int) -> None:
        """Add at least so many ids. Some more at once are cheaper than one at a time."""
        known = len(self._refs)
        more = max(least, _NEW_IDS, known // 8)
        self._generation.extend([1] * more)
        for column in (self._offset, self._length, self._refs, self._admission, self._born):
            column.frombytes(bytes(more * column.itemsize))
        self._spare[:0] = range(known + more - 1, known - 1, -1)  # the lowest is used first

    def alive(self, ranges: Records) -> Mask:
        """Per record, whether that generation of that range still has references."""
        return np.array([self._is_alive(*name) for name in ranges.tolist()], np.bool_)

    def hold(self, ranges: Records, counts: Counts = 1) -> list[Extent]:
        """More references; a range may be named several times. Return where they lie, padding
        included. RowsGone changes nothing."""
        refs, offsets, lengths, places = self._refs, self._offset, self._length, list[Extent]()
        for number, count in zip(self._living(ranges), _each(counts), strict=False):
            refs[number] += count
            places.append((offsets[number], lengths[number]))
        return places

    def release(self, ranges: Records, counts: Counts = 1) -> Freed:
        """Remove references. Ranges without references are freed. Names of dead ranges are
        ignored."""
        freed: Freed = []
        refs, generations, known = self._refs, self._generation, len(self._refs)
        offsets, lengths, admissions = self._offset, self._length, self._admission
        for (number, generation), count in zip(ranges.tolist(), _each(counts), strict=False):
            if number >= known or generations[number] != generation:
                continue
            left = refs[number] - count
            if left > 0:
                refs[number] = left
            elif refs[number] > 0:
                freed.append((offsets[number], lengths[number], admissions[number]))
                refs[number] = 0  # a generation of 0 says "no range" on the wire
                generations[number] = 1 if generation == _LAST_GENERATION else generation + 1
                self._spare.append(number)
        self.live -= len(freed)
        return freed

    def places(self, ranges: Records) -> list[Extent]:
        """Where these ranges are, with padding. Raises RowsGone if any is dead."""
        return [(self._offset[n], self._length[n]) for n in self._living(ranges)]

    def extents(self, ranges: Records) -> Records:
        """The same as EXTENT records."""
        return np.array(self.places(ranges), EXTENT)

    def refs(self, ranges: Records) -> npt.NDArray[np.int64]:
        """The references of each. Raises RowsGone if any is dead."""
        return np.array([self._refs[n] for n in self._living(ranges)], np.int64)

    def counts_of(self, ids: slice) -> npt.NDArray[np.int64]:
        """A view of the references under these ids, for a holder that knows which ranges are its
        own. Let go of it before ranges are added."""
        return np.frombuffer(self._refs, np.int64)[ids]

    def spilled(self, ranges: Records) -> Mask:
        """Per record, whether it is alive and its bytes are in the spill file."""
        spilled: Mask = self.kinds(ranges) == SPILLED
        return spilled

    def kinds(self, ranges: Records) -> npt.NDArray[np.uint8]:
        """Per record its class, with SPILLED and POOL; 0 for a dead one."""
        kinds = [self._admission[n] if self._is_alive(n, gen) else 0 for n, gen in ranges.tolist()]
        return np.array(kinds, np.uint8)

    def by_age(self, below: int) -> Records:
        """Living ranges charged to a class below this one, the oldest first."""
        refs, born = np.frombuffer(self._refs, np.int64), np.frombuffer(self._born, np.int64)
        ids = np.flatnonzero((refs > 0) & (np.frombuffer(self._admission, np.uint8) < below))
        ids = ids[np.argsort(born[ids], kind="stable")]
        ranges = np.empty(len(ids), RANGE)
        ranges["range"] = ids
        ranges["generation"] = np.frombuffer(self._generation, np.uint32)[ids]
        return ranges

    def move(self, ranges: Records, offsets: Bytes, admission: int) -> Freed:
        """Move these distinct ranges. Return where they were before."""
        ids = self._living(ranges)
        left = [(self._offset[n], self._length[n], self._admission[n]) for n in ids]
        for number, offset in zip(ids, offsets.tolist(), strict=True):
            self._offset[number] = offset
            self._admission[number] = admission
        return left

    def _is_alive(self, number: int, generation: int) -> bool:
        return (
            number < len(self._refs)
            and self._generation[number] == generation
            and self._refs[number] > 0
        )

    def _living(self, ranges: Records) -> list[int]:
        """Their ids. RowsGone if any is dead."""
        names: list[tuple[int, int]] = ranges.tolist()
        refs, generations, known = self._refs, self._generation, len(self._refs)
        living = [n for n, gen in names if n < known and generations[n] == gen and refs[n] > 0]
        if gone := len(names) - len(living):
            raise RowsGone(
                f"values were freed before this call could read them ({gone} of {len(names)}): "
                "read or claim the rows again",
                gone=gone,
                asked=len(names),
            )
        return living


def _each(counts: Counts) -> Iterable[int]:
    return repeat(counts) if isinstance(counts, int) else counts.tolist()


class Digests:
    """Digest to range, per partition. A match says that bytes are probably equal; the client
    compares them.

    An index that holds no references. The entry of a dead range is ignored at once, because the
    range's generation changed, and is removed before dead entries outnumber living ones.
    """

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._entries: dict[str, dict[bytes, int]] = {}
        self._count = 0
        self._sweep_at = _SWEEP_ABOVE

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<Digests {self._count} of {len(self._entries)} partitions>"

    def lookup(self, partition: str, digests: Records) -> Records:
        """The RANGE of each DIGEST, generation 0 if unknown. Pin it before another call."""
        found = np.zeros(len(digests), RANGE)
        entries = self._entries.get(partition)
        if entries:
            packed = np.fromiter(map(entries.get, _raw(digests), repeat(0)), U8, len(digests))
            found = ranges_of(packed)
            found[~self._ranges.alive(found)] = 0
        return found

    def enter(self, partition: str, digests: Records, ranges: Records) -> None:
        """Allow these ranges to be shared. The newest range of a digest is offered."""
        entries = self._entries.setdefault(partition, {})
        before = len(entries)
        entries.update(zip(_raw(digests), ids_of(ranges).tolist(), strict=True))
        self._count += len(entries) - before
        if self._count > self._sweep_at:
            self._sweep()

    def drop(self, partition: str) -> None:
        """Forget a partition."""
        self._count -= len(self._entries.pop(partition, ()))

    def _sweep(self) -> None:
        for partition, entries in list(self._entries.items()):
            packed = np.fromiter(entries.values(), U8, len(entries))
            alive = self._ranges.alive(ranges_of(packed)).tolist()
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
