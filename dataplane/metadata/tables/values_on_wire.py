"""The values of a message as pieces of chunks, and pieces as the values of a message.

What arrives came from another process: an index, a count or a mask that does not fit gets a typed
error before anything is changed. Layouts and the bytes of chunks pass through unread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from dataplane.errors import InvalidRows, LimitExceeded, ProtocolError
from dataplane.memory.extents import PAGE_BYTES
from dataplane.metadata.tables.bits import bytes_of, in_bytes, picked, rows_of
from dataplane.metadata.tables.names import PROGRESS
from dataplane.metadata.tables.pieces import UNUSED, Chunk, MessagePiece, Piece, Pieces
from dataplane.wire import tables as wire
from dataplane.wire.limits import (
    ALIGNMENT_BYTES,
    MAX_CHUNKS_PER_MESSAGE,
    MAX_FIELDS,
    MAX_LAYOUT_BYTES,
    MAX_NAME_BYTES,
    MAX_PIECES_PER_MESSAGE,
    MAX_ROWS_PER_MESSAGE,
)
from dataplane.wire.records import U4, column
from dataplane.wire.tables import INLINE, Owner

_PIECE_BYTES, _CHUNK_BYTES = 32, 48
"""About what one takes in a message."""
_Same = TypeVar("_Same", Owner, bytes)
_NO_NAMES: Mapping[Chunk, tuple[Owner, int]] = {}
Known = Callable[[Owner, int], Chunk | None]
"""The chunk that a shard has under this name."""


@lru_cache(4_096)
def _shared(value: _Same) -> _Same:
    """The one that has been kept before: chunks of many messages have the same owner and layout."""
    return value


# what arrives


def pieces_in(
    values: wire.Values, rows: int, known: Known, most: int = MAX_CHUNKS_PER_MESSAGE
) -> tuple[list[MessagePiece], list[Chunk]]:
    """The pieces of a message about this many rows, and its chunks that are in arenas. A chunk that
    the shard has already is that one. most: chunks that the message may have.

    ProtocolError, InvalidRows or LimitExceeded for values that do not fit together.
    """
    check_sizes(values, most)
    _check_fields(values.fields)
    chunks = [_chunk_in(values, one, known) for one in values.chunks]
    names = [(one.owner, one.number) for one in chunks if one.number]
    if len(set(names)) != len(names):
        owner, number = Counter(names).most_common(1)[0][0]
        raise ProtocolError(
            f"expected each chunk once in the message, got chunk {number} of peer {owner.peer} "
            "twice"
        )
    fields = tuple(values.fields)
    placed = [_piece_in(fields, one, chunks, rows) for one in values.pieces]
    rows_by_field(placed)
    return placed, [one for one in chunks if one.number]


def check_sizes(values: wire.Values, most_chunks: int = MAX_CHUNKS_PER_MESSAGE) -> None:
    """LimitExceeded where a message describes more than it may."""
    for what, given, most in (
        ("fields", values.fields, MAX_FIELDS),
        ("chunks", values.chunks, most_chunks),
        ("pieces", values.pieces, MAX_PIECES_PER_MESSAGE),
        ("layouts", values.layouts, MAX_CHUNKS_PER_MESSAGE),
        ("owners", values.owners, MAX_CHUNKS_PER_MESSAGE),
    ):
        if len(given) > most:
            raise LimitExceeded(
                f"the message has {len(given)} {what}, over the limit of {most}: write fewer rows "
                "per call",
                limit=most,
            )
    for layout in values.layouts:
        if len(layout) > MAX_LAYOUT_BYTES:
            raise LimitExceeded(
                f"a chunk's layout has {len(layout)} bytes, over the limit of {MAX_LAYOUT_BYTES}",
                limit=MAX_LAYOUT_BYTES,
            )


def _check_fields(fields: Sequence[str]) -> None:
    if len(set(fields)) != len(fields):
        twice = Counter(fields).most_common(1)[0][0]
        raise InvalidRows(f"field {twice[:40]!r} appears twice in this call: pass each field once")
    for field in fields:
        most = MAX_NAME_BYTES
        if PROGRESS in field:  # it has the name of a stage as well
            most += len(PROGRESS) + MAX_NAME_BYTES
        if not 0 < len(field) <= most:
            raise InvalidRows(
                f"invalid field name {field[:40]!r}: expected 1 to {most} characters, "
                f"got {len(field)}"
            )


def _chunk_in(values: wire.Values, one: wire.Chunk, known: Known) -> Chunk:
    if not 0 <= one.owner < len(values.owners):
        raise ProtocolError(
            f"invalid owner {one.owner} of chunk {one.number}: expected an index into the "
            f"{len(values.owners)} owners of the message"
        )
    if not 0 <= one.layout < len(values.layouts):
        raise ProtocolError(
            f"invalid layout {one.layout} of chunk {one.number}: expected an index into the "
            f"{len(values.layouts)} layouts of the message"
        )
    if not 0 <= one.rows <= MAX_ROWS_PER_MESSAGE or one.nbytes < 0:
        raise ProtocolError(
            f"invalid chunk {one.number}: expected 0 to {MAX_ROWS_PER_MESSAGE} rows and 0 bytes or "
            f"more, got {one.rows} rows and {one.nbytes} bytes"
        )
    owner, layout = _shared(values.owners[one.owner]), _shared(values.layouts[one.layout])
    if owner == INLINE:
        if one.number or len(one.inline) != one.nbytes:
            raise ProtocolError(
                f"invalid inline chunk: expected {one.nbytes} bytes and no chunk number, got "
                f"{len(one.inline)} bytes and number {one.number}"
            )
        return Chunk(owner, 0, one.rows, one.nbytes, layout, one.inline)
    found = known(owner, one.number)
    if one.number < 1:
        raise ProtocolError(f"invalid chunk number {one.number}: expected 1 or more")
    if found is None:
        return Chunk(owner, one.number, one.rows, one.nbytes, layout, one.inline)
    known_as = found.rows, found.nbytes, found.layout, found.inline
    if known_as != (one.rows, one.nbytes, layout, one.inline):
        raise ProtocolError(
            f"chunk {one.number} of peer {owner.peer}: expected the stored description "
            f"({found.rows} rows, {found.nbytes} bytes), got another one ({one.rows} rows, "
            f"{one.nbytes} bytes)"
        )
    return found


@lru_cache(4_096)
def _columns_in(fields: tuple[str, ...], columns: tuple[int, ...]) -> tuple[str, ...]:
    """The field that each column of a piece is."""
    if wrong := [field for field in columns if not -1 <= field < len(fields)]:
        raise ProtocolError(
            f"invalid field {wrong[0]} of a piece: expected an index into the {len(fields)} fields "
            "of the message, or -1"
        )
    names = tuple([UNUSED if field < 0 else fields[field] for field in columns])
    used = [name for name in names if name != UNUSED]
    if not used:
        raise ProtocolError("invalid piece: expected it to use a column of its chunk, got none")
    if len(set(used)) != len(used):
        twice = Counter(used).most_common(1)[0][0]
        raise ProtocolError(f"invalid piece: expected one column for field {twice!r}, got two")
    return names


def _piece_in(
    fields: tuple[str, ...], one: wire.Piece, chunks: Sequence[Chunk], rows: int
) -> MessagePiece:
    if not 0 <= one.chunk < len(chunks):
        raise ProtocolError(
            f"invalid chunk {one.chunk} of a piece: expected an index into the {len(chunks)} "
            "chunks of the message"
        )
    if len(one.fields) > MAX_FIELDS:
        raise ProtocolError(
            f"invalid piece: expected at most {MAX_FIELDS} columns, got {len(one.fields)}"
        )
    names = _columns_in(fields, tuple(one.fields))
    chunk, given = chunks[one.chunk], in_bytes(one.given)
    many = given.bit_count()
    if not given or one.base < 0 or one.base + given.bit_length() > rows:
        raise ProtocolError(
            f"invalid rows of a piece: expected one or more of the {rows} rows of the message, got "
            f"{many} from row {one.base} on"
        )
    at = tuple(column(one.at, U4, many).tolist()) if one.at else None
    last = max(at) if at is not None else one.first + many - 1
    if one.first < 0 or last >= chunk.rows:
        raise ProtocolError(
            f"invalid rows {one.first} to {last} of a piece: its chunk has only {chunk.rows} rows"
            if at is None
            else f"invalid row {last} of a piece: its chunk has only {chunk.rows} rows"
        )
    return MessagePiece(chunk, names, one.base, given, one.first, at)


def rows_by_field(pieces: Sequence[MessagePiece]) -> dict[str, int]:
    """The rows of the message that have a value, by field. InvalidRows where one has two."""
    alike: dict[tuple[str, ...], int] = {}
    for piece in pieces:
        rows, before = piece.given << piece.base, alike.get(piece.fields, 0)
        if before & rows:
            raise _two_values(next(field for field in piece.fields if field != UNUSED))
        alike[piece.fields] = before | rows
    found: dict[str, int] = {}
    for fields, rows in alike.items():
        for field in fields:
            if field != UNUSED:
                before = found.get(field, 0)
                if before & rows:
                    raise _two_values(field)
                found[field] = before | rows
    return found


def _two_values(field: str) -> InvalidRows:
    return InvalidRows(
        f"field {field!r} has two values for one row in this call: pass one value per row"
    )


# what leaves


class Outgoing(NamedTuple):
    """Values of rows, one block behind the other. parts: the pieces of a block, and which of its
    rows. fields: only these; None: all that one of the rows has."""

    parts: Sequence[tuple[Pieces, int]]
    fields: Sequence[str] | None = None

    def used(self) -> Iterator[Piece]:
        """Each piece of which something leaves."""
        wanted = None if self.fields is None else set(self.fields)
        for block, bits in self.parts:
            for part in block.parts:
                if part.live & bits and (wanted is None or not wanted.isdisjoint(part.fields)):
                    yield part

    def chunks(self) -> list[Chunk]:
        """Each chunk of which something leaves, once."""
        return list(dict.fromkeys([part.chunk for part in self.used()]))

    @property
    def nbytes(self) -> int:
        """About what a message takes at most that tells of them: each chunk counts its layout."""
        used = list(self.used())
        chunks = {part.chunk for part in used}
        pieces = sum([_PIECE_BYTES + (0 if p.at is None else 4 * len(p.at)) for p in used])
        return pieces + sum([_CHUNK_BYTES + len(c.layout) + len(c.inline) for c in chunks])

    def pulled(self, address: str) -> int:
        """Bytes that the peer at this address brings to itself for them."""
        return pulled([(chunk.owner, chunk.nbytes) for chunk in self.chunks()], address)

    def on_wire(self, names: Mapping[Chunk, tuple[Owner, int]] = _NO_NAMES) -> wire.Values:
        """As a message says them. names: of chunks that have others by now."""
        return _Writer(self.fields, names).written(self.parts)


def pulled(chunks: Iterable[tuple[Owner, int]], address: str) -> int:
    """Bytes that the peer at this address brings to itself for chunks of these owners and sizes:
    whole chunks, padded, and a page for every owner that is read from, and for what rides in the
    answer."""
    far = [(owner, size) for owner, size in chunks if owner != INLINE and owner.peer != address]
    owners = {owner for owner, _ in far}
    nbytes = sum([-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for _, size in far])
    return nbytes + PAGE_BYTES * (len(owners) + 1) if owners else 0


def message_bytes(values: wire.Values) -> int:
    """About what they take in a message."""
    chunks = sum([_CHUNK_BYTES + len(one.inline) for one in values.chunks])
    pieces = sum([_PIECE_BYTES + len(one.given) + len(one.at) for one in values.pieces])
    return chunks + pieces + sum(map(len, values.layouts))


class _Writer:
    """Numbers fields, owners, layouts and chunks of a message as they occur."""

    def __init__(
        self, fields: Sequence[str] | None, names: Mapping[Chunk, tuple[Owner, int]]
    ) -> None:
        self._names = names
        self._wanted = None if fields is None else set(fields)
        self._fields: dict[str, int] = (
            {} if fields is None else {f: n for n, f in enumerate(fields)}
        )
        self._owners: dict[Owner, int] = {}
        self._layouts: dict[bytes, int] = {}
        self._columns: dict[tuple[str, ...], list[int]] = {}
        self._numbers: dict[Chunk, int] = {}
        self._chunks: list[wire.Chunk] = []

    def written(self, parts: Sequence[tuple[Pieces, int]]) -> wire.Values:
        pieces, base = list[wire.Piece](), 0
        for block, bits in parts:
            whole = bits == (1 << block.count) - 1
            for part in block.parts:
                taken = part.live & bits
                if taken and (columns := self._columns_of(part.fields)):
                    pieces.append(self._piece(part, taken, None if whole else bits, base, columns))
            base += bits.bit_count()
        return wire.Values(
            list(self._fields), list(self._owners), list(self._layouts), self._chunks, pieces
        )

    def _columns_of(self, fields: tuple[str, ...]) -> list[int]:
        """The number of the field that each column of a piece is; none where none is wanted."""
        found = self._columns.get(fields)
        if found is None:
            wanted, known = self._wanted, self._fields
            found = [
                -1
                if field == UNUSED or not (wanted is None or field in wanted)
                else known.setdefault(field, len(known))
                for field in fields
            ]
            if max(found) < 0:
                found = []
            self._columns[fields] = found
        return found

    def _piece(
        self, part: Piece, taken: int, bits: int | None, base: int, columns: list[int]
    ) -> wire.Piece:
        """bits: the rows of the block that are in the message; None: all."""
        given = taken if bits is None else picked(taken, rows_of(bits))
        first, at = part.first, b"" if part.at is None else np.array(part.at, U4).tobytes()
        if taken != part.given:
            rows = part.chunk_rows(taken)
            first, at = rows[0], b""
            if list(rows) != list(range(first, first + len(rows))):
                first, at = 0, np.array(rows, U4).tobytes()
        return wire.Piece(self._chunk(part.chunk), columns, base, bytes_of(given), first, at)

    def _chunk(self, chunk: Chunk) -> int:
        number = self._numbers.get(chunk)
        if number is None:
            number = self._numbers[chunk] = len(self._chunks)
            at, name = chunk.owner, chunk.number
            if self._names:
                at, name = self._names.get(chunk, (at, name))
            owner = self._owners.setdefault(at, len(self._owners))
            layout = self._layouts.setdefault(chunk.layout, len(self._layouts))
            sizes = chunk.rows, chunk.nbytes
            self._chunks.append(wire.Chunk(owner, name, *sizes, layout, chunk.inline))
        return number
