"""Rows and groups of a store as a checkpoint has them: out as they stand at one moment, and in.

A group goes out whole in one call, between two changes of the store, so nothing of it is half done.
Leases stay behind: a row that is leased goes out as one that is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.errors import PartitionConflict, ProtocolError
from dataplane.metadata.shard.rows_out import names_of
from dataplane.metadata.shard.state import UNGROUPED, State
from dataplane.metadata.shard.units import ACKED, SPLIT
from dataplane.metadata.tables.columns import Array
from dataplane.metadata.tables.groups import CLOSED, UNKNOWN_SIZE
from dataplane.metadata.tables.incoming import ColumnIn, RowsIn, columns_in, rows_in
from dataplane.metadata.tables.key_index import KeyIndex, pairs, repeated
from dataplane.metadata.tables.small_values import check_inline
from dataplane.metadata.tables.tombstones import of_groups
from dataplane.wire.checkpoint import Progress, Restore, SaveDone, SurveyDone
from dataplane.wire.limits import ABSENT, NO_GROUP
from dataplane.wire.records import KEY, U4, VALUE, column
from dataplane.wire.tables import Rows, Table

MAX_UNITS_PER_SURVEY = 1 << 20
"""Keys of so many groups and rows are told at once: 16 MiB."""
MAX_ROWS_PER_SAVE = 4096
"""A larger group goes alone."""

_ROWS_FROM = 1 << 32
_BYTE = np.dtype("u1")


# out


def survey(state: State, cursor: int) -> SurveyDone:
    """The keys of the groups, and of rows without one, from a cursor on."""
    live = state.live()
    rows = live[state.group[live] == UNGROUPED]
    groups = state.groups.live()
    places = np.concatenate([groups, rows + _ROWS_FROM])
    here = places[places >= cursor][: MAX_UNITS_PER_SURVEY + 1]
    more = len(here) > MAX_UNITS_PER_SURVEY
    here = here[:MAX_UNITS_PER_SURVEY]
    closed = groups[state.groups.closed(groups)]
    there = len(closed) - int(state.groups.all_dropped(closed).sum())
    return SurveyDone(
        state.groups.index.keys[here[here < _ROWS_FROM]].tobytes(),
        state.index.keys[here[here >= _ROWS_FROM] - _ROWS_FROM].tobytes(),
        max(0, state.closed_groups - there),
        int(here[-1]) + 1 if more else 0,
    )


def save(state: State, groups: bytes, rows: bytes, nbytes: int) -> SaveDone:
    """The first of these groups and rows, as many as have about `nbytes`, at least one."""
    column(groups, KEY)
    column(rows, KEY)
    asked = pairs(groups)
    found, alone = state.groups.index.find(asked), state.index.find(pairs(rows))
    alone = np.where(state.group[np.maximum(alone, 0)] == UNGROUPED, alone, -1)
    counts = np.zeros(len(found), np.int64)
    counts[found >= 0] = state.groups.members.counts[found[found >= 0]]
    sizes = np.concatenate([counts, alone >= 0]).astype(np.int64)
    units = _fitting(sizes, MAX_ROWS_PER_SAVE)
    members = state.groups.members.gather(found[:units][found[:units] >= 0])[1].astype(np.int64)
    single = alone[: max(0, units - len(found))]
    slots = np.concatenate([members, single[single >= 0]])
    ends = np.cumsum(np.concatenate([[0], _row_bytes(state, slots)]))
    per_unit = np.diff(ends[np.concatenate([[0], np.cumsum(sizes[:units])])])
    units = _fitting(per_unit, nbytes)
    slots = slots[: int(sizes[:units].sum())]
    ids = found[:units]
    gone = asked[: len(ids)][ids < 0]
    return SaveDone(
        _table(state, slots, ids[ids >= 0], counts[: len(ids)][ids >= 0]),
        _progress(state, slots, ids[ids >= 0]),
        units,
        int((~state.tombstones.among(of_groups(gone))).sum()),
    )


def _fitting(sizes: Array, most: int) -> int:
    """How many of the first units together have at most so much, at least one."""
    return min(len(sizes), max(1, int(np.searchsorted(np.cumsum(sizes), most, "right"))))


def _row_bytes(state: State, slots: Array) -> Array:
    """The bytes of each row's values."""
    result = np.zeros(len(slots), np.int64)
    for one in state.fields.gather(slots, None)[0] if len(slots) else ():
        values = np.frombuffer(one.values, VALUE)
        result += np.where(values["owner"] == ABSENT, 0, values["nbytes"]).astype(np.int64)
        if one.leaf_counts:
            leaves = np.frombuffer(one.leaves, VALUE)
            row = np.repeat(np.arange(len(slots)), np.frombuffer(one.leaf_counts, U4))
            np.add.at(result, row, leaves["nbytes"].astype(np.int64))
    return result


