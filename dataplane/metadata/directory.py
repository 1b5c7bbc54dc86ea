"""The directory of given names: (generation, 16-byte key) -> the shard where it lives.

Kept at the peer that serves `Roster.directory_shards`; sans-I/O. Two hosts that put one new name at
once are ordered here: the shard that was entered first stays. Minted keys need no entry.
"""

from __future__ import annotations

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

    def __len__(self) -> int:
        return sum(map(len, self._shards.values()))

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
        return np.fromiter(found, np.uint16, len(names))

    def remove(self, generation: int, keys: npt.NDArray[np.void]) -> None:
        """Rows that were freed: their names may be given again."""
        known = self._shards.get(generation, {})
        for name in keys.tolist():
            known.pop(name, None)

    def drop(self, generation: int) -> None:
        """The partition was dropped."""
        self._shards.pop(generation, None)
