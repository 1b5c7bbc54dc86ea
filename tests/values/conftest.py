"""An arena in this process: what a write plans is copied, resolved to places and viewed again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.client.read.column_view import ColumnView
from dataplane.client.read.table import TableReader
from dataplane.client.write.chunks import (
    NewChunk,
    NewPiece,
    Unit,
    chunks_of,
    order_of,
    pieces_of,
    plan,
    values_of,
)
from dataplane.client.write.columns import ValueColumn, by_name, prepare
from dataplane.client.write.copying import copy_chunks
from dataplane.wire.packed import EXTENT, KEY, U8
from dataplane.wire.tables import Owner, Rows, Table, Values
from tests.placing import place
from tests.same import same

PEER = Owner("10.0.0.1:1", 7)


class Pin:
    """Stands for the arena as a reader maps it: read-only, alive as long as a view is."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        address = memory.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "shape": memory.shape,
            "typestr": "|u1",
            "data": (address, True),
        }


class Writes:
    """What `copy_chunks` needs of a client's mappings."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory

    def view(self, offset: int, length: int) -> np.ndarray:
        return self._memory[offset : offset + length]

    def populate(self, offset: int, length: int) -> bool:
        return True


class FakeArena:
    def __init__(self, size: int = 8 << 20) -> None:
        # aligned like a mapping, and dirty like used memory
        self._memory = np.full(size + 4096, 0xA5, np.uint8)
        shift = -self._memory.__array_interface__["data"][0] % 4096
        self.memory = self._memory[shift : shift + size]
        self.used = 4096

    def base(self) -> np.ndarray:
        return np.asarray(Pin(self.memory))

    def extents(self, *lengths: int) -> np.ndarray:
        """Granted extents, with a gap before each."""
        granted = np.empty(len(lengths), EXTENT)
        for index, length in enumerate(lengths):
            granted[index] = (self.used, length)
            self.used += length + 4096
        assert self.used <= self.memory.nbytes, "the arena is too small for this test"
        return granted

    def write(self, chunks: Sequence[NewChunk], extents: np.ndarray | None = None) -> None:
        """Copy the chunks that have no space yet."""
        new = [chunk for chunk in chunks if chunk.offset < 0 and not chunk.is_inline]
        if not new:
            return
        sizes = np.array([chunk.nbytes for chunk in new], U8)
        if extents is None:
            extents = self.extents(max(4096, int((sizes + U8.type(64)).sum())))
        for chunk, offset in zip(new, place(sizes, extents).tolist(), strict=True):
            chunk.offset = offset
        copy_chunks(new, Writes(self.memory))  # type: ignore[arg-type]

    def views(self, pieces: Sequence[NewPiece]) -> dict[str, ColumnView]:
        """The values of these pieces, as the peer answers a claim of them."""
        reader = self.reader(pieces)
        return {f: reader.view(f) for f in reader.fields}

    def reader(self, pieces: Sequence[NewPiece]) -> TableReader:
        """What arrives where all rows of these pieces are read."""
        said, written = said_of(pieces), chunks_of(pieces)
        extents = [(0, 0) if one.is_inline else (one.offset, one.nbytes) for one in written]
        places = np.array(extents, EXTENT)
        chunks = [
            one if wrote.is_inline else msgspec.structs.replace(one, number=number)
            for number, (one, wrote) in enumerate(zip(said.chunks, written, strict=True), 1)
        ]
        values = msgspec.structs.replace(said, chunks=chunks)
        rows = max(piece.rows[-1] for piece in pieces) + 1
        table = Table(Rows(bytes(KEY.itemsize * rows)), values, {}, places.tobytes())
        return TableReader(table, self.base())

    def put(
        self,
        columns: Mapping[str, Any],
        group: Any = None,
        dedup: Collection[str] = (),
    ) -> dict[str, list[Any]]:
        """Put and read again: the values of each field, in the order of the put. The same where
        small values go with the message as where they are in the arena."""
        prepared = prepare(by_name(columns), dedup=dedup)
        found, beside = (self._put(prepared, group, inline) for inline in (False, True))
        assert all(same(found[name], beside[name]) for name in columns)
        return beside

    def _put(self, columns: list[ValueColumn], group: Any, inline: bool) -> dict[str, list[Any]]:
        units, order = planned(columns, group, inline)
        pieces = pieces_of(units)
        self.write(chunks_of(pieces))
        rows = np.argsort(order) if order is not None else range(columns[0].count)
        views = self.views(pieces)
        values = {name: list(view) for name, view in views.items()}
        return {name: [every[row] for row in rows] for name, every in values.items()}

    def view(self, values: Any, inline: bool = False) -> ColumnView:
        """One field of a put. inline: small values go with the message."""
        (units,) = plan(prepare({"x": values}), inline=inline)
        pieces = pieces_of(units)
        self.write(chunks_of(pieces))
        return self.views(pieces)["x"]


def planned(
    columns: list[ValueColumn], group: Any = None, inline: bool = False
) -> tuple[list[Unit], list[int] | None]:
    """The units of a put, and the order of its rows in them."""
    groups = None if group is None else group.tolist()
    order = order_of(groups)
    if order is not None:
        columns, groups = [column.take(order) for column in columns], group[order].tolist()
    return plan(columns, groups, inline)[0], order


def said_of(pieces: Sequence[NewPiece]) -> Values:
    """What a message says of these pieces."""
    return values_of(PEER, pieces)


@pytest.fixture
def arena() -> FakeArena:
    return FakeArena()


@pytest.fixture(scope="session")
def new_arena() -> type[FakeArena]:
    """For properties, which need a fresh one an example."""
    return FakeArena
