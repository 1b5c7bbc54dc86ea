"""The values of a message, made of the pieces of a write.

A chunk says where this client wrote it, or what the peer calls it, if the peer has it already. The
bytes of small chunks go with the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import count
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.client.write.chunks import NewChunk, NewPiece, chunks_of
from dataplane.metadata.tables.bits import all_of, bits_of, bytes_of
from dataplane.metadata.tables.pieces import UNUSED
from dataplane.wire.packed import DIGEST, U4, ids_of
from dataplane.wire.tables import INLINE, Chunk, Owner, Piece, Values

Records = npt.NDArray[Any]
_Item = TypeVar("_Item")
_Use = tuple[int, tuple[tuple[str, ...], Sequence[int], int, Sequence[int] | None]]
"""Which chunk of the message, and `_use` of the piece."""
_chunk, _use = attrgetter("chunk"), attrgetter("fields", "rows", "first", "at")
_layout, _is_inline = attrgetter("layout"), attrgetter("is_inline")
CHUNK_COST_BYTES = 64
"""About what a chunk and its piece take in a message."""
SHARED_PIECES = 64
"""The pieces of a message are cached if it has no more."""


def values_of(owner: Owner, pieces: Sequence[NewPiece], base: int = 0) -> Values:
    """Return what a message says of these pieces: each chunk once, in the order of the pieces.
    owner: the peer of this host. base: the row of the write that is the first one of the
    message."""
    chunks = _numbered(map(_chunk, pieces))
    layouts = _numbered(map(_layout, chunks))
    owners = _numbered(map(_is_inline, chunks))
    uses = tuple(zip(map(chunks.__getitem__, map(_chunk, pieces)), map(_use, pieces), strict=True))
    try:
        used = _shared_pieces(uses, base) if len(uses) <= SHARED_PIECES else _pieces(uses, base)
    except TypeError:  # lists of rows have no hash, and rarely repeat
        used = _pieces(uses, base)
    fields, wire_pieces = used
    wire_chunks = [
        Chunk(
            owners[one.is_inline],
            one.number or 0,
            one.rows,
            one.nbytes,
            layouts[one.layout],
            one.beside,
            max(0, one.offset),
            one.digest,
        )
        for one in chunks
    ]
    owner_of = [INLINE if is_inline else owner for is_inline in owners]
    return Values(fields, owner_of, list(layouts), wire_chunks, wire_pieces)


def _numbered(items: Iterable[_Item]) -> dict[_Item, int]:
    """Return the distinct items in order, each with its index."""
    return dict(zip(dict.fromkeys(items), count()))


def _pieces(uses: tuple[_Use, ...], base: int) -> tuple[list[str], list[Piece]]:
    """Return the fields and the pieces of a message. uses: which rows use which chunk, one
    entry per piece."""
    fields: dict[str, int] = {}
    pieces: list[Piece] = []
    for number, (of_columns, rows, first, at) in uses:
        mine = [-1 if f == UNUSED else fields.setdefault(f, len(fields)) for f in of_columns]
        lowest = rows[0]
        if isinstance(rows, range):
            given = bytes_of(all_of(len(rows)))
        else:
            given = bytes_of(bits_of([row - lowest for row in rows]))
        places = b"" if at is None else np.array(at, U4).tobytes()
        pieces.append(Piece(number, tuple(mine), lowest - base, given, first, places))
    return list(fields), pieces


_shared_pieces = lru_cache(128)(_pieces)
"""Most messages of a producer differ only in their chunks, so they have the same pieces."""


def unnamed(pieces: Iterable[NewPiece]) -> list[NewChunk]:
    """Return the arena chunks that the peer does not know yet, in order. A message of these pieces
    names them."""
    every = chunks_of(pieces)
    return [chunk for chunk in every if chunk.number is None and not chunk.is_inline]


def committed(chunks: Iterable[NewChunk], ranges: Records | None = None) -> None:
    """Note that a message names these chunks, which were `unnamed`, so the peer owns their space.
    ranges: the peer's RANGE records of them, if the peer keeps them for a later message."""
    for chunk in chunks:
        chunk.offset = -1
    if ranges is not None:
        for chunk, known in zip(chunks, ids_of(ranges).tolist(), strict=False):
            chunk.number = known


def digests_of(chunks: Sequence[NewChunk]) -> bytes:
    """A DIGEST record per deduplicated chunk."""
    return np.array([(chunk.digest, chunk.nbytes) for chunk in chunks], DIGEST).tobytes()


def message_bytes(chunks: Iterable[NewChunk]) -> int:
    """About what these chunks add to a message."""
    return sum([CHUNK_COST_BYTES + len(chunk.beside) for chunk in chunks])
