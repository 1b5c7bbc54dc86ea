"""The values of a table that arrived: which rows of which chunk each field has.

A chunk is opened when a field in it is first used, once for all fields and selections of rows. What
a peer said is checked on the way: ProtocolError for a chunk outside the arena, or a piece that does
not fit its chunk or the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from operator import mul

import numpy as np
from msgspec.structs import replace

from dataplane.client.read.chunk_columns import ChunkColumn, Memory, form_of
from dataplane.client.read.column_view import ColumnView, RowSpan, cut, stretches
from dataplane.client.read.table_shape import TableShape, shape_of_values
from dataplane.client.session.session import Session
from dataplane.client.write.rows import Index, group_names, row_names, tag_values
from dataplane.errors import InvalidRows, mixed_releases
from dataplane.memory.extents import Extent
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.records import EXTENT, KEY, U4, column
from dataplane.wire.tables import Chunk, Name, Piece, Rows, Table, Values

NOWHERE = np.zeros(0, np.uint8)
"""The arena of rows of which nothing is pinned there."""


class TableReader:
    """Reads the values of a table, field by field.

    `part` makes readers of some of its rows, which share what was opened.
    """

    def __init__(self, table: Table, pin: object = NOWHERE) -> None:
        """pin: of the reply, which gives the whole arena, read-only."""
        self.table = table
        self._values = table.values
        self._pin = pin
        self._arena: Memory | None = None
        chunks = len(table.values.chunks)
        self._places: list[Extent] = column(table.places, EXTENT, chunks).tolist()
        self._shape = _shape_of(table)
        self._chunks: dict[int, Sequence[ChunkColumn | None]] = {-1: [None]}
        """the columns of chunks that were used; -1: of rows that lack a field"""
        self._runs: dict[str, list[RowSpan]] = {}
        self._rows: Index | None = None
        """those of the table, in this order; None: all"""
        self._chosen: list[tuple[int, int]] = []
        """the same as stretches"""

    @property
    def fields(self) -> list[str]:
        return self._values.fields

    @property
    def volume(self) -> int:
        """About the bytes of the values: of each chunk, the share of its rows that pieces use."""
        sizes = [chunk.nbytes for chunk in self._values.chunks]
        shared: float = sum(map(mul, sizes, self._shape.shares))
        return round(shared)

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
            opened, runs = self._chunks, []
            for chunk, at, first, last in self._shape.runs(field):
                if chunk not in opened:
                    opened[chunk] = self._open(chunk)
                runs.append(RowSpan(opened[chunk][at], first, last))
            self._runs[field] = runs
        if self._rows is not None:
            runs = cut(runs, self._chosen)
        return ColumnView(field, runs, name_of)

    def _open(self, number: int) -> list[ChunkColumn]:
        chunk = self._values.chunks[number]
        form = form_of(self._values.layout_of(chunk), chunk.rows)
        if len(form.specs) != self._shape.columns[number]:
            raise mixed_releases(
                f"chunk {number} has {len(form.specs)} columns, but one of its pieces lists a "
                "different number of fields"
            )
        if not chunk.number:
            return form.columns(chunk.inline)
        memory = self._memory(number)
        beside = bool(chunk.inline) or type(memory) is not np.ndarray  # of a device
        return form.columns(memory, chunk.inline if beside else None)

    def _memory(self, number: int) -> Memory:
        """The bytes of a chunk that is not inline."""
        offset, nbytes = self._places[number]
        if nbytes != (expected := self._values.chunks[number].nbytes):
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
        """The bytes of a chunk that is not in the host arena."""
        raise mixed_releases(
            f"a chunk of {nbytes} bytes at offset {offset} is outside the arena of "
            f"{0 if self._arena is None else len(self._arena)} bytes"
        )


def reader_of(session: Session, tables: list[Table], pins: list[int]) -> TableReader:
    """Return a reader of the tables of some replies, joined. pins: those of the replies."""
    pin = session.pinned(*pins)
    table = join_tables(tables)
    arena = pin if pin.number else NOWHERE
    pools = session.pools
    return TableReader(table, arena) if pools is None else pools.reader(table, arena)


def _shape_of(table: Table) -> TableShape:
    """ProtocolError for values that do not fit together."""
    try:
        return shape_of_values(table.values, len(table.rows.keys) // KEY.itemsize)
    except InvalidRows as exc:  # a peer made the table, and not the caller
        raise mixed_releases(f"the peer sent invalid rows: {exc.message}") from exc


def _check_page(table: Table) -> None:
    """Before this table becomes a part of a larger one: ProtocolError where its values refer to
    what is not in it, and would be found in another part then."""
    values = table.values
    _shape_of(table)
    column(table.places, EXTENT, len(values.chunks))
    for chunk in values.chunks:
        values.layout_of(chunk)


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
