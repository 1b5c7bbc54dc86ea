"""Which live range holds the bytes of a digest, per partition: the images of a prompt, stored once.

Runs in the peer. An index, not an owner: it holds no references. An entry whose range died is
unknown at once, because the range's generation moved on, and is swept before dead entries
outnumber living ones, so the index is bounded by the live ranges.
"""

from __future__ import annotations

from itertools import repeat

import numpy as np

from dataplane.memory.extents import Records
from dataplane.memory.ranges import Ranges
from dataplane.wire.records import DIGEST, RANGE, U8

_SWEEP_ABOVE = 1024
_RAW = np.dtype((np.void, DIGEST.itemsize))


class Digests:
    """Digest to range. A match says that bytes are probably equal; the client compares them."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._entries: dict[str, dict[bytes, int]] = {}
        self._count = 0
        self._sweep_at = _SWEEP_ABOVE

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<Digests {self._count} of {len(self._entries)} partitions>"

    def lookup(self, partition: str, digests: Records) -> Records:
        """The RANGE of each DIGEST, generation 0 where unknown. Pin before another call."""
        found = np.zeros(len(digests), RANGE)
        entries = self._entries.get(partition)
        if entries:
            packed = np.fromiter(map(entries.get, _raw(digests), repeat(0)), U8, len(digests))
            found = packed.view(RANGE)
            found[~self._ranges.alive(found)] = 0
        return found

    def enter(self, partition: str, digests: Records, ranges: Records) -> None:
        """These ranges may be shared from now on. The newest range of a digest is offered."""
        entries = self._entries.setdefault(partition, {})
        before = len(entries)
        packed = np.ascontiguousarray(ranges).view(U8).tolist()
        entries.update(zip(_raw(digests), packed, strict=True))
        self._count += len(entries) - before
        if self._count > self._sweep_at:
            self._sweep()

    def drop(self, partition: str) -> None:
        """Forget a partition."""
        self._count -= len(self._entries.pop(partition, ()))

    def _sweep(self) -> None:
        for partition, entries in list(self._entries.items()):
            packed = np.fromiter(entries.values(), U8, len(entries))
            alive = self._ranges.alive(packed.view(RANGE)).tolist()
            living = {
                digest: value
                for (digest, value), lives in zip(entries.items(), alive, strict=True)
                if lives
            }
            if living:
                self._entries[partition] = living
            else:
                del self._entries[partition]
        self._count = sum(map(len, self._entries.values()))
        self._sweep_at = max(_SWEEP_ABOVE, 2 * self._count)


def _raw(digests: Records) -> list[bytes]:
    raw: list[bytes] = np.ascontiguousarray(digests).view(_RAW).tolist()
    return raw
