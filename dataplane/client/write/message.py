"""The values of a message, made of the pieces of a write.

A chunk says where this client wrote it, or what the peer calls it, if the peer has it already. The
bytes of small chunks go with the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import attrgetter
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client.write.chunks import NewChunk, NewPiece, chunks_of
from dataplane.metadata.tables.bits import all_of, bits_of, bytes_of
from dataplane.metadata.tables.pieces import UNUSED
from dataplane.wire import tables
from dataplane.wire.records import DIGEST, U4, ids_of
from dataplane.wire.tables import INLINE, Owner, Values

Records = npt.NDArray[Any]
_rows, _nbytes, _layout = attrgetter("rows"), attrgetter("nbytes"), attrgetter("layout")
_beside, _offset, _digest = attrgetter("beside"), attrgetter("offset"), attrgetter("digest")
_is_inline, _number = attrgetter("is_inline"), attrgetter("number")
_chunk, _at = attrgetter("chunk"), attrgetter("at")
_use = attrgetter("fields", "rows", "first", "at")
CHUNK_COST_BYTES = 64
"""About what a chunk and its piece take in a message."""
_FEW_PIECES = 64
"""Messages of up to this many pieces tend to be alike."""


class MessageValues(msgspec.Struct, eq=False):
    """values: as the message has them. chunks: those that this client wrote, in order. shared:
    those that the peer has already. copied_bytes: what was copied for it, into the arena or the
    message."""

    values: Values
    chunks: list[NewChunk]
    shared: list[NewChunk]
    copied_bytes: int

    @property
    def nbytes(self) -> int:
        """Of all values."""
        return self.copied_bytes + sum([chunk.nbytes for chunk in self.shared])

    def committed(self, ranges: Records | None = None) -> None:
        """The peer has the chunks. ranges: what it calls them (RANGE), where it holds them."""
        for chunk in self.chunks:
            chunk.offset = -1
        if ranges is not None:
            for chunk, known in zip(self.chunks, ids_of(ranges).tolist(), strict=False):
                chunk.number = known


def values_of(owner: Owner, pieces: Sequence[NewPiece], base: int = 0) -> MessageValues:
    """What a message says of these pieces. owner: the peer of this host. base: the row of the
    write that is the first one of the message."""
    chunks = sorted(chunks_of(pieces), key=_is_inline)
    placed = len(chunks) - sum(map(_is_inline, chunks))
    own, inline = chunks[:placed], chunks[placed:]
    shared = list(filter(_number, own))
    if shared:
        own = [chunk for chunk in own if chunk.number is None]
        chunks = [*own, *shared, *inline]
    numbers = dict(zip(chunks, range(len(chunks)), strict=True))
    form = _form if _are_alike(pieces) else _form.__wrapped__
    fields, layouts, said, owners, of_layouts = form(
        tuple(map(_layout, chunks)),
        tuple(map(_use, pieces)),
        tuple(map(numbers.__getitem__, map(_chunk, pieces))),
        placed,
        base,
    )
    none = [0] * len(chunks)
    names, offsets = none, none
    if own:
        offsets = [*map(_offset, own), *none[len(own) :]]
    if shared:
        names = [chunk.number or 0 for chunk in chunks]
    every = map(
        tables.Chunk,
        owners,
        names,
        map(_rows, chunks),
        map(_nbytes, chunks),
        of_layouts,
        map(_beside, chunks),
        offsets,
        map(_digest, chunks),
    )
    owner_of = ([owner] if placed else []) + ([INLINE] if inline else [])
    values = Values(fields, owner_of, layouts, list(every), said)
    copied_bytes = sum(map(_nbytes, own)) + sum(map(_nbytes, inline))
    return MessageValues(values, own, shared, copied_bytes)


def _are_alike(pieces: Sequence[NewPiece]) -> bool:
    """Whether other messages are likely to have pieces of the same form."""
    return (
        len(pieces) <= _FEW_PIECES
        and {*map(type, map(_rows, pieces))} == {range}
        and {*map(type, map(_at, pieces))} == {NoneType}
    )


@lru_cache(128)
def _form(
    layouts: tuple[bytes, ...],
    uses: tuple[tuple[tuple[str, ...], Sequence[int], int, Sequence[int] | None], ...],
    numbers: tuple[int, ...],
    placed: int,
    base: int,
) -> tuple[list[str], list[bytes], list[tables.Piece], list[int], list[int]]:
    """What messages have in common whose pieces differ in nothing but the bytes of their chunks:
    the fields, the layouts, the pieces, and the owner and the layout of each chunk.

    layouts: of each chunk. uses: what each piece says of a chunk. numbers: which chunk that is.
    placed: how many chunks do not go with the message: the first ones. base: as for `values_of`."""
    fields: dict[str, int] = {}
    pieces: list[tables.Piece] = []
    for number, (of_columns, rows, first, at) in zip(numbers, uses, strict=True):
        mine = [-1 if f == UNUSED else fields.setdefault(f, len(fields)) for f in of_columns]
        lowest = rows[0]
        if isinstance(rows, range):
            given = bytes_of(all_of(len(rows)))
        else:
            given = bytes_of(bits_of([row - lowest for row in rows]))
        places = b"" if at is None else np.array(at, U4).tobytes()
        pieces.append(tables.Piece(number, mine, lowest - base, given, first, places))
    distinct: dict[bytes, int] = {}
    of_layouts = [distinct.setdefault(layout, len(distinct)) for layout in layouts]
    inline = len(layouts) - placed
    owners = [0] * placed + [1 if placed else 0] * inline
    return list(fields), list(distinct), pieces, owners, of_layouts


def digests_of(chunks: Sequence[NewChunk]) -> bytes:
    """A DIGEST record per deduplicated chunk."""
    return np.array([(chunk.digest, chunk.nbytes) for chunk in chunks], DIGEST).tobytes()


def message_bytes(chunks: Iterable[NewChunk]) -> int:
    """About what these chunks add to a message."""
    return sum([CHUNK_COST_BYTES + len(chunk.beside) for chunk in chunks])
