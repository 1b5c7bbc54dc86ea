"""The table of ranges: which stretches hold live values, and how many references each has.

Runs in the peer. A range is named by (id, generation); ids are used again with the next
generation, so a name that outlived its range is recognised. Counts are derived from the columns
that shards, pins and the cache hold; a release for a name that is no longer alive does nothing.
A range keeps its name when its bytes leave the arena for the spill file. Beside it: which live
range holds the bytes of a digest, so that the images of a prompt are stored once.
"""

from __future__ import annotations

from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.errors import RowsGone
from dataplane.memory.extents import Bytes, Mask, Records, each_once, every
from dataplane.wire.records import DIGEST, EXTENT, RANGE, U4, U8

Counts = npt.NDArray[np.integer] | int
Ids = npt.NDArray[np.intp]

SPILLED = 3
"""Stands for the class of ranges whose bytes are in the spill file, charged to none."""
DEVICE = 4
"""Times n, and added to the class of ranges whose bytes are in the n-th device arena, from 1."""

_FIRST_ROWS = 1024
_SWEEP_ABOVE = 1024
_RAW = np.dtype((np.void, DIGEST.itemsize))


class Freed(NamedTuple):
    """Stretches that ranges left: where they lay, and the class that was charged."""

    offsets: Bytes
    lengths: Bytes
    admissions: npt.NDArray[np.uint8]


_NOTHING = Freed(np.zeros(0, U8), np.zeros(0, U8), np.zeros(0, np.uint8))


