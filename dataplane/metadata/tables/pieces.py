"""Pieces: which rows of a block have their values in which chunk.

A chunk holds the values of several rows, column after column. A piece says how the rows of one
block use one chunk: the row r of the block has its values in the chunk row `first` plus the number
of given rows before r, or in the row that `at` names. Chunks stay unread.

A piece never changes. When rows lose a value, another piece takes its place with fewer `live` rows;
`given` stays, so that the other rows keep their places in the chunk.

A block stores its pieces as a `BlockShape` and its chunks. Most blocks differ only in their chunks,
so they share the shape.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

import msgspec

from dataplane.errors import InvalidRows
from dataplane.metadata.tables.bits import all_of, bits_of, rows_of
from dataplane.wire.tables import Owner

UNUSED = ""
"""In `Piece.fields`: a column of the chunk that no row of the piece uses."""


class Chunk(msgspec.Struct, gc=False, eq=False):
    """What a shard knows of a chunk. Compares and hashes by identity.

    owner, number: where its bytes are, and its name there. An inline chunk is at INLINE and has no
    number; its bytes are `inline`. A chunk in a pool has its lengths there. live_rows: rows that
    have a value in it, which may be more than `rows` where several have the same value. A chunk is
    used while this is above 0. Each hold of a message counts as one more row.
    """

    owner: Owner
    number: int
    rows: int
    nbytes: int
    layout: bytes = b""
    inline: bytes = b""
    live_rows: int = 0

    @property
    def dead_bytes(self) -> int:
        """The approximate bytes of values that no row uses any more."""
        dead = self.rows - self.live_rows
        return self.nbytes * dead // self.rows if dead > 0 else 0


ANY_STAGE = "\0"
"""In `Piece.by`: values of a checkpoint, which any stage may add again."""


C = TypeVar("C", Chunk, int)


class Piece(msgspec.Struct, Generic[C], frozen=True, gc=False):
    """chunk: the chunk, or its index in the block or message. fields: by column of the
    chunk. given: the rows of the block that the chunk has rows for.
    live: the given rows that still have these values. at: the chunk row of each given row, if they
    are not consecutive from `first` on. by: the stage that added the values; "": a put brought
    them. base: the row that is bit 0 of `given` and `live`. It is 0 in a block. In a message with
    more rows than a block, it keeps the masks short."""

    chunk: C
    fields: tuple[str, ...]
    given: int
    live: int
    first: int = 0
    at: tuple[int, ...] | None = None
    by: str = ""
    base: int = 0

    def chunk_rows(self, bits: int) -> Sequence[int]:
        """The chunk row of each of these given rows, in their order."""
        rows = rows_of(self.given)
        if bits == self.given:
            return self.at or range(self.first, self.first + len(rows))
        at = self.at
        return [
            self.first + rank if at is None else at[rank]
            for rank, row in enumerate(rows)
            if bits >> row & 1
        ]


MAX_BLOCK_ROWS = 256
"""Larger puts are split, because a value is kept as long as any row of its block exists."""
SHARED_SHAPE_BYTES = 8 << 10
"""Larger shapes are not shared, because they hardly repeat. This bounds the memory of those that
are."""
SHARED_STAGES = 16
"""A shape remembers for this many stages which rows have their fields."""


class BlockShape(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Which rows of a block have which fields, and where in its chunks. Compares by identity;
    `shape_of` creates it. A message has a shape too, as if all its rows were one block. live: by
    field, the rows that have it. nbytes: approximate size of the pieces and chunks, without inline
    bytes. having: for the fields of a stage, the rows that have all of them.
    used: by chunk, how many rows of the block have a value in it."""

    count: int
    pieces: tuple[Piece[int], ...]
    live: dict[str, int]
    nbytes: int
    used: tuple[int, ...]
    having: dict[tuple[str, ...], int] = {}


def shape_of(count: int, pieces: tuple[Piece[int], ...]) -> BlockShape:
    """Return the shape of a block of `count` rows. Raise InvalidRows if a row has two values of a
    field, which only pieces of a message can contain."""
    nbytes = sum([200 + (0 if piece.at is None else 36 * len(piece.at)) for piece in pieces])
    is_shared = nbytes <= SHARED_SHAPE_BYTES and count <= MAX_BLOCK_ROWS
    made = _shape if is_shared else _shape.__wrapped__
    return made(count, pieces, nbytes)


