"""Chunks: how the rows of a write are cut into what is stored, named and freed whole.

Runs in the client: pure planning, in plain Python a chunk. A write is a list of units. A unit is
reserved and committed whole: the rows of one group, or up to 32 rows without a group. Each column
of over 8 KiB in a unit has chunks of its own, and the other columns of the unit share one. The
smallest columns of a block go inline, with the message. No chunk crosses a unit, but for inline
ones and those of deduplicated values. What the bytes of a chunk are: `wire/layouts.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, chain, groupby
from struct import pack
from typing import Any

import msgspec
import numpy as np
import xxhash

from dataplane.client.write.columns import ValueColumn
from dataplane.errors import LimitExceeded
from dataplane.memory.extents import Extent
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
from dataplane.wire.records import U4
from dataplane.wire.tables import Name

CHUNK_BYTES = 1 << 20
"""Chunks are at most this large. A larger value is alone in its chunk."""
SHARED_COLUMN_BYTES = 8 << 10
"""Columns of a unit up to this size share a chunk."""
UNGROUPED_ROWS = 32
"""Rows without a group are cut into units of at most so many rows."""
BLOCK_ROWS = 256
"""Rows without a group that share an inline chunk."""
INLINE_BLOCK_BYTES = 8 << 10
SHARED_INLINE_BYTES = 1 << 10
"""Small neighbouring blocks share an inline chunk of about this size."""
UNIT_BYTES = 16 << 20
"""Rows without a group are cut earlier where they reach this size."""

DEDUP_BYTES = 4 << 10
"""Values of at least this size, in fields that are deduplicated, have chunks of their own."""
_PADDING = [bytes(length) for length in range(ALIGNMENT_BYTES)]


class Chunk(msgspec.Struct, eq=False):
    """What is stored as one: the rows from `first` to `last` of some columns.

    It goes with the message (`is_inline`), or has no space yet, or is at `offset` in space of this
    client, or the peer knows it as `range`. data: the bytes of one that is, or was, inline.
    lengths: of one for device memory, whose lengths go with the message. digest: the name of a
    deduplicated one. space: what it takes in the arena.
    """

    columns: Sequence[ValueColumn]
    first: int
    last: int
    nbytes: int
    layout: bytes
    places: Sequence[tuple[int, int]] = ()
    """where the values of each column start and end"""
    data: bytes | None = None
    is_inline: bool = False
    lengths: bytes | None = None
    digest: bytes = b""
    offset: int = -1
    range: int | None = None
    space: int = 0

    def __post_init__(self) -> None:
        self.space = layouts.aligned(self.nbytes) or ALIGNMENT_BYTES

    @property
    def rows(self) -> int:
        """How many it has."""
        return self.last - self.first

    def head(self) -> bytes:
        """What is before the values of the first column."""
        if self.lengths is not None:
            return b""
        lengths = lengths_of(self.columns, self.first, self.last)
        return lengths + _PADDING[-len(lengths) % ALIGNMENT_BYTES]

    def image(self) -> list[Buffer]:
        """Its bytes, in order."""
        if self.data is not None:
            return [self.data]
        buffers: list[Buffer] = [self.head()]
        written = len(buffers[0])
        for column, (start, end) in zip(self.columns, self.places, strict=True):
            if start > written:
                buffers.append(_PADDING[start - written])
            buffers += column.buffers(self.first, self.last)
            written = end
        return buffers


class Piece(msgspec.Struct, eq=False):
    """Which rows have their values in a chunk.

    fields: per column of the chunk. rows: ascending, numbered through the write in the order of its
    units. Their values are in the chunk's rows from `first` on, or in those that `at` names.
    """

    chunk: Chunk
    fields: tuple[str, ...]
    rows: Sequence[int]
    first: int = 0
    at: list[int] | None = None


class Unit(msgspec.Struct, eq=False):
    """Rows that are reserved and committed whole."""

    first: int
    last: int
    inline: Sequence[ValueColumn] = ()
    """columns that go inline; the same list where neighbours have the same"""
    block: int = 0
    """the first row of its block"""
    inline_bytes: int = 0
    """about what goes with the message"""
    pieces: list[Piece] = []
    """of all other columns"""
    chunks: list[Chunk] = []
    """those that this unit is the first to need"""
    repeats: list[Chunk] = []
    """deduplicated ones that an earlier unit has too"""
    nbytes: int = 0
    """what its chunks take in the arena"""


def room_of(chunks: Iterable[Chunk]) -> int:
    """What these chunks take in the arena."""
    return sum([chunk.space for chunk in chunks])


def spaces_of(chunks: Iterable[Chunk]) -> list[Extent]:
    """Where these chunks are in the arena, each with its padding; neighbours are joined."""
    spaces: list[Extent] = []
    end = -1
    for chunk in chunks:
        offset, space = chunk.offset, chunk.space
        if offset == end:
            spaces[-1] = spaces[-1][0], spaces[-1][1] + space
        else:
            spaces.append((offset, space))
        end = offset + space
    return spaces


def order_of(groups: Sequence[int] | None) -> list[int] | None:
    """The order of rows that brings those of one group together; None where they are together.

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
    """The units of a write: of `columns`, then of each of `others`, cut at the same rows. The
    chunks of those have their lengths beside them.

    order: of the rows, see `order_of`; None: those of a group are together. inline: whether small
    columns go with the message; those of `others` never do. unit_bytes: rows without a group are
    cut earlier where they reach it. LimitExceeded where a group has more rows or chunks than a
    message takes.
    """
    if order is not None and groups is not None:
        groups = [groups[row] for row in order]
        columns, *others = [[one.take(order) for one in some] for some in (columns, *others)]
    everything = [*columns, *chain.from_iterable(others)]
    n = everything[0].count
    planner = _Planner()
    units: list[Unit] = []
    beside: list[list[Unit]] = [[] for _ in others]
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
        sizes = [column.bytes_of(first, last) for column in columns]
        found, nbytes = _smallest(columns, sizes, rows) if inline else ([], 0)
        small = small if found == small else found
        rest = [column for column in columns if column not in small]
        cuts = [(first, last)]
        if group is None and (rows > UNGROUPED_ROWS or sum(sizes) > unit_bytes or others):
            cuts = _cuts(everything, first, last, unit_bytes)
        for start, stop in cuts:
            unit = Unit(start, stop, small, first, nbytes * (stop - start) // rows)
            planner.fill(unit, rest)
            units.append(unit)
            for mine, other in zip(beside, others, strict=True):
                mine.append(Unit(start, stop))
                planner.fill(mine[-1], other, on_device=True)
            _check_size([unit, *[mine[-1] for mine in beside]])
    return [units, *beside]


def _check_size(units: Sequence[Unit]) -> None:
    """LimitExceeded where these units of the same rows do not fit one message. A unit has at least
    as many pieces as chunks."""
    count = sum([len(unit.pieces) + (1 if unit.inline else 0) for unit in units])
    if count > MAX_CHUNKS_PER_MESSAGE:
        raise LimitExceeded(
            f"{units[0].last - units[0].first} rows that are stored together need {count} chunks, "
            f"over the limit of {MAX_CHUNKS_PER_MESSAGE}: split the group across several "
            "calls, or write fewer fields per call",
            limit=MAX_CHUNKS_PER_MESSAGE,
        )


def _blocks(n: int, groups: Sequence[int] | None) -> list[tuple[int, int, int | None]]:
    """Runs of rows: of one group, or of up to 256 rows without one."""
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
    """Neighbouring rows of one group, and how many."""
    return [(group, len([*rows])) for group, rows in groupby(groups)]


def _smallest(
    columns: Sequence[ValueColumn], sizes: Sequence[int], rows: int
) -> tuple[list[ValueColumn], int]:
    """Which columns of a block go inline: the smallest, as long as their chunk keeps to the budgets
    of a block and a row. Also how many bytes they have."""
    chosen: list[ValueColumn] = []
    lengths = nbytes = 0
    left = min(INLINE_BLOCK_BYTES, INLINE_ROW_BYTES * rows)
    for at in sorted(range(len(sizes)), key=sizes.__getitem__):
        lengths += U4.itemsize * columns[at].spec.width * rows
        left -= sizes[at] + ALIGNMENT_BYTES - 1 & -ALIGNMENT_BYTES
        if lengths > left:
            break
        chosen.append(columns[at])
        nbytes += sizes[at]
    return chosen, nbytes


def _cuts(
    columns: Sequence[ValueColumn], first: int, last: int, unit_bytes: int
) -> list[tuple[int, int]]:
    """How rows without a group are cut: every 32 rows, or earlier where they are large."""
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
    """Fills units. Equal values of deduplicated fields have one chunk in all of them."""

    def __init__(self) -> None:
        self._chunks: dict[bytes, Chunk] = {}
        """by digest"""
        self._hashed: dict[tuple[int, int], bytes] = {}
        self._here: set[Chunk] = set()
        """deduplicated ones of the unit"""

    def fill(self, unit: Unit, columns: Sequence[ValueColumn], on_device: bool = False) -> None:
        """Chunks for the unit's rows of these columns."""
        first, last, small = unit.first, unit.last, []
        self._here.clear()
        rows = range(first, last)
        for column in columns:
            if column.dedup and (left := self._apart(unit, column, first, last)) is not None:
                if left:
                    _add(unit, [column.take(left)], left, 0, on_device)
            elif column.bytes_of(first, last) <= SHARED_COLUMN_BYTES:
                small.append(column)
            else:
                _add(unit, [column], rows, first, on_device)
        if small:
            _add(unit, small, rows, first, on_device)

    def _apart(self, unit: Unit, column: ValueColumn, first: int, last: int) -> list[int] | None:
        """Give large values of these rows chunks of their own. Returns the rows that are left; None
        where there is no large value."""
        large = [row for row in range(first, last) if column.size_of(row) >= DEDUP_BYTES]
        if not large:
            return None
        users: dict[Chunk, list[int]] = {}
        for row in large:
            users.setdefault(self._once(unit, chunk_of([column], row, row + 1)), []).append(row)
        for chunk, rows in users.items():
            at = [0] * len(rows) if len(rows) > 1 else None
            unit.pieces.append(Piece(chunk, (column.field,), rows, 0, at))
        apart = {*large}
        return [row for row in range(first, last) if row not in apart]

    def _once(self, unit: Unit, chunk: Chunk) -> Chunk:
        """The chunk of these bytes: this one, or the one that has them already."""
        digest = self._digest(chunk)
        found = self._chunks.setdefault(digest, chunk)
        if found is chunk:
            chunk.digest = digest
        elif not _equal(found, chunk):  # other bytes have the same name
            found = chunk
        if found is chunk:
            unit.chunks.append(chunk)
            unit.nbytes += chunk.space
        elif found not in self._here:
            unit.repeats.append(found)
        self._here.add(found)
        return found

    def _digest(self, chunk: Chunk) -> bytes:
        """Of its bytes and its layout. The same memory is hashed once."""
        buffers = chunk.columns[0].buffers(chunk.first, chunk.last)
        memory = _memory(buffers[0]) if len(buffers) == 1 else None
        digest = None if memory is None else self._hashed.get(memory)
        if digest is None:
            hashing = xxhash.xxh3_128()
            for buffer in buffers:
                hashing.update(buffer)
            digest = hashing.digest()
            if memory is not None:
                self._hashed[memory] = digest
        return xxhash.xxh3_128_digest(
            digest + lengths_of(chunk.columns, chunk.first, chunk.last) + chunk.layout
        )


def _add(
    unit: Unit, columns: Sequence[ValueColumn], rows: Sequence[int], first: int, on_device: bool
) -> None:
    """Chunks for these rows of the write, which are the rows from `first` on of the columns."""
    last, start, fields = first + len(rows), first, fields_of(columns)
    while start < last:
        stop = last if len(columns) > 1 else _end(columns[0], start, last)
        chunk = chunk_of(columns, start, stop, on_device)
        unit.chunks.append(chunk)
        unit.nbytes += chunk.space
        unit.pieces.append(Piece(chunk, fields, rows[start - first : stop - first]))
        start = stop


def _end(column: ValueColumn, first: int, last: int) -> int:
    """How far the rows of a column go into one chunk."""
    if column.bytes_of(first, last) <= CHUNK_BYTES:
        return last
    total = column.size_of(first)
    for row in range(first + 1, last):
        total += column.size_of(row)
        if total > CHUNK_BYTES:
            return row
    return last


def fields_of(columns: Sequence[ValueColumn]) -> tuple[str, ...]:
    return tuple([column.field for column in columns])


def chunk_of(
    columns: Sequence[ValueColumn], first: int, last: int, on_device: bool = False
) -> Chunk:
    """A chunk of these rows of the columns."""
    specs = tuple([column.spec for column in columns])
    width = 0 if on_device else sum([spec.width for spec in specs])
    places, end = [], U4.itemsize * (last - first) * width
    for column in columns:
        start = layouts.aligned(end)
        end = start + column.bytes_of(first, last)
        places.append((start, end))
    chunk = Chunk(columns, first, last, end, layouts.encode(specs), places)
    if on_device:
        chunk.lengths = lengths_of(columns, first, last)
    return chunk


def pieces_of(units: Sequence[Unit]) -> list[Piece]:
    """The pieces of neighbouring units. The small columns of a block become one inline chunk."""
    pieces: list[Piece] = []
    begin, nbytes = units[0], 0
    for unit, following in zip(units, [*units[1:], None], strict=True):
        pieces += unit.pieces
        if following is not None and following.inline is unit.inline:
            nbytes += unit.inline_bytes
            fits = nbytes + following.inline_bytes <= SHARED_INLINE_BYTES
            if fits or following.block == begin.block:
                continue
        if unit.inline:
            chunk, rows = (
                _inline(unit.inline, begin.first, unit.last),
                range(begin.first, unit.last),
            )
            pieces.append(Piece(chunk, fields_of(unit.inline), rows))
        begin, nbytes = following or begin, 0
    return pieces


def _inline(columns: Sequence[ValueColumn], first: int, last: int) -> Chunk:
    chunk = chunk_of(columns, first, last)
    chunk.data, chunk.is_inline = b"".join(chunk.image()), True
    return chunk


def _of_rows(chunk: Chunk, rows: Sequence[int]) -> Chunk:
    """An inline chunk of just these rows of one: the shard keeps no others."""
    columns, data = [], chunk.data or b""
    numbers = [chunk.first + row for row in rows]
    for column, (start, _) in zip(chunk.columns, chunk.places, strict=True):
        sizes = [column.size_of(row) for row in range(chunk.first, chunk.last)]
        ends = list(accumulate(sizes, initial=start))
        source = [data[ends[row] : ends[row + 1]] for row in rows]
        lengths = list(chain(*[column.lengths_of(row, row + 1) for row in numbers]))
        sizes = list(map(len, source))
        columns.append(
            ValueColumn(column.field, len(rows), column.spec, source, sum(sizes), sizes, lengths)
        )
    return _inline(columns, 0, len(rows))


def select(pieces: Iterable[Piece], rows: Sequence[int]) -> list[Piece]:
    """What of these pieces belongs to `rows`, which ascend: they are numbered from 0 on."""
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
            one = Piece(chunk, piece.fields, numbers, at[0])
            if at != [*range(at[0], at[0] + len(at))]:
                one.first, one.at = 0, at
            selected.append(one)
    return selected


def without(pieces: Iterable[Piece], fields: Collection[str]) -> list[Piece]:
    """These pieces without some fields."""
    left = []
    for piece in pieces:
        kept = tuple([UNUSED if field in fields else field for field in piece.fields])
        if any(kept):
            left.append(Piece(piece.chunk, kept, piece.rows, piece.first, piece.at))
    return left


def chunks_of(pieces: Iterable[Piece]) -> list[Chunk]:
    """The chunks that these pieces are in, each once."""
    return list(dict.fromkeys([piece.chunk for piece in pieces]))


def lengths_of(columns: Sequence[ValueColumn], first: int, last: int) -> bytes:
    """What a chunk says of these rows, column after column."""
    lengths: list[int] = []
    for column in columns:
        width = column.spec.width
        lengths += column.lengths[first * width : last * width]
    return pack(f"<{len(lengths)}I", *lengths)


def _memory(source: Buffer) -> tuple[int, int]:
    if isinstance(source, bytes):
        return id(source), len(source)
    return source.__array_interface__["data"][0], source.nbytes


def _equal(one: Chunk, other: Chunk) -> bool:
    if (one.layout, one.nbytes) != (other.layout, other.nbytes):
        return False
    images = one.image(), other.image()
    return len(images[0]) == len(images[1]) and all(map(_same, *images))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))
