"""Sets of disjoint stretches of the arena, as two sorted columns: starts and ends.

Pure functions in numpy; the free space and what each client may write are both kept in this form.
Disjoint stretches have one order, by start and by end alike, so sorting the two columns on their
own pairs them up again. That is the trick behind every function here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataplane.wire.limits import ALIGNMENT_BYTES
from dataplane.wire.records import EXTENT, U8

PAGE_BYTES = 4096
"""Granted extents start at a multiple of this and are a multiple of this long."""

Bytes = npt.NDArray[np.uint64]
Records = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]
Set = tuple[Bytes, Bytes]

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
    """What ranges of these lengths occupy: multiples of 64 bytes, and never nothing."""
    result: Bytes = (np.maximum(lengths, _ONE) + _ALIGN) & ~_ALIGN
    return result


def room(nbytes: int) -> int:
    """The same for one."""
    return max(nbytes + -nbytes % ALIGNMENT_BYTES, ALIGNMENT_BYTES)


def every(mask: Mask) -> bool:
    """`mask.all()`; for short columns, which most are, at a fifth of the cost."""
    return b"\0" not in mask.tobytes()


def some(mask: Mask) -> bool:
    """`mask.any()`, likewise."""
    return b"\1" in mask.tobytes()


def each_once(numbers: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """In order. `np.unique` would fill a hash table first, for four times the time."""
    numbers = np.sort(numbers)
    again = numbers[1:] == numbers[:-1]
    return numbers[np.concatenate(([True], ~again))] if np.count_nonzero(again) else numbers


def empty() -> Set:
    return np.empty(0, U8), np.empty(0, U8)


def records(starts: Bytes, ends: Bytes) -> Records:
    """The set as a column of EXTENT records."""
    column = np.empty(len(starts), EXTENT)
    column["offset"] = starts
    column["length"] = ends - starts
    return column


def coalesce(starts: Bytes, ends: Bytes) -> Set:
    """The set of these stretches in any order, neighbours joined. ValueError where two overlap."""
    if len(starts) < 2:
        return starts, ends
    starts, ends = np.sort(starts, kind="stable"), np.sort(ends, kind="stable")
    if np.count_nonzero(starts[1:] < ends[:-1]):
        raise ValueError("extents overlap")
    apart = starts[1:] != ends[:-1]
    if every(apart):
        return starts, ends
    return starts[np.concatenate(([True], apart))], ends[np.concatenate((apart, [True]))]


def covers(stretches: Set, starts: Bytes, ends: Bytes) -> Mask:
    """Per piece, whether one stretch of the set contains it."""
    if not len(stretches[0]):
        return np.zeros(len(starts), np.bool_)
    if len(stretches[0]) == 1:
        only: Mask = (starts >= stretches[0][0]) & (ends <= stretches[1][0])
        return only
    at = np.searchsorted(stretches[0], starts, "right")
    inside: Mask = (at > 0) & (ends <= stretches[1][at - 1])
    return inside


def subtract(stretches: Set, starts: Bytes, ends: Bytes) -> Set:
    """The set without these pieces, which it must contain and which must be disjoint."""
    left = np.sort(np.concatenate((stretches[0], ends)), kind="stable")
    right = np.sort(np.concatenate((stretches[1], starts)), kind="stable")
    some = left < right
    return left[some], right[some]