@lru_cache(1_024)
def _shape(count: int, pieces: tuple[Piece[int], ...], nbytes: int) -> BlockShape:
    by_chunk: dict[int, int] = {}
    for piece in pieces:
        by_chunk[piece.chunk] = by_chunk.get(piece.chunk, 0) | piece.live
    used = tuple(
        [by_chunk.get(chunk, 0).bit_count() for chunk in range(1 + max(by_chunk, default=-1))]
    )
    return BlockShape(count, pieces, rows_by_field(pieces), nbytes, used)


def rows_by_field(pieces: Sequence[Piece[int]]) -> dict[str, int]:
    """The rows that have a value, by field. Raise InvalidRows if a row has two values of a
    field."""
    alike: dict[tuple[str, ...], int] = {}
    for piece in pieces:
        rows, before = piece.live << piece.base, alike.get(piece.fields, 0)
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


@lru_cache(1_024)
def _beside(one: BlockShape, other: BlockShape) -> BlockShape:
    """Both shapes in one; the chunks of `other` follow those of `one`."""
    many = 1 + max([piece.chunk for piece in one.pieces], default=-1)
    moved = [msgspec.structs.replace(piece, chunk=many + piece.chunk) for piece in other.pieces]
    return shape_of(one.count, (*one.pieces, *moved))


@lru_cache(1_024)
def _written_by(shape: BlockShape, stage: str) -> BlockShape:
    pieces = [msgspec.structs.replace(piece, by=stage) for piece in shape.pieces]
    return shape_of(shape.count, tuple(pieces))


