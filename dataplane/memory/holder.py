"""What one client holds of the arena: extents it may write into, and ranges it reads.

Runs in the peer. This is the truth that counts are derived from: a client's grants and pins come
back when it gives them back, or when every process that mapped them is proved gone.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from dataplane.errors import ProtocolError
from dataplane.memory.extents import (
    PAGE_BYTES,
    Bytes,
    Records,
    Set,
    coalesce,
    covers,
    empty,
    every,
    records,
    subtract,
)

_REMEMBERED = 4


class Holder:
    """One client's grants and pins. Extents of one holder that touch are one.

    The class of a grant is remembered as bytes per class and not per extent: what a client writes
    may be charged to another class than it was granted for, and then that one's bytes are used up.
    """

    def __init__(self) -> None:
        self.pins: dict[int, Records] = {}
        self.quarantined = False
        """Lost, but its processes may live and write: nothing of it is used for others."""
        self.granted_by_class = [0, 0, 0]
        self.recent: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        """Stretches granted last; the client still has them mapped, so it gets them first."""
        self._grants: Set = empty()

    def __repr__(self) -> str:
        lost = " quarantined" if self.quarantined else ""
        return f"<Holder granted={self.granted_bytes} B pins={len(self.pins)}{lost}>"

    @property
    def granted_bytes(self) -> int:
        return sum(self.granted_by_class)

    @property
    def grants(self) -> Records:
        """EXTENT records of all that it may write."""
        return records(*self._grants)

    def grant(self, starts: Bytes, ends: Bytes, admission: int) -> None:
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            self.recent.append((start // PAGE_BYTES * PAGE_BYTES, end))
        self.granted_by_class[admission] += int((ends - starts).sum())
        have = self._grants
        if not len(have[0]):
            self._grants = coalesce(starts, ends)
            return
        self._grants = coalesce(np.concatenate((have[0], starts)), np.concatenate((have[1], ends)))

    def carve(self, starts: Bytes, ends: Bytes, admission: int) -> list[int]:
        """Take pieces out of the grants: the bytes per class that they were granted under.

        `admission` is used up first. ProtocolError, and nothing is taken, unless every piece lies
        inside the grants and none overlaps another.
        """
        if len(starts) == 1 == len(self._grants[0]) and self._carve_one(starts, ends):
            return self._uncharge(int(ends.item() - starts.item()), admission)
        inside = covers(self._grants, starts, ends)
        if not every(inside):
            bad = int(inside.argmin())
            raise ProtocolError(
                f"bytes {int(starts[bad])}..{int(ends[bad])} of the arena are not granted to this "
                f"client (piece {bad} of {len(starts)})",
                offset=int(starts[bad]),
                end=int(ends[bad]),
            )
        try:
            pieces = coalesce(starts, ends)
        except ValueError as exc:
            raise ProtocolError(f"two of {len(starts)} pieces of the arena overlap") from exc
        self._grants = subtract(self._grants, *pieces)
        return self._uncharge(int((ends - starts).sum()), admission)

    def _carve_one(self, starts: Bytes, ends: Bytes) -> bool:
        """Cut a piece off the only grant, at its start: what a steady producer does."""
        granted, limit = self._grants[0].item(), self._grants[1].item()
        if starts.item() != granted or ends.item() > limit:
            return False
        self._grants = (ends, self._grants[1]) if ends.item() < limit else empty()
        return True

    def take_grants(self) -> tuple[Set, list[int]]:
        """All grants and their bytes per class; the holder has none afterwards."""
        grants, by_class = self._grants, self.granted_by_class
        self._grants, self.granted_by_class = empty(), [0, 0, 0]
        return grants, by_class

    def _uncharge(self, nbytes: int, admission: int) -> list[int]:
        taken = [0, 0, 0]
        for candidate in (admission, 0, 1, 2):
            part = min(nbytes, self.granted_by_class[candidate])
            self.granted_by_class[candidate] -= part
            taken[candidate] += part
            nbytes -= part
        assert nbytes == 0, nbytes
        return taken
