"""Extents of the arena: sizes and padding, sets of extents, and where the chunks of a write go.

A set of disjoint extents is two sorted columns, starts and ends. Disjoint extents have the same
order by start and by end, so the two columns can be sorted separately. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dataplane.errors import LimitExceeded
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
    """The space that chunks of these lengths use: multiples of 64 bytes, and never 0."""
    result: Bytes = (np.maximum(lengths, _ONE) + _ALIGN) & ~_ALIGN
    return result


def room(nbytes: int) -> int:
    """The space that a chunk of this length uses."""
    return max(nbytes + -nbytes % ALIGNMENT_BYTES, ALIGNMENT_BYTES)


def some(mask: Mask) -> bool:
    """`mask.any()`, at a fifth of its cost for short columns. Most columns are short."""
    return b"\1" in mask.tobytes()


def coalesce(starts: Bytes, ends: Bytes) -> Set:
    """The set of these extents, which may be in any order, with neighbours merged. Raises
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


def placed(sizes: Sequence[int], extents: Iterable[Extent]) -> tuple[list[int], list[Extent]]:
    """Return the offset of each chunk in the arena, and the unused parts of the extents.

    The peer grants extents by this rule and the client fills them by it. Chunks are placed in
    order: each into the current extent if it fits there, else into the next one that holds it. No
    chunk crosses extents. Each starts at a multiple of 64 bytes and owns its padding.

    sizes: bytes of each chunk, unpadded. extents: their offsets are multiples of 64. Raises
    LimitExceeded if the chunks do not all fit.
    """
    offsets: list[int] = []
    left: list[Extent] = []
    slots = iter(extents)
    at = end = 0
    for size in sizes:
        needed = size + ALIGNMENT_BYTES - 1 & -ALIGNMENT_BYTES or ALIGNMENT_BYTES
        while at + needed > end:
            if at < end:
                left.append((at, end - at))
            at, length = next(slots, (-1, 0))
            if at < 0:
                raise LimitExceeded(
                    f"only {len(offsets)} of this call's {len(sizes)} memory chunks fit into the "
                    "space that was reserved for the call: write fewer rows per call",
                    chunks=len(sizes),
                    fitting=len(offsets),
                )
            end = at + length
        offsets.append(at)
        at += needed
    if at < end:
        left.append((at, end - at))
    return offsets, [*left, *slots]