class Ranges:
    """Columns by range id."""

    def __init__(self) -> None:
        self.live = 0
        """Ranges that have references."""
        self._top = 0  # ids below were used at least once
        self._spare: list[Ids] = []  # ids to use again, as they came back
        self._offset = np.zeros(_FIRST_ROWS, U8)
        self._length = np.zeros(_FIRST_ROWS, U8)
        self._generation = np.ones(_FIRST_ROWS, U4)
        self._refs = np.zeros(_FIRST_ROWS, np.int64)
        self._admission = np.zeros(_FIRST_ROWS, np.uint8)
        self._born = np.zeros(_FIRST_ROWS, np.int64)
        self._births = 0

    def __repr__(self) -> str:
        return f"<Ranges {self.live} live of {self._top} ids>"

    def add(self, offsets: Bytes, lengths: Bytes, refs: Counts, admission: int) -> Records:
        """New ranges with at least one reference each; their RANGE records."""
        count = len(offsets)
        ids = self._take_ids(count)
        self._offset[ids] = offsets
        self._length[ids] = lengths
        self._refs[ids] = refs
        self._admission[ids] = admission
        self._births += 1
        self._born[ids] = self._births
        self.live += count
        ranges = np.empty(count, RANGE)
        ranges["range"] = ids
        ranges["generation"] = self._generation[ids]
        return ranges

    def alive(self, ranges: Records) -> Mask:
        """Per record, whether that generation of that range still has references."""
        return self._look_up(ranges)[1]

    def hold(self, ranges: Records, counts: Counts = 1) -> None:
        """More references; a range may be named several times. RowsGone changes nothing."""
        if not len(ranges):
            return
        ids = self._living(ranges)
        if len(ids) == 1:
            self._refs[ids] += counts
        else:
            np.add.at(self._refs, ids, np.asarray(counts, np.int64))

    def release(self, ranges: Records, counts: Counts = 1) -> Freed:
        """Fewer references; what has none left is freed. Names of dead ranges are ignored."""
        if len(ranges) == 1:
            number, generation = ranges.item()
            count = counts if isinstance(counts, int) else int(counts[0])
            return self._release_one(number, generation, count)
        ids, alive = self._look_up(ranges)
        if not every(alive):
            ids = ids[alive]
            counts = counts if isinstance(counts, int) else counts[alive]
        np.subtract.at(self._refs, ids, np.asarray(counts, np.int64))
        dead = ids[self._refs[ids] <= 0]
        return self._free(each_once(dead) if len(dead) > 1 else dead)

    def extents(self, ranges: Records) -> Records:
        """Where these ranges lie: EXTENT records, padding included. RowsGone if any is dead."""
        ids = self._living(ranges)
        column = np.empty(len(ids), EXTENT)
        column["offset"] = self._offset[ids]
        column["length"] = self._length[ids]
        return column

    def refs(self, ranges: Records) -> npt.NDArray[np.int64]:
        """References of each. RowsGone if any is dead."""
        return self._refs[self._living(ranges)]

    def counts_of(self, ids: Ids) -> npt.NDArray[np.int64]:
        """References of whatever lives under each id, for holders that know that it is theirs."""
        return self._refs[ids]

    def spilled(self, ranges: Records) -> Mask:
        """Per record, whether it is alive and its bytes are in the spill file."""
        alive = self.alive(ranges)
        ids = np.where(alive, ranges["range"], 0)
        found: Mask = alive & (self._admission[ids] == SPILLED)
        return found

    def kinds(self, ranges: Records) -> npt.NDArray[np.uint8]:
        """Per record its class, with SPILLED and DEVICE; 0 for a dead one."""
        alive = self.alive(ranges)
        kinds: npt.NDArray[np.uint8] = self._admission[np.where(alive, ranges["range"], 0)] * alive
        return kinds

    def by_age(self, below: int) -> Records:
        """Living ranges charged to a class below this one, the oldest first."""
        ids = np.flatnonzero((self._refs[: self._top] > 0) & (self._admission[: self._top] < below))
        ids = ids[np.argsort(self._born[ids], kind="stable")]
        ranges = np.empty(len(ids), RANGE)
        ranges["range"] = ids
        ranges["generation"] = self._generation[ids]
        return ranges

    def move(self, ranges: Records, offsets: Bytes, admission: int) -> Freed:
        """These different ranges lie elsewhere from now on; what they left."""
        ids = self._living(ranges)
        left = self._stretches(ids)
        self._offset[ids] = offsets
        self._admission[ids] = admission
        return left

    def _is_alive(self, number: int, generation: int) -> bool:
        """For a single range: numpy's fixed cost would be most of it."""
        return (
            number < self._top
            and self._generation.item(number) == generation
            and self._refs.item(number) > 0
        )

    def _release_one(self, number: int, generation: int, count: int) -> Freed:
        if not self._is_alive(number, generation):
            return _NOTHING
        left = self._refs.item(number) - count
        if left <= 0:
            return self._free(np.array([number], np.intp))
        self._refs[number] = left
        return _NOTHING

    def _free(self, dead: Ids) -> Freed:
        if not len(dead):
            return _NOTHING
        freed = self._stretches(dead)
        self._bury(dead)
        return freed

    def _stretches(self, ids: Ids) -> Freed:
        return Freed(self._offset[ids], self._length[ids], self._admission[ids])

    def _look_up(self, ranges: Records) -> tuple[Ids, Mask]:
        """Their ids, 0 for one that no range ever had, and whether each is alive."""
        ids: Ids = ranges["range"].astype(np.intp)
        if len(ids) == 1:
            return ids, np.array([self._is_alive(*ranges.item())])
        if np.maximum.reduce(ids, initial=0) < self._top:
            return ids, self._are_alive(ids, ranges)
        known = ids < self._top
        ids = np.where(known, ids, 0)
        return ids, self._are_alive(ids, ranges) & known

    def _are_alive(self, ids: Ids, ranges: Records) -> Mask:
        alive: Mask = (self._generation[ids] == ranges["generation"]) & (self._refs[ids] > 0)
        return alive

    def _living(self, ranges: Records) -> Ids:
        ids, alive = self._look_up(ranges)
        if not every(alive):
            gone = int(len(alive) - np.count_nonzero(alive))
            raise RowsGone(
                f"the bytes of {gone} of {len(alive)} values were freed before this call could "
                "read them: read or claim the rows again",
                gone=gone,
                asked=len(alive),
            )
        return ids

    def _bury(self, ids: Ids) -> None:
        self.live -= len(ids)
        self._refs[ids] = 0
        generations = self._generation[ids] + np.uint32(1)
        generations[generations == 0] = 1  # 0 says "no range" on the wire
        self._generation[ids] = generations
        self._spare.append(ids)

    def _take_ids(self, count: int) -> Ids:
        """Ids that came back, newest column first, then new ones."""
        parts: list[Ids] = []
        missing = count
        while missing and self._spare:
            column = self._spare.pop()
            if len(column) > missing:
                self._spare.append(column[missing:])
                column = column[:missing]
            parts.append(column)
            missing -= len(column)
        if missing:
            self._grow(self._top + missing)
            parts.append(np.arange(self._top, self._top + missing, dtype=np.intp))
            self._top += missing
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.intp)

    def _grow(self, rows: int) -> None:
        have = len(self._refs)
        if rows <= have:
            return
        more = max(rows, 2 * have) - have
        self._offset = np.concatenate((self._offset, np.zeros(more, U8)))
        self._length = np.concatenate((self._length, np.zeros(more, U8)))
        self._generation = np.concatenate((self._generation, np.ones(more, U4)))
        self._refs = np.concatenate((self._refs, np.zeros(more, np.int64)))
        self._admission = np.concatenate((self._admission, np.zeros(more, np.uint8)))
        self._born = np.concatenate((self._born, np.zeros(more, np.int64)))


class Digests:
    """Digest to range, per partition. A match says that bytes are probably equal; the client
    compares them.

    An index, not an owner: it holds no references. An entry whose range died is unknown at once,
    because the range's generation moved on, and is swept before dead entries outnumber living ones.
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
        """The RANGE of each DIGEST, generation 0 where unknown. Pin before another call."""
        found = np.zeros(len(digests), RANGE)
        entries = self._entries.get(partition)
        if entries:
            packed = np.fromiter(map(entries.get, _raw(digests), repeat(0)), U8, len(digests))
            found = packed.view(RANGE)
            found[~self._ranges.alive(found)] = 0
        return found

    def enter(self, partition: str, digests: Records, ranges: Records) -> None:
        """These ranges may be shared from now on. The newest range of a digest is offered."""
        entries = self._entries.setdefault(partition, {})
        before = len(entries)
        packed = np.ascontiguousarray(ranges).view(U8).tolist()
        entries.update(zip(_raw(digests), packed, strict=True))
        self._count += len(entries) - before
        if self._count > self._sweep_at:
            self._sweep()

    def drop(self, partition: str) -> None:
        """Forget a partition."""
        self._count -= len(self._entries.pop(partition, ()))

    def _sweep(self) -> None:
        for partition, entries in list(self._entries.items()):
            packed = np.fromiter(entries.values(), U8, len(entries))
            alive = self._ranges.alive(packed.view(RANGE)).tolist()
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
