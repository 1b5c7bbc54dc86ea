"""From 16-byte keys to ids: an open-addressed table in numpy, looked up in columns.

A dict would cost 140 bytes an entry and a loop per key; this costs 24 to 36 and looks up 100,000
keys in a few rounds of probing. Ids are given by the caller; the keys lie here, by id.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from dataplane.metadata.tables.columns import Array, grow

_EMPTY, _REMOVED = -1, -2
_SMALLEST_BITS = 7
_FULLEST = 0.6  # entries, removed ones included, over places
_FULL_AFTER_REBUILD = 0.4

_FEW = 32
"""So few keys are looked up one by one: a round of probing in columns costs as much."""
_MASK = (1 << 64) - 1
_C1, _C2 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_U1, _U2, _U32 = np.uint64(_C1), np.uint64(_C2), np.uint64(32)


def pairs(keys: bytes | memoryview) -> Array:
    """A KEY column as two u8 a key, the form in which keys are looked up."""
    return np.frombuffer(keys, np.uint64).reshape(-1, 2)


def mixed(keys: Array) -> Array:
    """A well-spread u8 per key; equal keys have equal ones."""
    # minted keys differ in a few bits only, so both halves are folded before the second product
    folded = keys[:, 0] + keys[:, 1] * _U1
    folded ^= folded >> _U32
    return folded * _U2


def repeated(keys: Array) -> Array:
    """Positions of keys that occur earlier in the same column; empty when all differ."""
    if len(keys) < 2 or (len(keys) <= _FEW and len(set(map(tuple, keys.tolist()))) == len(keys)):
        return np.zeros(0, np.int64)
    hashes = np.sort(mixed(keys))
    if (hashes[1:] != hashes[:-1]).all():
        return np.zeros(0, np.int64)
    _, first = np.unique(np.ascontiguousarray(keys).view("V16").ravel(), return_index=True)
    seen = np.ones(len(keys), bool)
    seen[first] = False
    return seen.nonzero()[0]


class KeyIndex:
    """Which id has a key. `keys` holds the key of each id, as pairs of u8."""

    def __init__(self) -> None:
        self.keys: Array = np.zeros((0, 2), np.uint64)
        self._known = memoryview(cast(Any, self.keys.reshape(-1)))
        """the keys, one half after the other: an item of it takes a third of numpy's time"""
        self._clean(_SMALLEST_BITS)
        self._live = 0

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self._table.nbytes

    def reserve(self, capacity: int) -> None:
        """Make room for ids below `capacity`."""
        self._known.release()  # growing may move what it shows
        grow(self.keys, capacity)
        self._known = memoryview(cast(Any, self.keys.reshape(-1)))

    def find(self, keys: Array) -> Array:
        """The id of each key, -1 where unknown."""
        places = self._places(keys)
        ids = self._table[places].astype(np.int64)
        ids[places < 0] = _EMPTY
        return ids

    def insert(self, keys: Array, ids: Array) -> None:
        """Enter keys that are all different and unknown here."""
        self.keys[ids] = keys
        self._live += len(ids)
        if self._used + len(ids) > _FULLEST * len(self._table):
            self._rebuild(ids)
        self._enter(keys, ids)

    def remove(self, ids: Array) -> None:
        """Forget ids that are known."""
        self._table[self._places(self.keys[ids])] = _REMOVED
        self._live -= len(ids)

    def _clean(self, bits: int) -> None:
        self._shift = 64 - bits
        self._last = (1 << bits) - 1
        self._table: Array = np.full(1 << bits, _EMPTY, np.int32)
        self._places_of = memoryview(cast(Any, self._table))
        self._used = 0

    def _places(self, keys: Array) -> Array:
        """Where each key lies in the table, -1 where it is unknown."""
        if len(keys) > _FEW:
            return self._probe(keys)
        table, known, shift, last = self._places_of, self._known, self._shift, self._last
        places = []
        for first, second in keys.tolist():
            folded = (first + second * _C1) & _MASK
            place = ((folded ^ folded >> 32) * _C2 & _MASK) >> shift
            while (found := table[place]) != _EMPTY:
                if found >= 0 and known[2 * found] == first and known[2 * found + 1] == second:
                    break
                place = (place + 1) & last
            else:
                place = -1
            places.append(place)
        return np.array(places, np.int64)

    def _probe(self, keys: Array) -> Array:
        """The same for many: all keys step together."""
        places = np.full(len(keys), -1, np.int64)
        if not len(self.keys):
            return places
        at = (mixed(keys) >> np.uint64(self._shift)).astype(np.int64)
        active = np.arange(len(keys))
        first, second = keys[:, 0], keys[:, 1]
        while len(active):
            found = self._table[at]
            known = self.keys[found]
            hit = (found >= 0) & (known[:, 1] == second) & (known[:, 0] == first)
            places[active[hit]] = at[hit]
            go_on = (~hit & (found != _EMPTY)).nonzero()[0]
            active, first, second = active[go_on], first[go_on], second[go_on]
            at = (at[go_on] + 1) & self._last
        return places

    def _enter(self, keys: Array, ids: Array) -> None:
        self._used += len(ids)
        if len(ids) <= _FEW:
            table, shift, last = self._places_of, self._shift, self._last
            for (first, second), one in zip(keys.tolist(), ids.tolist(), strict=True):
                folded = (first + second * _C1) & _MASK
                place = ((folded ^ folded >> 32) * _C2 & _MASK) >> shift
                while table[place] >= 0:
                    place = (place + 1) & last
                table[place] = one
            return
        at = (mixed(keys) >> np.uint64(self._shift)).astype(np.int64)
        while len(ids):
            free = (self._table[at] < 0).nonzero()[0]
            self._table[at[free]] = ids[free]  # of several that meet in one place, the last stays
            left = (self._table[at] != ids).nonzero()[0]
            ids = ids[left]
            at = (at[left] + 1) & self._last

    def _rebuild(self, coming: Array) -> None:
        """A table with room for the entries there and those to come, without removed ones."""
        there = self._table[self._table >= 0].astype(np.int64)
        bits = _SMALLEST_BITS
        while (len(there) + len(coming)) > _FULL_AFTER_REBUILD * (1 << bits):
            bits += 1
        self._clean(bits)
        if len(there):
            self._enter(self.keys[there], there)
