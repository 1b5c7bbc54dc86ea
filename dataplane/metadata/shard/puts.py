"""Puts and adds: everything is checked first, then everything is written.

`plan_put` changes nothing and raises what the put would raise, so a peer can ask before it moves
bytes; `apply_put` cannot fail any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dataplane.errors import (
    FieldExists,
    GroupClosed,
    InvalidRows,
    PartitionSealed,
    ProtocolError,
    RowsDropped,
    counted,
    without_group,
)
from dataplane.memory.extents import some
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables.columns import Array
from dataplane.metadata.tables.groups import UNKNOWN_SIZE, UNLIMITED
from dataplane.metadata.tables.incoming import ColumnIn, RowsIn, columns_in, rows_in
from dataplane.metadata.tables.interning import Numbers
from dataplane.metadata.tables.names import format_minted
from dataplane.metadata.tables.small_values import check_inline
from dataplane.metadata.tables.tombstones import of_groups
from dataplane.wire.tables import Column, Name, Owner, Rows, Scalar, Spec

_NONE = np.zeros(0, np.int64)
SHOWN_NAMES = 8
"""How many names an error carries."""


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """kept: per field, rows whose value was there already and stayed. gone: rows that were passed
    over, because they were here before and have been freed."""

    kept: dict[str, int] = field(default_factory=dict)
    closed_groups: int = 0
    gone: int = 0


@dataclass(slots=True)
class PutPlan:
    """A checked put. slots: -1 for new rows. groups: id per entry of the message's groups. there:
    which rows of the message it is about, where some are passed over. reuse: names that are
    remembered may be new rows'. holder: whose permits its new groups use; 0: nobody's."""

    rows: RowsIn
    columns: list[ColumnIn]
    tags: Mapping[str, Sequence[Scalar]]
    slots: Array
    new: Array
    groups: Array
    new_groups: Array
    keep: bool
    there: Array | None = None
    reuse: bool = False
    sound: bool = False
    """what the columns name of specs and owners was checked too"""
    holder: int = 0

    @property
    def continues(self) -> bool:
        """Is it about a group or row that is here already? The first one speaks for all."""
        known = self.groups if len(self.groups) else self.slots
        return bool(len(known) and known[0] >= 0)

    def bring(
        self,
        state: State,
        columns: Sequence[Column],
        specs: Sequence[Spec],
        owners: Sequence[Owner],
        inline: bytes,
    ) -> None:
        """The columns as they came, checked; what they bring for rows that are passed over goes."""
        there = self.there
        count = self.rows.count if there is None else len(there)
        if not self.sound or there is not None:
            self.columns = columns_in(columns, count, len(specs), len(owners))
        check_inline(self.columns, owners, inline)
        if there is not None:
            self.columns = [
                discard(state, one, there, specs, owners, inline) for one in self.columns
            ]


def plan_put(
    state: State,
    rows: Rows,
    columns: Sequence[Column],
    tags: Mapping[str, Sequence[Scalar]],
    *,
    replace: bool,
    keep: bool,
    reuse: bool = False,
    named: tuple[int, int] | None = None,
) -> PutPlan:
    """Check a put against the store; what its records name only where it is known how many specs
    and owners there are (`named`)."""
    if replace and keep:
        raise ProtocolError("a put either replaces values or keeps them")
    incoming = rows_in(rows)
    fields = columns_in(columns, incoming.count, *(named or (None, None)))
    state.fields.check_room([one.field for one in fields])
    state.tags.check(tags, incoming.count)
    slots = state.index.find(incoming.keys)
    new = (slots < 0).nonzero()[0]
    there = None
    if len(new) and len(state.tombstones) and not reuse:
        gone = _gone(state, incoming, new)
        if len(gone):
            there = np.ones(incoming.count, np.bool_)
            there[gone] = False
            incoming, slots = _passed_over(incoming, there), slots[there]
            tags = {name: only(values, there) for name, values in tags.items()}
            fields = [] if not incoming.count else [cut(one, there) for one in fields]
            new = (slots < 0).nonzero()[0]
    if len(new):
        _check_new_rows(state, incoming, new, reuse)
    if len(new) < incoming.count and not (replace or keep):
        _check_fields(state, incoming, slots, fields)
    groups, new_groups = _plan_groups(state, incoming, slots, new, reuse)
    return PutPlan(
        incoming,
        fields,
        tags,
        slots,
        new,
        groups,
        new_groups,
        keep,
        there,
        reuse,
        named is not None,
    )


def apply_put(
    state: State, plan: PutPlan, specs: Sequence[Spec], owners: Sequence[Owner], inline: bytes
) -> PutOutcome:
    """Carry out a plan made for this very state."""
    gone = 0 if plan.there is None else len(plan.there) - plan.rows.count
    if not plan.rows.count:
        return PutOutcome(gone=gone)
    if plan.reuse and len(state.tombstones):
        state.tombstones.remove(plan.rows.keys[plan.new])
        state.tombstones.remove(of_groups(plan.rows.group_keys[plan.new_groups]))
    numbers = state.fields.intern(specs, owners, inline)
    touched = _enter_groups(state, plan)
    _enter_rows(state, plan)
    if len(plan.new) < plan.rows.count:  # known rows may be in groups that the message leaves out
        touched = state.groups_of(plan.slots)
    kept: dict[str, int] = {}
    if len(plan.new) == plan.rows.count:
        state.fields.write_new(plan.slots, plan.columns, numbers)
    else:
        kept = _write(state, plan.slots, plan.columns, numbers, plan.keep)
    if plan.tags:
        state.tags.set(plan.slots, plan.tags)
    closed = state.written(plan.slots, touched)
    if plan.tags and len(plan.new) < plan.rows.count:
        state.retag(plan.slots)
    return PutOutcome(kept, closed, gone)


def add_fields(
    state: State,
    stage: Stage,
    slots: Array,
    columns: Sequence[ColumnIn],
    specs: Sequence[Spec],
    owners: Sequence[Owner],
    inline: bytes,
) -> dict[str, int]:
    """Write columns that `check_added` let through; values that are there stay, and are counted."""
    kept = _write(state, slots, columns, state.fields.intern(specs, owners, inline), keep=True)
    stage.add(slots, state.fields.mask([one.field for one in columns if one.here is None]))
    for one in columns:
        if one.here is not None:
            stage.add(slots[one.here], state.fields.mask([one.field]))
    state.written(slots, state.groups_of(slots))
    return kept


def check_added(
    state: State, stage: Stage | None, slots: Array, columns: Sequence[ColumnIn], there: Array
) -> None:
    """FieldExists where another writer has set a field of these rows. What the stage itself added,
    before its rows came to it again, stays; None: of progress, which is of no field that is there.
    there: which positions of the columns they are."""
    mask = state.fields.known_mask([one.field for one in columns])
    if not np.count_nonzero(state.fields.present[slots] & np.uint64(mask)):
        return
    for one in columns:
        taken = state.fields.have(one.field, slots)
        if one.here is not None:
            taken &= one.here[there]
        if taken.any() and stage is not None:
            taken &= ~stage.added(slots, state.fields.mask([one.field]))
        if taken.any():
            keys = names_at(state, slots[taken])
            said = f"{counted(int(taken.sum()), 'row has', 'rows have')} a field {one.field!r} "
            said += f"already, such as {keys[0]!r}"
            if stage is not None:
                said += f", which another writer than stage {stage.name!r} has set"
            raise FieldExists(
                f"{said}; nothing of this call was stored: "
                f"{'add it' if stage is not None else 'give progress back'} under another name",
                field=one.field,
                keys=keys,
            )


def _write(
    state: State, slots: Array, columns: Sequence[ColumnIn], numbers: Numbers, keep: bool
) -> dict[str, int]:
    """Write columns of rows; per field how many values stayed, where some did."""
    if not keep:
        for one in columns:
            over = slots if one.here is None else slots[one.here]
            for stage in state.stages.values():
                stage.overwritten(over, state.fields.mask([one.field]))
    stayed = {one.field: state.fields.write(slots, one, numbers, keep) for one in columns}
    return {field: count for field, count in stayed.items() if count}


def shown(names: Sequence[Name] | None, keys: Array, positions: Array) -> list[Name]:
    """The first few names at these positions, for a message and its details."""
    few = positions[:SHOWN_NAMES].tolist()
    if names is not None:
        return [names[i] for i in few]
    return [format_minted(keys[i].tobytes()) for i in few]


def names_at(state: State, slots: Array) -> list[Name]:
    """The first few names of rows that are here, for a message and its details."""
    return [state.name(slot) for slot in slots[:SHOWN_NAMES].tolist()]


def _gone(state: State, rows: RowsIn, new: Array) -> Array:
    """Those of these rows that were here under given names, or their group was, and are freed."""
    gone = state.tombstones.freed(rows.keys[new])
    if rows.group is not None and len(rows.group_keys):
        over = state.tombstones.freed(of_groups(rows.group_keys))
        index = rows.group[new]
        gone |= (index >= 0) & over[index]
    return new[gone]


def _passed_over(rows: RowsIn, there: Array) -> RowsIn:
    """The rows without those that are passed over."""
    at = there.nonzero()[0].tolist()
    names = None if rows.names is None else [rows.names[i] for i in at]
    group = None if rows.group is None else rows.group[there]
    return RowsIn(len(at), rows.keys[there], names, group, rows.group_keys, rows.group_names)


def cut(one: ColumnIn, there: Array) -> ColumnIn:
    """A column without some rows, whose references the caller knows to be none yet."""
    counts, leaves = one.counts, one.leaves
    if counts is not None:
        leaves, counts = leaves[np.repeat(there, counts)], counts[there]
    here = None if one.here is None else one.here[there]
    return ColumnIn(one.field, one.values[there], here, counts, leaves)


def discard(
    state: State,
    one: ColumnIn,
    there: Array,
    specs: Sequence[Spec],
    owners: Sequence[Owner],
    inline: bytes,
) -> ColumnIn:
    """The column without rows that are gone; the references they brought are let go."""
    refused = ~there if one.here is None else ~there & one.here
    numbers = state.fields.intern(specs, owners, inline)
    if one.counts is not None:
        state.fields.refuse(one.leaves[~np.repeat(there, one.counts)], numbers)
    state.fields.refuse(one.values[refused], numbers)
    return cut(one, there)


def only(values: Sequence[Scalar], there: Array) -> Sequence[Scalar]:
    """A tag's values without those of some rows; one for all stays."""
    if len(values) != len(there) or len(values) == 1:
        return values
    return [value for value, keep in zip(values, there.tolist(), strict=True) if keep]


