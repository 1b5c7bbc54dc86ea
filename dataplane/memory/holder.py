"""Holders: the extents that each client may write, and the chunks that it pins. No I/O."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence

from dataplane.errors import LimitExceeded, mixed_releases
from dataplane.memory.extents import PAGE_BYTES, Extent, Numbers

_REMEMBERED = 4


class Holder:
    """One client's grants and pins, from which counts are derived. They end when the client
    releases them, or when every process that mapped them has exited. Adjacent extents of one holder
    are merged.

    The classes of grants are stored as bytes per class, not per extent: written bytes may be
    charged to another class than they were granted for.
    """

    def __init__(self, most_extents: float = math.inf) -> None:
        self.most_extents = most_extents
        """The most separate extents that the client may have."""
        self.pins: dict[int, Numbers] = {}
        self.quarantined = False
        """Whether the client is lost, but its processes may live and write. No other holder gets
        its extents."""
        self.granted_by_class = [0, 0, 0]
        self.recent: deque[Extent] = deque(maxlen=_REMEMBERED)
        """Extents granted last; the client still has them mapped, so it gets them first."""
        self._starts: list[int] = []
        """The starts of the extents that the client may write, in order."""
        self._ends: list[int] = []

    def __repr__(self) -> str:
        lost = " quarantined" if self.quarantined else ""
        return f"<Holder granted={self.granted_bytes} B pins={len(self.pins)}{lost}>"

    @property
    def granted_bytes(self) -> int:
        return sum(self.granted_by_class)

    @property
    def grants(self) -> list[Extent]:
        """All extents that the client may write, in order."""
        pairs = zip(self._starts, self._ends, strict=True)
        return [(start, end - start) for start, end in pairs]

    def grant(self, extents: Sequence[Extent], admission: int) -> None:
        """Add free extents."""
        starts, ends = self._starts, self._ends
        for start, length in extents:
            end = start + length
            self.recent.append((start // PAGE_BYTES * PAGE_BYTES, length))
            self.granted_by_class[admission] += length
            at = bisect_left(starts, start)
            before, after = at > 0 and ends[at - 1] == start, starts[at : at + 1] == [end]
            if before and after:
                ends[at - 1] = ends.pop(at)
                del starts[at]
            elif before:
                ends[at - 1] = end
            elif after:
                starts[at] = start
            else:
                starts.insert(at, start)
                ends.insert(at, end)

    def carve(self, extents: Sequence[Extent], admission: int) -> list[int]:
        """Take extents out of the grants. Return the bytes per class that they were granted under.

        `admission` is used up first. Raises ProtocolError, and takes nothing, unless every extent
        is inside the grants and none overlaps another, and LimitExceeded if too many separate
        extents would be left.
        """
        starts, ends = self._starts, self._ends
        more = 0
        found: list[tuple[int, int, int]] = []
        for start, end in _merged(extents):
            at = bisect_right(starts, start) - 1
            if at < 0 or end > ends[at]:
                raise mixed_releases(
                    f"bytes {start}..{end} of the arena are not reserved for this client",
                    offset=start,
                    end=end,
                )
            found.append((at, start, end))
            more += (start > starts[at]) + (end < ends[at]) - 1
        self.check(more)
        for at, start, end in reversed(found):  # backwards, so that the other positions stay valid
            last = ends[at]
            if start > starts[at]:
                ends[at] = start
                if end < last:
                    starts.insert(at + 1, end)
                    ends.insert(at + 1, last)
            elif end < last:
                starts[at] = end
            else:
                del starts[at], ends[at]
        return self._uncharge(sum([length for _, length in extents]), admission)

    def check(self, more: int) -> None:
        """Raise LimitExceeded if `more` further separate extents would exceed the limit."""
        count = len(self._starts) + more
        if count > self.most_extents:
            raise LimitExceeded(
                f"after this call, the client would hold {count} separate writable ranges of "
                f"the arena, over the limit of {self.most_extents}: finish or cancel some "
                "pending puts first",
                limit=self.most_extents,
            )

    def _uncharge(self, nbytes: int, admission: int) -> list[int]:
        taken = [0, 0, 0]
        for candidate in (admission, 0, 1, 2):
            if not nbytes:
                break
            part = min(nbytes, self.granted_by_class[candidate])
            self.granted_by_class[candidate] -= part
            taken[candidate] += part
            nbytes -= part
        assert nbytes == 0, nbytes
        return taken


def _merged(extents: Sequence[Extent]) -> Iterator[Extent]:
    """Yield start and end of these extents in order, with neighbours merged. Raises ProtocolError
    if two overlap."""
    begin = end = -1
    for start, length in sorted(extents):
        if start < end:
            raise mixed_releases(
                f"two of the {len(extents)} extents of the arena in this message overlap"
            )
        if start > end:
            if end >= 0:
                yield begin, end
            begin = start
        end = start + length
    if end >= 0:
        yield begin, end
