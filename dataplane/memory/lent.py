"""References of other peers' shards to this arena's chunks, by the incarnation of that peer.

Runs in the peer, without I/O. When such a peer is lost, it can no longer release anything
itself, so these references are released for it. They also limit what a peer may release if it
returns after all.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from dataplane.memory.extents import Numbers
from dataplane.wire.packed import U4, U8
from dataplane.wire.tables import Owner

Counts = npt.NDArray[np.uint32]


class Lent:
    """How many references to each chunk the shards of each peer hold. An `Owner` is one incarnation
    of a peer."""

    def __init__(self) -> None:
        self._held: dict[Owner, dict[int, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def __repr__(self) -> str:
        return f"<Lent {len(self)} chunks to {len(self._held)} peers>"

    def lend(self, to: Owner, chunks: Numbers) -> None:
        """Add one reference for each of these."""
        held = self._held.setdefault(to, {})
        for packed in chunks.tolist():
            held[packed] = held.get(packed, 0) + 1

    def returned(self, by: Owner, chunks: Numbers, counts: Counts) -> Counts:
        """Return how many of these references the peer really had, and remove them."""
        held = self._held.get(by, {})
        had = np.zeros(len(chunks), U4)
        for at, (packed, count) in enumerate(zip(chunks.tolist(), counts.tolist(), strict=True)):
            have = held.get(packed, 0)
            had[at] = min(have, count)
            if have > count:
                held[packed] = have - count
            else:
                held.pop(packed, None)
        if not held:
            self._held.pop(by, None)
        return had

    def lost(self, to: Owner) -> tuple[Numbers, Counts]:
        """Remove all references of a lost peer, and return them: chunk numbers and u4 counts."""
        held = self._held.pop(to, {})
        return _columns(held)

    def inherited(
        self,
        origins: Iterable[Owner],
        heir: Owner | None,
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
            for packed in named if more else list(held):
                had[packed] = had.get(packed, 0) + held.pop(packed, 0)
            if not held:
                self._held.pop(origin, None)
        held = self._held.setdefault(heir, {}) if heir is not None else {}
        for packed, count in zip(named, counts.tolist(), strict=True):
            kept = min(count, had.get(packed, 0))
            if kept:
                held[packed] = held.get(packed, 0) + kept
                had[packed] -= kept
        return _columns({packed: count for packed, count in had.items() if count})

    def count(self, to: Owner) -> int:
        """The number of chunks that this peer's shards reference."""
        return len(self._held.get(to, ()))

    @property
    def peers(self) -> list[Owner]:
        """The peers that hold references."""
        return list(self._held)


def _columns(held: dict[int, int]) -> tuple[Numbers, Counts]:
    chunks = np.fromiter(held.keys(), U8, len(held))
    return chunks, np.fromiter(held.values(), U4, len(held))
