"""The values of a message, made of the pieces of a write.

A chunk says where this client wrote it, or what the peer calls it, if the peer has it already. The
bytes of small chunks go with the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import attrgetter
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
_layout, _chunk = attrgetter("layout"), attrgetter("chunk")
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
    own, shared, inline = list[NewChunk](), list[NewChunk](), list[NewChunk]()
    for chunk in chunks_of(pieces):
        (inline if chunk.is_inline else own if chunk.number is None else shared).append(chunk)
    chunks = [*own, *shared, *inline]
    placed = len(chunks) - len(inline)
    numbers = {chunk: number for number, chunk in enumerate(chunks)}
    uses = (
        tuple(map(_layout, chunks)),
        tuple(map(_use, pieces)),
        tuple(map(numbers.__getitem__, map(_chunk, pieces))),
        placed,
        base,
    )
    try:
        form = _form(*uses) if len(pieces) <= _FEW_PIECES else _form.__wrapped__(*uses)
    except TypeError:  # lists of rows have no hash, and few messages have the same
        form = _form.__wrapped__(*uses)
    fields, layouts, said, owners, of_layouts = form
    every = [
        tables.Chunk(
            owners[number],
            one.number or 0,
            one.rows,
            one.nbytes,
            of_layouts[number],
            one.beside,
            max(0, one.offset),
            one.digest,
        )
        for one, number in numbers.items()
    ]
    copied_bytes = sum([one.nbytes for one in chunks if one.number is None])
    owner_of = ([owner] if placed else []) + ([INLINE] if inline else [])
    values = Values(fields, owner_of, layouts, every, said)
    return MessageValues(values, own, shared, copied_bytes)


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
