"""Layouts: the columns of a chunk. Clients write and read layouts, and peers forward them unread.

A chunk holds, for some rows, one column after the other:

    lengths (u4) of all columns | values of column 1 | values of column 2 | …

Each of these parts starts at a multiple of 64 bytes. In a column, a row has one length per open
axis of the `ColumnSpec`, and a scalar or a number none. A text, bytes or an object has one length:
its number of bytes. Values of successive rows are adjacent; objects are padded to multiples of 16
bytes. The lengths determine
where each value starts, so a reader has to check only their sums. If a chunk is in a pool,
its lengths are in the message that names the chunk, and not before its values.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Any, Literal

import msgspec
import numpy as np

from dataplane.errors import ValueCorrupt
from dataplane.wire.arrays import dtype_of
from dataplane.wire.limits import ALIGNMENT_BYTES, MAX_FIELDS, MAX_LAYOUT_BYTES, MAX_RANK

OPEN = -1
"""In `ColumnSpec.shape`: an open axis, whose length may differ between rows."""
OBJECT_ALIGNMENT_BYTES = 16
"""Objects, and the arrays in them, start at multiples of this."""
VERSION = 1
_WITH_DTYPE = "array", "scalar", "number"
_OF_NUMBERS = "bool", "int64", "float64"


def aligned(nbytes: int) -> int:
    """Return the start of the next part of a chunk, after a part that ends at `nbytes`."""
    return nbytes + ALIGNMENT_BYTES - 1 & -ALIGNMENT_BYTES


class ColumnSpec(msgspec.Struct, array_like=True, frozen=True, dict=True, cache_hash=True):
    """The type of a column.

    kind: "scalar" is a scalar of NumPy or ml_dtypes per row, and "number" a Python bool, int or
    float, stored as bool, int64 or float64. dtype: for these and for arrays, its name in NumPy or
    ml_dtypes. loose: the rows were put one by one, so a TensorDict returns them as a nested tensor;
    for objects, they are data and not tensors.
    """

    kind: Literal["array", "scalar", "number", "text", "bytes", "object"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    loose: bool = False

    @cached_property
    def width(self) -> int:
        """The number of lengths per row."""
        return self.shape.count(OPEN) if self.dtype else 1

    @cached_property
    def items(self) -> np.dtype[Any]:
        """The dtype of a column that has one."""
        return dtype_of(self.dtype)

    @cached_property
    def unit_shape(self) -> tuple[int, ...] | None:
        """The shape of a value with lengths of 1 along its first axis, of which all values of the
        column are a sequence. None if the open axis is not the first, or not the only one."""
        if not self.width:
            return self.shape
        return self.shape[1:] if self.width == 1 and self.shape[0] == OPEN else None

    @cached_property
    def unit_bytes(self) -> int:
        """The bytes of a value with lengths of 1; for an object, its alignment."""
        if self.dtype:
            return self.items.itemsize * math.prod([n for n in self.shape if n != OPEN])
        return OBJECT_ALIGNMENT_BYTES if self.kind == "object" else 1


class Layout(msgspec.Struct, array_like=True, frozen=True):
    version: int
    columns: tuple[ColumnSpec, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Layout)


@lru_cache(1024)
def encode(columns: tuple[ColumnSpec, ...]) -> bytes:
    """Return the layout of a chunk with these columns."""
    return _encoder.encode(Layout(VERSION, columns))


@lru_cache(1024)
def decode(layout: bytes) -> tuple[ColumnSpec, ...]:
    """Return the columns of a layout. Raise ValueCorrupt if it is invalid."""
    if len(layout) > MAX_LAYOUT_BYTES:  # this function keeps the layouts that it decoded
        raise ValueCorrupt(
            f"its layout is {len(layout)} bytes long: expected at most {MAX_LAYOUT_BYTES}"
        )
    try:
        found = _decoder.decode(layout)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ValueCorrupt(f"its layout cannot be decoded: {exc}") from exc
    if found.version != VERSION:
        raise ValueCorrupt(
            f"its layout has version {found.version}, but this client reads version {VERSION}"
        )
    if not 0 < len(found.columns) <= MAX_FIELDS:
        raise ValueCorrupt(
            f"its layout has {len(found.columns)} columns: expected 1 to {MAX_FIELDS}"
        )
    for spec in found.columns:
        if len(spec.shape) > MAX_RANK or any(length < OPEN for length in spec.shape):
            raise ValueCorrupt(
                f"its layout has a column of shape {spec.shape}: expected at most {MAX_RANK} axes, "
                f"each of length 0 or more, or {OPEN} for a variable length"
            )
        if bool(spec.dtype) != (spec.kind in _WITH_DTYPE):
            raise ValueCorrupt(
                f"its layout has a {spec.kind!r} column of dtype {spec.dtype[:64]!r}: columns of "
                f"kinds {', '.join(_WITH_DTYPE)} must have a dtype, and other columns must not"
            )
        if spec.kind == "number" and spec.dtype not in _OF_NUMBERS:
            raise ValueCorrupt(
                f"its layout has a 'number' column of dtype {spec.dtype[:64]!r}: expected "
                f"{', '.join(_OF_NUMBERS[:-1])} or {_OF_NUMBERS[-1]}"
            )
        if spec.dtype:
            dtype_of(spec.dtype)
        if spec.shape and spec.kind != "array":
            raise ValueCorrupt(
                f"its layout has a {spec.kind!r} column of shape {spec.shape}: expected ()"
            )
    return found.columns
