"""The values of a table that arrived: which rows of which chunk each field has.

A chunk is opened when a field in it is first used, once for all fields and selections of rows. The
reader then checks what the peer sent: a chunk outside the arena, or a piece that does not fit its
chunk or the rows, raises ProtocolError. It checks what the writer stored: a chunk that does not fit
its layout raises ValueCorrupt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import lru_cache, partial
from itertools import pairwise
from operator import mul
from typing import TypeAlias

import numpy as np

from dataplane.client.read.chunk_columns import ChunkColumn, Memory, form_of
from dataplane.client.read.column_view import (
    ColumnView,
    NameOf,
    RowSpan,
    corrupt,
    cut,
    row_runs,
)
from dataplane.client.session.session import Session
from dataplane.client.write.rows import Index, group_names, row_name, row_names, tag_values
from dataplane.errors import InvalidRows, ValueCorrupt, mixed_releases
from dataplane.memory.extents import Extent
from dataplane.metadata.tables.bits import rows_of
from dataplane.metadata.tables.incoming import MessageForm, message_form, shape_in
from dataplane.metadata.tables.pieces import Piece
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.messages import Claimed, Fetched, ReadDone
from dataplane.wire.packed import EXTENT, KEY, U4, column
from dataplane.wire.tables import INLINE, Name, Owner, Rows, Table, Values

NOWHERE = np.zeros(0, np.uint8)
"""The arena of a table without pinned chunks."""
SHARED_RUNS = 512
"""The most runs that a shape caches, of all its fields. Others are computed for each call."""
ChunkRun: TypeAlias = tuple[int, int, int, int]
"""Consecutive rows of a table: a chunk, or -1 for rows that lack the field; a column of it; and its
rows, from the first up to, but not including, the last."""


class TableReader:
    """Reads the values of a table, field by field.

    `part` returns readers of some of its rows, which share the opened chunks.
    """

    def __init__(self, table: Table, pin: object = NOWHERE) -> None:
        """pin: of the reply, which gives the whole arena, read-only."""
        self.table = table
        self._values = table.values
        self._pin = pin
        self._arena: Memory | None = None
        chunks = len(table.values.chunks)
        self._places: list[Extent] = column(table.places, EXTENT, chunks).tolist()
        try:
            self._shape = shape_of_values(table.values, table.rows.count)
        except InvalidRows as exc:  # a peer made the table, and not the caller
            raise mixed_releases(f"the peer sent invalid rows: {exc.message}") from exc
        self._chunks: dict[int, Sequence[ChunkColumn | None]] = {-1: [None]}
        """the columns of chunks that were used; -1: for rows that lack a field"""
        self._runs: dict[str, list[RowSpan]] = {}
        self._rows: Index | None = None
        """the chosen rows of the table, in this order; None: all"""
        self._chosen: list[tuple[int, int]] = []
        """the same rows as runs: the first row of each run, and the row after its last"""
        self._pages: list[TableReader] = []
        """the readers that were joined, in the order of their rows; [] for a single table"""

    @property
    def fields(self) -> list[str]:
        return self.table.values.fields

    @property
    def volume(self) -> int:
        """Approximate bytes of the values: of each chunk, the share of its rows that pieces use."""
        if self._pages:
            return sum([page.volume for page in self._pages])
        sizes = [chunk.nbytes for chunk in self._values.chunks]
        shared: float = sum(map(mul, sizes, self._shape.shares))
        return round(shared)

    def part(self, rows: Index) -> TableReader:
        """Return a reader of only these rows, in this order."""
        part = copy(self)
        part._rows = rows if self._rows is None else self._rows[rows]
        part._chosen = row_runs(part._rows)
        return part

    def view(self, field: str, name_of: NameOf | None = None) -> ColumnView:
        """Return a field of the rows. name_of: returns the name of a row for errors."""
        runs = self._all_runs(field)
        if self._rows is not None:
            runs = cut(runs, self._chosen)
        return ColumnView(field, runs, name_of, self._owner_of)

    def _all_runs(self, field: str) -> list[RowSpan]:
        """The runs of a field, for all rows of the table."""
        runs = self._runs.get(field)
        if runs is not None:
            return runs
        if self._pages:
            runs = [run for page in self._pages for run in page._all_runs(field)]
        else:
            opened, runs = self._chunks, []
            try:
                for chunk, at, first, last in self._shape.runs(field):
                    if chunk not in opened:
                        opened[chunk] = self._open(chunk)
                    runs.append((opened[chunk][at], first, last))
            except ValueCorrupt as exc:
                row = sum([last - first for _, first, last in runs])
                name_of = partial(row_name, self.table.rows)
                raise corrupt(field, row, name_of, self._owner(chunk), exc.message) from exc
        self._runs[field] = runs
        return runs

    def _owner_of(self, column: ChunkColumn) -> Owner:
        """The owner of the chunk of an opened column."""
        for page in self._pages or [self]:
            for number, columns in page._chunks.items():
                if any(one is column for one in columns):
                    return page._owner(number)
        return INLINE

    def _owner(self, number: int) -> Owner:
        owners, owner = self._values.owners, self._values.chunks[number].owner
        return owners[owner] if 0 <= owner < len(owners) else INLINE

    def _open(self, number: int) -> list[ChunkColumn]:
        chunk = self._values.chunks[number]
        form = form_of(self._values.layout_of(chunk), chunk.rows)
        if form.count != self._shape.columns[number]:
            raise ValueCorrupt(
                f"its layout has {form.count} columns, but a put with this layout names "
                "another number of fields"
            )
        if not chunk.number:
            return form.columns(chunk.inline)
        memory = self._memory(number, chunk.nbytes)
        beside = chunk.inline or type(memory) is not np.ndarray  # of a device
        return form.columns(memory, chunk.inline if beside else None)

    def _memory(self, number: int, expected: int) -> Memory:
        """Return the bytes of a chunk that is not inline. expected: its size."""
        offset, nbytes = self._places[number]
        if nbytes != expected:
            raise mixed_releases(
                f"chunk {number} and its extent differ in size: expected {expected} bytes, "
                f"got {nbytes}"
            )
        arena = self._arena
        if arena is None:
            arena = self._arena = np.asarray(self._pin)
        if offset + nbytes > len(arena):
            return self._beyond(offset, nbytes)
        return arena[offset : offset + nbytes]

    def _beyond(self, offset: int, nbytes: int) -> Memory:
        """The bytes of a chunk outside the host arena, where only a plug-in has memory."""
        raise mixed_releases(
            f"a chunk of {nbytes} bytes at offset {offset} is outside the arena of "
            f"{0 if self._arena is None else len(self._arena)} bytes"
        )


class TableShape:
    """Where the values of a table are: of each field, the runs of rows in each chunk. Tables that
    differ only in their chunks share it.

    columns: by number of the chunk, how many columns its pieces name; 0 if its pieces disagree.
    shares: by chunk, the share of its rows that pieces name."""

    __slots__ = ("_free_runs", "_pieces", "_rows", "_runs", "_used", "columns", "shares")

    def __init__(self, form: MessageForm) -> None:
        """Raise ProtocolError or InvalidRows if pieces do not fit the chunks or the rows."""
        shape, self._used = shape_in(form)
        self._pieces, self._rows = shape.pieces, form.rows
        self.columns: dict[int, int] = {}
        self.shares = [0.0] * len(form.chunk_rows)
        for one in self._pieces:
            chunk, many = self._used[one.chunk], len(one.fields)
            if self.columns.setdefault(chunk, many) != many:
                self.columns[chunk] = 0
            self.shares[chunk] += one.given.bit_count() / form.chunk_rows[chunk]
        self._runs: dict[str, list[ChunkRun]] = {}
        self._free_runs = SHARED_RUNS

    def runs(self, field: str) -> list[ChunkRun]:
        """Return where the values of a field are, in the order of the rows."""
        runs = self._runs.get(field)
        if runs is None:
            placed: list[tuple[int, ChunkRun]] = []
            for one in self._pieces:
                if field in one.fields:
                    chunk, at = self._used[one.chunk], one.fields.index(field)
                    for row, first, last in _runs_of(one):
                        placed.append((row, (chunk, at, first, last)))
            runs = _without_gaps(placed, self._rows)
            if len(runs) <= self._free_runs:
                self._free_runs -= len(runs)
                self._runs[field] = runs
        return runs


def shape_of_values(values: Values, rows: int) -> TableShape:
    """Return the shape of a table of this many rows. Raise ProtocolError or InvalidRows if pieces
    do not fit its chunks or its rows."""
    form = message_form(values, rows)
    return _shared_shape(form) if form.is_small else TableShape(form)


_shared_shape = lru_cache(1_024)(TableShape)


def _runs_of(piece: Piece[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a piece: its first row of the table, its first row of the chunk, and the
    row of the chunk after its last."""
    rows, first, base = rows_of(piece.given), piece.first, piece.base
    if piece.at is None and isinstance(rows, range):
        yield base + rows.start, first, first + len(rows)
        return
    at = piece.at or range(first, first + len(rows))
    cuts = [n for n in range(1, len(rows)) if (rows[n] - rows[n - 1], at[n] - at[n - 1]) != (1, 1)]
    for start, stop in pairwise([0, *cuts, len(rows)]):
        yield base + rows[start], at[start], at[stop - 1] + 1


