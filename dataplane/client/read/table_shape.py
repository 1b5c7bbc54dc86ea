"""Where the values of a table are: of each field, the runs of rows in each chunk.

The pieces of a table are checked as a shard checks those of a message. Tables that differ only in
their chunks share one shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

from dataplane.metadata.tables.bits import rows_of
from dataplane.metadata.tables.incoming import MessageForm, form_of, shape_in
from dataplane.metadata.tables.pieces import Piece
from dataplane.wire.tables import Values

SHARED_RUNS = 512
"""Runs that a shape keeps, of all its fields together. Further ones are computed for each call."""


ChunkRun: TypeAlias = tuple[int, int, int, int]
"""Consecutive rows of a table: a chunk, or -1 for rows that lack the field; a column of it; and its
rows, from the first up to, but not including, the last."""


class TableShape:
    """The part of a table that other tables share. columns: by number of the chunk, how many
    columns its pieces name; 0 if its pieces disagree. shares: by chunk, the share of its rows that
    pieces name."""

    __slots__ = ("_free_runs", "_pieces", "_rows", "_runs", "_used", "columns", "shares")

    def __init__(self, form: MessageForm) -> None:
        """ProtocolError or InvalidRows for pieces that fit neither the chunks nor the rows."""
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
            placed = list[tuple[int, ChunkRun]]()
            for one in self._pieces:
                if field in one.fields:
                    chunk, at = self._used[one.chunk], one.fields.index(field)
                    for row, first, last in _stretches(one):
                        placed.append((row, (chunk, at, first, last)))
            runs = _without_gaps(placed, self._rows)
            if len(runs) <= self._free_runs:
                self._free_runs -= len(runs)
                self._runs[field] = runs
        return runs


def shape_of_values(values: Values, rows: int) -> TableShape:
    """Return the shape of a table of this many rows. ProtocolError or InvalidRows for pieces that
    fit neither its chunks nor its rows."""
    form = form_of(values, rows)
    return _shared_shape(form) if form.is_small else TableShape(form)


@lru_cache(1_024)
def _shared_shape(form: MessageForm) -> TableShape:
    return TableShape(form)


def _stretches(piece: Piece[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a piece: its first row of the table, its first row of the chunk, and the
    row of the chunk behind its last."""
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
    runs, end = list[ChunkRun](), 0
    for row, run in sorted(placed):
        if row > end:
            runs.append((-1, 0, 0, row - end))
        runs.append(run)
        end = row + run[3] - run[2]
    if end < count:
        runs.append((-1, 0, 0, count - end))
    return runs
