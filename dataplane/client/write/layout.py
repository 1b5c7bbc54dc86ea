"""How a put lies in the arena: which values share a range, in parcels that are written whole.

Runs in the client, sans-I/O, in columns. A parcel is what the peer reserves as one unit: whole
groups (or single rows) of up to about 1 MiB together, or one larger group alone. Values of up to
1 KiB go inline, with the message, as far as a row may bring of such; those of at least 4 KiB are
ranges of their own; the others are packed, field by field, into blocks of at most 64 KiB. Where a
range lies is decided later, by `memory.placement`; the copy is in `filling`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.client.write.dedup import Copies, find_copies
from dataplane.client.write.filling import fill
from dataplane.client.write.parcel import Ints, LaidColumn, LaidStrip, Layout, Parcel, join
from dataplane.client.write.values import Prepared, PreparedColumn, Strip
from dataplane.errors import LimitExceeded
from dataplane.wire.limits import (
    ALIGNMENT_BYTES,
    INLINE_ALIGNMENT_BYTES,
    INLINE_LIMIT_BYTES,
    INLINE_ROW_BYTES,
    MAX_ROWS_PER_MESSAGE,
    NO_GROUP,
    PACK_BLOCK_BYTES,
    PACK_LIMIT_BYTES,
)
from dataplane.wire.records import U8, VALUE
from dataplane.wire.tables import Name

__all__ = ["Parcel", "fill", "join", "plan", "plan_beside"]

PARCEL_BYTES = 1 << 20
_FURTHEST = 1 << 32
"""What a record can say of where it starts."""
BLOCK_STEP_BYTES = PACK_BLOCK_BYTES - PACK_LIMIT_BYTES
"""A packed value is in the block `its last byte // this`, counted through the parcel: so blocks are
found for all values at once, follow each other without a gap, and none is over PACK_BLOCK_BYTES."""
MAX_INLINE_BYTES = 16 << 20
"""What one parcel may bring inline; a put of larger ones has nothing inline."""


def plan(
    prepared: Prepared, group_index: np.ndarray | None = None, inline: bool = False
) -> list[Parcel]:
    """Cut a put into parcels. inline: whether small values go with the message.

    group_index: u4 a row, NO_GROUP for a row without group. Rows of one group stay together
    wherever they are in the put; else rows keep their order. LimitExceeded where one group has
    more rows than a message takes.
    """
    return plan_beside([prepared], group_index, inline)[0]


def plan_beside(
    parts: Sequence[Prepared],
    group_index: np.ndarray | None = None,
    inline: bool = False,
    group_names: Sequence[Name] | None = None,
) -> list[list[Parcel]]:
    """Plan fields of the same rows that go to different memories. Each part is cut into parcels at
    the same rows. Only the first part has inline values. `group_names`: for messages."""
    n = parts[0].n
    row_bytes = _row_bytes(parts[0])
    for other in parts[1:]:
        row_bytes += _row_bytes(other)
    row_ends = np.cumsum(row_bytes)
    order = None
    if row_ends[-1] <= PARCEL_BYTES and n <= MAX_ROWS_PER_MESSAGE:
        bounds = np.array([0, n])
    elif group_index is None:
        bounds = _cut(row_ends, np.arange(1, n + 1))
    else:
        order, unit_ends = _units(group_index)
        if order is not None:
            row_ends = np.cumsum(row_bytes[order])
        bounds = _cut(row_ends, unit_ends)
        rows = np.diff(bounds)
        if (most := int(rows.max())) > MAX_ROWS_PER_MESSAGE:
            row = int(bounds[rows.argmax()])
            number = int(group_index[row if order is None else order[row]])
            which = f"group {group_names[number]!r}" if group_names else "one group"
            raise LimitExceeded(
                f"{which} has {most} rows in this put, over the limit of {MAX_ROWS_PER_MESSAGE}: "
                "split the group across several put() calls",
                limit=MAX_ROWS_PER_MESSAGE,
            )
    return [_parcels(part, order, bounds, inline and part is parts[0]) for part in parts]


def _parcels(prepared: Prepared, order: Ints | None, bounds: Ints, inline: bool) -> list[Parcel]:
    columns = prepared.columns
    if order is not None:
        columns = [_reordered(column, order) for column in columns]
    layout = _lay(prepared, columns, bounds, inline)
    layout.order = order
    return [Parcel(layout, at, at + 1) for at in range(len(bounds) - 1)]


def _room(sizes: int | Ints) -> int | Ints:
    """What a value takes: padded, and never nothing, so that every value has a place."""
    return np.maximum(-(-sizes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, ALIGNMENT_BYTES)


def _sizes(strip: Strip) -> Ints:
    if isinstance(strip.sizes, int):
        return np.full(strip.count, strip.sizes)
    return strip.sizes


def _from_zero(values: npt.NDArray[Any]) -> Ints:
    """Running totals, with the 0 before the first."""
    totals = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=totals[1:])
    return totals


def _row_bytes(prepared: Prepared) -> Ints:
    total = np.zeros(prepared.n, np.int64)
    for column in prepared.columns:
        total += _room(column.values.sizes)
        if column.leaves is not None and column.leaf_counts is not None:
            ends = _from_zero(np.asarray(_room(_sizes(column.leaves))))
            total += np.diff(ends[_from_zero(column.leaf_counts)])
    return total


def _units(group_index: np.ndarray) -> tuple[Ints | None, Ints]:
    """The order of rows that brings groups together (None: they are), and where each unit ends."""
    count = len(group_index)
    unit = group_index.astype(np.int64)
    alone = unit == NO_GROUP
    unit[alone] = NO_GROUP + np.flatnonzero(alone)
    _, first, inverse = np.unique(unit, return_index=True, return_inverse=True)
    rank = first[inverse]
    order = None
    if (np.diff(rank) < 0).any():
        order = np.argsort(rank, kind="stable")
        rank = rank[order]
    return order, np.append(np.flatnonzero(np.diff(rank)) + 1, count)


def _cut(row_ends: Ints, unit_ends: Ints) -> Ints:
    """Row bounds of the parcels: as many whole units as fit PARCEL_BYTES, at least one."""
    bytes_to, rows_to = row_ends[unit_ends - 1].tolist(), unit_ends.tolist()
    bounds, unit, before = [0], 0, 0
    while unit < len(rows_to):
        unit = max(unit + 1, bisect_right(bytes_to, before + PARCEL_BYTES, unit))
        before = bytes_to[unit - 1]
        bounds.append(rows_to[unit - 1])
    return np.array(bounds)


def _reordered(column: PreparedColumn, order: Ints) -> PreparedColumn:
    values = _taken(column.values, order)
    if column.leaves is None or column.leaf_counts is None:
        return PreparedColumn(column.field, values, dedup=column.dedup)
    starts, counts = _from_zero(column.leaf_counts)[:-1][order], column.leaf_counts[order]
    ends = _from_zero(counts)
    leaf_order = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], counts)
    leaves = _taken(column.leaves, leaf_order)
    return PreparedColumn(column.field, values, counts, leaves, column.dedup)


def _taken(strip: Strip, order: Ints) -> Strip:
    source = strip.source
    if isinstance(source, np.ndarray) and source.shape[1] < PACK_LIMIT_BYTES:
        source = source[order]
    else:
        # large rows stay where they are until the one copy
        source = [source[index] for index in order.tolist()]
    sizes = strip.sizes if isinstance(strip.sizes, int) else strip.sizes[order]
    specs = strip.specs if isinstance(strip.specs, int) else strip.specs[order]
    return Strip(len(order), source, sizes, specs)


def _lay(
    prepared: Prepared, columns: list[PreparedColumn], row_bounds: Ints, inline: bool
) -> Layout:
    laid: list[LaidColumn] = []
    strips: list[tuple[Strip, LaidStrip]] = []
    for column in columns:
        values = LaidStrip(column.values.source, np.zeros(column.values.count, VALUE), row_bounds)
        strips.append((column.values, values))
        leaves = None
        if column.leaves is not None and column.leaf_counts is not None:
            bounds = _from_zero(column.leaf_counts)[row_bounds]
            leaves = LaidStrip(column.leaves.source, np.zeros(bounds[-1], VALUE), bounds)
            strips.append((column.leaves, leaves))
        laid.append(LaidColumn(column.field, values, column.leaf_counts, leaves, column.dedup))
    for strip, target in strips:
        target.records["nbytes"], target.records["spec"] = strip.sizes, strip.specs
    targets, parcels = [target for _, target in strips], len(row_bounds) - 1
    inline_bounds = np.zeros(parcels + 1, np.int64)
    if inline and laid:
        _choose_inline(laid, prepared.n)
        inline_bounds = _number_inline(targets, parcels)
    copies = find_copies(laid) if any(column.dedup for column in laid) else Copies()
    sizes, range_bounds = _number([t for t in targets if not t.all_inline], parcels)
    layout = Layout(prepared.specs, row_bounds, range_bounds, sizes, laid, inline_bounds)
    copies.settle(layout)
    return layout


def _inline_room(sizes: Ints) -> Ints:
    return -(-sizes // INLINE_ALIGNMENT_BYTES) * INLINE_ALIGNMENT_BYTES


def _choose_inline(columns: list[LaidColumn], n: int) -> None:
    """Mark the small values, as far as a row may bring of such: its fields in order, the leaves of
    a value all or none."""
    used = np.zeros(n, np.int64)
    for column in columns:
        sizes = column.values.records["nbytes"].astype(np.int64)
        room = _inline_room(sizes)
        goes = (sizes <= INLINE_LIMIT_BYTES) & (used + room <= INLINE_ROW_BYTES)
        used += np.where(goes, room, 0)
        column.values.inline = goes if goes.any() else None
        if column.leaves is None or column.leaf_counts is None:
            continue
        sizes = column.leaves.records["nbytes"].astype(np.int64)
        small = sizes <= INLINE_LIMIT_BYTES
        row = np.repeat(np.arange(n), column.leaf_counts)
        takes = np.bincount(row, np.where(small, _inline_room(sizes), 0), n).astype(np.int64)
        fits = used + takes <= INLINE_ROW_BYTES
        used += np.where(fits, takes, 0)
        small &= fits[row]
        column.leaves.inline = small if small.any() else None


def _number_inline(strips: list[LaidStrip], parcels: int) -> Ints:
    """Say where inline values start, counted through the put: in each parcel strip by strip.
    Returns the bounds of the parcels in their bytes."""
    chosen = [strip for strip in strips if strip.inline is not None]
    within, bounds = np.zeros(parcels, np.int64), np.zeros(parcels + 1, np.int64)
    places: list[tuple[LaidStrip, Ints, Ints]] = []
    for strip in chosen:
        edges = np.asarray(strip.bounds)
        room = np.asarray(_inline_room(strip.records["nbytes"].astype(np.int64)))
        room[~np.asarray(strip.inline)] = 0
        ends = _from_zero(room)
        at, counts = ends[edges], _steps(edges)
        places.append((strip, ends[:-1] + np.repeat(within - at[:-1], counts), counts))
        within = within + _steps(at)
    np.cumsum(within, out=bounds[1:])
    if within.max(initial=0) > MAX_INLINE_BYTES or bounds[-1] >= _FURTHEST:
        for strip in chosen:
            strip.inline = None
        return np.zeros(parcels + 1, np.int64)
    for strip, starts, counts in places:
        starts = starts + np.repeat(bounds[:-1], counts)
        strip.records["range"][strip.inline] = starts[strip.inline]
        strip.records["owner"][strip.inline] = 1
    return bounds


class _Places(NamedTuple):
    """Where the values of a strip come in their parcels, before it is known where blocks end.

    counts: values a parcel. ranks: of large values, among the parcel's. mixed: None where all are
    large; else which are small, what they take, and where that ends in the parcel's blocks.
    """

    counts: Ints
    ranks: Ints
    mixed: tuple[np.ndarray, Ints, Ints] | None


def _places(strips: list[LaidStrip], parcels: int) -> tuple[list[_Places], Ints, Ints]:
    """Each strip's places, and per parcel the bytes that are packed and the large values."""
    packed, large = np.zeros(parcels, np.int64), np.zeros(parcels, np.int64)
    places: list[_Places] = []
    for strip in strips:
        bounds = np.asarray(strip.bounds)
        counts = _steps(bounds)
        if _is_large(strip):
            ranks = np.arange(len(strip.records)) + np.repeat(large - bounds[:-1], counts)
            large += counts
            places.append(_Places(counts, ranks, None))
            continue
        sizes = strip.records["nbytes"].astype(np.int64)
        small, elsewhere = sizes < PACK_LIMIT_BYTES, strip.elsewhere
        if strip.inline is not None:
            small &= ~strip.inline
        own = ~small if elsewhere is None else ~(small | elsewhere)
        room = np.where(small, _room(sizes), 0)
        ends, ranks = _from_zero(room), _from_zero(own)
        at, rank_at = ends[bounds], ranks[bounds]
        ends = ends[1:] + np.repeat(packed - at[:-1], counts)
        ranks = ranks[:-1] + np.repeat(large - rank_at[:-1], counts)
        packed += _steps(at)
        large += _steps(rank_at)
        places.append(_Places(counts, ranks, (small, room, ends)))
    return places, packed, large


