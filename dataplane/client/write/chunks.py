"""Chunks: how the rows of a write are divided into chunks, which are stored and freed whole, and
how a message describes them.

Runs in the client: pure planning, at most a few Python steps per chunk. A write is a list of units.
A unit is reserved and committed whole: the rows of one group, or up to 32 rows without a group.
Each column of over 8 KiB in a unit has chunks of its own, and the other columns of the unit share
one. The smallest columns of a block go inline, with the message. Only inline chunks and chunks of
deduplicated values serve several units. `wire/layouts.py` defines the bytes of a chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise, repeat
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from dataplane.client.write.columns import ValueColumn
from dataplane.errors import LimitExceeded
from dataplane.memory.extents import Extent
from dataplane.metadata.tables.bits import all_of, bits_of, bytes_of
from dataplane.metadata.tables.pieces import UNUSED
from dataplane.wire import layouts
from dataplane.wire.limits import (
    ALIGNMENT_BYTES,
    INLINE_ROW_BYTES,
    MAX_CHUNKS_PER_MESSAGE,
    MAX_ROWS_PER_MESSAGE,
    NO_GROUP,
)
from dataplane.wire.objects import Buffer
from dataplane.wire.packed import DIGEST, U4
from dataplane.wire.tables import INLINE, Chunk, Name, Owner, Piece, Values

CHUNK_BYTES = 1 << 20
"""Chunks are at most this large. A larger value is alone in its chunk."""
SHARED_COLUMN_BYTES = 8 << 10
"""Columns of a unit up to this size share a chunk."""
UNGROUPED_ROWS = 32
"""Rows without a group are cut into units of at most this many rows."""
BLOCK_ROWS = 256
"""Rows without a group that share an inline chunk."""
INLINE_BLOCK_BYTES = 8 << 10
SHARED_INLINE_BYTES = 1 << 10
"""Small neighbouring blocks share an inline chunk of about this size."""
UNIT_BYTES = 16 << 20
"""Units of rows without a group end early at this size."""

DEDUP_BYTES = 4 << 10
"""In deduplicated fields, each value of at least this size has its own chunk."""
CHUNK_COST_BYTES = 64
"""Approximate bytes of a chunk and its piece in a message."""
SHARED_PIECES = 64
"""The pieces of a message are cached up to this number."""
_PADDING = [bytes(length) for length in range(ALIGNMENT_BYTES)]
_UP, _DOWN = ALIGNMENT_BYTES - 1, -ALIGNMENT_BYTES
"""`n + _UP & _DOWN` is `layouts.aligned(n)`"""
_field, _spec, _lengths = attrgetter("field"), attrgetter("spec"), attrgetter("lengths")
_nbytes, _space, _chunk = attrgetter("nbytes"), attrgetter("space"), attrgetter("chunk")
_Use = tuple[int, tuple[str, ...], Sequence[int], int, Sequence[int] | None]
"""(chunk number in the message, then `fields`, `rows`, `first` and `at` of the piece)."""


class NewChunk(msgspec.Struct, eq=False):
    """A chunk to write: some rows of some columns.

    It is sent inside the message (`is_inline`), has no space yet, is at `offset` in space of this
    client, or is known to the peer as `number`. columns: of only its rows. space: bytes in the
    arena. head: the lengths of its rows, stored before the values except in device memory. beside:
    bytes sent with the message: the lengths of a chunk for device memory, or a whole inline chunk.
    data: the bytes of a chunk that is or was inline. digest: the name of a deduplicated chunk.
    """

    columns: Sequence[ValueColumn]
    rows: int
    nbytes: int
    space: int
    layout: bytes
    head: bytes = b""
    beside: bytes = b""
    data: bytes | None = None
    is_inline: bool = False
    digest: bytes = b""
    offset: int = -1
    number: int | None = None

    def land(self) -> None:
        """Store an inline chunk in the arena instead of the message. It then needs space."""
        self.is_inline, self.beside = False, b""

    def image(self) -> list[Buffer]:
        """The bytes of the chunk, in order."""
        if self.data is not None:
            return [self.data]
        buffers: list[Buffer] = [self.head]
        end = len(self.head)
        for column in self.columns:
            if gap := -end % ALIGNMENT_BYTES:
                buffers.append(_PADDING[gap])
            buffers += column.buffers()
            end = column.nbytes
        return buffers

    def places(self) -> list[tuple[ValueColumn, int]]:
        """The columns, and where the values of each start."""
        places, end = [], len(self.head)
        for column in self.columns:
            start = layouts.aligned(end)
            end = start + column.nbytes
            places.append((column, start))
        return places


class NewPiece(msgspec.Struct, eq=False):
    """The rows that have values in a chunk.

    fields: per column of the chunk. rows: ascending, numbered across all units of the write. Their
    values are in the chunk's rows from `first` on, or in the chunk's rows `at`.
    """

    chunk: NewChunk
    fields: tuple[str, ...]
    rows: Sequence[int]
    first: int = 0
    at: list[int] | None = None


class Unit(msgspec.Struct, eq=False):
    """Rows `first` to `last` - 1, which are reserved and committed whole."""

    first: int
    last: int
    inline: Sequence[ValueColumn] = ()
    """inline columns; neighbouring units with equal ones share one list"""
    block: int = 0
    """the first row of its block"""
    inline_bytes: int = 0
    """approximate bytes of the inline columns"""
    pieces: list[NewPiece] = []
    """pieces of all other columns"""
    nbytes: int = 0
    """bytes of its chunks in the arena, without deduplicated ones of an earlier unit"""


def room_of(chunks: Iterable[NewChunk]) -> int:
    """Return the bytes that these chunks take in the arena."""
    return sum(map(_space, chunks))


def spaces_of(chunks: Iterable[NewChunk]) -> list[Extent]:
    """Where these chunks are in the arena, each with its padding; neighbours are joined."""
    spaces: list[Extent] = []
    start = end = -1
    for chunk in chunks:
        if chunk.offset != end:
            if start >= 0:
                spaces.append((start, end - start))
            start = chunk.offset
        end = chunk.offset + chunk.space
    if start >= 0:
        spaces.append((start, end - start))
    return spaces


def order_of(groups: Sequence[int] | None) -> list[int] | None:
    """The order in which the rows of each group are adjacent; None if they already are.

    groups: of each row, NO_GROUP for a row without a group.
    """
    if not groups or groups.count(groups[0]) == len(groups):
        return None
    first: dict[int, int] = {}
    at = [
        row if group == NO_GROUP else first.setdefault(group, row)
        for row, group in enumerate(groups)
    ]
    order = sorted(range(len(at)), key=at.__getitem__)
    return None if order == list(range(len(at))) else order


def plan(
    columns: Sequence[ValueColumn],
    groups: Sequence[int] | None = None,
    inline: bool = False,
    unit_bytes: int = UNIT_BYTES,
    group_names: Sequence[Name] = (),
    others: Sequence[Sequence[ValueColumn]] = (),
    order: list[int] | None = None,
) -> list[list[Unit]]:
    """The units of `columns`, then of each of `others`, divided at the same rows. Chunks of
    `others` have their lengths in `beside`.

    order: from `order_of`. inline: whether small columns of `columns` are sent inside the message.
    unit_bytes: a unit of rows without a group ends early at this size. Raises LimitExceeded if a
    group has more rows or chunks than a message holds.
    """
    if order is not None and groups is not None:
        groups = [groups[row] for row in order]
        columns, *others = [[one.take(order) for one in some] for some in (columns, *others)]
    everything = [*columns, *chain.from_iterable(others)]
    n = everything[0].count
    planner = _Planner()
    units: list[list[Unit]] = [[] for _ in (columns, *others)]
    small: list[ValueColumn] = []
    for first, last, group in _blocks(n, groups):
        rows = last - first
        if group is not None and rows > MAX_ROWS_PER_MESSAGE:
            which = f"group {group_names[group]!r}" if group_names else "one group"
            raise LimitExceeded(
                f"{which} has {rows} rows in this put, over the limit of {MAX_ROWS_PER_MESSAGE}: "
                "split the group across several calls",
                limit=MAX_ROWS_PER_MESSAGE,
            )
        sizes = list(map(_nbytes, columns))
        if rows < n:
            sizes = [column.bytes_of(first, last) for column in columns]
        cuts = [(first, last)]
        if group is None and (rows > UNGROUPED_ROWS or others or sum(sizes) > unit_bytes):
            cuts = _cuts(everything, first, last, unit_bytes)
        rest, nbytes = columns, 0
        found: list[ValueColumn] = []
        if inline:
            found, rest, nbytes = _smallest(columns, sizes, rows)
        small = small if found == small else found
        for start, stop in cuts:
            alike = [Unit(start, stop, small, first, nbytes * (stop - start) // rows)]
            if rest or others:
                planner.fill(alike[0], _parts(rest, start, stop))
                for other in others:
                    alike.append(Unit(start, stop))
                    planner.fill(alike[-1], _parts(other, start, stop), on_device=True)
                _check_size(alike)
            for memory, unit in enumerate(alike):
                units[memory].append(unit)
    return units


def _check_size(units: Sequence[Unit]) -> None:
    """Raise LimitExceeded if these units of the same rows do not fit into one message. A unit has
    at least as many pieces as chunks."""
    count = sum([len(unit.pieces) + bool(unit.inline) for unit in units])
    if count > MAX_CHUNKS_PER_MESSAGE:
        rows = units[0].last - units[0].first
        raise LimitExceeded(
            f"the {rows} rows of one group that this call writes need {count} chunks in one "
            "message, "
            f"over the limit of {MAX_CHUNKS_PER_MESSAGE}: split the group across several calls, or "
            "write fewer fields per call",
            limit=MAX_CHUNKS_PER_MESSAGE,
        )


def _blocks(n: int, groups: Sequence[int] | None) -> list[tuple[int, int, int | None]]:
    """Runs of rows: of one group, or up to 256 rows without a group."""
    blocks: list[tuple[int, int, int | None]] = []
    first = 0
    for group, rows in [(NO_GROUP, n)] if groups is None else _runs(groups):
        last = first + rows
        if group != NO_GROUP:
            blocks.append((first, last, group))
        else:
            for start in range(first, last, BLOCK_ROWS):
                blocks.append((start, min(start + BLOCK_ROWS, last), None))
        first = last
    return blocks


def _runs(groups: Sequence[int]) -> list[tuple[int, int]]:
    """For each run of adjacent rows of one group, the group and the number of rows."""
    return [(group, len([*rows])) for group, rows in groupby(groups)]


def _smallest(
    columns: Sequence[ValueColumn], sizes: Sequence[int], rows: int
) -> tuple[list[ValueColumn], list[ValueColumn], int]:
    """Return the inline columns of a block, the other columns, and the bytes of the inline ones.
    The smallest columns are inline, within the budgets of a block and a row."""
    nbytes, left = sum(sizes), min(INLINE_BLOCK_BYTES, INLINE_ROW_BYTES * rows)
    if nbytes + sum(map(len, map(_lengths, columns))) + _UP * len(sizes) <= left:
        return [*columns], [], nbytes  # all columns, the usual case for a single row
    chosen: set[int] = set()
    nbytes = 0
    for at in sorted(range(len(sizes)), key=sizes.__getitem__):
        size = sizes[at]
        left -= U4.itemsize * columns[at].spec.width * rows + (size + _UP & _DOWN)
        if left < 0:
            break
        chosen.add(at)
        nbytes += size
    # in field order, because the order of sizes may differ between blocks
    found = [column for at, column in enumerate(columns) if at in chosen]
    return found, [column for at, column in enumerate(columns) if at not in chosen], nbytes


def _cuts(
    columns: Sequence[ValueColumn], first: int, last: int, unit_bytes: int
) -> list[tuple[int, int]]:
    """Return how rows without a group are cut: every 32 rows, or earlier if they are large."""
    cuts: list[tuple[int, int]] = []
    start = first
    while start < last:
        stop = min(start + UNGROUPED_ROWS, last)
        if sum([column.bytes_of(start, stop) for column in columns]) > unit_bytes:
            total, row = 0, start
            while row < stop:
                total += sum([column.size_of(row) for column in columns])
                if total > unit_bytes and row > start:
                    break
                row += 1
            stop = row
        cuts.append((start, stop))
        start = stop
    return cuts


class _Planner:
    """Fills units with pieces. All units share one chunk per deduplicated value."""

    def __init__(self) -> None:
        self._chunks: dict[bytes, NewChunk] = {}
        """by digest"""
        self._hashed: dict[tuple[int, int], bytes] = {}

    def fill(self, unit: Unit, columns: Sequence[ValueColumn], on_device: bool = False) -> None:
        """Add chunks and pieces for these columns, which have only the unit's rows."""
        rows, small = range(unit.first, unit.last), []
        groups: list[Sequence[ValueColumn]] = []
        """columns that share a chunk of all these rows"""
        for column in columns:
            if column.dedup and (left := self._apart(unit, column)) is not None:
                if left:
                    _add_cut(unit, column.take(left), [rows[row] for row in left], on_device)
            elif column.nbytes <= SHARED_COLUMN_BYTES:
                small.append(column)
            elif column.nbytes <= CHUNK_BYTES:
                groups.append([column])
            else:
                _add_cut(unit, column, rows, on_device)
        if small:
            groups.append(small)
        if groups:
            _add(unit, groups, repeat(rows), on_device)

    def _apart(self, unit: Unit, column: ValueColumn) -> list[int] | None:
        """Give large values of this column chunks of their own. Return the rows of the column that
        are left, or None if no value is large."""
        large = [row for row in range(column.count) if column.size_of(row) >= DEDUP_BYTES]
        if not large:
            return None
        users: dict[NewChunk, list[int]] = {}
        for row in large:
            chunk = self._once(unit, chunk_of([column.part(row, row + 1)]))
            users.setdefault(chunk, []).append(unit.first + row)
        for chunk, rows in users.items():
            at = [0] * len(rows) if len(rows) > 1 else None
            unit.pieces.append(NewPiece(chunk, (column.field,), rows, 0, at))
        apart = {*large}
        return [row for row in range(column.count) if row not in apart]

    def _once(self, unit: Unit, chunk: NewChunk) -> NewChunk:
        """Return the earlier chunk with the same bytes, or else this one."""
        digest = self._digest(chunk)
        found = self._chunks.setdefault(digest, chunk)
        if found is chunk:
            chunk.digest = digest
        elif not _equal(found, chunk):  # a digest collision
            found = chunk
        if found is chunk:
            unit.nbytes += chunk.space
        return found

    def _digest(self, chunk: NewChunk) -> bytes:
        """Return the digest of the bytes and the layout of a chunk. The same memory is hashed
        once."""
        (column,) = chunk.columns
        buffers = column.buffers()
        memory = _memory(buffers[0]) if len(buffers) == 1 else None
        digest = None if memory is None else self._hashed.get(memory)
        if digest is None:
            hashing = xxhash.xxh3_128()
            for buffer in buffers:
                hashing.update(buffer)
            digest = hashing.digest()
            if memory is not None:
                self._hashed[memory] = digest
        return xxhash.xxh3_128_digest(digest + column.lengths + chunk.layout)


