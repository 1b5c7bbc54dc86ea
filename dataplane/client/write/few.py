"""A put of few values, laid out in plain Python: for these numpy's fixed cost a call is most of it.

The rules are those of `layout`, and so is the result. The smallest values go inline, others below
4 KiB of all fields share one block, larger ones are ranges of their own behind it. Runs in the
client, without I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.client.write.layout import BLOCK_STEP_BYTES, PARCEL_BYTES
from dataplane.client.write.parallel import carry_out
from dataplane.client.write.values import Buffer, Prepared, Strip
from dataplane.client.write.written import Cells, Written
from dataplane.memory.mapping import WriteMaps
from dataplane.memory.placement import place
from dataplane.wire.limits import (
    ALIGNMENT_BYTES,
    INLINE_ALIGNMENT_BYTES,
    INLINE_LIMIT_BYTES,
    INLINE_ROW_BYTES,
    PACK_LIMIT_BYTES,
)
from dataplane.wire.records import EXTENT, U4, VALUE
from dataplane.wire.tables import Spec

Records = npt.NDArray[Any]

FEW_VALUES, FEW_LARGE = 256, 48
"""So many values in all, and so many that are ranges of their own: with more, columns win."""
_FEW_BYTES = PARCEL_BYTES // 2
"""of several rows; from here on the copy is what counts"""
_VALUE = Struct("<IIQIHH")
"""A VALUE record."""
_PADDING = [bytes(length) for length in range(ALIGNMENT_BYTES + 1)]


@dataclass(frozen=True, slots=True)
class Few:
    """Values with their records. The first range is the block, where `block` is not empty."""

    cells: list[Cells]
    specs: list[Spec]
    block: bytes
    large: list[Buffer]
    sizes: list[int]
    """bytes of each range"""
    nbytes: int
    """what they take in the arena, padding included"""
    inline: bytes

    def offsets(self, extents: Records) -> list[int]:
        """Where each range starts, as `place` says."""
        if len(extents) != 1:
            offsets: list[int] = place(np.array(self.sizes), extents).tolist()
            return offsets
        return list(accumulate(map(room, self.sizes[:-1]), initial=extents["offset"].item()))

    def copy(self, offsets: list[int], writes: WriteMaps) -> None:
        """Write the values to where their ranges start."""
        ranges = [self.block, *self.large] if self.block else self.large
        places = zip(ranges, offsets, self.sizes, strict=True)
        copies = ((writes.view(at, size), np.frombuffer(one, np.uint8)) for one, at, size in places)
        carry_out(copies, self.nbytes)

    def written(self, offsets: list[int]) -> Written:
        """As the parts of a message."""
        if not offsets:
            return Written(self.cells, self.specs, inline=self.inline)
        ranges = np.array(list(zip(offsets, self.sizes, strict=True)), EXTENT)
        return Written(self.cells, self.specs, ranges, inline=self.inline)


def room(size: int) -> int:
    """What a value of this size takes: padded, and never nothing, so that each has a place."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES or ALIGNMENT_BYTES


def inline_room(size: int) -> int:
    """What a value of this size takes inline."""
    return -(-size // INLINE_ALIGNMENT_BYTES) * INLINE_ALIGNMENT_BYTES


def lay_few(prepared: Prepared, inline: bool) -> Few | None:
    """The whole put in one block and one message; None where it is more than that."""
    columns = prepared.columns
    strips = [s for c in columns for s in (c.values, c.leaves) if s is not None]
    if sum(s.count for s in strips) > FEW_VALUES or any(c.dedup for c in columns):
        return None
    if prepared.n > 1 and sum(map(_nbytes, strips)) > _FEW_BYTES:
        return None
    sizes = [_each(strip.sizes, strip.count) for strip in strips]
    goes = _goes_inline(prepared, sizes) if inline else [[False] * len(each) for each in sizes]
    stay = [
        [n for n, out in zip(each, outs, strict=True) if not out]
        for each, outs in zip(sizes, goes, strict=True)
    ]
    large = [n for each in stay for n in each if n >= PACK_LIMIT_BYTES]
    total = sum(room(n) for each in stay for n in each)
    small = total - sum(map(room, large))
    if small > BLOCK_STEP_BYTES or len(large) > FEW_LARGE:
        return None
    laid = _Laid(1 if small else 0)
    records = iter([laid.add(*one) for one in zip(strips, sizes, goes, strict=True)])
    cells = [
        Cells(c.field, next(records))
        if c.leaf_counts is None
        else Cells(c.field, next(records), c.leaf_counts.astype(U4), next(records))
        for c in columns
    ]
    ranges = [small, *large] if small else large
    return Few(cells, prepared.specs, b"".join(laid.packed), laid.large, ranges, total, laid.inline)


class _Laid:
    """What was laid out so far, and where the next packed and the next large value go."""

    def __init__(self, first_large: int) -> None:
        self.packed: list[Buffer] = []
        self.large: list[Buffer] = []
        self._inline: list[Buffer] = []
        self._next_range = first_large
        self._delta = self._inline_bytes = 0

    @property
    def inline(self) -> bytes:
        return b"".join(self._inline)

    def add(self, strip: Strip, sizes: list[int], goes: list[bool]) -> Records:
        """The VALUE records of a strip. goes: which are inline."""
        specs = _each(strip.specs, strip.count)
        records = []
        for value, size, inline, spec in zip(strip.source, sizes, goes, specs, strict=True):
            if inline:
                records.append(_VALUE.pack(self._inline_bytes, 0, size, spec, 0, 1))
                takes = inline_room(size)
                self._inline += (value, _PADDING[takes - size])
                self._inline_bytes += takes
            elif size < PACK_LIMIT_BYTES:
                takes = room(size)
                records.append(_VALUE.pack(0, 0, size, spec, self._delta, 0))
                self.packed += (value, _PADDING[takes - size])
                self._delta += takes
            else:
                records.append(_VALUE.pack(self._next_range, 0, size, spec, 0, 0))
                self.large.append(value)
                self._next_range += 1
        return np.frombuffer(b"".join(records), VALUE)


def _goes_inline(prepared: Prepared, sizes: list[list[int]]) -> list[list[bool]]:
    """Per strip which values are small, and within what a row may bring of such: its fields in
    order, the leaves of a value all or none."""
    left = [INLINE_ROW_BYTES] * prepared.n
    goes: list[list[bool]] = []
    given = iter(sizes)
    for one in prepared.columns:
        outs = []
        for row, size in enumerate(next(given)):
            out = size <= INLINE_LIMIT_BYTES and inline_room(size) <= left[row]
            left[row] -= inline_room(size) if out else 0
            outs.append(out)
        goes.append(outs)
        if one.leaf_counts is not None:
            leaves, at, outs = next(given), 0, []
            for row, count in enumerate(one.leaf_counts.tolist()):
                some = leaves[at : at + count]
                small = [size <= INLINE_LIMIT_BYTES for size in some]
                takes = sum(inline_room(size) for size in some if size <= INLINE_LIMIT_BYTES)
                if takes > left[row]:
                    small = [False] * count
                else:
                    left[row] -= takes
                outs += small
                at += count
            goes.append(outs)
    return goes


def _nbytes(strip: Strip) -> int:
    sizes = strip.sizes
    return sizes * strip.count if isinstance(sizes, int) else int(sizes.sum())


def _each(numbers: int | Records, count: int) -> list[int]:
    """A number a value, where there may be one for all."""
    return [numbers] * count if isinstance(numbers, int) else numbers.tolist()