def _number(strips: list[LaidStrip], parcels: int) -> tuple[np.ndarray, Ints]:
    """Give every value its range, numbered through the put: in each parcel blocks, then large ones.

    Returns the ranges' sizes (u8) and the bounds of the parcels in them.
    """
    if not strips:
        return np.zeros(0, U8), np.zeros(parcels + 1, np.int64)
    if all(s.bounds is strips[0].bounds and _is_large(s) for s in strips):
        return _number_large(strips)
    places, packed, large = _places(strips, parcels)
    blocks = -(-packed // BLOCK_STEP_BYTES)
    range_bounds = _from_zero(blocks + large)
    block_ends = np.zeros(range_bounds[-1] + 1, np.int64)
    sizes = np.zeros(range_bounds[-1], U8)
    for strip, (counts, ranks, mixed) in zip(strips, places, strict=True):
        records = strip.records
        ranges = ranks + np.repeat(range_bounds[:-1] + blocks, counts)
        if mixed is None:
            records["range"], sizes[ranges] = ranges, records["nbytes"]
            continue
        small, room, ends = mixed
        inside = np.where(small, (ends - 1) // BLOCK_STEP_BYTES, 0)
        ranges = np.where(small, np.repeat(range_bounds[:-1], counts) + inside, ranges)
        _end_blocks(block_ends, ranges[small], ends[small])
        before = np.where(inside > 0, block_ends[ranges - 1], 0)
        if strip.inline is None:
            records["range"] = ranges
        else:
            records["range"] = np.where(strip.inline, records["range"], ranges)
        records["delta"] = np.where(small, ends - room - before, 0)
        own = ~small if strip.elsewhere is None else ~(small | strip.elsewhere)
        sizes[ranges[own]] = records["nbytes"][own]
    is_block = block_ends[:-1] > 0
    starts = np.where(_first_of_parcel(range_bounds), 0, np.roll(block_ends[:-1], 1))
    sizes[is_block] = (block_ends[:-1] - starts)[is_block]
    return sizes, range_bounds


def _number_large(strips: list[LaidStrip]) -> tuple[np.ndarray, Ints]:
    """As `_number`, where each row has a large value in every strip: the same for all strips, but
    that each comes behind the one before."""
    bounds = np.asarray(strips[0].bounds)
    counts = _steps(bounds)
    range_bounds = len(strips) * bounds
    ranges = np.arange(bounds[-1]) + np.repeat(range_bounds[:-1] - bounds[:-1], counts)
    step = np.repeat(counts, counts)
    sizes = np.empty(range_bounds[-1], U8)
    for strip in strips:
        strip.records["range"], sizes[ranges] = ranges, strip.records["nbytes"]
        ranges += step
    return sizes, range_bounds


def _is_large(strip: LaidStrip) -> bool:
    """Whether every value is a range of its own: no blocks, then, and nothing to look for."""
    sizes = strip.records["nbytes"]
    return strip.skip is None and len(sizes) > 0 and int(sizes.min()) >= PACK_LIMIT_BYTES


def _steps(values: Ints) -> Ints:
    """`np.diff`, which is slow where there are few."""
    return values[1:] - values[:-1]


def _first_of_parcel(range_bounds: Ints) -> np.ndarray:
    first = np.zeros(range_bounds[-1] + 1, bool)
    first[range_bounds[:-1]] = True
    return first[:-1]


def _end_blocks(block_ends: Ints, ranges: Ints, ends: Ints) -> None:
    """Note where blocks end, as far as this strip knows: later strips of a parcel lie behind."""
    if len(ranges):
        last = np.append(ranges[1:] != ranges[:-1], True)
        block_ends[ranges[last]] = ends[last]