def _parts(columns: Sequence[ValueColumn], first: int, last: int) -> Sequence[ValueColumn]:
    """The columns with only these rows."""
    if not columns or last - first == columns[0].count:
        return columns
    return [column.part(first, last) for column in columns]


def _add(
    unit: Unit,
    groups: Sequence[Sequence[ValueColumn]],
    rows: Iterable[Sequence[int]],
    on_device: bool,
) -> None:
    """Add one chunk and piece per group of columns. rows: of each group."""
    chunks = [chunk_of(group, on_device) for group in groups]
    unit.nbytes += room_of(chunks)
    unit.pieces += map(NewPiece, chunks, map(fields_of, groups), rows)


def _add_cut(unit: Unit, column: ValueColumn, rows: Sequence[int], on_device: bool) -> None:
    """Add the chunks that a column of these rows needs."""
    ends, nbytes = [0], 0
    for row in range(column.count):
        size = column.size_of(row)
        if row > ends[-1] and nbytes + size > CHUNK_BYTES:
            ends.append(row)
            nbytes = 0
        nbytes += size
    spans = list(pairwise([*ends, column.count]))
    parts = [[column.part(*span)] for span in spans]
    _add(unit, parts, [rows[first:last] for first, last in spans], on_device)


def fields_of(columns: Sequence[ValueColumn]) -> tuple[str, ...]:
    return tuple(map(_field, columns))


