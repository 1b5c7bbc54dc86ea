"""The values of a table that arrived: which rows of which chunk each field has.

A chunk is opened when a field in it is first used, once for all fields and selections of rows. What
a peer said is checked on the way: ProtocolError for a chunk outside the arena, or a piece that does
not fit its chunk or the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import pairwise
from operator import itemgetter

import numpy as np
from msgspec.structs import replace

from dataplane.client.read.chunk_columns import ChunkColumn, Memory, columns_of
from dataplane.client.read.column_view import ColumnView, RowSpan, cut, stretches
from dataplane.client.write.rows import Index, group_names, row_names, tag_values
from dataplane.errors import ProtocolError
from dataplane.metadata.tables.bits import rows_of
from dataplane.wire import layouts
from dataplane.wire.limits import MAX_ROWS_PER_MESSAGE, NO_GROUP
from dataplane.wire.records import EXTENT, KEY, U4, U8, column
from dataplane.wire.tables import Chunk, Name, Piece, Rows, Table, Values

NOWHERE = np.zeros(0, np.uint8)
"""The arena of rows of which nothing is pinned there."""

_Stretch = tuple[int, int, int]
"""A row of the table, and from which to which row of the chunk its value and the following are."""


class TableReader:
    """Reads the values of a table, field by field.

    `part` makes readers of some of its rows, which share what was opened.
    """

    def __init__(self, table: Table, pin: object = NOWHERE) -> None:
        """pin: of the reply, which gives the whole arena, read-only."""
        self.count = len(table.rows.keys) // KEY.itemsize
        self._values = table.values
        self._pin = pin
        self._arena: Memory | None = None
        chunks = len(table.values.chunks)
        self._places: list[int] = column(table.places, U8, 2 * chunks).tolist()
        self._uses = _uses(table.values)
        self._chunks: dict[int, list[ChunkColumn]] = {}
        self._pieces: dict[int, tuple[list[ChunkColumn], list[_Stretch]]] = {}
        self._runs: dict[str, list[RowSpan]] = {}
        self._rows: Index | None = None
        """those of the table, in this order; None: all"""
        self._chosen: list[tuple[int, int]] = []
        """the same as stretches"""

    @property
    def fields(self) -> list[str]:
        return self._values.fields

    def part(self, rows: Index) -> TableReader:
        """A reader of only these rows, in this order."""
        part = copy(self)
        part._rows = rows if self._rows is None else self._rows[rows]
        part._chosen = stretches(part._rows)
        return part

    def view(self, field: str, name_of: Callable[[int], object] | None = None) -> ColumnView:
        """A field of the rows. name_of: what a row is called in messages."""
        runs = self._runs.get(field)
        if runs is None:
            runs = self._runs[field] = self._find(field)
        if self._rows is not None:
            runs = cut(runs, self._chosen)
        return ColumnView(field, runs, name_of)

    def _find(self, field: str) -> list[RowSpan]:
        """The field of all rows of the table."""
        placed: list[tuple[int, RowSpan]] = []
        for number, at in self._uses[field]:
            columns, rows = self._pieces.get(number) or self._open_piece(number)
            for row, first, last in rows:
                placed.append((row, RowSpan(columns[at], first, last)))
        if len(placed) > 1:
            placed.sort(key=itemgetter(0))
        runs: list[RowSpan] = []
        end = 0
        for row, run in placed:
            if row < end:
                raise ProtocolError(
                    f"field {field!r}: expected one value for row {row}, got two. Install the same "
                    "dataplane release everywhere"
                )
            if row > end:
                runs.append(RowSpan(None, 0, row - end))
            runs.append(run)
            end = row + run.last - run.first
        if end < self.count:
            runs.append(RowSpan(None, 0, self.count - end))
        return runs

    def _open_piece(self, number: int) -> tuple[list[ChunkColumn], list[_Stretch]]:
        """The columns of the chunk of a piece, and which of its rows the piece has."""
        piece = self._values.pieces[number]
        columns = self._chunks.get(piece.chunk)
        if columns is None:
            columns = self._chunks[piece.chunk] = self._open(piece.chunk)
        if len(piece.fields) != len(columns):
            raise ProtocolError(
                f"expected one field per column of the chunk, got {len(piece.fields)} fields for "
                f"{len(columns)} columns. Install the same dataplane release everywhere"
            )
        rows = _stretches(piece, self._values.chunks[piece.chunk].rows, self.count)
        found = self._pieces[number] = columns, rows
        return found

    def _open(self, number: int) -> list[ChunkColumn]:
        chunk, known = self._values.chunks[number], self._values.layouts
        if not 0 <= chunk.layout < len(known):
            raise ProtocolError(
                f"invalid layout {chunk.layout} of chunk {number}: expected an index into the "
                f"{len(known)} layouts of the table. Install the same dataplane release everywhere"
            )
        if not 0 <= chunk.rows <= MAX_ROWS_PER_MESSAGE:
            raise ProtocolError(
                f"chunk {number}: expected 0 to {MAX_ROWS_PER_MESSAGE} rows, got {chunk.rows}. "
                "Install the same dataplane release everywhere"
            )
        specs = layouts.decode(known[chunk.layout])
        if not chunk.number:
            return columns_of(specs, chunk.rows, chunk.inline)
        offset, nbytes = self._places[2 * number : 2 * number + 2]
        if nbytes != chunk.nbytes:
            raise ProtocolError(
                f"chunk {number} and its extent differ in size: expected {chunk.nbytes} bytes, got "
                f"{nbytes}. Install the same dataplane release everywhere"
            )
        memory = self._memory(offset, nbytes)
        if not chunk.inline and isinstance(memory, np.ndarray):
            return columns_of(specs, chunk.rows, memory)
        return columns_of(specs, chunk.rows, memory, chunk.inline)

    def _memory(self, offset: int, nbytes: int) -> Memory:
        """A place in the arena."""
        arena = self._arena
        if arena is None:
            arena = self._arena = np.asarray(self._pin)
        if offset + nbytes > len(arena):
            raise ProtocolError(
                f"a chunk of {nbytes} bytes at offset {offset} is outside the arena of "
                f"{len(arena)} bytes. Install the same dataplane release everywhere"
            )
        return arena[offset : offset + nbytes]


def _uses(values: Values) -> dict[str, list[tuple[int, int]]]:
    """By field, the pieces that have it, and the column of the chunk of each."""
    uses: list[list[tuple[int, int]]] = [[] for _ in values.fields]
    for number, piece in enumerate(values.pieces):
        if not 0 <= piece.chunk < len(values.chunks):
            raise ProtocolError(
                f"invalid chunk {piece.chunk} of piece {number}: expected an index into the "
                f"{len(values.chunks)} chunks of the table. Install the same dataplane release "
                "everywhere"
            )
        for at, field in enumerate(piece.fields):
            if not -1 <= field < len(uses):
                raise ProtocolError(
                    f"invalid field {field} of piece {number}: expected an index into the "
                    f"{len(uses)} fields of the table, or -1. Install the same dataplane release "
                    "everywhere"
                )
            if field >= 0:
                uses[field].append((number, at))
    return dict(zip(values.fields, uses, strict=True))


def _rows_of(piece: Piece, count: int) -> Sequence[int]:
    """The rows of the table that a piece has, counted from its base. count: rows of the table."""
    given = int.from_bytes(piece.given, "little")
    if not given or piece.base < 0 or piece.base + given.bit_length() > count:
        raise ProtocolError(
            f"invalid piece of {given.bit_count()} rows from row {piece.base}: expected at least "
            f"one row, all within the {count} rows of the table. Install the same dataplane "
            "release everywhere"
        )
    return rows_of(given)


def _stretches(piece: Piece, chunk_rows: int, count: int) -> list[_Stretch]:
    """Where the rows of a piece are in its chunk."""
    rows, base, first = _rows_of(piece, count), piece.base, piece.first
    at = column(piece.at, U4, len(rows)).tolist() if piece.at else None
    end = first + len(rows) if at is None else max(at) + 1
    if first < 0 or end > chunk_rows:
        raise ProtocolError(
            f"invalid row {first if first < 0 else end - 1} of a piece: its chunk has {chunk_rows} "
            "rows. Install the same dataplane release everywhere"
        )
    if at is None and isinstance(rows, range):
        return [(base + rows.start, first, end)]
    at = at or range(first, end)
    cuts = [n for n in range(1, len(rows)) if (rows[n] - rows[n - 1], at[n] - at[n - 1]) != (1, 1)]
    bounds = pairwise([0, *cuts, len(rows)])
    return [(base + rows[start], at[start], at[stop - 1] + 1) for start, stop in bounds]


def _check_page(table: Table) -> None:
    """Before this table becomes a part of a larger one: ProtocolError where its values refer to
    what is not in it, and would be found in another part then."""
    values, count = table.values, len(table.rows.keys) // KEY.itemsize
    _uses(values)
    column(table.places, EXTENT, len(values.chunks))
    for number, chunk in enumerate(values.chunks):
        if not 0 <= chunk.layout < len(values.layouts):
            raise ProtocolError(
                f"invalid layout {chunk.layout} of chunk {number}: expected an index into the "
                f"{len(values.layouts)} layouts of the table. Install the same dataplane release "
                "everywhere"
            )
    for piece in values.pieces:
        _rows_of(piece, count)


def volume(values: Values) -> int:
    """About the bytes of these values: of each chunk, the share of its rows that pieces use."""
    total, chunks = 0, values.chunks
    for piece in values.pieces:
        if 0 <= piece.chunk < len(chunks) and (chunk := chunks[piece.chunk]).rows > 0:
            given = int.from_bytes(piece.given, "little")
            total += chunk.nbytes * given.bit_count() // chunk.rows
    return total


def join_tables(tables: list[Table]) -> Table:
    """Join the tables of several replies. A field or tag that one lacks is absent in its rows."""
    if len(tables) == 1:
        return tables[0]
    for one in tables:
        _check_page(one)
    counts = [len(t.rows.keys) // KEY.itemsize for t in tables]
    tag_names = dict.fromkeys(name for t in tables for name in t.tags)
    return Table(
        _join_rows([t.rows for t in tables]),
        _join_values([t.values for t in tables], counts),
        {
            name: [v for t, n in zip(tables, counts, strict=True) for v in tag_values(t, name, n)]
            for name in tag_names
        },
        b"".join([t.places for t in tables]),
    )


def _join_values(parts: list[Values], counts: list[int]) -> Values:
    fields = list(dict.fromkeys(field for part in parts for field in part.fields))
    numbers = {field: number for number, field in enumerate(fields)}
    layouts, chunks, pieces = list[bytes](), list[Chunk](), list[Piece]()
    base = 0
    for part, count in zip(parts, counts, strict=True):
        renumbered = {at: numbers[field] for at, field in enumerate(part.fields)} | {-1: -1}
        for piece in part.pieces:
            own = [renumbered[field] for field in piece.fields]
            where = (piece.given, piece.first, piece.at)
            pieces.append(Piece(len(chunks) + piece.chunk, own, base + piece.base, *where))
        chunks += [replace(chunk, layout=len(layouts) + chunk.layout) for chunk in part.chunks]
        layouts += part.layouts
        base += count
    # The owners of chunks are of no interest here.
    return Values(fields, [], layouts, chunks, pieces)


def _join_rows(parts: list[Rows]) -> Rows:
    """A group may go on behind a page's end, so equal group keys are one group."""
    keys = b"".join(p.keys for p in parts)
    names: list[Name] | None = None
    if any(p.names is not None for p in parts):
        names = [name for p in parts for name in row_names(p)]
    if not any(p.group_index for p in parts):
        return Rows(keys, names)
    numbers: dict[bytes, int] = {}
    ids: list[Name] = []
    columns = []
    for part in parts:
        n = len(part.keys) // KEY.itemsize
        if not part.group_index:
            columns.append(np.full(n, NO_GROUP, U4))
            continue
        renumber = []
        for at, name in enumerate(group_names(part)):
            key = part.group_keys[at * KEY.itemsize : (at + 1) * KEY.itemsize]
            renumber.append(numbers.setdefault(key, len(numbers)))
            if len(ids) < len(numbers):
                ids.append(name)
        groups = column(part.group_index, U4, n)
        known = groups != NO_GROUP
        joined = np.full(n, NO_GROUP, U4)
        joined[known] = np.array(renumber, U4)[groups[known]]
        columns.append(joined)
    return Rows(keys, names, np.concatenate(columns).tobytes(), b"".join(numbers), ids)
