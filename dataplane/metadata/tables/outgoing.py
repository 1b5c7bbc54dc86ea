"""The values of rows as a message describes them: the concatenated pieces of their blocks, and the
chunks of these pieces.

Layouts and the bytes of chunks pass through unread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from dataplane.memory.extents import PAGE_BYTES
from dataplane.metadata.tables.bits import all_of, bytes_of, picked, rows_of
from dataplane.metadata.tables.pieces import (
    UNUSED,
    BlockShape,
    Chunk,
    Piece,
    Pieces,
)
from dataplane.wire import tables as wire
from dataplane.wire.limits import ALIGNMENT_BYTES
from dataplane.wire.packed import U4
from dataplane.wire.tables import INLINE, Owner

_PIECE_BYTES, _CHUNK_BYTES = 32, 48
"""Approximate bytes of one piece and of one chunk in a message."""
_NO_NAMES: Mapping[Chunk, tuple[Owner, int]] = {}
SHARED_BLOCKS = 128
"""The skeleton of values is cached up to this number of blocks, so that batches of rows that were
put one by one use the cache. Larger skeletons hardly repeat, and would fill the memory."""
SHARED_BYTES = 32 << 10
"""The same limit, for the bytes of the pieces of these blocks."""

Parts = tuple[tuple[BlockShape, int], ...]
"""The shape of each block in order, and which of its rows are sent."""


class _Skeleton(NamedTuple):
    """Outgoing values without their chunks. used: indices into the concatenated chunks of all
    blocks. pieces: their chunk numbers are indices into `used`. by: who added each piece."""

    fields: list[str]
    pieces: list[wire.Piece]
    used: list[int]
    by: list[str]
    nbytes: int


class OutgoingValues:
    """Values of rows, block after block. parts: the pieces of a block, and which of its rows.
    fields: only these; None: every field that a row has."""

    __slots__ = ("_skeleton", "chunks")

    def __init__(
        self, parts: Sequence[tuple[Pieces, int]], fields: Sequence[str] | None = None
    ) -> None:
        is_shared = len(parts) <= SHARED_BLOCKS and (
            sum([block.nbytes for block, _ in parts]) <= SHARED_BYTES
        )
        made = _skeleton if is_shared else _skeleton.__wrapped__
        shapes = tuple([(block.shape, bits) for block, bits in parts])
        self._skeleton = skeleton = made(shapes, None if fields is None else tuple(fields))
        if len(parts) == 1:
            chunks: Sequence[Chunk] = parts[0][0].chunks
        else:
            chunks = [chunk for block, _ in parts for chunk in block.chunks]
        self.chunks = [chunks[n] for n in skeleton.used]
        """the chunks that are sent, in the order in which the pieces number them"""

    @property
    def by(self) -> list[str]:
        """The stage that added each piece; "" for a put."""
        return self._skeleton.by

    @property
    def nbytes(self) -> int:
        """An upper estimate of their size in a message: each chunk counts its layout."""
        sizes = [_CHUNK_BYTES + len(c.layout) + len(c.inline) for c in dict.fromkeys(self.chunks)]
        return self._skeleton.nbytes + sum(sizes)

    def pulled(self, address: str) -> int:
        """Bytes that the peer at this address pulls for these values."""
        chunks = dict.fromkeys(self.chunks)
        return pulled([(chunk.owner, chunk.nbytes) for chunk in chunks], address)

    def on_wire(self, names: Mapping[Chunk, tuple[Owner, int]] = _NO_NAMES) -> wire.Values:
        """The wire form. names: of chunks that have moved, their new names."""
        owners: dict[Owner, int] = {}
        layouts: dict[bytes, int] = {}
        distinct = dict.fromkeys(self.chunks)
        chunks = []
        for chunk in distinct:
            at, name = chunk.owner, chunk.number
            if names:
                at, name = names.get(chunk, (at, name))
            owner = owners.setdefault(at, len(owners))
            layout = layouts.setdefault(chunk.layout, len(layouts))
            chunks.append(wire.Chunk(owner, name, chunk.rows, chunk.nbytes, layout, chunk.inline))
        pieces = self._skeleton.pieces
        if len(distinct) < len(self.chunks):  # blocks share some
            numbers = {chunk: n for n, chunk in enumerate(distinct)}
            of = [numbers[chunk] for chunk in self.chunks]
            pieces = [msgspec.structs.replace(one, chunk=of[one.chunk]) for one in pieces]
        return wire.Values(self._skeleton.fields, list(owners), list(layouts), chunks, pieces)


@lru_cache(256)
def _skeleton(parts: Parts, wanted: tuple[str, ...] | None) -> _Skeleton:
    numbers: dict[str, int] = {} if wanted is None else {f: n for n, f in enumerate(wanted)}
    columns: dict[tuple[str, ...], tuple[int, ...]] = {}
    used: dict[int, int] = {}
    nbytes = 0
    pieces: list[wire.Piece] = []
    by: list[str] = []
    base = before = 0
    for shape, bits in parts:
        rows = None if bits == all_of(shape.count) else rows_of(bits)
        for one in shape.pieces:
            taken = one.live & bits
            if not taken:
                continue
            if one.fields not in columns:
                columns[one.fields] = _columns(one.fields, wanted, numbers)
            if not columns[one.fields]:
                continue
            chunk = used.setdefault(before + one.chunk, len(used))
            given = bytes_of(taken if rows is None else picked(taken, rows))
            first, at = one.first, one.at
            if taken != one.given:
                first, at = _places(one, taken)
            raw = b"" if at is None else np.array(at, U4).tobytes()
            pieces.append(wire.Piece(chunk, columns[one.fields], base, given, first, raw))
            by.append(one.by)
            nbytes += _PIECE_BYTES + (0 if one.at is None else 4 * len(one.at))
        base += bits.bit_count()
        before += 1 + max([one.chunk for one in shape.pieces], default=-1)
    return _Skeleton(list(numbers), pieces, list(used), by, nbytes)


def _columns(
    fields: tuple[str, ...], wanted: tuple[str, ...] | None, numbers: dict[str, int]
) -> tuple[int, ...]:
    """The field number of each column of a piece, -1 for unwanted fields; () if none is wanted."""
    found = [
        -1
        if field == UNUSED or not (wanted is None or field in wanted)
        else numbers.setdefault(field, len(numbers))
        for field in fields
    ]
    return tuple(found) if max(found) >= 0 else ()


def _places(one: Piece[int], taken: int) -> tuple[int, tuple[int, ...] | None]:
    """The chunk rows of some given rows: the first of consecutive ones, or a list."""
    rows = list(one.chunk_rows(taken))
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return rows[0], None
    return 0, tuple(rows)


def pulled(chunks: Iterable[tuple[Owner, int]], address: str) -> int:
    """Bytes that the peer at this address pulls for chunks of these owners and sizes: whole padded
    chunks, one page per remote owner, and one page for values inside the reply."""
    far = [(owner, size) for owner, size in chunks if owner != INLINE and owner.peer != address]
    owners = {owner for owner, _ in far}
    nbytes = sum([-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for _, size in far])
    return nbytes + PAGE_BYTES * (len(owners) + 1) if owners else 0


def message_bytes(values: wire.Values) -> int:
    """The approximate size of values in a message."""
    chunks = sum([_CHUNK_BYTES + len(one.inline) for one in values.chunks])
    pieces = sum([_PIECE_BYTES + len(one.given) + len(one.at) for one in values.pieces])
    return chunks + pieces + sum(map(len, values.layouts))
