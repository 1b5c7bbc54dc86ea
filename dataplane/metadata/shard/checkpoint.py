"""Rows and groups of a store in a checkpoint: saved as they are at one moment, and restored.

A group is saved whole in one call, between two changes of the store, so it is consistent. Leases
are not saved: a leased row is saved as a ready one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from dataplane.errors import PartitionConflict, ProtocolError, counted
from dataplane.metadata.shard.blocks import (
    ACKED,
    MAX_GROUP_ROWS,
    PENDING,
    SPLIT,
    UNKNOWN_SIZE,
    Block,
    Group,
    KeyIndex,
    Rows,
)
from dataplane.metadata.shard.puts import PUT, PutPlan, enter_rows, new_parts
from dataplane.metadata.shard.rows_out import table_of, tags_held, values_of
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables import tags as tagging
from dataplane.metadata.tables.bits import bits_of
from dataplane.metadata.tables.incoming import RowsIn, ValuesIn, different, rows_in
from dataplane.metadata.tables.keys import keys_in
from dataplane.metadata.tables.pieces import ANY_STAGE, Chunk, Pieces
from dataplane.metadata.tables.remembered import of_group
from dataplane.metadata.tables.tags import MISSING
from dataplane.wire.checkpoint import Progress, Restore, SaveDone, SurveyDone
from dataplane.wire.limits import MAX_CHUNKS_PER_MESSAGE, MAX_CHUNKS_PER_RESTORE
from dataplane.wire.packed import column

MAX_UNITS_PER_SURVEY = 1 << 20
"""Keys of groups and rows in one reply: 16 MiB."""
MAX_ROWS_PER_SAVE = 4096
"""A larger group is saved alone."""

_BYTE = np.dtype("u1")


# out


def survey(state: State, cursor: int) -> SurveyDone:
    """The keys of the groups, and of rows without a group, from a cursor on."""
    units: list[tuple[int, Group | Block]] = [(g.number, g) for g in state.groups.values()]
    units += [(block.number, block) for block in state.blocks.values() if not block.group]
    units.sort(key=lambda one: one[0])
    groups: list[bytes] = []
    rows: list[bytes] = []
    left, more = MAX_UNITS_PER_SURVEY, 0
    for number, unit in units[bisect_left(units, cursor, key=lambda one: one[0]) :]:
        many = 1 if isinstance(unit, Group) else unit.live.bit_count()
        if many > left and (groups or rows):
            more = number
            break
        left -= many
        if isinstance(unit, Group):
            groups.append(unit.key)
        else:
            rows.append(unit.keys_of(unit.live))
    there = sum([one.closed and not one.all_dropped for one in state.groups.values()])
    closed = max(0, state.closed_groups - there)
    return SurveyDone(b"".join(groups), b"".join(rows), closed, more, state.losses.total)


def save(state: State, groups: bytes, rows: bytes, nbytes: int) -> SaveDone:
    """Save the first of these groups and rows, up to about `nbytes` but at least one."""
    asked = keys_in(groups)
    units: list[tuple[Group | None, list[tuple[Block, int]]]] = []
    for key in asked:
        group = state.groups.get(key)
        units.append((group, [] if group is None else [(b, b.live) for b in group.blocks]))
    for key in keys_in(rows):
        found = [part for part in state.find(key).parts if not part[0].group]
        units.append((None, found))
    many = size = pieces = 0
    chunks: set[Chunk] = set()
    for taken, (_, parts) in enumerate(units):
        many += sum([bits.bit_count() for _, bits in parts])
        for block, bits in parts:
            shape, known = block.values.shape, block.values.chunks
            used = [known[one.chunk] for one in shape.pieces if one.live & bits]
            pieces += len(used)
            size += sum([chunk.nbytes for chunk in {*used} - chunks])
            chunks.update(used)
        full = many > MAX_ROWS_PER_SAVE or pieces > MAX_CHUNKS_PER_MESSAGE
        if taken and (full or size > nbytes):
            units = units[:taken]
            break
    here = [group for group, _ in units if group is not None]
    gone = [key for key, (group, _) in zip(asked, units, strict=False) if group is None]
    saved = Rows([part for _, parts in units for part in parts])
    ended = sum([not state.tombstones.dropped(of_group(key)) for key in gone])
    table = table_of(state, saved, values_of(state, saved, None), [group.key for group in here])
    progress, lost = _progress(state, saved, here), state.losses.total
    return SaveDone(table, progress, len(units), ended, lost=lost)


def _progress(state: State, rows: Rows, groups: Sequence[Group]) -> Progress:
    acked: dict[str, bytes] = {}
    split: dict[str, bytes] = {}
    for name, stage in state.stages.items():
        done = bytes(stage.of(block).acked >> row & 1 for block, row in rows)
        apart = bytes(group.states[stage.number] == SPLIT for group in groups)
        acked |= {name: done} if any(done) else {}
        split |= {name: apart} if any(apart) else {}
    tagged = {
        name: bytes(value is not MISSING for value in values)
        for name, values in tags_held(rows).items()
        if any(value is MISSING for value in values)
    }
    sizes = [(one.expected, one.seen - one.live, one.dropped, one.closed) for one in groups]
    return Progress(sizes, acked, split, tagged)


# in


def restore(state: State, op: Restore) -> None:
    """Store rows and groups that are new here. Raises PartitionConflict if some are not.

    Readiness and the states of groups are derived from the rows, so a file cannot make groups
    inconsistent. The reply is remembered for retries.
    """
    rows, arrived = _checked(state, op)
    sizes = op.progress.sizes
    state.hold(arrived)
    names, groups = op.rows.group_names, []
    for at, (key, told) in enumerate(zip(keys_in(op.rows.group_keys), sizes, strict=True)):
        group = state.add_group(key, None if names is None else names[at], UNKNOWN_SIZE)
        group.expected, group.seen, group.dropped = told[:3]
        groups.append(group)
    blocks: list[Block] = []
    if rows is not None:
        blocks = _enter_rows(state, op, rows, arrived.pieces, groups)
    state.settled(arrived)
    closed = [group for group, told in zip(groups, sizes, strict=True) if told[3]]
    for group in closed:
        group.closed, group.expected = True, group.seen
    for name, raw in op.progress.split.items():
        for at, group in enumerate(groups):
            if raw[at]:
                state.stage(name).move_group(group, SPLIT)
    made = len(closed) - sum([one.all_dropped for one in closed])
    state.closed_groups += made + op.closed_groups
    state.written(blocks, groups)
    for group in groups:
        for stage in state.stages.values():
            stage.settle(group)
    if state.permits.counts and state.definition.free == "drop":
        state.permits.acked(state, [group for group in groups if not group.is_spent])
    state.producers.add(0 if rows is None else rows.count)
    state.remember(op.change, PUT)


def _enter_rows(
    state: State, op: Restore, rows: RowsIn, pieces: Pieces, groups: Sequence[Group]
) -> list[Block]:
    plan = PutPlan(rows, rows.count, {}, None, range(rows.count), list(groups), [])
    blocks = enter_rows(state, plan, pieces)
    for block, (_, places) in zip(blocks, new_parts(plan), strict=True):
        # A checkpoint does not say which stage added a value, so any stage may add it again.
        block.values = block.values.written_by(ANY_STAGE)
        for name, stage in state.stages.items():
            done = op.progress.acked.get(name, b"")
            if bits := bits_of(row for row, place in enumerate(places) if done and done[place]):
                stage.move(block, bits, PENDING, ACKED)
        for name, told in op.tags.items():
            raw = op.progress.tagged.get(name)
            having = [r for r, place in enumerate(places) if raw is None or raw[place]]
            if having:
                mine = told if len(told) == 1 else [told[places[row]] for row in having]
                state.set_tags(block, having, {name: mine})
    return blocks


def _checked(state: State, op: Restore) -> tuple[RowsIn | None, ValuesIn]:
    """Check everything that could be wrong, before anything changes."""
    told = op.progress
    keys = _new(state.index, op.rows.keys, "row", state.partition)
    group_keys = _new(state.groups, op.rows.group_keys, "group", state.partition)
    rows = rows_in(op.rows) if keys else None
    if op.closed_groups < 0:
        raise ProtocolError(
            f"the checkpoint has closed_groups={op.closed_groups}: expected 0 or more. "
            "Restore another checkpoint"
        )
    fields = op.values.fields
    if rows is None and (fields or op.tags):
        raise ProtocolError(
            f"the checkpoint has {counted(len(fields), 'field')} and "
            f"{counted(len(op.tags), 'tag')}, but no rows. Restore another checkpoint"
        )
    if op.rows.group_names is not None and len(op.rows.group_names) != len(group_keys):
        raise ProtocolError(
            "expected one name per group in the checkpoint, got "
            f"{counted(len(op.rows.group_names), 'name')} for {counted(len(group_keys), 'group')}. "
            "Restore another checkpoint"
        )
    arrived = state.arrived(op.values, len(keys), MAX_CHUNKS_PER_RESTORE)
    state.check_fields(arrived.pieces.fields)
    tagging.check(op.tags, len(keys), state.tag_names)
    for marks, count, known in (
        (told.acked, len(keys), state.stage),
        (told.split, len(group_keys), state.stage),
        (told.tagged, len(keys), None),
    ):
        for name, raw in marks.items():
            column(raw, _BYTE, count)
            if known is not None:
                known(name)
    live = Counter(rows.group if rows is not None and rows.group is not None else [])
    if len(told.sizes) != len(group_keys):
        raise ProtocolError(
            f"expected the sizes of {counted(len(group_keys), 'group')} in the checkpoint, got "
            f"{len(told.sizes)}. Restore another checkpoint"
        )
    for at, (expected, gone, dropped, closed) in enumerate(told.sizes):
        sound = 0 <= dropped <= gone <= MAX_GROUP_ROWS
        if not sound or not UNKNOWN_SIZE <= expected <= MAX_GROUP_ROWS:
            raise ProtocolError(
                f"group {at} of the checkpoint expects {counted(expected, 'row')}, and has "
                f"{counted(gone, 'freed row')}, of which {dropped} were dropped. Restore another "
                "checkpoint"
            )
        full = expected != UNKNOWN_SIZE and expected <= gone + live[at]
        if closed and not live[at]:
            raise ProtocolError(
                f"group {at} of the checkpoint is closed, but has no rows. Restore "
                "another checkpoint"
            )
        if full and not closed:
            raise ProtocolError(
                f"group {at} of the checkpoint is complete ({counted(expected, 'row')}), but is "
                "not closed. Restore another checkpoint"
            )
    return rows, arrived


def _new(
    index: KeyIndex | Mapping[bytes, object], raw: bytes, what: str, partition: str
) -> list[bytes]:
    keys = different(raw, what)
    there = sum([key in index for key in keys])
    if there:
        raise PartitionConflict(
            f"the checkpoint has {counted(len(keys), what)}, of which partition {partition!r} "
            f"already contains {there}: drop the partition first, or restore "
            "into another run",
            partition=partition,
        )
    return keys
