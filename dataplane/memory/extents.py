"""Sets of disjoint ranges of the arena, as two sorted columns: starts and ends.

Pure functions in numpy. Disjoint ranges have the same order by start and by end, so the two
columns can be sorted separately.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataplane.wire.limits import ALIGNMENT_BYTES

PAGE_BYTES = 4096
"""Granted extents start at a multiple of this and are a multiple of this long."""

Bytes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.uint64]
"""Chunk numbers, which the owner of the chunks assigns; 0: no chunk."""
Records = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]
Set = tuple[Bytes, Bytes]
Extent = tuple[int, int]
"""Offset and length."""

_ALIGN = np.uint64(ALIGNMENT_BYTES - 1)
_PAGE = np.uint64(PAGE_BYTES - 1)
_ONE = np.uint64(1)


def page_up(nbytes: int) -> int:
    """The next multiple of a page."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def page_down(nbytes: int) -> int:
    """The last multiple of a page."""
    return nbytes // PAGE_BYTES * PAGE_BYTES


def padded(lengths: npt.NDArray[np.uint64]) -> Bytes:
    """The space that ranges of these lengths use: multiples of 64 bytes, and never 0."""
    result: Bytes = (np.maximum(lengths, _ONE) + _ALIGN) & ~_ALIGN
    return result


def room(nbytes: int) -> int:
    """The same for one length."""
    return max(nbytes + -nbytes % ALIGNMENT_BYTES, ALIGNMENT_BYTES)


def some(mask: Mask) -> bool:
    """`mask.any()`. For short columns, which most are, at a fifth of the cost."""
    return b"\1" in mask.tobytes()


def coalesce(starts: Bytes, ends: Bytes) -> Set:
    """The set of these ranges, which may be in any order, with neighbours merged. Raises
    ValueError if two overlap."""
    if len(starts) < 2:
        return starts, ends
    starts, ends = np.sort(starts, kind="stable"), np.sort(ends, kind="stable")
    if np.count_nonzero(starts[1:] < ends[:-1]):
        raise ValueError("extents overlap")
    apart = starts[1:] != ends[:-1]
    if apart.all():
        return starts, ends
    return starts[np.concatenate(([True], apart))], ends[np.concatenate((apart, [True]))]
