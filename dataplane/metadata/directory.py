"""The directory of given names: (generation, 16-byte key) -> the shard where it lives.

Kept at the peer that serves `Roster.directory_shards`; sans-I/O. Two hosts that put one new name at
once are ordered here: the shard that was entered first stays. Minted keys need no entry. A name
whose row was freed leaves in two steps, and stays where a put has asked for it in between.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import repeat

import numpy as np
import numpy.typing as npt

from dataplane.wire.limits import SHARDS

UNKNOWN = 0xFFFF
assert SHARDS < UNKNOWN


class Directory:
    """One dict per partition's generation, so that a dropped partition goes in one step."""

    def __init__(self) -> None:
        self._shards: dict[int, dict[bytes, int]] = {}
        self._leaving: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        """Names, without those that are about to leave."""
        known, leaving = (map(len, kept.values()) for kept in (self._shards, self._leaving))
        return sum(known) - sum(leaving)

    def __repr__(self) -> str:
        return f"<Directory of {len(self)} names in {len(self._shards)} partitions>"

    def enter(
        self,
        generation: int,
        keys: npt.NDArray[np.void],
        shard: int | npt.NDArray[np.uint16] | None,
    ) -> npt.NDArray[np.uint16]:
        """The shard of each key (KEY records). New keys are entered at `shard` (one for all, or a
        column); with None nothing is entered and an unknown key gives 0xFFFF."""
        names = keys.tolist()
        if shard is None:
            known = self._shards.get(generation, {})
            found = map(known.get, names, repeat(UNKNOWN))
        else:
            known = self._shards.setdefault(generation, {})
            wanted = repeat(int(shard)) if isinstance(shard, int) else iter(shard.tolist())
            found = map(known.setdefault, names, wanted)
            if generation in self._leaving:
                self._leaving[generation].difference_update(names)
        return np.fromiter(found, np.uint16, len(names))

    def expect_leave(self, generation: int, keys: npt.NDArray[np.void]) -> None:
        """Rows with these names were freed; puts may be on their way to where these lead."""
        known = self._shards.get(generation, {})
        going = [name for name in keys.tolist() if name in known]
        if going:
            self._leaving.setdefault(generation, set()).update(going)

    def leave(self, generation: int, keys: npt.NDArray[np.void]) -> None:
        """So long afterwards that no such put is left: names that nobody entered since are free."""
        leaving = self._leaving.get(generation, set())
        self._take_out(generation, leaving.intersection(keys.tolist()))

    def remove(self, generation: int, keys: npt.NDArray[np.void]) -> None:
        """No row ever was where these names lead, or will be: they are free at once."""
        self._take_out(generation, keys.tolist())

    def _take_out(self, generation: int, names: Collection[bytes]) -> None:
        known = self._shards.get(generation, {})
        for name in names:
            known.pop(name, None)
        leaving = self._leaving.get(generation)
        if leaving is not None:
            leaving.difference_update(names)
            if not leaving:
                del self._leaving[generation]

    def drop(self, generation: int) -> None:
        """The partition was dropped."""
        self._shards.pop(generation, None)
        self._leaving.pop(generation, None)
