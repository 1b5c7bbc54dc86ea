"""Columns of a chunk as arrays over its memory. `wire/layouts.py` defines the layout of a chunk."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, repeat
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.errors import ValueCorrupt
from dataplane.wire import layouts, objects
from dataplane.wire.arrays import Array, dtype_name
from dataplane.wire.layouts import OBJECT_ALIGNMENT_BYTES, OPEN, ColumnSpec
from dataplane.wire.limits import ALIGNMENT_BYTES

Memory = npt.NDArray[np.uint8]
Refused = Callable[["ChunkColumn", int, int, str], ValueCorrupt]
"""Returns the error for adjacent rows of a column, one of which does not fit its layout. Takes
the first row, the row after the last, and the reason."""
_width = attrgetter("width")
_UP, _DOWN = ALIGNMENT_BYTES - 1, -ALIGNMENT_BYTES
"""`n + _UP & _DOWN` is `layouts.aligned(n)`, without a call for each column."""


class ChunkColumn(msgspec.Struct, eq=False):
    """One column of a chunk.

    lengths: of its rows in order, `spec.width` per row. memory: of the chunk, in the arena or
    inline. start: the offset of the first row in it. bounds: the start of each row relative to
    `start`, and the end of the last row, in units of `spec.unit_bytes`. Lengths and bounds are
    plain ints: a chunk has few rows, and numpy's fixed cost per call would dominate.
    """

    spec: ColumnSpec
    rows: int
    lengths: Sequence[int]
    bounds: Sequence[int]
    memory: Memory | bytes
    start: int = 0
    _flat: Array | None = None

    @classmethod
    def of(cls, array: Array) -> ChunkColumn:
        """Return a column whose only row is this contiguous array."""
        spec = ColumnSpec("array", dtype_name(array.dtype) or "", array.shape, True)
        return cls(spec, 1, (), range(2), array.reshape(-1).view(np.uint8))

    @property
    def is_array(self) -> bool:
        return self.spec.kind == "array"

    def shape_of(self, row: int) -> tuple[int, ...]:
        """The shape of a row, which is an array."""
        width = self.spec.width
        if not width:
            return self.spec.shape
        return _closed(self.spec.shape, self.lengths[row * width : (row + 1) * width])

    def shared_shape(self, first: int, last: int) -> tuple[int, ...] | None:
        """The shape of these rows. None if their shapes differ or they are not arrays."""
        if not self.is_array:
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
        return self._over(self.shape_of(row), self.bounds[row])

    def _over(self, shape: tuple[int, ...], bound: int = 0) -> Array:
        """Return an array over the values. Raise ValueCorrupt if an axis is longer than numpy
        allows."""
        spec = self.spec
        try:
            return np.ndarray(shape, spec.items, self.memory, self.start + bound * spec.unit_bytes)
        except ValueError as exc:
            raise ValueCorrupt(f"a value cannot have the shape {shape}: {exc}") from exc

    def values(self, first: int, last: int, refused: Refused | None = None) -> Iterable[Any]:
        """Return the values of neighbouring rows. Raise ValueCorrupt if one does not fit its
        layout. Objects are decoded as the caller iterates; `refused` makes their errors."""
        if self.spec.kind == "array":
            return self.arrays(first, last)
        if self.spec.dtype:
            return self.scalars(first, last)
        cells, kind = self.cells(first, last), self.spec.kind
        if kind == "text":
            try:
                return [str(cell, "utf-8", "surrogatepass") for cell in cells]
            except UnicodeDecodeError as exc:
                raise ValueCorrupt(f"expected UTF-8 text: {exc}") from exc
        if kind == "bytes":
            return map(bytes, cells)
        if refused is None:
            return map(objects.decode, cells)
        return map(objects.decode, cells, repeat(partial(refused, self, first, last)))

    def arrays(self, first: int, last: int) -> Iterable[Array]:
        """Neighbouring rows as views."""
        spec, flat = self.spec, self._flat
        if flat is None:
            if spec.unit_shape is None:
                return [self.array(row) for row in range(first, last)]
            flat = self._flat = self._over((self.bounds[-1], *spec.unit_shape))
        if spec.width:
            if self.rows == 1:
                return [flat[:]]  # a separate array, because a caller may change its shape
            bounds = self.bounds
            spans = map(slice, bounds[first:last], bounds[first + 1 : last + 1])
            return map(flat.__getitem__, spans)
        if spec.shape:
            return flat[first:last]
        return [flat[row, ...] for row in range(first, last)]  # items would be numpy scalars

    def scalars(self, first: int, last: int) -> Iterable[Any]:
        """Neighbouring rows as scalars of NumPy, or as Python numbers."""
        flat = self._over((self.rows,))[first:last]
        return flat if self.spec.kind == "scalar" else flat.tolist()

    def cells(self, first: int, last: int) -> list[memoryview]:
        """The bytes of texts, of bytes or of objects, row by row."""
        memory: memoryview = memoryview(self.memory)  # type: ignore[arg-type]
        unit, start = self.spec.unit_bytes, self.start
        rows = zip(self.bounds[first:last], self.lengths[first:last], strict=True)
        return [memory[(at := start + bound * unit) : at + length] for bound, length in rows]

    def span(self, first: int, last: int) -> Memory:
        """The bytes of neighbouring rows, one after the other. Objects include their padding."""
        memory, start, unit = self.memory, self.start, self.spec.unit_bytes
        if isinstance(memory, bytes):
            memory = np.frombuffer(memory, np.uint8)
        return memory[start + self.bounds[first] * unit : start + self.bounds[last] * unit]


class ChunkForm:
    """Finds the columns of chunks that have the same layout and the same number of rows."""

    def __init__(self, specs: tuple[ColumnSpec, ...], rows: int) -> None:
        self.specs, self.count, self._rows = specs, len(specs), rows
        self._columns: list[tuple[ColumnSpec, slice, _UnitsOf | None, range | None]] = []
        """by column: its spec; its part of the lengths; the units per row, if not the length; and
        the bounds of its rows, if they do not depend on lengths"""
        count = 0
        for spec in specs:
            units: _UnitsOf | None = None
            if spec.width > 1:
                units = partial(_array_units, spec.width)
            elif spec.kind == "object":
                units = _object_units
            own = slice(count, count + spec.width * rows)
            self._columns.append((spec, own, units, None if spec.width else range(rows + 1)))
            count = own.stop
        try:
            self._head = struct.Struct(f"<{count}I")
        except struct.error as exc:
            raise ValueCorrupt(f"its chunk cannot have {rows} rows: {exc}") from exc

    def columns(self, memory: Memory | bytes, lengths: bytes | None = None) -> list[ChunkColumn]:
        """Return the columns of a chunk. Raise ValueCorrupt if specs, lengths and bytes do not
        match.

        lengths: if they are not stored before the values, as for a chunk on a device.
        """
        head, rows = self._head, self._rows
        found = []
        try:
            if lengths is None:
                numbers = head.unpack_from(memory)  # type: ignore[arg-type]
                end = head.size
            else:
                numbers, end = head.unpack(lengths), 0
        except struct.error as exc:
            raise ValueCorrupt(
                f"its chunk has {rows} rows, each with {sum(map(_width, self.specs))} lengths: "
                f"expected {'at least ' if lengths is None else ''}{head.size} bytes of lengths, "
                f"got {len(memory if lengths is None else lengths)}"
            ) from exc
        for spec, own, units, fixed in self._columns:
            mine = numbers[own]
            bounds = fixed or list(accumulate(units(mine) if units else mine, initial=0))
            start = end + _UP & _DOWN
            end = start + bounds[-1] * spec.unit_bytes
            found.append(ChunkColumn(spec, rows, mine, bounds, memory, start))
        if end != len(memory):
            raise ValueCorrupt(
                f"the columns of its chunk take {end} bytes, but the chunk has {len(memory)}"
            )
        return found


@lru_cache(1024)
def form_of(layout: bytes, rows: int) -> ChunkForm:
    """Return the form of chunks of a layout. Raise ValueCorrupt for an invalid layout."""
    return ChunkForm(layouts.decode(layout), rows)


_UnitsOf = Callable[[Sequence[int]], Iterable[int]]
"""Return the number of units of each row from the lengths of the rows."""


def _array_units(width: int, lengths: Sequence[int]) -> list[int]:
    return [math.prod(lengths[at : at + width]) for at in range(0, len(lengths), width)]


def _object_units(lengths: Sequence[int]) -> list[int]:
    return [-(-length // OBJECT_ALIGNMENT_BYTES) for length in lengths]


def _closed(shape: tuple[int, ...], lengths: Sequence[int]) -> tuple[int, ...]:
    """The shape of a row, with its own lengths on the open axes."""
    if len(shape) == 1:
        return tuple(lengths)
    own = iter(lengths)
    return tuple([next(own) if length == OPEN else length for length in shape])
