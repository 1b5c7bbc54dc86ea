"""Keys of rows and groups that are no more, so that a late or repeated put does not make them anew.

Dropped ones, which are cancelled, and freed ones that had given names, which have been everywhere.
At most a million, the oldest go first and are counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MAX_TOMBSTONES = 1_000_000
BYTES_EACH = 172
"""Measured with a million of them."""
_FLIPPED = bytes(range(255, -1, -1))


def of_group(key: bytes) -> bytes:
    """The key of a group as it is kept here: a row may have the same name, and is another."""
    return key.translate(_FLIPPED)


class Tombstones:
    def __init__(self, limit: int = MAX_TOMBSTONES) -> None:
        self._limit = limit
        self._freed: OrderedDict[bytes, bool] = OrderedDict()
        """oldest first; False: it was dropped"""
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._freed)

    @property
    def nbytes(self) -> int:
        return BYTES_EACH * len(self._freed)

    def add(self, keys: Iterable[bytes], freed: bool = False) -> None:
        """Those known keep their age, and what was dropped stays so."""
        for key in keys:
            self._freed[key] = freed and self._freed.get(key, True)
        while len(self._freed) > self._limit:
            self._freed.popitem(last=False)
            self.forgotten += 1

    def remove(self, keys: Iterable[bytes]) -> None:
        """These names are used again."""
        for key in keys:
            self._freed.pop(key, None)

    def all(self) -> list[tuple[bytes, bool]]:
        """Each with whether it was freed, oldest first."""
        return list(self._freed.items())

    def dropped(self, key: bytes) -> bool:
        return self._freed.get(key) is False

    def freed(self, key: bytes) -> bool:
        """It had a given name, and went when all had acked it."""
        return self._freed.get(key) is True
