"""Copies of other hosts' ranges, cached while there is space. They are neither replicas nor the
original.

Runs in the peer. A copy is a local range of the pull class to which the cache holds one
reference; readers pin it like any other range. Unpinned copies are evicted, least recently used
first. A copy whose owner has freed the range is dropped when the peer learns that. Except for
the sum `evictable_bytes`, operations on some copies cost nothing for the others: a host may have
millions.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from dataplane.memory.extents import Records
from dataplane.memory.ranges import Ranges
from dataplane.wire.packed import RANGE, U8, ids_of, ranges_of

_NUMBER = (1 << 32) - 1
"""The bits of a packed RANGE that are its number; the others are its generation."""


class Copy(NamedTuple):
    """A cached copy. owner: the incarnation of the peer that has the original. remote, local: the
    packed RANGE at the owner and here."""

    owner: int
    remote: int
    local: int
    nbytes: int


class PulledCopies:
    """The copies, by owner and by the time of their last use."""

    def __init__(self, ranges: Ranges, release: Callable[[Records], int]) -> None:
        self.cached_bytes = 0
        self._ranges = ranges
        self._release = release
        self._copies: dict[int, dict[int, Copy]] = {}
        """incarnation of the owner -> number of the range there -> copy"""
        self._recency: OrderedDict[int, Copy] = OrderedDict()
        """by local RANGE, least recently used first"""
        self._sizes = array("q")
        """by the number of the local range: bytes of the copy; 0 for a range that is none"""

    def __len__(self) -> int:
        return len(self._recency)

    def __repr__(self) -> str:
        return f"<PulledCopies {len(self)} ranges, {self.cached_bytes} B>"

    def lookup(self, incarnation: int, remote: Records) -> Records:
        """The local RANGE of each remote one, generation 0 if there is no copy.

        Pin what is found before anything else can evict it.
        """
        known = self._copies.get(incarnation)
        if not known:
            return np.zeros(len(remote), RANGE)
        found = []
        for name in ids_of(remote).tolist():
            copy = known.get(name & _NUMBER)
            if copy is None or copy.remote != name:
                found.append(0)
            else:
                found.append(copy.local)
                self._recency.move_to_end(copy.local)
        return _ranges(found)

    def insert(self, incarnation: int, remote: Records, local: Records) -> None:
        """Add copies. The one reference of each local range becomes the cache's.

        An existing copy stays, and the reference of the new one is released, unless the new one
        has a later generation.
        """
        known, unneeded = self._copies.setdefault(incarnation, {}), list[int]()
        places = self._ranges.places(local)
        names = zip(ids_of(remote).tolist(), ids_of(local).tolist(), strict=True)
        for (name, held), (_, nbytes) in zip(names, places, strict=True):
            before = known.get(name & _NUMBER)
            if before is not None:
                if not _is_later(name, before.remote):
                    unneeded.append(held)
                    continue
                self._forget(before)
                unneeded.append(before.local)
            copy = known[name & _NUMBER] = Copy(incarnation, name, held, nbytes)
            self._recency[held] = copy
            self._note_size(held & _NUMBER, nbytes)
            self.cached_bytes += nbytes
        if unneeded:
            self._release(_ranges(unneeded))

    def evict(self, nbytes: int) -> int:
        """Evict at least `nbytes` of unpinned copies, if there are that many. Return the freed
        bytes. A copy found pinned counts as used now."""
        unpinned, pinned = list[Copy](), list[int]()
        counts = self._ranges.counts_of(slice(None))
        for local, copy in self._recency.items():
            if nbytes <= 0:
                break
            # the cache's own reference keeps the range alive: no need to compare generations
            if counts[local & _NUMBER] == 1:
                unpinned.append(copy)
                nbytes -= copy.nbytes
            else:
                pinned.append(local)
        for local in pinned:
            self._recency.move_to_end(local)
        return self._drop(unpinned)

    @property
    def evictable_bytes(self) -> int:
        """The bytes that `evict` could free now."""
        if not self.cached_bytes:
            return 0
        sizes = np.frombuffer(self._sizes, np.int64)
        return int(sizes.sum(where=self._ranges.counts_of(slice(len(sizes))) == 1))

    def drop_owner(self, incarnation: int) -> int:
        """Drop all copies of a peer that is gone. Return the bytes freed at once; pinned copies
        are freed with their pins."""
        freed = self._drop(list(self._copies.get(incarnation, {}).values()))
        self._copies.pop(incarnation, None)
        return freed

    def some_of(self, incarnation: int, most: int) -> Records:
        """The RANGE, at their owner, of up to this many copies of a peer: the next ones at each
        call, so that all are visited."""
        known = self._copies.get(incarnation, {})
        some = list(islice(known.items(), most))
        for number, copy in some:
            del known[number]
            known[number] = copy
        return _ranges([copy.remote for _, copy in some])

    def drop(self, incarnation: int, remote: Records) -> int:
        """Drop the copies of these ranges of a peer. Return the bytes freed at once."""
        known = self._copies.get(incarnation, {})
        names = {*ids_of(remote).tolist()}
        found = [known.get(name & _NUMBER) for name in names]
        return self._drop([copy for copy in found if copy is not None and copy.remote in names])

    def drop_dead(self, incarnation: int) -> int:
        """Drop the copies of ranges of this host that were freed, from under this incarnation.
        Return the bytes freed at once."""
        copies = list(self._copies.get(incarnation, {}).values())
        if not copies:
            return 0
        alive = self._ranges.alive(_ranges([copy.remote for copy in copies])).tolist()
        return self._drop([copy for copy, lives in zip(copies, alive, strict=True) if not lives])

    def _drop(self, copies: Sequence[Copy]) -> int:
        if not copies:
            return 0
        for copy in copies:
            self._forget(copy)
        return self._release(_ranges([copy.local for copy in copies]))

    def _forget(self, copy: Copy) -> None:
        """The caller releases its reference."""
        del self._copies[copy.owner][copy.remote & _NUMBER]
        del self._recency[copy.local]
        self._sizes[copy.local & _NUMBER] = 0
        self.cached_bytes -= copy.nbytes

    def _note_size(self, number: int, nbytes: int) -> None:
        if (more := number + 1 - len(self._sizes)) > 0:
            self._sizes.frombytes(bytes(more * self._sizes.itemsize))
        self._sizes[number] = nbytes


def _is_later(name: int, other: int) -> bool:
    """Whether the generation of this packed RANGE follows that of the other. Generations begin
    again after 2**32."""
    return 0 < (name >> 32) - (other >> 32) & _NUMBER < 1 << 31


def _ranges(names: Sequence[int]) -> Records:
    return ranges_of(np.array(names, U8))