def chunk_of(columns: Sequence[ValueColumn], on_device: bool = False) -> NewChunk:
    """A chunk of these columns."""
    head, beside = b"".join(map(_lengths, columns)), b""
    if on_device:
        head, beside = beside, head
    end = len(head)
    for column in columns:
        end = (end + _UP & _DOWN) + column.nbytes
    space = (end + _UP & _DOWN) or ALIGNMENT_BYTES
    layout = layouts.encode(tuple(map(_spec, columns)))
    return NewChunk(columns, columns[0].count, end, space, layout, head, beside)


def pieces_of(units: Sequence[Unit]) -> list[NewPiece]:
    """Return the pieces of neighbouring units. The small columns of a block become one inline
    chunk."""
    pieces: list[NewPiece] = []
    begin, nbytes = units[0], 0
    for number, unit in enumerate(units, 1):
        following = units[number] if number < len(units) else None
        pieces += unit.pieces
        if following is not None and following.inline is unit.inline:
            nbytes += unit.inline_bytes
            fits = nbytes + following.inline_bytes <= SHARED_INLINE_BYTES
            if fits or following.block == begin.block:
                continue
        if unit.inline:
            rows = range(begin.first, unit.last)
            columns = _parts(unit.inline, begin.first, unit.last)
            pieces.append(NewPiece(_inline(columns), fields_of(columns), rows))
        begin, nbytes = following or begin, 0
    return pieces


