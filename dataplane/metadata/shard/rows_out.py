"""Outgoing rows: the table of a lease or of a read, and which rows a read selects."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from struct import Struct

import numpy as np

from dataplane.errors import FieldUnknown, RowsGone, counted, did_you_mean, mixed_releases
from dataplane.metadata.shard import blocks
from dataplane.metadata.shard.blocks import (
    ACKED,
    LEASED,
    PENDING,
    READY,
    Block,
    Rows,
    progress_field,
    progress_in,
)
from dataplane.metadata.shard.finishes import lease_of, positions_of
from dataplane.metadata.shard.puts import shown
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables.bits import all_of, rows_of
from dataplane.metadata.tables.keys import KEY_BYTES, PROGRESS, format_minted, keys_in
from dataplane.metadata.tables.outgoing import OutgoingValues
from dataplane.metadata.tables.pieces import Pieces, pieces_of
from dataplane.metadata.tables.tags import MISSING
from dataplane.metadata.tables.where import checked
from dataplane.wire import tables as wire
from dataplane.wire.limits import MAX_ROWS_PER_MESSAGE, NO_GROUP
from dataplane.wire.packed import KEY, U4, column
from dataplane.wire.tables import Name, Scalar, Table, Where

_PLACE = Struct("<QH")
"""the number of a block, and a row of it"""


def _leased_rows(state: State, number: int) -> Rows:
    """The unfinished rows of a lease. Raises RowsGone if some were dropped."""
    lease = lease_of(state, number)
    held, left = lease.held, lease.many_left
    if len(held) < left:
        gone = left - len(held)
        raise RowsGone(
            f"lease {number} had {counted(left, 'unfinished row')}, of which {gone} "
            f"{'was' if gone == 1 else 'were'} dropped or lost: claim again",
            rows=gone,
        )
    return held


def leased_at(state: State, number: int, index: bytes) -> tuple[Rows, bytes]:
    """The unfinished rows at these indices (u4) of a lease, and the indices that they have.
    Raises InvalidRows for an index that the lease does not have."""
    lease = lease_of(state, number)
    positions = positions_of(lease, index)
    at: dict[int, tuple[Block, int]] = {}
    for part in lease.at(positions):
        there = lease.left[part.number] & part.block.live
        at |= {
            place: (part.block, row)
            for place, row in zip(part.at, part.rows, strict=True)
            if there >> row & 1
        }
    places = sorted(at)
    left = np.array([positions[place] for place in places], U4).tobytes()
    return Rows.of(at[place] for place in places), left


def table(
    state: State, rows: Rows | int, fields: Sequence[str] | None = None, stage: str = ""
) -> Table:
    """A table of these rows, or of the unfinished ones of a lease.

    stage: the claiming stage, which also gets its earlier progress of these rows. A claim leaves
    out a field that no row ever had; other reads raise FieldUnknown for it. Raises RowsGone if
    leased rows were dropped.
    """
    rows = _leased_rows(state, rows) if isinstance(rows, int) else rows
    here = fields if fields is None else known(state, fields)
    if fields is not None and here is not None and len(here) < len(fields) and not stage:
        check_known(state, fields)
    return table_of(state, rows, values_of(state, rows, here, stage))


def check_known(state: State, fields: Sequence[str], stage: str = "") -> None:
    """Raise FieldUnknown for a field that no row has ever had. stage: the claiming stage, which
    may also name what it stored with a release."""
    for name in fields:
        if not state.fields.get(name) and progress_field(stage, name) not in state.progress:
            there = sorted(name for name, had in state.fields.items() if had)
            raise FieldUnknown(
                f"no row has a field {name!r}{did_you_mean(name, there)}: use one of the fields "
                f"{there}",
                field=name,
            )


def table_of(
    state: State, rows: Rows, values: OutgoingValues, groups: Sequence[bytes] = ()
) -> Table:
    """A table of rows. groups: listed first, also if none of these rows is in them."""
    return Table(on_wire(state, rows, groups), values.on_wire(), tags_of(rows))


def claimed(state: State, rows: Rows, fields: Sequence[str] | None, stage: str) -> OutgoingValues:
    """What a claim receives of these rows."""
    here = None if fields is None else known(state, fields)
    return values_of(state, rows, here, stage)


def known(state: State, fields: Sequence[str]) -> list[str]:
    """The given fields that some row has had."""
    return list(filter(state.fields.get, fields))


def values_of(
    state: State, rows: Rows, fields: Sequence[str] | None, stage: str = ""
) -> OutgoingValues:
    """The values of these fields, or of all fields (None), with all of a stage's progress."""
    if not state.progress:
        return OutgoingValues([(block.values, bits) for block, bits in rows.parts], fields)
    wanted = None if fields is None else dict.fromkeys(fields)
    parts = []
    for block, bits in rows.parts:
        own, progress = _own_and_progress(block.values, bits, stage)
        if fields is not None:
            own = own.only(fields)
        if wanted is not None:
            wanted |= dict.fromkeys(progress.fields)
        parts.append((own.overlaid(progress, keep=True)[0] if progress.chunks else own, bits))
    return OutgoingValues(parts, None if wanted is None else list(wanted))


