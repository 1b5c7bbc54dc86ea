"""A put of few values, laid out in plain Python: for these numpy's fixed cost a call is most of it.

The rules are those of `layout`, and so is the result. Small values of all fields share one block,
larger ones are ranges of their own behind it. Runs in the client, without I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.client.layout import BLOCK_STEP_BYTES, PARCEL_BYTES
from dataplane.client.parallel import carry_out
from dataplane.client.values import Buffer, Prepared, Strip
from dataplane.client.written import Cells, Written
from dataplane.memory.mapping import WriteMaps
from dataplane.memory.placement import place
from dataplane.wire.limits import ALIGNMENT_BYTES, CARRIED, PACK_LIMIT_BYTES
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

    def riding(self) -> Written:
        """As the parts of a message that has the values in it."""
        ranges = np.array([(CARRIED, size) for size in self.sizes], EXTENT)
        parts: list[Buffer] = [self.block]
        for value, size in zip(self.large, self.sizes[1 if self.block else 0 :], strict=True):
            parts += (value, _PADDING[room(size) - size])
        return Written(self.cells, self.specs, ranges, carried=b"".join(parts))

    def written(self, offsets: list[int]) -> Written:
        """As the parts of a message."""
        ranges = np.array(list(zip(offsets, self.sizes, strict=True)), EXTENT)
        return Written(self.cells, self.specs, ranges)


def room(size: int) -> int:
    """What a value of this size takes: padded, and never nothing, so that each has a place."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES or ALIGNMENT_BYTES


def lay_few(prepared: Prepared) -> Few | None:
    """The whole put in one block and one message; None where it is more than that."""
    columns = prepared.columns
    strips = [s for c in columns for s in (c.values, c.leaves) if s is not None]
    if sum(s.count for s in strips) > FEW_VALUES or any(c.dedup for c in columns):
        return None
    if prepared.n > 1 and sum(map(_nbytes, strips)) > _FEW_BYTES:
        return None
    sizes = [_each(strip.sizes, strip.count) for strip in strips]
    rooms = [list(map(room, each)) for each in sizes]
    large = [n for each in sizes for n in each if n >= PACK_LIMIT_BYTES]
    total = sum(map(sum, rooms))
    small = total - sum(map(room, large))
    if small > BLOCK_STEP_BYTES or len(large) > FEW_LARGE:
        return None
    laid = _Laid(1 if small else 0)
    records = iter([laid.add(*one) for one in zip(strips, sizes, rooms, strict=True)])
    cells = [
        Cells(c.field, next(records))
        if c.leaf_counts is None
        else Cells(c.field, next(records), c.leaf_counts.astype(U4), next(records))
        for c in columns
    ]
    ranges = [small, *large] if small else large
    return Few(cells, prepared.specs, b"".join(laid.packed), laid.large, ranges, total)


class _Laid:
    """What was laid out so far, and where the next packed and the next large value go."""

    def __init__(self, first_large: int) -> None:
        self.packed: list[Buffer] = []
        self.large: list[Buffer] = []
        self._next_range = first_large
        self._delta = 0

    def add(self, strip: Strip, sizes: list[int], rooms: list[int]) -> Records:
        """The VALUE records of a strip."""
        specs = _each(strip.specs, strip.count)
        records = []
        for value, size, takes, spec in zip(strip.source, sizes, rooms, specs, strict=True):
            if size < PACK_LIMIT_BYTES:
                records.append(_VALUE.pack(0, 0, size, spec, self._delta, 0))
                self.packed += (value, _PADDING[takes - size])
                self._delta += takes
            else:
                records.append(_VALUE.pack(self._next_range, 0, size, spec, 0, 0))
                self.large.append(value)
                self._next_range += 1
        return np.frombuffer(b"".join(records), VALUE)


def _nbytes(strip: Strip) -> int:
    sizes = strip.sizes
    return sizes * strip.count if isinstance(sizes, int) else int(sizes.sum())


def _each(numbers: int | Records, count: int) -> list[int]:
    """A number a value, where there may be one for all."""
    return [numbers] * count if isinstance(numbers, int) else numbers.tolist()
