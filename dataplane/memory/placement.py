"""The layout rule: where in granted extents each range of a put lies.

The peer grants extents by it and the client fills them by it, so both import this file. Ranges go
in order; each is put into the current extent if it fits there, else into the next that holds it.
No range straddles two extents, each starts at a multiple of 64 bytes and owns its padding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataplane.errors import LimitExceeded
from dataplane.memory.extents import Bytes, Records, padded
from dataplane.wire.records import EXTENT, U8


def place(sizes: npt.ArrayLike, extents: Records) -> Bytes:
    """The offset of each range in the arena, u8.

    sizes: bytes of each range, unpadded. extents: EXTENT records, whose offsets are multiples of
    64. LimitExceeded where the ranges do not all fit; see `fitting`.
    """
    room = padded(np.asarray(sizes, U8))
    offsets, done = _lay(room, extents)
    if done < len(room):
        raise LimitExceeded(
            f"only {done} of {len(room)} values fit into the {len(extents)} extents reserved for "
            "them",
            ranges=len(room),
            fitting=done,
        )
    return offsets


def fitting(sizes: npt.ArrayLike, extents: Records) -> int:
    """How many of the first ranges fit, so that a writer knows whether its extents suffice."""
    return _lay(padded(np.asarray(sizes, U8)), extents)[1]


def remainder(sizes: npt.ArrayLike, offsets: Bytes, extents: Records) -> Records:
    """What is left of the extents once these ranges lie at these offsets: EXTENT records."""
    if len(extents) == 1 and len(offsets):  # as placed, the last range ends last
        offset, length = extents.item()
        used = offsets.item(-1) + padded(np.asarray(sizes, U8)[-1:]).item() - offset
        left = np.array([(offset + used, length - used)], EXTENT)
        return left if used < length else left[:0]
    ends = offsets + padded(np.asarray(sizes, U8))
    ends.sort()
    starts, limits = extents["offset"], extents["offset"] + extents["length"]
    at = np.searchsorted(ends, limits, "right")
    last = ends[np.maximum(at, 1) - 1] if len(ends) else np.zeros(len(extents), U8)
    begin = np.where((at > 0) & (last > starts), last, starts)
    left = np.empty(len(extents), EXTENT)
    left["offset"], left["length"] = begin, limits - begin
    return left[left["length"] > 0]


def _lay(room: Bytes, extents: Records) -> tuple[Bytes, int]:
    """Offsets of the ranges that fit (the rest undefined), and their number."""
    ends = np.cumsum(room, dtype=U8)
    offsets = ends - room
    done, before = 0, np.uint64(0)
    for start, length in zip(extents["offset"], extents["length"], strict=True):
        if done == len(room):
            break
        upto = int(np.searchsorted(ends, before + length, "right"))
        if upto > done:
            # unsigned columns wrap, so a start below `before` comes out right
            offsets[done:upto] += np.uint64((int(start) - int(before)) % (1 << 64))
            done, before = upto, ends[upto - 1]
    return offsets, done