def _inline(columns: Sequence[ValueColumn]) -> NewChunk:
    chunk = chunk_of(columns)
    chunk.data = chunk.beside = b"".join(chunk.image())
    chunk.is_inline = True
    return chunk


def _of_rows(chunk: NewChunk, rows: Sequence[int]) -> NewChunk:
    """Return an inline chunk with only these rows of another one, because the shard stores it
    whole."""
    columns, data = [], chunk.data or b""
    for column, start in chunk.places():
        sizes = [column.size_of(row) for row in range(column.count)]
        ends = list(accumulate(sizes, initial=start))
        source: list[Buffer] = [data[ends[row] : ends[row + 1]] for row in rows]
        sizes = list(map(len, source))
        lengths = b"".join(map(column.lengths_of, rows))
        columns.append(
            ValueColumn(column.field, len(rows), column.spec, source, sum(sizes), sizes, lengths)
        )
    return _inline(columns)


def select(pieces: Iterable[NewPiece], rows: Sequence[int]) -> list[NewPiece]:
    """Return the parts of these pieces that belong to `rows` (ascending), renumbered from 0."""
    selected = []
    for piece in pieces:
        mine = piece.rows
        low, high = bisect_left(rows, mine[0]), bisect_left(rows, mine[-1] + 1)
        if low == high:
            continue
        some = enumerate(rows[low:high], low)
        if isinstance(mine, range):
            taken = [(number, row - mine.start) for number, row in some]
        else:
            places = {row: place for place, row in enumerate(mine)}
            taken = [(number, places[row]) for number, row in some if row in places]
        if taken:
            at = [piece.first + n if piece.at is None else piece.at[n] for _, n in taken]
            numbers = [number for number, _ in taken]
            chunk = piece.chunk
            if chunk.is_inline and len(at) < chunk.rows:
                chunk, at = _of_rows(chunk, at), [*range(len(at))]
            one = NewPiece(chunk, piece.fields, numbers, at[0])
            if at != [*range(at[0], at[0] + len(at))]:
                one.first, one.at = 0, at
            selected.append(one)
    return selected


