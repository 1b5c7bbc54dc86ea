"""The values of a message, made of the pieces of a write.

A chunk says where this client wrote it, or what the peer calls it, if the peer has it already. The
bytes of small chunks go with the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client.write.chunks import Chunk, Piece, chunks_of
from dataplane.metadata.tables.bits import all_of, bits_of, bytes_of
from dataplane.metadata.tables.pieces import UNUSED
from dataplane.metadata.tables.references import ids_of
from dataplane.wire import tables
from dataplane.wire.records import DIGEST, U4
from dataplane.wire.tables import INLINE, Owner, Values

Records = npt.NDArray[Any]
CHUNK_COST_BYTES = 64
"""About what a chunk and its piece take in a message."""


class MessageValues(msgspec.Struct, eq=False):
    """values: as the message has them. chunks: those that this client wrote, in order. shared:
    those that the peer has already. copied_bytes: what was copied for it, into the arena or the
    message."""

    values: Values
    chunks: list[Chunk]
    shared: list[Chunk]
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
                chunk.range = known


def values_of(owner: Owner, pieces: Sequence[Piece], base: int = 0) -> MessageValues:
    """What a message says of these pieces. owner: the peer of this host. base: the row of the
    write that is the first one of the message."""
    own: list[Chunk] = []
    shared: list[Chunk] = []
    inline: list[Chunk] = []
    for chunk in chunks_of(pieces):
        (inline if chunk.is_inline else own if chunk.range is None else shared).append(chunk)
    owners = [owner] if own or shared else []
    layouts: dict[bytes, int] = {}
    numbers: dict[Chunk, int] = {}
    said: list[tables.Chunk] = []
    for chunk in (*own, *shared, *inline):
        numbers[chunk] = len(said)
        layout = layouts.setdefault(chunk.layout, len(layouts))
        size = chunk.rows, chunk.nbytes, layout
        if chunk.is_inline:
            said.append(tables.Chunk(len(owners), 0, *size, chunk.data or b""))
            continue
        name, offset = (0, chunk.offset) if chunk.range is None else (chunk.range, 0)
        said.append(tables.Chunk(0, name, *size, chunk.lengths or b"", offset, chunk.digest))
    if inline:
        owners.append(INLINE)
    fields: dict[str, int] = {}
    parts: list[tables.Piece] = []
    for piece in pieces:
        mine = [-1 if f == UNUSED else fields.setdefault(f, len(fields)) for f in piece.fields]
        at = b"" if piece.at is None else np.array(piece.at, U4).tobytes()
        number, rows = numbers[piece.chunk], piece.rows
        given = _every(len(rows)) if isinstance(rows, range) else _mask(rows)
        parts.append(tables.Piece(number, mine, rows[0] - base, given, piece.first, at))
    values = Values(list(fields), owners, list(layouts), said, parts)
    copied_bytes = sum([chunk.nbytes for chunk in (*own, *inline)])
    return MessageValues(values, own, shared, copied_bytes)


@lru_cache(1024)
def _every(count: int) -> bytes:
    """The mask of so many consecutive rows."""
    return bytes_of(all_of(count))


def _mask(rows: Sequence[int]) -> bytes:
    """The mask of these rows, counted from the first."""
    return bytes_of(bits_of([row - rows[0] for row in rows]))


def digests_of(chunks: Sequence[Chunk]) -> bytes:
    """A DIGEST record per deduplicated chunk."""
    return np.array([(chunk.digest, chunk.nbytes) for chunk in chunks], DIGEST).tobytes()


def message_bytes(chunks: Iterable[Chunk]) -> int:
    """About what these chunks add to a message."""
    nbytes = 0
    for chunk in chunks:
        nbytes += CHUNK_COST_BYTES + (chunk.nbytes if chunk.is_inline else 0)
        nbytes += len(chunk.lengths or b"")
    return nbytes