def _check_new_rows(state: State, rows: RowsIn, new: Array, reuse: bool) -> None:
    dropped = _NONE
    if len(state.tombstones) and not reuse:
        dropped = new[state.tombstones.among(rows.keys[new])]
    if len(dropped):
        keys = shown(rows.names, rows.keys, dropped)
        raise RowsDropped(
            f"{counted(len(dropped), 'row of this put was', 'rows of this put were')} dropped from "
            f"partition {state.partition!r}: {keys}; their trajectories are "
            "cancelled: put the others without them",
            keys=keys,
            rows=len(dropped),
        )
    size = state.definition.group_size
    if size is not None:
        alone = len(new) if rows.group is None else int(np.count_nonzero(rows.group[new] < 0))
        if alone:
            raise without_group(alone, size)
    if state.sealed:
        if rows.group is not None and len(state.tombstones) and not reuse:
            groups = np.unique(rows.group[new])
            _check_new_groups(state, rows, groups[groups >= 0])  # the seal may have dropped them
        raise PartitionSealed(
            f"partition {state.partition!r} is sealed and takes no new rows; "
            f"{len(new)} of this put are new: put them into another partition (new fields of rows "
            "that are in are welcome). Where the same program ran before under this run's name, it "
            "finds what it left: connect(fresh=True) ends that first",
            partition=state.partition,
            rows=len(new),
        )


