"""Layouts: what the columns of a chunk are, as clients write and read it. Peers pass it on unread.

A chunk holds, for some rows, one column after the other:

    lengths (u4) of all columns | values of column 1 | values of column 2 | …

Each of these parts starts at a multiple of 64 bytes. A row has as many lengths in a column as its
`ColumnSpec` has open axes. A text, bytes and an object have one: their number of bytes. The values
of a row follow those of the row before; objects are padded to multiples of 16 bytes. Where each
value starts follows from the lengths, so a reader checks sums and trusts nothing else. The lengths
of a chunk in device memory are not in front of its values: they travel with the message that names
the chunk.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Any, Literal

import msgspec
import numpy as np

from dataplane.errors import ProtocolError
from dataplane.wire.arrays import dtype_of
from dataplane.wire.limits import ALIGNMENT_BYTES, MAX_FIELDS, MAX_RANK

OPEN = -1
"""In `ColumnSpec.shape`: an axis whose length each row says itself."""
OBJECT_ALIGNMENT_BYTES = 16
"""An object starts at a multiple of this, and so does each array inside of it."""
VERSION = 1


def aligned(nbytes: int) -> int:
    """Where the next part of a chunk starts, behind a part that ends at `nbytes`."""
    return nbytes + ALIGNMENT_BYTES - 1 & -ALIGNMENT_BYTES


class ColumnSpec(msgspec.Struct, array_like=True, frozen=True, dict=True, cache_hash=True):
    """How the bytes of a column are read.

    `array`: `dtype` is the name that numpy or ml_dtypes has for it. loose: rows were given one by
    one, so that a TensorDict has them as a nested tensor; of objects, that they are data and no
    tensors.
    """

    kind: Literal["array", "text", "bytes", "object"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    loose: bool = False

    @cached_property
    def width(self) -> int:
        """How many lengths a row has."""
        return self.shape.count(OPEN) if self.kind == "array" else 1

    @cached_property
    def items(self) -> np.dtype[Any]:
        """Of an array."""
        return dtype_of(self.dtype)

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes of what lengths count: of an array whose open axes have the length 1; of an object,
        which is padded, its alignment."""
        if self.kind == "array":
            return self.items.itemsize * math.prod([n for n in self.shape if n != OPEN])
        return OBJECT_ALIGNMENT_BYTES if self.kind == "object" else 1


class Layout(msgspec.Struct, array_like=True, frozen=True):
    version: int
    columns: tuple[ColumnSpec, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Layout)


@lru_cache(1024)
def encode(columns: tuple[ColumnSpec, ...]) -> bytes:
    """The layout of a chunk with these columns."""
    return _encoder.encode(Layout(VERSION, columns))


@lru_cache(1024)
def decode(layout: bytes) -> tuple[ColumnSpec, ...]:
    """The columns of a chunk with this layout. ProtocolError where it is none."""
    try:
        found = _decoder.decode(layout)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"could not decode the layout of a chunk: {exc}") from exc
    if found.version != VERSION:
        raise ProtocolError(
            f"a chunk has a layout of version {found.version}, but this client reads version "
            f"{VERSION}: install the same release on both sides"
        )
    if not 0 < len(found.columns) <= MAX_FIELDS:
        raise ProtocolError(
            f"invalid layout of a chunk: expected 1 to {MAX_FIELDS} columns, got "
            f"{len(found.columns)}"
        )
    for spec in found.columns:
        if len(spec.shape) > MAX_RANK or any(length < OPEN for length in spec.shape):
            raise ProtocolError(
                f"invalid shape {spec.shape} of a column: expected at most {MAX_RANK} axes, each "
                f"of {OPEN} or more"
            )
        if spec.kind == "array":
            dtype_of(spec.dtype)
    return found.columns