def _own_and_progress(values: Pieces, bits: int, stage: str) -> tuple[Pieces, Pieces]:
    """The rows' own fields; and a stage's progress with these rows, where a row has no field of
    that name."""
    fields = values.fields
    own = values.only([field for field in fields if PROGRESS not in field])
    names = progress_in(fields, stage) if stage else {}
    if not names:
        return own, pieces_of(values.count)
    progress = values.only(names).without(all_of(values.count) & ~bits).renamed(names)
    for name in names.values():
        progress = progress.without(own.live(name), [name])
    return own, progress


def on_wire(state: State, rows: Rows, first: Sequence[bytes] = ()) -> wire.Rows:
    """Keys, names and groups of these rows, in wire form. The given groups come first."""
    keys = rows.keys
    names = blocks.names_of(rows, keys)
    groups = dict.fromkeys([*first, *[block.group for block, _ in rows.parts]])
    if len(groups) == 1:
        raw = bytes(U4.itemsize * len(rows))
    else:
        numbers = {key: number for number, key in enumerate(filter(None, groups))} | {b"": NO_GROUP}
        many = [bits.bit_count() for _, bits in rows.parts]
        raw = np.repeat(np.array([numbers[b.group] for b, _ in rows.parts], U4), many).tobytes()
    groups.pop(b"", None)
    if not groups:
        return wire.Rows(keys, names)
    group_keys, given = b"".join(groups), [state.groups[key].given for key in groups]
    if all([name is None for name in given]):
        return wire.Rows(keys, names, raw, group_keys)
    shown_names = [
        format_minted(key) if name is None else name
        for key, name in zip(groups, given, strict=True)
    ]
    return wire.Rows(keys, names, raw, group_keys, shown_names)


def tags_of(rows: Rows) -> dict[str, list[Scalar]]:
    """Every tag that one of the rows has, one value per row; None if a row lacks it."""
    return {
        name: [None if value is MISSING else value for value in values]
        for name, values in tags_held(rows).items()
    }


def tags_held(rows: Rows) -> dict[str, list[Scalar]]:
    """The same, with `MISSING` for a row that lacks a tag."""
    found: dict[str, list[Scalar]] = {}
    at = 0
    for block, bits in rows.parts:
        many = bits.bit_count()
        if block.tags is not None:
            for name, values in block.tags.items(rows_of(bits)):
                known = found.setdefault(name, [])
                known += [MISSING] * (at - len(known))
                known += values
        at += many
    for values in found.values():
        values += [MISSING] * (at - len(values))
    return found


