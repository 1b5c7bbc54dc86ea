"""The values of a message as pieces of chunks, and pieces as the values of a message.

What arrives came from another process: an index, a count or a mask that does not fit gets a typed
error before anything is changed. Layouts and the bytes of chunks pass through unread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from dataplane.errors import InvalidRows, LimitExceeded, ProtocolError, counted
from dataplane.memory.extents import PAGE_BYTES
from dataplane.metadata.tables.bits import all_of, bytes_of, in_bytes, picked, rows_of
from dataplane.metadata.tables.names import PROGRESS
from dataplane.metadata.tables.pieces import (
    SHARED_SHAPE_BYTES,
    UNUSED,
    BlockShape,
    Chunk,
    Piece,
    Pieces,
    shape_of,
    with_chunks,
)
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
_NO_VALUES = wire.Values()
_NO_NAMES: Mapping[Chunk, tuple[Owner, int]] = {}
Known = Mapping[Owner, Mapping[int, Chunk]]
"""The chunks that a shard has, by owner and number."""
_NOTHING: Mapping[int, Chunk] = {}
SHARED_BYTES, SHARED_CHUNKS, SHARED_ROWS = 1_024, 64, 1_024
"""What a message brings is looked up only if its encoded pieces, the names of its fields, its
chunks and its rows are no more: larger ones hardly repeat, and would fill the memory."""
SHARED_RUNS = 512
"""The same of the runs of its fields."""
SHARED_BLOCKS = 32
"""The same of blocks whose values leave together."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[wire.Piece])


@lru_cache(4_096)
def _shared(value: _Same) -> _Same:
    """The one that has been kept before: chunks of many messages have the same owner and layout."""
    return value


_same_size = lru_cache(64)(int)
"""Columns of the same lengths have chunks of the same size, which share its number."""


# what arrives


class MessageRun(NamedTuple):
    """Consecutive rows of a message. Their values are rows `first` to `last` of a column of a
    chunk. chunk: -1 if the rows lack the field."""

    chunk: int
    column: int
    first: int
    last: int


class MessageShape(msgspec.Struct, gc=False, eq=False):
    """The part of a message that other messages share, which differ from it only in their chunks.

    rows: by field, the rows that have it. used: by number of the chunk, how many columns its pieces
    name; 0 if its pieces disagree. uses_all: `used` has all chunks of the message, in their order.
    shares: by chunk, the share of its rows that pieces name.
    """

    count: int
    fields: tuple[str, ...]
    pieces: tuple[Piece[int], ...]
    rows: dict[str, int]
    used: dict[int, int]
    uses_all: bool = True
    shares: list[float] = []
    _block: BlockShape | None = None
    _runs: dict[str, list[MessageRun]] = {}
    _free_runs: int = SHARED_RUNS

    @property
    def block(self) -> BlockShape:
        """Of a block that has all rows of the message, and the chunks in `used`."""
        if self._block is None:
            number = {chunk: n for n, chunk in enumerate(self.used)}
            pieces = []
            for one in self.pieces:
                first, at = (0, one.at) if one.at is not None else (one.first, None)
                if at is not None and at == (*range(at[0], at[0] + len(at)),):
                    first, at = at[0], None
                given = one.given << one.base
                pieces.append(Piece(number[one.chunk], one.fields, given, given, first, at))
            self._block = shape_of(self.count, tuple(pieces))
        return self._block

    def runs(self, field: str) -> list[MessageRun]:
        """Return where the values of a field are, in the order of the rows. The shape keeps up to
        SHARED_RUNS of these; further ones are computed for each call."""
        runs = self._runs.get(field)
        if runs is None:
            placed = list[tuple[int, MessageRun]]()
            for one in self.pieces:
                if field in one.fields:
                    at = one.fields.index(field)
                    for row, first, last in _stretches(one):
                        placed.append((row, MessageRun(one.chunk, at, first, last)))
            runs = _without_gaps(placed, self.count)
            if len(runs) <= self._free_runs:
                self._free_runs -= len(runs)
                self._runs[field] = runs
        return runs