def without(pieces: Iterable[NewPiece], fields: Collection[str]) -> list[NewPiece]:
    """These pieces without some fields."""
    left = []
    for piece in pieces:
        kept = tuple([UNUSED if field in fields else field for field in piece.fields])
        if any(kept):
            left.append(NewPiece(piece.chunk, kept, piece.rows, piece.first, piece.at))
    return left


def chunks_of(pieces: Iterable[NewPiece]) -> list[NewChunk]:
    """The distinct chunks of these pieces."""
    return list(dict.fromkeys(map(_chunk, pieces)))


def _memory(source: Buffer) -> tuple[int, int]:
    if isinstance(source, bytes):
        return id(source), len(source)
    return source.__array_interface__["data"][0], source.nbytes


def _equal(one: NewChunk, other: NewChunk) -> bool:
    if (one.layout, one.nbytes) != (other.layout, other.nbytes):
        return False
    images = one.image(), other.image()
    return len(images[0]) == len(images[1]) and all(map(_same, *images))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


# the message


def values_of(owner: Owner, pieces: Sequence[NewPiece], base: int = 0) -> Values:
    """Return these pieces as a message describes them: each chunk once, in the order of the pieces.
    owner: the peer of this host. base: the row of the write that is the first one of the
    message."""
    numbers: dict[NewChunk, int] = {}
    layout_of: dict[bytes, int] = {}
    owners: dict[bool, int] = {}
    chunks: list[Chunk] = []
    uses: list[_Use] = []
    for piece in pieces:
        one = piece.chunk
        number = numbers.get(one)
        if number is None:
            numbers[one] = number = len(chunks)
            chunks.append(
                Chunk(
                    owners.setdefault(one.is_inline, len(owners)),
                    one.number or 0,
                    one.rows,
                    one.nbytes,
                    layout_of.setdefault(one.layout, len(layout_of)),
                    one.beside,
                    max(0, one.offset),
                    one.digest,
                )
            )
        uses.append((number, piece.fields, piece.rows, piece.first, piece.at))
    made = _shared_pieces if len(uses) <= SHARED_PIECES else _pieces
    try:
        fields, wire_pieces = made(tuple(uses), base)
    except TypeError:  # lists of rows have no hash, and rarely repeat
        fields, wire_pieces = _pieces(tuple(uses), base)
    owner_of = [INLINE if is_inline else owner for is_inline in owners]
    return Values(fields, owner_of, list(layout_of), chunks, wire_pieces)


def _pieces(uses: tuple[_Use, ...], base: int) -> tuple[list[str], list[Piece]]:
    """Return the fields and the pieces of a message. uses: which rows use which chunk, one
    entry per piece."""
    fields: dict[str, int] = {}
    pieces: list[Piece] = []
    for number, of_columns, rows, first, at in uses:
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


def committed(chunks: Iterable[NewChunk], numbers: npt.NDArray[np.uint64] | None = None) -> None:
    """Note that a message names these chunks, which were `unnamed`, so the peer owns their space.
    numbers: those of the chunks at the peer, if it keeps them for a later message."""
    for chunk in chunks:
        chunk.offset = -1
    if numbers is not None:
        for chunk, known in zip(chunks, numbers.tolist(), strict=False):
            chunk.number = known


def digests_of(chunks: Sequence[NewChunk]) -> bytes:
    """Return a DIGEST record per deduplicated chunk."""
    return np.array([(chunk.digest, chunk.nbytes) for chunk in chunks], DIGEST).tobytes()


def message_bytes(chunks: Iterable[NewChunk]) -> int:
    """Return about how many bytes these chunks add to a message."""
    return sum([CHUNK_COST_BYTES + len(chunk.beside) for chunk in chunks])
