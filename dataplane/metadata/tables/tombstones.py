"""Keys of rows and groups that are no more, so that a late or repeated put does not make them anew.

Dropped ones, which are cancelled, and freed ones that had given names, which have been everywhere.
A ring: at most a million, the oldest go first and are counted. 17 bytes each, and the index.
"""

from __future__ import annotations

import numpy as np

from dataplane.metadata.tables.columns import Array, capacity_for, grow
from dataplane.metadata.tables.key_index import KeyIndex

MAX_TOMBSTONES = 1_000_000
_NONE, _DROPPED, _FREED = range(3)


def of_groups(keys: Array) -> Array:
    """The keys of groups as they are kept here: a row may have the same name, and is another."""
    return ~keys


class Tombstones:
    def __init__(self, limit: int = MAX_TOMBSTONES) -> None:
        self._limit = limit
        self._index = KeyIndex()
        self._kinds: Array = np.zeros(0, np.uint8)
        """by place in the ring"""
        self._added = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + self._kinds.nbytes

    def add(self, keys: Array, freed: bool = False) -> None:
        """Enter keys (all different); those known keep their age, and what was dropped stays so."""
        places = self._index.find(keys)
        known = places[places >= 0]
        if not freed:
            self._kinds[known] = _DROPPED
        keys = keys[places < 0]
        self.forgotten += len(keys[: -self._limit])
        keys = keys[-self._limit :]
        count = len(keys)
        if not count:
            return
        numbers = np.arange(self._added, self._added + count)
        places = numbers % self._limit
        top = min(self._limit, self._added + count)
        capacity = capacity_for(len(self._kinds), top)
        self._index.reserve(capacity)
        grow(self._kinds, capacity)
        old = places[self._kinds[places] != _NONE]
        if len(old):
            self.forgotten += len(old)
            self._index.remove(old)
        self._index.insert(keys, places)
        self._kinds[places] = _FREED if freed else _DROPPED
        self._added += count

    def remove(self, keys: Array) -> None:
        """These names are used again."""
        places = self._index.find(keys)
        places = places[places >= 0]
        if len(places):
            self._index.remove(places)
            self._kinds[places] = _NONE

    def all(self) -> tuple[Array, Array]:
        """(all of them, oldest first; which of them were freed)."""
        at = self._added % self._limit if self._added > self._limit else 0
        count = min(self._added, self._limit)
        places = np.roll(np.arange(count), -at)
        places = places[self._kinds[places] != _NONE]
        return self._index.keys[places], self._kinds[places] == _FREED

    def among(self, keys: Array) -> Array:
        """Which of these keys were dropped."""
        return self._are(keys, _DROPPED)

    def freed(self, keys: Array) -> Array:
        """Which of these keys, given ones, were freed."""
        return self._are(keys, _FREED)

    def _are(self, keys: Array, kind: int) -> Array:
        if not len(self._index):
            return np.zeros(len(keys), np.bool_)
        places = self._index.find(keys)
        result: Array = (places >= 0) & (self._kinds[places] == kind)
        return result
