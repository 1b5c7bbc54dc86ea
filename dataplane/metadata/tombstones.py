"""Keys of dropped rows and groups, so that a late put learns that it was cancelled.

A ring: at most a million, the oldest go first and are counted. 16 bytes each, and the index. Keys
that went are kept until they are drained, for the directory has entries that lead to them.
"""

from __future__ import annotations

import numpy as np

from dataplane.metadata.columns import Array, capacity_for
from dataplane.metadata.index import KeyIndex

MAX_TOMBSTONES = 1_000_000


class Tombstones:
    def __init__(self, limit: int = MAX_TOMBSTONES) -> None:
        self._limit = limit
        self._index = KeyIndex()
        self._added = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    def add(self, keys: Array) -> None:
        """Enter keys (all different); those known keep their age."""
        keys = keys[self._index.find(keys) < 0]
        self.forgotten += len(keys[: -self._limit])
        keys = keys[-self._limit :]
        count = len(keys)
        if not count:
            return
        places = np.arange(self._added, self._added + count) % self._limit
        old = places[np.arange(self._added, self._added + count) >= self._limit]
        if len(old):
            self.forgotten += len(old)
            self._index.remove(old)
        top = min(self._limit, self._added + count)
        self._index.reserve(capacity_for(len(self._index.keys), top))
        self._index.insert(keys, places)
        self._added += count

    def keys(self) -> Array:
        """All of them, oldest first."""
        at = self._added % self._limit if self._added > self._limit else 0
        return np.roll(self._index.keys[: min(self._added, self._limit)], -at, axis=0)

    def among(self, keys: Array) -> Array:
        """Which of these keys were dropped."""
        if not len(self._index):
            return np.zeros(len(keys), np.bool_)
        result: Array = self._index.find(keys) >= 0
        return result
