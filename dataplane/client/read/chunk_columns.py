"""Columns of a chunk as arrays over its memory. How a chunk is laid out: `wire/layouts.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import ProtocolError
from dataplane.wire.arrays import Array, dtype_name
from dataplane.wire.layouts import OBJECT_ALIGNMENT_BYTES, OPEN, ColumnSpec, aligned
from dataplane.wire.records import U4

Memory = npt.NDArray[np.uint8]


class ChunkColumn:
    """One column. lengths: those of its rows one behind the other, `spec.width` for each. values:
    the bytes of all rows. Lengths are plain ints: a chunk has few rows, and numpy's fixed cost a
    call would be most of it."""

    __slots__ = ("_block", "_flat", "_starts", "is_array", "lengths", "rows", "spec", "values")

    def __init__(self, spec: ColumnSpec, rows: int, lengths: list[int], values: Memory) -> None:
        self.spec = spec
        self.rows = rows
        self.lengths = lengths
        self.values = values
        self.is_array = spec.kind == "array"
        self._starts: list[int] | None = None
        self._block: Array | None = None
        self._flat: tuple[Array, list[int]] | None = None

    @classmethod
    def of(cls, array: Array) -> ChunkColumn:
        """One row: this array, which is contiguous."""
        spec = ColumnSpec("array", dtype_name(array.dtype) or "", array.shape, True)
        return cls(spec, 1, [], array.reshape(-1).view(np.uint8))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an array."""
        return self.spec.items

    @property
    def starts(self) -> list[int]:
        """Where each row starts in `values`, and where the last one ends."""
        starts = self._starts
        if starts is None:
            starts = self._starts = list(accumulate(self._rooms(), initial=0))
        return starts

    def _rooms(self) -> list[int]:
        """What each row takes, padding included."""
        if self.is_array:
            return _array_bytes(self.spec, self.rows, self.lengths)
        return list(map(_object_room, self.lengths)) if self.spec.kind == "object" else self.lengths

    @property
    def block(self) -> Array | None:
        """All rows as one array [rows, ...] where they share a shape; None where they differ, or
        are no arrays."""
        if self._block is None:
            shape = self.shared_shape(0, self.rows)
            self._block = None if shape is None else self._over((self.rows, *shape))
        return self._block

    @property
    def flat(self) -> tuple[Array, list[int]] | None:
        """All rows side by side along their first axis, and where each starts along it, where that
        axis is the only open one."""
        if self._flat is None:
            spec = self.spec
            if self.is_array and spec.width == 1 and spec.shape[0] == OPEN and spec.fixed_bytes:
                bounds = list(accumulate(self.lengths, initial=0))
                self._flat = self._over((bounds[-1], *spec.shape[1:])), bounds
        return self._flat

    def shape_of(self, row: int) -> tuple[int, ...]:
        """Of an array."""
        width = self.spec.width
        if not width:
            return self.spec.shape
        return _closed(self.spec.shape, self.lengths[row * width : (row + 1) * width])

    def shared_shape(self, first: int, last: int) -> tuple[int, ...] | None:
        """The shape of these rows; None where they differ, or are no arrays."""
        if not self.is_array or first == last:
            return None
        width = self.spec.width
        if not width:
            return self.spec.shape
        mine = self.lengths[first * width : last * width]
        if any([mine[at::width].count(mine[at]) != last - first for at in range(width)]):
            return None
        return _closed(self.spec.shape, mine[:width])

    def array(self, row: int) -> Array:
        """A row as a view."""
        return self._over(self.shape_of(row), self.starts[row])

    def _over(self, shape: tuple[int, ...], start: int = 0) -> Array:
        """An array over the values. The bytes are there, but axes may be longer than numpy has."""
        try:
            return np.ndarray(shape, self.dtype, self.values, start)
        except ValueError as exc:
            raise ProtocolError(f"a value cannot have the shape {shape}: {exc}") from exc

    def arrays(self, first: int, last: int) -> Iterable[Array]:
        """Neighbouring rows as views."""
        found = self.flat
        if found is not None:
            flat, bounds = found
            return [flat[start:end] for start, end in pairwise(bounds[first : last + 1])]
        block = self.block
        if block is None:
            return map(self.array, range(first, last))
        if block.ndim > 1:
            return block[first:last]
        return [block[row, ...] for row in range(first, last)]  # items would be numpy scalars

    def cells(self, first: int, last: int) -> list[memoryview]:
        """The bytes of texts, of bytes or of objects, row by row."""
        memory: memoryview = memoryview(self.values)  # type: ignore[arg-type]
        rows = zip(self.starts[first:last], self.lengths[first:last], strict=True)
        return [memory[start : start + length] for start, length in rows]

    def span(self, first: int, last: int) -> Memory:
        """The bytes of neighbouring rows, one behind the other; of objects with what is between
        them."""
        return self.values[self.starts[first] : self.starts[last]]


def columns_of(
    specs: Sequence[ColumnSpec], rows: int, memory: Memory, lengths: Memory | None = None
) -> list[ChunkColumn]:
    """The columns of a chunk of this many rows.

    lengths: where they are not in front of the values, as those of a chunk on a device.
    ProtocolError where specs, lengths and bytes do not fit each other.
    """
    width = sum([spec.width for spec in specs])
    head_bytes = U4.itemsize * width * rows
    source = memory if lengths is None else lengths
    if len(source) < head_bytes or (lengths is not None and len(source) != head_bytes):
        raise ProtocolError(
            f"a chunk of {rows} rows with {width} lengths each: expected "
            f"{'at least ' if lengths is None else ''}{head_bytes} bytes, got {len(source)}"
        )
    numbers: list[int] = source[:head_bytes].view(U4).tolist()
    end, begin = head_bytes if lengths is None else 0, 0
    found = []
    for spec in specs:
        mine = numbers if len(specs) == 1 else numbers[begin : begin + spec.width * rows]
        begin += len(mine)
        at = aligned(end)
        end = at + _nbytes(spec, rows, mine)
        found.append(ChunkColumn(spec, rows, mine, memory[at:end]))
    if end != len(memory):
        raise ProtocolError(
            f"invalid chunk: expected {end} bytes, the size of its columns, got {len(memory)}"
        )
    return found


def _nbytes(spec: ColumnSpec, rows: int, lengths: list[int]) -> int:
    if spec.kind == "array":
        if spec.width < 2:
            return spec.fixed_bytes * (sum(lengths) if spec.width else rows)
        return sum(_array_bytes(spec, rows, lengths))
    if spec.kind == "object":
        return sum(map(_object_room, lengths))
    return sum(lengths)


def _array_bytes(spec: ColumnSpec, rows: int, lengths: list[int]) -> list[int]:
    """Bytes of each row."""
    fixed, width = spec.fixed_bytes, spec.width
    if not width:
        return [fixed] * rows
    if width == 1:
        return [length * fixed for length in lengths]
    return [math.prod(lengths[at : at + width]) * fixed for at in range(0, len(lengths), width)]


def _closed(shape: tuple[int, ...], lengths: list[int]) -> tuple[int, ...]:
    """The shape of a row, with its own lengths on the open axes."""
    if len(shape) == 1:
        return tuple(lengths)
    own = iter(lengths)
    return tuple([next(own) if length == OPEN else length for length in shape])


def _object_room(nbytes: int) -> int:
    return -(-nbytes // OBJECT_ALIGNMENT_BYTES) * OBJECT_ALIGNMENT_BYTES
