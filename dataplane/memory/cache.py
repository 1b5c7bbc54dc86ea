"""Copies of other hosts' chunks, cached while there is space. They are neither replicas nor the
original.

Runs in the peer. A copy is a local chunk of the pull class to which the cache holds one reference;
readers pin it like any other chunk. Unpinned copies are evicted, least recently used first. A copy
whose owner has freed the chunk is dropped when the peer learns that. A host may have millions of
copies, so the cost of an operation depends only on the copies that it names, except for the sum
`evictable_bytes`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from dataplane.memory.chunks import INDEX, Chunks
from dataplane.memory.extents import Numbers
from dataplane.wire.packed import U8


class Copy(NamedTuple):
    """A cached copy. owner: the incarnation of the peer that has the original. remote, local: the
    number of the chunk at the owner and here."""

    owner: int
    remote: int
    local: int
    nbytes: int


class PulledCopies:
    """The copies, by owner and by the time of their last use."""

    def __init__(self, chunks: Chunks, release: Callable[[Numbers], int]) -> None:
        self.cached_bytes = 0
        self._chunks = chunks
        self._release = release
        self._copies: dict[int, dict[int, Copy]] = {}
        """incarnation of the owner -> index of the chunk there -> copy"""
        self._recency: OrderedDict[int, Copy] = OrderedDict()
        """by local number, least recently used first"""
        self._sizes = array("q")
        """by the index of the local chunk: bytes of the copy; 0 if the chunk is no copy"""

    def __len__(self) -> int:
        return len(self._recency)

    def __repr__(self) -> str:
        return f"<PulledCopies {len(self)} chunks, {self.cached_bytes} B>"

    def lookup(self, incarnation: int, remote: Numbers) -> Numbers:
        """Return the local chunk of each remote one, 0 if there is no copy.

        Pin the local chunks before anything else can evict them.
        """
        known = self._copies.get(incarnation)
        if not known:
            return np.zeros(len(remote), U8)
        found = []
        for name in remote.tolist():
            copy = known.get(name & INDEX)
            if copy is None or copy.remote != name:
                found.append(0)
            else:
                found.append(copy.local)
                self._recency.move_to_end(copy.local)
        return _numbers(found)

    def insert(self, incarnation: int, remote: Numbers, local: Numbers) -> None:
        """Add copies. The one reference of each local chunk becomes the cache's.

        An existing copy stays, and the reference of the new one is released, unless the new one
        has a later generation.
        """
        known = self._copies.setdefault(incarnation, {})
        unneeded: list[int] = []
        places = self._chunks.places(local)
        names = zip(remote.tolist(), local.tolist(), strict=True)
        for (name, held), (_, nbytes) in zip(names, places, strict=True):
            before = known.get(name & INDEX)
            if before is not None:
                if not _is_later(name, before.remote):
                    unneeded.append(held)
                    continue
                self._forget(before)
                unneeded.append(before.local)
            copy = known[name & INDEX] = Copy(incarnation, name, held, nbytes)
            self._recency[held] = copy
            self._note_size(held & INDEX, nbytes)
            self.cached_bytes += nbytes
        if unneeded:
            self._release(_numbers(unneeded))

    def evict(self, nbytes: int) -> int:
        """Evict at least `nbytes` of unpinned copies, if there are that many. Return the freed
        bytes. A copy found pinned counts as used now."""
        unpinned: list[Copy] = []
        pinned: list[int] = []
        counts = self._chunks.counts_of(slice(None))
        for local, copy in self._recency.items():
            if nbytes <= 0:
                break
            # the cache's own reference keeps the chunk alive: no need to compare generations
            if counts[local & INDEX] == 1:
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
        return int(sizes.sum(where=self._chunks.counts_of(slice(len(sizes))) == 1))

    def drop_owner(self, incarnation: int) -> int:
        """Drop all copies of a peer that is gone. Return the bytes freed at once; pinned copies
        are freed with their pins."""
        freed = self._drop(list(self._copies.get(incarnation, {}).values()))
        self._copies.pop(incarnation, None)
        return freed

    def some_of(self, incarnation: int, most: int) -> Numbers:
        """Return the remote numbers of up to `most` copies of a peer: other copies at each call,
        until all were visited."""
        known = self._copies.get(incarnation, {})
        some = list(islice(known.items(), most))
        for number, copy in some:
            del known[number]
            known[number] = copy
        return _numbers([copy.remote for _, copy in some])

    def drop(self, incarnation: int, remote: Numbers) -> int:
        """Drop the copies of these chunks of a peer. Return the bytes freed at once."""
        known = self._copies.get(incarnation, {})
        names = {*remote.tolist()}
        found = [known.get(name & INDEX) for name in names]
        return self._drop([copy for copy in found if copy is not None and copy.remote in names])

    def drop_dead(self, incarnation: int) -> int:
        """Drop the copies of this incarnation whose originals are freed chunks of this host. Return
        the bytes freed at once."""
        copies = list(self._copies.get(incarnation, {}).values())
        if not copies:
            return 0
        alive = self._chunks.alive(_numbers([copy.remote for copy in copies])).tolist()
        return self._drop([copy for copy, lives in zip(copies, alive, strict=True) if not lives])

    def _drop(self, copies: Sequence[Copy]) -> int:
        if not copies:
            return 0
        for copy in copies:
            self._forget(copy)
        return self._release(_numbers([copy.local for copy in copies]))

    def _forget(self, copy: Copy) -> None:
        """Remove a copy. The caller releases its reference."""
        del self._copies[copy.owner][copy.remote & INDEX]
        del self._recency[copy.local]
        self._sizes[copy.local & INDEX] = 0
        self.cached_bytes -= copy.nbytes

    def _note_size(self, number: int, nbytes: int) -> None:
        if (more := number + 1 - len(self._sizes)) > 0:
            self._sizes.frombytes(bytes(more * self._sizes.itemsize))
        self._sizes[number] = nbytes


def _is_later(name: int, other: int) -> bool:
    """Return whether the generation of this number follows that of the other. Generations wrap
    around after 2**32."""
    return 0 < (name >> 32) - (other >> 32) & INDEX < 1 << 31


def _numbers(names: Sequence[int]) -> Numbers:
    return np.array(names, U8)
