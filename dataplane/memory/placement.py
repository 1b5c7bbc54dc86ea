"""The layout rule: where in granted extents each chunk of a write is.

The peer grants extents by this rule and the client fills them by it, so both import this file.
Chunks are placed in order: each into the current extent if it fits there, else into the next one
that holds it. No chunk crosses extents. Each starts at a multiple of 64 bytes and owns its
padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dataplane.errors import LimitExceeded
from dataplane.memory.extents import Extent
from dataplane.wire.limits import ALIGNMENT_BYTES


def placed(sizes: Sequence[int], extents: Iterable[Extent]) -> tuple[list[int], list[Extent]]:
    """The offset of each chunk in the arena, and what is left of the extents.

    sizes: bytes of each chunk, unpadded. extents: their offsets are multiples of 64. Raises
    LimitExceeded if the chunks do not all fit.
    """
    offsets: list[int] = []
    left: list[Extent] = []
    slots = iter(extents)
    at = end = 0
    for size in sizes:
        room = size + ALIGNMENT_BYTES - 1 & -ALIGNMENT_BYTES or ALIGNMENT_BYTES
        while at + room > end:
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
        at += room
    if at < end:
        left.append((at, end - at))
    return offsets, [*left, *slots]