def _table(state: State, slots: Array, groups: Array, counts: Array) -> Table:
    """The rows, group by group; groups without rows are named too."""
    keys = state.index.keys[slots].tobytes()
    rows = Rows(keys, names_of(state.names, slots, keys))
    if len(groups):
        index = np.full(len(slots), NO_GROUP, U4)
        index[: int(counts.sum())] = np.repeat(np.arange(len(groups), dtype=U4), counts)
        rows.group_index = index.tobytes()
        rows.group_keys = state.groups.index.keys[groups].tobytes()
        rows.group_names = names_of(state.groups.names, groups, rows.group_keys)
    if not len(slots):
        return Table(rows)
    columns, specs, owners, inline = state.fields.gather(slots, None)
    return Table(rows, columns, specs, owners, state.tags.table(slots), inline)


def _progress(state: State, slots: Array, ids: Array) -> Progress:
    groups = state.groups
    acked = {name: stage.rows.state[slots] == ACKED for name, stage in state.stages.items()}
    split = {name: stage.groups.state[ids] == SPLIT for name, stage in state.stages.items()}
    tagged = {name: present for name, present, _ in state.tags.held(slots) if not present.all()}
    return Progress(
        groups.expected[ids].astype(U4).tobytes(),
        (groups.seen[ids] - groups.members.counts[ids]).astype(U4).tobytes(),
        groups.dropped[ids].astype(U4).tobytes(),
        groups.closed(ids).astype(_BYTE).tobytes(),
        {name: one.astype(_BYTE).tobytes() for name, one in acked.items() if one.any()},
        {name: one.astype(_BYTE).tobytes() for name, one in split.items() if one.any()},
        {name: one.astype(_BYTE).tobytes() for name, one in tagged.items()},
    )


# in


@dataclass(slots=True)
class _Plan:
    """What a Restore brings, checked and as arrays."""

    rows: RowsIn | None
    columns: list[ColumnIn]
    groups: Array
    expected: Array
    gone: Array
    dropped: Array
    closed: Array


def restore(state: State, op: Restore) -> None:
    """Enter rows and groups that are new here. PartitionConflict where some are not.

    Readiness and the states of groups follow from what is there, so nothing that a file says can
    make the tables contradict each other.
    """
    plan = _checked(state, op)
    marks = {name: _marks(raw) for name, raw in op.progress.acked.items()}
    groups = state.add_groups(plan.groups, op.rows.group_names, UNKNOWN_SIZE)
    state.groups.expected[groups] = plan.expected
    state.groups.seen[groups], state.groups.dropped[groups] = plan.gone, plan.dropped
    slots = np.zeros(0, np.int64)
    if plan.rows is not None:
        slots = _enter_rows(state, op, plan.rows, plan.columns, groups)
    closed = groups[plan.closed]
    state.groups.phase[closed] = CLOSED
    state.groups.expected[closed] = state.groups.seen[closed]
    for name, done in marks.items():
        state.stage(name).ack(slots[done])
    for name, raw in op.progress.split.items():
        state.stage(name).groups.move(groups[_marks(raw)], SPLIT)
    made = len(closed) - int(state.groups.all_dropped(closed).sum())
    state.closed_groups += made + op.closed_groups
    state.written(slots, groups)
    if state.permits.counts and state.definition.free == "drop":
        state.permits.acked(state, groups)