def _check_fields(state: State, rows: RowsIn, slots: Array, fields: Sequence[ColumnIn]) -> None:
    known = (slots >= 0).nonzero()[0]
    for one in fields:
        there = state.fields.have(one.field, slots[known])
        if one.here is not None:
            there &= one.here[known]
        if there.any():
            keys = shown(rows.names, rows.keys, known[there])
            raise FieldExists(
                f"{counted(int(there.sum()), 'row has', 'rows have')} a field {one.field!r} "
                f"already, such as {keys[0]!r}; fields are written once, replace=True "
                "writes a new value",
                field=one.field,
                keys=keys,
            )


def _plan_groups(
    state: State, rows: RowsIn, slots: Array, new: Array, reuse: bool
) -> tuple[Array, Array]:
    """(id per group of the message, -1 if new; positions of those that are to be made)."""
    if rows.group is None or not len(rows.group_keys):
        return _NONE, _NONE
    groups = state.groups.index.find(rows.group_keys)
    if len(new) < rows.count:
        _check_known_groups(state, rows, slots, groups)
    joining = rows.group[new]
    joining = joining[joining >= 0]
    if not len(joining):
        return groups, _NONE
    counts = np.bincount(joining, minlength=len(groups))
    unknown = (groups < 0) & (counts > 0)
    made = unknown.nonzero()[0]
    if len(made) and len(state.tombstones) and not reuse:
        _check_new_groups(state, rows, made)
    _check_sizes(state, rows, groups, counts)
    return groups, made