def _without_gaps(placed: list[tuple[int, ChunkRun]], count: int) -> list[ChunkRun]:
    """Return these runs in order, with further runs for the rows that none of them has."""
    end = 0
    runs: list[ChunkRun] = []
    for row, run in sorted(placed):
        if row > end:
            runs.append((-1, 0, 0, row - end))
        runs.append(run)
        end = row + run[3] - run[2]
    if end < count:
        runs.append((-1, 0, 0, count - end))
    return runs


def reader_of(session: Session, *replies: Claimed | Fetched | ReadDone) -> TableReader:
    """Return one reader for the tables of several replies. It keeps their pins."""
    pin = session.pinned(*[reply.pin for reply in replies])
    arena = pin if pin.number else NOWHERE
    make = TableReader if session.pools is None else session.pools.reader
    return join_readers([make(reply.table, arena) for reply in replies])


def join_readers(pages: list[TableReader]) -> TableReader:
    """Join the readers of several replies. If a reply lacks a field or tag, its rows lack it."""
    if len(pages) == 1:
        return pages[0]
    tables = [page.table for page in pages]
    counts = [table.rows.count for table in tables]
    tags = {
        name: [v for t, n in zip(tables, counts, strict=True) for v in tag_values(t, name, n)]
        for name in dict.fromkeys(name for table in tables for name in table.tags)
    }
    fields = list(dict.fromkeys(field for table in tables for field in table.values.fields))
    whole = copy(pages[0])
    whole.table = Table(_join_rows([table.rows for table in tables]), Values(fields), tags)
    whole._pages, whole._runs = pages, {}
    return whole


def _join_rows(parts: list[Rows]) -> Rows:
    """A group may continue on the next page, so equal group keys are one group."""
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
        n = part.count
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