def find_rows(state: State, raw: bytes, names: Sequence[Name] | None = None) -> Rows:
    """The rows of these keys, in their order. Raises RowsGone if one does not exist."""
    if len(raw) % KEY_BYTES:
        column(raw, KEY)
    found = state.find(raw)
    if len(found) * KEY_BYTES < len(raw):
        keys = keys_in(raw)
        gone = [i for i, key in enumerate(keys) if key not in state.index]
        dropped = [i for i in gone if state.tombstones.dropped(keys[i])]
        shown_names = shown(names, keys, gone)
        some = f"{len(gone)} of the {len(keys)} rows asked for, for example "
        raise RowsGone(
            f"partition {state.partition!r} does not contain {some if len(keys) > 1 else 'row '}"
            f"{', '.join(map(repr, shown_names))}: a missing row may never have been put, may have "
            "been freed or dropped, or may have been lost with a peer. part.lost() lists the lost "
            "rows",
            keys=shown_names,
            dropped=shown(names, keys, dropped),
            rows=len(gone),
        )
    return found


def read(
    state: State,
    rows: wire.Rows | None = None,
    where: Where | None = None,
    limit: int = 0,
    after: bytes = b"",
) -> tuple[Rows, bool]:
    """Return the rows that a read selects, and whether there are more. They are valid until the
    next change.

    after: the position of the previous row, from `place_of`. Reads all rows, or those that match
    a filter.
    """
    wanted = None if where is None else checked(where)
    most = min(limit, MAX_ROWS_PER_MESSAGE) if limit > 0 else MAX_ROWS_PER_MESSAGE
    parts = state.rows.parts if rows is None else find_rows(state, rows.keys, rows.names).parts
    if after:
        parts = _behind(parts, after)
    found, left = [], most + 1
    for block, bits in parts:
        if wanted is not None:
            bits = state.test(wanted, block, bits)
        if bits:
            found.append((block, bits))
            left -= bits.bit_count()
        if left <= 0:
            break
    all_of_them = Rows(found)
    return all_of_them.first(most), len(all_of_them) > most


def overview(state: State, rows: Rows) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """For each field, 1 for a row that has it; for each stage, the state of each row: PENDING,
    READY, LEASED or ACKED. A byte per row."""
    has: dict[str, bytearray] = {}
    states = {name: bytearray() for name in state.stages}
    at = 0
    for block, bits in rows.parts:
        places = rows_of(bits)
        end = at + len(places)
        for field in block.values.fields:
            there = block.values.live(field)
            if there & bits and PROGRESS not in field:
                column = has.setdefault(field, bytearray(len(rows)))
                column[at:end] = bytes([there >> row & 1 for row in places])
        for name, stage in state.stages.items():
            mine = stage.of(block)
            known = (mine.ready, READY), (mine.leased, LEASED), (mine.acked, ACKED)
            states[name] += bytes(
                [next((kind for mask, kind in known if mask >> row & 1), PENDING) for row in places]
            )
        at = end
    return (
        {field: bytes(one) for field, one in has.items()},
        {name: bytes(one) for name, one in states.items()},
    )


def place_of(rows: Rows) -> bytes:
    """The position of the last of these rows: the same in every copy of the store, and never
    reused."""
    block, bits = rows.parts[-1]
    return _PLACE.pack(block.number, bits.bit_length() - 1)


def _behind(parts: Sequence[tuple[Block, int]], place: bytes) -> list[tuple[Block, int]]:
    """The rows behind a position. Blocks are numbered in order of arrival."""
    if len(place) != _PLACE.size:
        raise mixed_releases(
            f"invalid read position: expected {_PLACE.size} bytes, got {len(place)}"
        )
    number, row = _PLACE.unpack(place)
    first = bisect_left(parts, number, key=lambda part: part[0].number)
    rest = list(parts[first:])
    if rest and rest[0][0].number == number:
        block, bits = rest[0]
        rest[0] = block, bits >> row + 1 << row + 1
    return rest
