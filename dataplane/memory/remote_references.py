"""References of other peers' shards to this arena's chunks, by the incarnation of that peer.

Runs in the peer, without I/O. A lost peer can no longer release its references, so this peer
releases them. If the lost peer returns, it may release only references that this peer still counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from dataplane.memory.extents import Numbers
from dataplane.wire.packed import U4, U8
from dataplane.wire.tables import Owner

Counts = npt.NDArray[np.uint32]


class RemoteReferences:
    """How many references to each chunk the shards of each peer hold. An `Owner` is one incarnation
    of a peer."""

    def __init__(self) -> None:
        self._held: dict[Owner, dict[int, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def __repr__(self) -> str:
        return f"<RemoteReferences {len(self)} chunks of {len(self._held)} peers>"

    def add(self, holder: Owner, chunks: Numbers) -> None:
        """Add one reference of `holder` to each of these chunks."""
        held = self._held.setdefault(holder, {})
        for number in chunks.tolist():
            held[number] = held.get(number, 0) + 1

    def release(self, holder: Owner, chunks: Numbers, counts: Counts) -> Counts:
        """Remove references of `holder`. Return, per chunk, how many of them it had."""
        held = self._held.get(holder, {})
        had = np.zeros(len(chunks), U4)
        for at, (number, count) in enumerate(zip(chunks.tolist(), counts.tolist(), strict=True)):
            have = held.get(number, 0)
            had[at] = min(have, count)
            if have > count:
                held[number] = have - count
            else:
                held.pop(number, None)
        if not held:
            self._held.pop(holder, None)
        return had

    def lost(self, holder: Owner) -> tuple[Numbers, Counts]:
        """Remove all references of a lost peer, and return them: chunk numbers and u4 counts."""
        return _columns(self._held.pop(holder, {}))

    def inherited(
        self,
        origins: Iterable[Owner],
        successor: Owner | None,
        chunks: Numbers,
        counts: Counts,
        more: bool = False,
    ) -> tuple[Numbers, Counts]:
        """Handle the report of a successor (None: this peer itself), which lists each chunk
        once. Return the references that the lost peers had and the successor does not hold.
        more: a later report lists further chunks, so only references to these are returned."""
        named: list[int] = chunks.tolist()
        had: dict[int, int] = {}
        for origin in origins:
            held = self._held.get(origin, {})
            for number in named if more else list(held):
                had[number] = had.get(number, 0) + held.pop(number, 0)
            if not held:
                self._held.pop(origin, None)
        held = self._held.setdefault(successor, {}) if successor is not None else {}
        for number, count in zip(named, counts.tolist(), strict=True):
            kept = min(count, had.get(number, 0))
            if kept:
                held[number] = held.get(number, 0) + kept
                had[number] -= kept
        return _columns({number: count for number, count in had.items() if count})

    def count(self, holder: Owner) -> int:
        """The number of chunks that this peer's shards reference."""
        return len(self._held.get(holder, ()))

    @property
    def peers(self) -> list[Owner]:
        """The peers that hold references."""
        return list(self._held)


def _columns(held: dict[int, int]) -> tuple[Numbers, Counts]:
    chunks = np.fromiter(held.keys(), U8, len(held))
    return chunks, np.fromiter(held.values(), U4, len(held))
