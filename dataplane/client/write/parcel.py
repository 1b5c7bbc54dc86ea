"""Parcels: the pieces of a put that are reserved, written and committed whole.

A parcel is a window onto the layout of the whole put, so cutting a put into many costs little, and
neighbours can be joined again for one message. Its records number the ranges of this parcel: first
those it writes itself, then those it shares with values that the peer has already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client.write.values import Buffer
from dataplane.memory.extents import padded
from dataplane.wire.records import DIGEST, U4, U8, VALUE
from dataplane.wire.tables import Column, Spec

Ints = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]
_NO_INTS, _NO_VALUES = np.zeros(0, np.int64), np.zeros(0, VALUE)


@dataclass(slots=True, eq=False)
class LaidStrip:
    """Values of one field in the order of the layout, with their VALUE records.

    `bounds` cuts them into parcels; ranges are numbered through the put. `skip` marks values that
    lie where an equal one of the same parcel is written, `inline` those that go with the message:
    their records have the owner 1 and say where they start in its bytes, counted through the put.
    """

    source: npt.NDArray[np.uint8] | list[Buffer]
    records: Records
    bounds: Sequence[int] | Ints
    skip: Mask | None = None
    inline: Mask | None = None

    @property
    def all_inline(self) -> bool:
        return self.inline is not None and bool(self.inline.all())

    @property
    def elsewhere(self) -> Mask | None:
        """Which values are not written where their range is new; None: all are."""
        if self.inline is None or self.skip is None:
            return self.skip if self.inline is None else self.inline
        both: Mask = self.inline | self.skip
        return both


@dataclass(slots=True, eq=False)
class LaidColumn:
    """One field of the put."""

    field: str
    values: LaidStrip
    leaf_counts: Ints | None = None
    leaves: LaidStrip | None = None
    dedup: bool = False


@dataclass(eq=False)
class Layout:
    """A whole put. Bounds have an entry a parcel and one more.

    order: the rows of the put in layout order, None where that is their own. digests: DIGEST by
    ascending range; `repeated` marks those that an earlier parcel has too.
    """

    specs: list[Spec]
    row_bounds: Sequence[int] | Ints
    range_bounds: Sequence[int] | Ints
    sizes: npt.NDArray[np.uint64]
    columns: list[LaidColumn]
    inline_bounds: Ints
    order: Ints | None = None
    digests: Records = field(default_factory=lambda: np.zeros(0, DIGEST))
    digest_ranges: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    digest_sources: list[Buffer] = field(default_factory=list)
    repeated: Mask = field(default_factory=lambda: np.zeros(0, bool))

    @cached_property
    def ends(self) -> Ints:
        """Running bytes of the ranges in the arena, with the 0 before the first."""
        ends = np.zeros(len(self.sizes) + 1, np.int64)
        np.cumsum(padded(self.sizes), out=ends[1:])
        return ends


class Cells(msgspec.Struct, frozen=True, eq=False):
    """One field of the rows as records: VALUE, and those of array leaves where rows have any."""

    field: str
    values: Records
    leaf_counts: npt.NDArray[np.uint32] | None = None
    leaves: Records = _NO_VALUES

    def wire(self) -> Column:
        counts = b"" if self.leaf_counts is None else self.leaf_counts.tobytes()
        return Column(self.field, self.values.tobytes(), counts, self.leaves.tobytes())

    def mapped(self, change: Callable[[Records], Records]) -> Cells:
        """With its values, then its leaves, changed."""
        return Cells(self.field, change(self.values), self.leaf_counts, change(self.leaves))

    def take(self, rows: Ints) -> Cells:
        """Only the cells of these rows."""
        if self.leaf_counts is None:
            return Cells(self.field, self.values[rows])
        counts = self.leaf_counts
        starts = np.cumsum(counts) - counts
        # Leaves of the taken rows, in the order of the rows.
        taken = [np.arange(starts[r], starts[r] + counts[r]) for r in rows.tolist()]
        at = np.concatenate(taken) if taken else np.zeros(0, np.intp)
        return Cells(self.field, self.values[rows], counts[rows], self.leaves[at.astype(np.intp)])


class Strand(NamedTuple):
    """Values of one strip that this parcel writes: source indexes, their records, ranges."""

    source: npt.NDArray[np.uint8] | list[Buffer]
    first: int
    at: Ints | None
    records: Records


class Parcel:
    """Parcels `first` to `last` of a layout, as one."""

    __slots__ = ("_first", "_last", "_layout", "_shared")

    def __init__(self, layout: Layout, first: int, last: int) -> None:
        self._layout, self._first, self._last = layout, first, last
        self._shared: Mask | None = None

    def __len__(self) -> int:
        bounds = self._layout.row_bounds
        return int(bounds[self._last]) - int(bounds[self._first])

    def __repr__(self) -> str:
        return f"<Parcel of {len(self)} rows, {len(self.sizes)} ranges, {self.nbytes} bytes>"

    @property
    def rows(self) -> Ints:
        """Which rows of the put these are, in the order of the records."""
        start, stop = (self._layout.row_bounds[at] for at in (self._first, self._last))
        order = self._layout.order
        return np.arange(start, stop) if order is None else order[start:stop]

    @property
    def sizes(self) -> npt.NDArray[np.uint64]:
        """Bytes (u8) of each range that this parcel writes; what is shared is not among them."""
        low, high = self._ranges()
        sizes = self._layout.sizes[low:high]
        return sizes if self._shared is None else sizes[~self._shared]

    @property
    def inline_bytes(self) -> int:
        """What goes with the message."""
        low, high = self._inline()
        return high - low

    @property
    def nbytes(self) -> int:
        """What the ranges take in the arena, padding included."""
        if self._shared is not None:
            return int(padded(self.sizes).sum())
        low, high = self._ranges()
        return self._layout.ends.item(high) - self._layout.ends.item(low)

    def units(self) -> list[bytes]:
        """The u8 columns of `sizes` of each of the parcels joined here; none of them shares yet."""
        assert self._shared is None, "units are reserved before anything is shared"
        width = U8.itemsize
        low, high = self._ranges()
        raw = self._layout.sizes[low:high].tobytes()
        bounds = [
            width * (int(bound) - low)
            for bound in self._layout.range_bounds[self._first : self._last + 1]
        ]
        return [raw[start:stop] for start, stop in pairwise(bounds)]

    @property
    def specs(self) -> list[Spec]:
        """The specs of the whole put; the records' `spec` is an index into them."""
        return self._layout.specs

    @property
    def cells(self) -> list[Cells]:
        """The VALUE records by field: `range` indexes `sizes`, then what was shared."""
        return [
            Cells(
                column.field,
                self._records(column.values),
                self._leaf_counts(column),
                _NO_VALUES if column.leaves is None else self._records(column.leaves),
            )
            for column in self._layout.columns
        ]

    # dedup

    @property
    def digests(self) -> Records:
        """DIGEST of each range that may lie at the peer already, or that later puts may share."""
        return self._layout.digests[self._own_digests()]

    @property
    def digest_ranges(self) -> npt.NDArray[np.uint32]:
        """Which of `sizes` each digest belongs to (u4)."""
        local = self._layout.digest_ranges[self._own_digests()] - self._ranges()[0]
        return self._renumbered(local).astype(U4)

    def run(self, max_rows: int, max_bytes: int, cost: int | Ints, max_cost: int) -> int:
        """The end of the longest run of parcels from this one on that keeps to these limits, at
        least this one. cost: of each row of the put, or one number for all.

        The run ends before a parcel that repeats what an earlier one writes: the peer is asked
        about that once the earlier one is in.
        """
        layout, first = self._layout, self._first
        rows = np.asarray(layout.row_bounds)
        if isinstance(cost, int):
            costs = cost * rows
        else:
            each = cost if layout.order is None else cost[layout.order]
            costs = np.concatenate(([0], np.cumsum(each)))[rows]
        costs = costs + layout.inline_bounds
        nbytes = layout.ends[layout.range_bounds]
        stop = min(
            int(np.searchsorted(totals, totals[first] + most, "right")) - 1
            for totals, most in ((rows, max_rows), (nbytes, max_bytes), (costs, max_cost))
        )
        if layout.repeated.any():
            again = layout.digest_ranges[layout.repeated]
            parcels = np.searchsorted(layout.range_bounds, again, "right") - 1
            stop = min(stop, int(parcels[parcels > first].min(initial=stop)))
        return max(stop, first + 1)

    def bytes_of(self, index: int) -> npt.NDArray[np.uint8]:
        """The bytes behind a digest, to be compared with the stored ones before sharing."""
        source = self._layout.digest_sources[int(self._own_digests()[index])]
        return np.frombuffer(source, np.uint8)

    def share(self, known: npt.ArrayLike) -> None:
        """Refer to the peer's ranges for the digests where `known` is true, instead of writing.

        They are numbered behind the own ranges, in the order of the digests. Sharing is for once:
        what is shared is no longer among `digests`.
        """
        low, high = self._ranges()
        ranges = self._layout.digest_ranges[self._own_digests()[np.asarray(known, bool)]] - low
        if len(ranges):
            assert self._shared is None, "a parcel is shared once"
            self._shared = np.zeros(high - low, bool)
            self._shared[ranges] = True

    # writing

    def strands(self) -> Iterator[Strand]:
        """What has to be copied into the arena; the records number the own ranges."""
        for column in self._layout.columns:
            for strip in (column.values, column.leaves):
                if strip is not None:
                    yield self._strand(strip)

    def inline_strands(self) -> Iterator[Strand]:
        """What goes with the message; the records say where each starts in its bytes."""
        for column in self._layout.columns:
            for strip in (column.values, column.leaves):
                if strip is not None and strip.inline is not None:
                    low, high = strip.bounds[self._first], strip.bounds[self._last]
                    at = np.flatnonzero(strip.inline[low:high])
                    whole = None if len(at) == high - low else at
                    yield Strand(strip.source, int(low), whole, self._records(strip)[at])

    def _strand(self, strip: LaidStrip) -> Strand:
        low, high = strip.bounds[self._first], strip.bounds[self._last]
        records, elsewhere = self._records(strip), strip.elsewhere
        if self._shared is None and elsewhere is None:
            return Strand(strip.source, int(low), None, records)
        written = records["range"] < len(self.sizes)
        if elsewhere is not None:
            written &= ~elsewhere[low:high]
        at = np.flatnonzero(written)
        return Strand(strip.source, int(low), at, records[at])

    def _ranges(self) -> tuple[int, int]:
        bounds = self._layout.range_bounds
        return int(bounds[self._first]), int(bounds[self._last])

    def _inline(self) -> tuple[int, int]:
        bounds = self._layout.inline_bounds
        return bounds.item(self._first), bounds.item(self._last)

    def _records(self, strip: LaidStrip) -> Records:
        start, stop = strip.bounds[self._first], strip.bounds[self._last]
        records, inline = strip.records[start:stop], strip.inline
        low, before = self._ranges()[0], self._inline()[0]
        if low == before == 0 and self._shared is None:
            return records
        records = records.copy()
        if inline is None:
            records["range"] = self._renumbered(records["range"] - U4.type(low))
            return records
        mine = inline[start:stop]
        records["range"][mine] -= U4.type(before)
        records["range"][~mine] = self._renumbered(records["range"][~mine] - U4.type(low))
        return records

    def _renumbered(self, ranges: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self._shared is None:
            return ranges
        own = ~self._shared
        numbers: Ints = np.where(own, np.cumsum(own), own.sum() + np.cumsum(self._shared)) - 1
        renumbered: npt.NDArray[Any] = numbers[ranges]
        return renumbered

    def _leaf_counts(self, column: LaidColumn) -> npt.NDArray[np.uint32] | None:
        if column.leaf_counts is None:
            return None
        bounds = self._layout.row_bounds
        return column.leaf_counts[bounds[self._first] : bounds[self._last]].astype(U4)

    def _own_digests(self) -> Ints:
        """Positions in the layout of the digests of ranges that are this parcel's own."""
        ranges = self._layout.digest_ranges
        if not len(ranges):
            return _NO_INTS
        low, high = self._ranges()
        first, last = np.searchsorted(ranges, (low, high))
        at = np.arange(first, last)
        return at if self._shared is None else at[~self._shared[ranges[at] - low]]


def join(parcels: Sequence[Parcel]) -> Parcel:
    """Neighbouring parcels of one put as one, whatever each of them shares."""
    whole = Parcel(parcels[0]._layout, parcels[0]._first, parcels[-1]._last)
    for one, other in zip(parcels, parcels[1:], strict=False):
        assert one._layout is other._layout and one._last == other._first, "neighbours only"
    if any(parcel._shared is not None for parcel in parcels):
        whole._shared = np.concatenate(
            [np.zeros(len(p.sizes), bool) if p._shared is None else p._shared for p in parcels]
        )
    return whole
