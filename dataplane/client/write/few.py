"""A put of few values, laid out in plain Python: for these numpy's fixed cost a call is most of it.

The rules are those of `layout`, and so is the result. The smallest values go inline, others below
4 KiB of all fields share blocks, larger ones are ranges of their own behind those. Runs in the
client, without I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client.write.layout import BLOCK_STEP_BYTES, PARCEL_BYTES
from dataplane.client.write.parallel import Copy, carry_out, populate
from dataplane.client.write.values import Buffer, Prepared, PreparedColumn, Strip
from dataplane.client.write.written import Written
from dataplane.memory.mapping import WriteMaps
from dataplane.memory.placement import place
from dataplane.wire.limits import (
    ALIGNMENT_BYTES,
    INLINE_ALIGNMENT_BYTES,
    INLINE_LIMIT_BYTES,
    INLINE_ROW_BYTES,
    PACK_LIMIT_BYTES,
)
from dataplane.wire.records import EXTENT, ONE_VALUE, U4
from dataplane.wire.tables import Column, Spec

Records = npt.NDArray[Any]
Record = tuple[int, int, int, int, int, int]

FEW_VALUES = 256
"""With more, columns win."""
_FEW_BYTES = PARCEL_BYTES // 2
"""Of several rows that may go apart."""
_PADDING = [bytes(length) for length in range(ALIGNMENT_BYTES + 1)]


class Few(msgspec.Struct, frozen=True, eq=False):
    """Values with their records. The first ranges are the blocks."""

    columns: list[Column]
    specs: list[Spec]
    blocks: list[bytes]
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

    def copy(self, offsets: list[int], extents: Records, writes: WriteMaps) -> None:
        """Write the values to where their ranges start, in these extents, in order."""
        populate(writes, extents.tolist(), offsets[-1] + room(self.sizes[-1]), self.nbytes)
        carry_out(self._copies(offsets, extents, writes), self.nbytes)

    def _copies(self, offsets: list[int], extents: Records, writes: WriteMaps) -> Iterator[Copy]:
        mapped, first, end = iter(extents.tolist()), 0, 0
        ranges = zip([*self.blocks, *self.large], offsets, self.sizes, strict=True)
        for one, at, size in ranges:
            while not first <= at < end:
                first, length = next(mapped)
                memory, end = writes.view(first, length), first + length
            yield memory[at - first : at - first + size], np.frombuffer(one, np.uint8)

    def written(self, offsets: list[int]) -> Written:
        """As the parts of a message."""
        if not offsets:
            return Written(self.columns, self.specs, inline=self.inline)
        ranges = np.empty(len(offsets), EXTENT)
        ranges["offset"], ranges["length"] = offsets, self.sizes
        return Written(self.columns, self.specs, ranges, inline=self.inline)


def room(size: int) -> int:
    """What a value of this size takes: padded, and never nothing, so that each has a place."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES or ALIGNMENT_BYTES