def _enter_rows(
    state: State, op: Restore, rows: RowsIn, columns: Sequence[ColumnIn], groups: Array
) -> Array:
    joined = None
    if rows.group is not None and len(groups):
        joined = np.where(rows.group >= 0, groups[rows.group], UNGROUPED)
    slots = state.add_rows(rows.keys, rows.names, joined)
    numbers = state.fields.intern(op.specs, op.owners, op.inline)
    for one in columns:
        state.fields.write(slots, one, numbers, keep=False)
        # A checkpoint does not say whose value it is: whoever adds it again finds his own.
        for stage in state.stages.values():
            here = slots if one.here is None else slots[one.here]
            stage.add(here, state.fields.mask([one.field]))
    for name, values in op.tags.items():
        raw = op.progress.tagged.get(name)
        if raw is None:
            state.tags.set(slots, {name: values})
            continue
        present = _marks(raw)
        if present.any():
            some = values if len(values) == 1 else [values[at] for at in present.nonzero()[0]]
            state.tags.set(slots[present], {name: some})
    return slots


def _checked(state: State, op: Restore) -> _Plan:
    """Everything that could be wrong, before anything changes."""
    told = op.progress
    keys = _new(state.index, op.rows.keys, "row", state.partition)
    group_keys = _new(state.groups.index, op.rows.group_keys, "group", state.partition)
    rows = rows_in(op.rows) if len(keys) else None
    columns = columns_in(op.columns, len(keys), len(op.specs), len(op.owners)) if rows else []
    check_inline(columns, op.owners, op.inline)
    if op.closed_groups < 0 or (rows is None and (op.columns or op.tags)):
        raise ProtocolError("columns or tags without rows, or fewer than no groups")
    if op.rows.group_names is not None and len(op.rows.group_names) != len(group_keys):
        raise ProtocolError(f"{len(op.rows.group_names)} names for {len(group_keys)} groups")
    state.fields.check_room([one.field for one in columns])
    state.tags.check(op.tags, len(keys))
    for marks, count, known in (
        (told.acked, len(keys), state.stage),
        (told.split, len(group_keys), state.stage),
        (told.tagged, len(keys), None),
    ):
        _check_marks(marks, count, known)
    expected, gone, dropped = (
        column(raw, U4, len(group_keys)).astype(np.int32)
        for raw in (told.expected, told.gone, told.dropped)
    )
    closed = column(told.closed, _BYTE, len(group_keys)).astype(np.bool_)
    live = np.zeros(len(group_keys), np.int64)
    if rows is not None and rows.group is not None:
        live += np.bincount(rows.group[rows.group >= 0], minlength=len(group_keys))
    over = ~closed & (expected != UNKNOWN_SIZE) & (expected <= gone + live)
    if (dropped > gone).any() or (gone < 0).any() or (closed & (live == 0)).any() or over.any():
        raise ProtocolError("a group whose sizes contradict each other")
    return _Plan(rows, columns, group_keys, expected, gone, dropped, closed)


def _new(index: KeyIndex, raw: bytes, what: str, partition: str) -> Array:
    column(raw, KEY)
    keys = pairs(raw)
    if len(repeated(keys)):
        raise ProtocolError(f"a {what} is named twice")
    there = int((index.find(keys) >= 0).sum()) if len(keys) else 0
    if there:
        raise PartitionConflict(
            f"{there} of {len(keys)} {what}s are in partition {partition!r} already; restore where "
            "it is not, or drop it first",
            partition=partition,
        )
    return keys


def _check_marks(
    marks: dict[str, bytes], count: int, known: Callable[[str], object] | None
) -> None:
    for name, raw in marks.items():
        column(raw, _BYTE, count)
        if known is not None:
            known(name)


def _marks(raw: bytes) -> Array:
    return np.frombuffer(raw, _BYTE).astype(np.bool_)