def _stretches(piece: Piece[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a piece: its first row of the message, its first row of the chunk, and the
    row of the chunk behind its last."""
    rows, first, base = rows_of(piece.given), piece.first, piece.base
    if piece.at is None and isinstance(rows, range):
        yield base + rows.start, first, first + len(rows)
        return
    at = piece.at or range(first, first + len(rows))
    cuts = [n for n in range(1, len(rows)) if (rows[n] - rows[n - 1], at[n] - at[n - 1]) != (1, 1)]
    for start, stop in pairwise([0, *cuts, len(rows)]):
        yield base + rows[start], at[start], at[stop - 1] + 1


def _without_gaps(placed: list[tuple[int, MessageRun]], count: int) -> list[MessageRun]:
    """These runs in order, with runs of the rows that none of them has."""
    runs, end = list[MessageRun](), 0
    for row, run in sorted(placed):
        if row > end:
            runs.append(MessageRun(-1, 0, 0, row - end))
        runs.append(run)
        end = row + run.last - run.first
    if end < count:
        runs.append(MessageRun(-1, 0, 0, count - end))
    return runs


class IncomingValues(NamedTuple):
    """The values of a message, checked. chunks: all of them. known: those of them that the shard
    had before."""

    shape: MessageShape
    chunks: list[Chunk]
    known: list[Chunk]

    @property
    def fields(self) -> list[str]:
        """Those of the rows."""
        return list(self.shape.rows)

    @property
    def pieces(self) -> list[Piece[Chunk]]:
        """The pieces one by one."""
        return with_chunks(self.shape.pieces, self.chunks)

    @property
    def block(self) -> Pieces:
        """The values of a block that has all rows of the message."""
        return Pieces(self.shape.block, tuple(self.used))

    @property
    def nbytes(self) -> int:
        """Of all chunks that it brought to the rows."""
        return sum([chunk.nbytes for chunk in self.used])

    @property
    def used(self) -> list[Chunk]:
        """The chunks of its pieces."""
        shape, chunks = self.shape, self.chunks
        return chunks if shape.uses_all else [chunks[n] for n in shape.used]


def values_in(
    values: wire.Values, rows: int, known: Known, most: int = MAX_CHUNKS_PER_MESSAGE
) -> IncomingValues:
    """The values of a message about this many rows. A chunk that the shard has already is that one.
    most: chunks that the message may have.

    ProtocolError, InvalidRows or LimitExceeded for values that do not fit together.
    """
    if values == _NO_VALUES:
        return IncomingValues(MessageShape(rows, (), (), {}, {}), [], [])
    check_sizes(values, most)
    chunks, before = _chunks_in(values, known)
    return IncomingValues(shape_in(values, rows), chunks, before)


def shape_in(values: wire.Values, rows: int) -> MessageShape:
    """The shape of a message about this many rows. ProtocolError or InvalidRows for pieces that fit
    neither its chunks nor its rows."""
    pieces = _encoder.encode(values.pieces)
    chunk_rows = tuple([one.rows for one in values.chunks])
    is_shared = (
        len(pieces) <= SHARED_BYTES
        and len(chunk_rows) <= SHARED_CHUNKS
        and rows <= SHARED_ROWS
        and sum(map(len, values.fields)) <= SHARED_BYTES
    )
    made = _shape_in if is_shared else _shape_in.__wrapped__
    return made(tuple(values.fields), pieces, chunk_rows, rows)


@lru_cache(1_024)
def _shape_in(
    fields: tuple[str, ...], pieces: bytes, chunk_rows: tuple[int, ...], rows: int
) -> MessageShape:
    """The shape of a message, checked. pieces: encoded. chunk_rows: the rows of each chunk."""
    _check_fields(fields)
    placed = [_piece_in(fields, one, chunk_rows, rows) for one in _decoder.decode(pieces)]
    used: dict[int, int] = {}
    shares = [0.0] * len(chunk_rows)
    for one in placed:
        if used.setdefault(one.chunk, len(one.fields)) != len(one.fields):
            used[one.chunk] = 0
        shares[one.chunk] += one.given.bit_count() / chunk_rows[one.chunk]
    uses_all = [*used] == [*range(len(chunk_rows))]
    return MessageShape(rows, fields, tuple(placed), rows_by_field(placed), used, uses_all, shares)


def check_sizes(values: wire.Values, most_chunks: int = MAX_CHUNKS_PER_MESSAGE) -> None:
    """LimitExceeded where a message describes more than it may."""
    if (
        len(values.fields) > MAX_FIELDS
        or len(values.chunks) > most_chunks
        or len(values.pieces) > MAX_PIECES_PER_MESSAGE
        or max(len(values.layouts), len(values.owners)) > MAX_CHUNKS_PER_MESSAGE
    ):
        raise too_many(values, most_chunks)
    largest = max(map(len, values.layouts), default=0)
    if largest > MAX_LAYOUT_BYTES:
        raise LimitExceeded(
            f"a chunk's layout is {largest} bytes long, over the limit of {MAX_LAYOUT_BYTES}: "
            "write fewer fields per call",
            limit=MAX_LAYOUT_BYTES,
        )


def too_many(values: wire.Values, most_chunks: int) -> LimitExceeded:
    """Which part of a message is too large."""
    sizes = [
        ("fields", len(values.fields), MAX_FIELDS),
        ("chunks", len(values.chunks), most_chunks),
        ("pieces", len(values.pieces), MAX_PIECES_PER_MESSAGE),
        ("layouts", len(values.layouts), MAX_CHUNKS_PER_MESSAGE),
        ("owners", len(values.owners), MAX_CHUNKS_PER_MESSAGE),
    ]
    what, given, most = next(one for one in sizes if one[1] > one[2])
    return LimitExceeded(
        f"the message has {given} {what}, over the limit of {most}: write fewer rows per call",
        limit=most,
    )


def check_owners(values: wire.Values) -> None:
    """Raise ProtocolError unless each chunk has an owner of the message, and a number and a size of
    0 or more."""
    owners = len(values.owners)
    for chunk in values.chunks:
        owner = chunk.owner
        if owner < 0 or owner >= owners:
            raise ProtocolError(
                f"invalid owner index {owner} for chunk {chunk.number}: the message lists "
                f"{counted(owners, 'owner')}. Install the same dataplane release "
                "everywhere"
            )
        if chunk.number < 0 or chunk.nbytes < 0:
            raise ProtocolError(
                f"invalid chunk {chunk.number} of {chunk.nbytes} bytes: expected a non-negative "
                "number and size. Install the same dataplane release everywhere"
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
                f"field name {field[:40]!r} has {len(field)} characters: choose a name of "
                f"1 to {most} characters"
            )


def _chunks_in(values: wire.Values, known: Known) -> tuple[list[Chunk], list[Chunk]]:
    """The chunks of a message, and those of them that the shard has already."""
    owners = [_shared(owner) for owner in values.owners]
    layouts = [_shared(layout) for layout in values.layouts]
    there = [None if owner == INLINE else known.get(owner, _NOTHING) for owner in owners]
    chunks, before = list[Chunk](), list[Chunk]()
    many_owners, many_layouts, most_rows = len(owners), len(layouts), MAX_ROWS_PER_MESSAGE
    for one in values.chunks:
        at, number, rows, nbytes, form = one.owner, one.number, one.rows, one.nbytes, one.layout
        if at < 0 or form < 0 or rows < 0 or nbytes < 0:
            raise _invalid(one, values)
        if at >= many_owners or form >= many_layouts or rows > most_rows:
            raise _invalid(one, values)
        mine = there[at]
        if mine is None:
            if number or len(one.inline) != nbytes:
                raise ProtocolError(
                    f"invalid inline chunk: expected {nbytes} bytes and no chunk number, "
                    f"got {len(one.inline)} bytes and number {number}. Install the same dataplane "
                    "release everywhere"
                )
        elif number < 1:
            raise ProtocolError(
                f"invalid chunk number {number}: expected 1 or more. "
                "Install the same dataplane release everywhere"
            )
        elif (found := mine.get(number)) is not None:
            _check_same(found, one, layouts[form])
            chunks.append(found)
            before.append(found)
            continue
        size = _same_size(nbytes)
        chunks.append(Chunk(owners[at], number, rows, size, layouts[form], one.inline))
    numbers = [one.number for one in chunks if one.number]
    if len(set(numbers)) < len(numbers):
        _check_distinct(chunks)
    return chunks, before


def _check_same(found: Chunk, one: wire.Chunk, layout: bytes) -> None:
    """ProtocolError unless a message describes a chunk as the shard has it."""
    has = found.rows, found.nbytes, found.layout, found.inline
    if has != (one.rows, one.nbytes, layout, one.inline):
        raise ProtocolError(
            f"chunk {one.number} of peer {found.owner.peer} differs from the stored chunk in "
            f"size, layout or data: expected {counted(found.rows, 'row')} and "
            f"{counted(found.nbytes, 'byte')}, got "
            f"{counted(one.rows, 'row')} and {counted(one.nbytes, 'byte')}. Install the same "
            "dataplane release everywhere"
        )


def _check_distinct(chunks: Iterable[Chunk]) -> None:
    """ProtocolError if a message has a chunk twice. Chunks of different owners may have the same
    number."""
    names = Counter([(one.owner, one.number) for one in chunks if one.number])
    (owner, number), times = names.most_common(1)[0]
    if times > 1:
        raise ProtocolError(
            f"the message lists chunk {number} of peer {owner.peer} {times} times: expected each "
            "chunk at most once. Install the same dataplane release everywhere"
        )


def _invalid(one: wire.Chunk, values: wire.Values) -> ProtocolError:
    """What is wrong with the description of a chunk."""
    if not 0 <= one.owner < len(values.owners):
        return ProtocolError(
            f"invalid owner index {one.owner} for chunk {one.number}: the message lists "
            f"{counted(len(values.owners), 'owner')}. Install the same dataplane release "
            "everywhere"
        )
    if not 0 <= one.layout < len(values.layouts):
        return ProtocolError(
            f"invalid layout index {one.layout} for chunk {one.number}: the message has "
            f"{counted(len(values.layouts), 'layout')}. Install the same dataplane release "
            "everywhere"
        )
    return ProtocolError(
        f"invalid chunk {one.number}: expected 0 to {MAX_ROWS_PER_MESSAGE} rows and 0 or more "
        f"bytes, got {one.rows} rows and {one.nbytes} bytes. Install the same dataplane release "
        "everywhere"
    )


def _columns_in(fields: tuple[str, ...], columns: tuple[int, ...]) -> tuple[str, ...]:
    """The field that each column of a piece is."""
    if wrong := [field for field in columns if not -1 <= field < len(fields)]:
        raise ProtocolError(
            f"invalid field index {wrong[0]} in a piece: the message has "
            f"{counted(len(fields), 'field')}, and an unused column must have index -1. "
            "Install the same dataplane release everywhere"
        )
    names = tuple([UNUSED if field < 0 else fields[field] for field in columns])
    used = [name for name in names if name != UNUSED]
    if not used:
        raise ProtocolError(
            "invalid piece: expected at least one column, got none. "
            "Install the same dataplane release everywhere"
        )
    if len(set(used)) != len(used):
        twice = Counter(used).most_common(1)[0][0]
        raise ProtocolError(
            f"invalid piece: expected one column for field {twice!r}, got "
            "two. Install the same dataplane release everywhere"
        )
    return names


def _piece_in(
    fields: tuple[str, ...], one: wire.Piece, chunk_rows: Sequence[int], rows: int
) -> Piece[int]:
    if not 0 <= one.chunk < len(chunk_rows):
        raise ProtocolError(
            f"a piece refers to chunk index {one.chunk}, but the message has only "
            f"{counted(len(chunk_rows), 'chunk')}. Install the same dataplane release "
            "everywhere"
        )
    if len(one.fields) > MAX_FIELDS:
        raise ProtocolError(
            f"invalid piece: expected at most {MAX_FIELDS} columns, got "
            f"{len(one.fields)}. Install the same dataplane release everywhere"
        )
    names = _columns_in(fields, tuple(one.fields))
    has, given = chunk_rows[one.chunk], in_bytes(one.given)
    many = given.bit_count()
    if not given or one.base < 0 or one.base + given.bit_length() > rows:
        raise ProtocolError(
            f"invalid piece of {counted(many, 'row')} from row {one.base}: a piece needs at "
            f"least one row, and the message has only {counted(rows, 'row')}. Install the same "
            "dataplane release everywhere"
        )
    at = tuple(column(one.at, U4, many).tolist()) if one.at else None
    last = max(at) if at is not None else one.first + many - 1
    if one.first < 0 or last >= has:
        raise ProtocolError(
            (
                f"a piece refers to rows {one.first} to {last} of its chunk, which has only "
                f"{counted(has, 'row')}. Install the same dataplane release everywhere"
            )
            if at is None
            else (
                f"a piece refers to row {last} of its chunk, which has only "
                f"{counted(has, 'row')}. "
                "Install the same dataplane release everywhere"
            )
        )
    return Piece(one.chunk, names, given, given, one.first, at, "", one.base)


def rows_by_field(pieces: Sequence[Piece[int]]) -> dict[str, int]:
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

Parts = tuple[tuple[BlockShape, int], ...]
"""Blocks, one behind the other, by shape, and which of their rows leave."""


class _Skeleton(NamedTuple):
    """Values that leave, without their chunks. pieces: they number the chunks by `used`, the chunks
    of all blocks one behind the other, of which these are used. by: who added each piece."""

    fields: list[str]
    pieces: list[wire.Piece]
    used: list[int]
    by: list[str]
    nbytes: int


class OutgoingValues:
    """Values of rows, one block behind the other. parts: the pieces of a block, and which of its
    rows. fields: only these; None: all that one of the rows has."""

    __slots__ = ("_skeleton", "chunks")

    def __init__(
        self, parts: Sequence[tuple[Pieces, int]], fields: Sequence[str] | None = None
    ) -> None:
        is_shared = len(parts) <= SHARED_BLOCKS and (
            sum([block.nbytes for block, _ in parts]) <= SHARED_SHAPE_BYTES
        )
        made = _skeleton if is_shared else _skeleton.__wrapped__
        shapes = tuple([(block.shape, bits) for block, bits in parts])
        self._skeleton = skeleton = made(shapes, None if fields is None else tuple(fields))
        if len(parts) == 1:
            chunks: Sequence[Chunk] = parts[0][0].chunks
        else:
            chunks = [chunk for block, _ in parts for chunk in block.chunks]
        self.chunks = [chunks[n] for n in skeleton.used]
        """of which something leaves, in the order in which the pieces number them"""

    @property
    def by(self) -> list[str]:
        """The stage that added each piece, "" where none did."""
        return self._skeleton.by

    @property
    def nbytes(self) -> int:
        """About what a message takes at most that tells of them: each chunk counts its layout."""
        sizes = [_CHUNK_BYTES + len(c.layout) + len(c.inline) for c in dict.fromkeys(self.chunks)]
        return self._skeleton.nbytes + sum(sizes)

    def pulled(self, address: str) -> int:
        """Bytes that the peer at this address brings to itself for them."""
        chunks = dict.fromkeys(self.chunks)
        return pulled([(chunk.owner, chunk.nbytes) for chunk in chunks], address)

    def on_wire(self, names: Mapping[Chunk, tuple[Owner, int]] = _NO_NAMES) -> wire.Values:
        """As a message says them. names: of chunks that have others by now."""
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


@lru_cache(1_024)
def _skeleton(parts: Parts, wanted: tuple[str, ...] | None) -> _Skeleton:
    numbers: dict[str, int] = {} if wanted is None else {f: n for n, f in enumerate(wanted)}
    columns: dict[tuple[str, ...], list[int]] = {}
    used: dict[int, int] = {}
    pieces, by, nbytes = list[wire.Piece](), list[str](), 0
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
) -> list[int]:
    """The number of the field that each column of a piece is; none where none is wanted."""
    found = [
        -1
        if field == UNUSED or not (wanted is None or field in wanted)
        else numbers.setdefault(field, len(numbers))
        for field in fields
    ]
    return found if max(found) >= 0 else []


def _places(one: Piece[int], taken: int) -> tuple[int, tuple[int, ...] | None]:
    """Where some of the given rows are in the chunk: from which row on, or in these."""
    rows = list(one.chunk_rows(taken))
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return rows[0], None
    return 0, tuple(rows)


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