def inline_room(size: int) -> int:
    """What a value of this size takes inline."""
    return -(-size // INLINE_ALIGNMENT_BYTES) * INLINE_ALIGNMENT_BYTES


def lay_few(prepared: Prepared, inline: bool, together: bool = False) -> Few | None:
    """The whole put in one message; None where it is more than that. together: rows
    of one unit, which are never taken apart."""
    columns, count = prepared.columns, 0
    for one in columns:
        count += one.values.count + (0 if one.leaves is None else one.leaves.count)
        if one.dedup or count > FEW_VALUES:
            return None
    if prepared.n > 1 and not together and sum(map(_nbytes, columns)) > _FEW_BYTES:
        return None
    laid = _Laid([INLINE_ROW_BYTES if inline else -1] * prepared.n)
    for one in columns:
        laid.add(one)
    blocks = [b"".join(block) for block in laid.blocks]
    sizes = [*map(len, blocks), *laid.large_sizes]
    total, going = sum(map(room, sizes)), b"".join(laid.inline)
    return Few(laid.columns(), prepared.specs, blocks, laid.large, sizes, total, going)


class _Laid:
    """What was laid out so far. left: what each row may still bring inline."""

    def __init__(self, left: list[int]) -> None:
        self.blocks: list[list[Buffer]] = []
        self.large: list[Buffer] = []
        self.large_sizes: list[int] = []
        self.inline: list[Buffer] = []
        self._packed_bytes = self._block_start = self._inline_bytes = 0
        self._columns: list[tuple[PreparedColumn, list[Record], list[Record]]] = []
        self._left = left

    def add(self, one: PreparedColumn) -> None:
        """A field: its values, inline as long as their rows may bring them, then their leaves, of a
        row all or none."""
        values, leaves = self._strip(one.values), []
        if one.leaf_counts is not None and one.leaves is not None:
            leaves = self._strip(one.leaves, self._leaves_inline(one.leaves, one.leaf_counts))
        self._columns.append((one, values, leaves))

    def _leaves_inline(self, leaves: Strip, counts: npt.NDArray[np.int64]) -> list[bool]:
        sizes, at, goes = _each(leaves.sizes, leaves.count), 0, list[bool]()
        for row, count in enumerate(counts.tolist()):
            some = sizes[at : at + count]
            small = [size <= INLINE_LIMIT_BYTES for size in some]
            takes = sum(inline_room(size) for size in some if size <= INLINE_LIMIT_BYTES)
            if takes > self._left[row]:
                small = [False] * count
            else:
                self._left[row] -= takes
            goes += small
            at += count
        return goes

    def _strip(self, strip: Strip, goes: list[bool] | None = None) -> list[Record]:
        """goes: which values are inline; None: those that their rows may bring, one a row."""
        records: list[Record] = []
        sizes, specs = _each(strip.sizes, strip.count), _each(strip.specs, strip.count)
        left = self._left
        for at, (value, size, spec) in enumerate(zip(strip.source, sizes, specs, strict=True)):
            takes = inline_room(size)
            inline = size <= INLINE_LIMIT_BYTES and takes <= left[at] if goes is None else goes[at]
            if inline:
                if goes is None:
                    left[at] -= takes
                records.append((self._inline_bytes, 0, size, spec, 0, 1))
                self.inline += (value, _PADDING[takes - size])
                self._inline_bytes += takes
            elif size < PACK_LIMIT_BYTES:
                takes = room(size)
                number = (self._packed_bytes + takes - 1) // BLOCK_STEP_BYTES
                if number == len(self.blocks):
                    self.blocks.append([])
                    self._block_start = self._packed_bytes
                delta = self._packed_bytes - self._block_start
                records.append((number, 0, size, spec, delta, 0))
                self.blocks[number] += (value, _PADDING[takes - size])
                self._packed_bytes += takes
            else:
                records.append((len(self.large), 0, size, spec, 0, 0))
                self.large.append(value)
                self.large_sizes.append(size)
        return records

    def columns(self) -> list[Column]:
        """Of all fields, once it is known how many blocks there are: large values come behind."""
        columns = []
        for one, values, leaves in self._columns:
            column = Column(one.field, self._column(values))
            if one.leaf_counts is not None:
                column.leaf_counts = one.leaf_counts.astype(U4).tobytes()
                column.leaves = self._column(leaves)
            columns.append(column)
        return columns

    def _column(self, records: list[Record]) -> bytes:
        """VALUE records."""
        blocks = len(self.blocks)
        if blocks and self.large:
            records = [
                (one[0] + blocks, *one[1:]) if one[2] >= PACK_LIMIT_BYTES else one
                for one in records
            ]
        return b"".join([ONE_VALUE.pack(*record) for record in records])


def _nbytes(one: PreparedColumn) -> int:
    total = 0
    for strip in (one.values, one.leaves):
        if strip is not None:
            sizes = strip.sizes
            total += sizes * strip.count if isinstance(sizes, int) else int(sizes.sum())
    return total


def _each(numbers: int | Records, count: int) -> list[int]:
    """A number a value, where there may be one for all."""
    return [numbers] * count if isinstance(numbers, int) else numbers.tolist()
