"""An arena in this process: what a put lays out is filled, resolved to places and viewed again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pytest

from dataplane.client.read.views import ColumnView, same
from dataplane.client.write.filling import inline_of
from dataplane.client.write.layout import Parcel, fill, plan
from dataplane.client.write.values import Prepared, prepare
from dataplane.memory.placement import place
from dataplane.wire.records import EXTENT, PLACE, PLACE_INLINE
from dataplane.wire.tables import Column


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
        return granted

    def write(self, parcel: Parcel, extents: np.ndarray | None = None) -> np.ndarray:
        """Fill a parcel; returns the offsets of its ranges."""
        if extents is None:
            extents = self.extents(max(4096, parcel.nbytes))
        offsets = place(parcel.sizes, extents)
        fill(parcel, offsets, lambda offset, length: self.memory[offset : offset + length])
        return offsets

    def columns(self, parcel: Parcel, offsets: np.ndarray) -> list[Column]:
        """The parcel's columns with PLACE records, as the peer answers a claim."""
        return [
            Column(
                cells.field,
                _places(cells.values, offsets),
                b"" if cells.leaf_counts is None else cells.leaf_counts.tobytes(),
                _places(cells.leaves, offsets),
            )
            for cells in parcel.cells
        ]

    def views(self, parcel: Parcel, offsets: np.ndarray) -> dict[str, ColumnView]:
        base, inline = self.base(), inline_of(parcel)
        return {
            c.field: ColumnView(c, parcel.specs, base, inline=inline)
            for c in self.columns(parcel, offsets)
        }

    def put(
        self,
        columns: Mapping[str, Any],
        group: Any = None,
        dedup: Collection[str] = (),
    ) -> dict[str, list[Any]]:
        """Put and read again: the values of each field, in the order of the put. The same where
        small values go with the message as where they lie in the arena."""
        prepared = prepare(columns, dedup=dedup)
        found, beside = (self._put(prepared, group, inline) for inline in (False, True))
        assert all(same(found[name], beside[name]) for name in columns)
        return beside

    def _put(self, columns: Prepared, group: Any, inline: bool) -> dict[str, list[Any]]:
        parcels = plan(columns, group, inline)
        result: dict[str, dict[int, Any]] = {one.field: {} for one in columns.columns}
        for parcel in parcels:
            for name, view in self.views(parcel, self.write(parcel)).items():
                result[name].update(zip(parcel.rows.tolist(), view, strict=True))
        return {name: [rows[row] for row in sorted(rows)] for name, rows in result.items()}

    def view(self, values: Any, inline: bool = False) -> ColumnView:
        """One field of a put that is one parcel. inline: small values go with the message."""
        (parcel,) = plan(prepare({"x": values}), inline=inline)
        return self.views(parcel, self.write(parcel))["x"]


def _places(records: np.ndarray, offsets: np.ndarray) -> bytes:
    places = np.zeros(len(records), PLACE)
    if len(records):
        inline = records["owner"] == 1
        own = records[~inline]
        places["offset"][~inline] = offsets[own["range"]] + own["delta"]
        places["offset"][inline], places["flags"][inline] = records["range"][inline], PLACE_INLINE
        places["nbytes"], places["spec"] = records["nbytes"], records["spec"]
    return places.tobytes()


@pytest.fixture
def arena() -> FakeArena:
    return FakeArena()


@pytest.fixture(scope="session")
def new_arena() -> type[FakeArena]:
    """For properties, which need a fresh one an example."""
    return FakeArena