class Pieces(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The values of a block. chunks: distinct, all in use. The live rows of one field in
    different pieces never overlap. The values of a message may have more rows than a block, and its
    pieces a `base`: `split` makes blocks of them."""

    shape: BlockShape
    chunks: tuple[Chunk, ...] = ()

    @property
    def parts(self) -> tuple[Piece[Chunk], ...]:
        """The pieces one by one."""
        chunks = self.chunks
        return tuple(
            [
                Piece(chunks[p.chunk], p.fields, p.given, p.live, p.first, p.at, p.by, p.base)
                for p in self.shape.pieces
            ]
        )

    @property
    def count(self) -> int:
        return self.shape.count

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that some row has."""
        return tuple(self.shape.live)

    @property
    def nbytes(self) -> int:
        """The approximate size of the pieces and their chunks, without inline bytes."""
        return self.shape.nbytes

    def live(self, field: str) -> int:
        """The rows that have a value of this field."""
        return self.shape.live.get(field, 0)

    def added(self, stage: str, field: str) -> int:
        """The rows whose value of this field this stage has added."""
        bits = 0
        for piece in self.shape.pieces:
            if piece.by in (stage, ANY_STAGE) and field in piece.fields:
                bits |= piece.live
        return bits

    def having(self, fields: Iterable[str]) -> int:
        """The rows that have all of these fields."""
        key, shape = tuple(fields), self.shape
        bits = shape.having.get(key)
        if bits is None:
            bits = all_of(shape.count)
            for field in key:
                bits &= shape.live.get(field, 0)
            if len(shape.having) == SHARED_STAGES:
                shape.having.clear()
            shape.having[key] = bits
        return bits

    def inside(self, chunks: Iterable[Chunk]) -> dict[str, int]:
        """Field → the rows whose value lies in one of these chunks."""
        wanted = set(chunks)
        found: dict[str, int] = {}
        for part in self.parts:
            if part.chunk in wanted:
                for field in part.fields:
                    if field != UNUSED:
                        found[field] = found.get(field, 0) | part.live
        return found

    def rows_by_chunk(self) -> dict[Chunk, int]:
        """Each chunk, with the rows that have a value in it."""
        used: dict[Chunk, int] = {}
        for part in self.parts:
            used[part.chunk] = used.get(part.chunk, 0) | part.live
        return used

    def only(self, fields: Iterable[str]) -> Pieces:
        """Return the values of these fields only."""
        wanted = set(fields)
        parts = []
        for part in self.parts:
            kept = tuple([f if f in wanted else UNUSED for f in part.fields])
            if kept == part.fields:
                parts.append(part)
            elif any(kept):
                parts.append(msgspec.structs.replace(part, fields=kept))
        return pieces_of(self.count, parts)

    def overlaid(self, new: Pieces, keep: bool) -> tuple[Pieces, dict[str, int]]:
        """Add the values of `new`, which has the same rows.

        Where a row has a field already, the old value stays (`keep`) or the new one takes its
        place. Returns also how many old values stayed, by field.
        """
        mine = self.shape.live
        meet = {f: both for f, bits in new.shape.live.items() if (both := bits & mine.get(f, 0))}
        if not meet and set(self.chunks).isdisjoint(new.chunks):
            is_shared = self.nbytes + new.nbytes <= SHARED_SHAPE_BYTES
            made = _beside if is_shared else _beside.__wrapped__
            return Pieces(made(self.shape, new.shape), self.chunks + new.chunks), {}
        old, came = self.parts, new.parts
        if meet and keep:
            came = _without(came, meet)
        elif meet:
            old = _without(old, meet)
        found = pieces_of(self.count, _coalesced(old, came))
        return found, {f: bits.bit_count() for f, bits in meet.items()} if keep else {}

    def without(self, bits: int, fields: Iterable[str] | None = None) -> Pieces:
        """Remove the values of these rows, of these fields or of all."""
        names = self.fields if fields is None else fields
        return pieces_of(self.count, _without(self.parts, dict.fromkeys(names, bits)))

    def renamed(self, names: Mapping[str, str]) -> Pieces:
        """Return the values with other names for some fields."""
        parts = []
        for part in self.parts:
            fields = tuple([names.get(field, field) for field in part.fields])
            same = fields == part.fields
            parts.append(part if same else msgspec.structs.replace(part, fields=fields))
        return pieces_of(self.count, parts)

    def written_by(self, stage: str) -> Pieces:
        """Return the values as added by this stage."""
        is_shared = self.nbytes <= SHARED_SHAPE_BYTES
        made = _written_by if is_shared else _written_by.__wrapped__
        return Pieces(made(self.shape, stage), self.chunks)


def pieces_of(count: int, parts: Sequence[Piece[Chunk]] = ()) -> Pieces:
    """The values of a block of `count` rows with these pieces."""
    chunks = {chunk: n for n, chunk in enumerate(dict.fromkeys([part.chunk for part in parts]))}
    pieces = [
        Piece(chunks[one.chunk], one.fields, one.given, one.live, one.first, one.at, one.by)
        for one in parts
    ]
    return Pieces(shape_of(count, tuple(pieces)), tuple(chunks))


Part = tuple[Sequence[int], Sequence[int], int]
"""Rows of a message, the block row of each, and the number of rows of the block."""


def split(pieces: Sequence[Piece[Chunk]], parts: Sequence[Part]) -> list[Pieces]:
    """Split the pieces of a message among parts, which share no row. The time grows with the rows
    of all pieces, and not with the number of parts. Consecutive rows take less."""
    found: list[list[Piece[Chunk]]] = [[] for _ in parts]
    order = sorted(range(len(parts)), key=lambda number: parts[number][0][0])
    starts = [parts[number][0][0] for number in order]
    runs = all([isinstance(rows, range) and isinstance(there, range) for rows, there, _ in parts])
    homes: dict[int, tuple[int, int]] = {}  # the part of each row, and its row of the block
    for piece in pieces:
        given = rows_of(piece.given)
        if runs and isinstance(given, range):
            first, end = piece.base + given.start, piece.base + given.stop
            near = max(0, bisect_right(starts, first) - 1)
            for number in order[near : bisect_left(starts, end)]:
                if (mine := _part_of(piece, first, end, parts[number])) is not None:
                    found[number].append(mine)
            continue
        if not homes:
            for number, (rows, there, _) in enumerate(parts):
                homes.update(zip(rows, [(number, row) for row in there], strict=True))
        taken: dict[int, list[tuple[int, int]]] = {}
        for rank, row in enumerate(given):
            if (home := homes.get(piece.base + row)) is not None:
                taken.setdefault(home[0], []).append((home[1], rank))
        for number, pairs in taken.items():
            pairs.sort()
            bits = bits_of([row for row, _ in pairs])
            found[number].append(_piece(piece, bits, [rank for _, rank in pairs]))
    return [pieces_of(count, mine) for (_, _, count), mine in zip(parts, found, strict=True)]


def nbytes_of(values: Iterable[tuple[Pieces, int]]) -> int:
    """The approximate bytes of these rows. Each row of a chunk counts equally, and a value that
    several rows share counts once."""
    used: dict[Chunk, int] = {}
    for pieces, bits in values:
        for chunk, rows in pieces.rows_by_chunk().items():
            used[chunk] = used.get(chunk, 0) + (rows & bits).bit_count()
    return sum([c.nbytes * min(c.rows, many) // max(1, c.rows) for c, many in used.items()])


def _part_of(piece: Piece[Chunk], first: int, end: int, part: Part) -> Piece[Chunk] | None:
    """Return the rows that a part of consecutive rows has of a piece, or None if it has none. The
    piece has all rows of the message from `first` to `end`."""
    rows, there, _ = part
    low, high = max(first, rows[0]), min(end, rows[-1] + 1)
    if low >= high:
        return None
    given, before = all_of(high - low, there[0] + low - rows[0]), low - first
    if piece.at is not None:
        return _piece(piece, given, range(before, before + high - low))
    return Piece(piece.chunk, piece.fields, given, given, piece.first + before, None, piece.by)


def _piece(piece: Piece[Chunk], given: int, ranks: Sequence[int]) -> Piece[Chunk]:
    at = [piece.first + rank if piece.at is None else piece.at[rank] for rank in ranks]
    return _at(piece.chunk, piece.fields, given, given, at, piece.by)


def _at(
    chunk: Chunk,
    fields: tuple[str, ...],
    given: int,
    live: int,
    at: Sequence[int],
    by: str = "",
) -> Piece[Chunk]:
    first = at[0]
    if all([row == first + n for n, row in enumerate(at)]):
        return Piece(chunk, fields, given, live, first, None, by)
    return Piece(chunk, fields, given, live, 0, tuple(at), by)


def _without(parts: Iterable[Piece[Chunk]], gone: Mapping[str, int]) -> tuple[Piece[Chunk], ...]:
    """Remove the rows `gone` of each field. Fields of a piece that keep the same rows stay
    together."""
    found: list[Piece[Chunk]] = []
    for part in parts:
        left = [part.live & ~gone.get(f, 0) if f != UNUSED else 0 for f in part.fields]
        for live in dict.fromkeys(left):
            if live == part.live and UNUSED not in part.fields and left.count(live) == len(left):
                found.append(part)
            elif live:
                fields = tuple(
                    [
                        f if bits == live else UNUSED
                        for f, bits in zip(part.fields, left, strict=True)
                    ]
                )
                found.append(msgspec.structs.replace(part, fields=fields, live=live))
    return tuple(found)


def _coalesced(
    old: tuple[Piece[Chunk], ...], new: tuple[Piece[Chunk], ...]
) -> tuple[Piece[Chunk], ...]:
    """Old and new pieces. Pieces with equal chunk and fields are merged, because rows of one add
    may be acked one by one."""
    if {part.chunk for part in old}.isdisjoint([part.chunk for part in new]):
        return old + new
    found = list(old)
    for part in new:
        place = next(
            (
                n
                for n, one in enumerate(found)
                if one.chunk is part.chunk
                and (one.fields, one.by) == (part.fields, part.by)
                and not one.live & part.live
            ),
            None,
        )
        if place is None:
            found.append(part)
        else:
            found[place] = _united(found[place], part)
    return tuple(found)


def _united(one: Piece[Chunk], other: Piece[Chunk]) -> Piece[Chunk]:
    """Merge two pieces; only their live rows remain."""
    rows = list(zip(rows_of(one.live), one.chunk_rows(one.live), strict=True))
    rows += zip(rows_of(other.live), other.chunk_rows(other.live), strict=True)
    rows.sort()
    live = one.live | other.live
    return _at(one.chunk, one.fields, live, live, [at for _, at in rows], one.by)