def _check_new_groups(state: State, rows: RowsIn, made: Array) -> None:
    dropped = made[state.tombstones.among(of_groups(rows.group_keys[made]))]
    if len(dropped):
        names = shown(rows.group_names, rows.group_keys, dropped)
        raise RowsDropped(
            f"the groups {names} were dropped; they are cancelled: put the others without them",
            groups=names,
        )


def _check_known_groups(state: State, rows: RowsIn, slots: Array, groups: Array) -> None:
    assert rows.group is not None
    known = ((slots >= 0) & (rows.group >= 0)).nonzero()[0]
    if not len(known):
        return
    named = groups[rows.group[known]]
    # an unknown group is no row's, not even a row's that has none
    wrong = known[(named < 0) | (state.group[slots[known]] != named)]
    if len(wrong):
        keys = shown(rows.names, rows.keys, wrong)
        raise InvalidRows(
            f"the row {keys[0]!r} is known in another group; a row's group never changes", keys=keys
        )


def _check_sizes(state: State, rows: RowsIn, groups: Array, counts: Array) -> None:
    size = state.definition.group_size
    over = counts > state.groups.room(groups, UNLIMITED if size is None else size)
    if some(over):
        bad = over.nonzero()[0]
        names = shown(rows.group_names, rows.group_keys, bad)
        raise GroupClosed(
            f"the group {names[0]!r} takes no more rows: it is closed, or closes with fewer than "
            f"the {int(counts[bad[0]])} that this put adds",
            groups=names,
        )


def _enter_groups(state: State, plan: PutPlan) -> Array:
    """Make the plan's new groups. Returns the groups that get new rows or values."""
    made = plan.new_groups
    if len(made):
        given = plan.rows.group_names
        names = None if given is None else [given[i] for i in made.tolist()]
        size = state.definition.group_size or UNKNOWN_SIZE
        plan.groups[made] = state.add_groups(plan.rows.group_keys[made], names, size)
        if plan.holder:
            state.permits.use(plan.holder, plan.groups[made])
    if not len(plan.groups):
        return _NONE
    return plan.groups[plan.groups >= 0]


def _enter_rows(state: State, plan: PutPlan) -> None:
    """Make the plan's new rows and enter their slots in it."""
    rows, new = plan.rows, plan.new
    if not len(new):
        return
    whole = len(new) == rows.count
    names = rows.names
    if names is not None and not whole:
        names = [names[i] for i in new.tolist()]
    groups = None
    if len(plan.groups) and rows.group is not None:
        index = rows.group if whole else rows.group[new]
        groups = np.where(index >= 0, plan.groups[index], -1)
    plan.slots[new] = state.add_rows(rows.keys if whole else rows.keys[new], names, groups)
