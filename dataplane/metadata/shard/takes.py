"""Taking ready units from a lane under a lease.

A take is met from the front of one lane, whole or not at all; what it costs depends on the units
taken, never on how many rows there are. Of the first ready units, those whose largest value lies on
the claimant's host go first, eight times past the oldest at most: where writers and readers share
hosts, rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dataplane.errors import FrameTooLarge, ProtocolError, counted
from dataplane.metadata.shard.lanes import Lane
from dataplane.metadata.shard.leases import Lease
from dataplane.metadata.shard.pull_credit import PullCredit, pulled_per_row, rounding
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.state import UNGROUPED, State
from dataplane.metadata.tables.columns import Array
from dataplane.wire.limits import MAX_FRAME_BYTES
from dataplane.wire.messages import Want
from dataplane.wire.tables import Where

_FIRST_LOOK = 64
NEAR_UNITS = 64
"""How far into a lane units are looked for that lie near whoever claims."""
GRANTED_BYTES = MAX_FRAME_BYTES * 3 // 4
"""Of records of values, and of values that live here, in one grant; names and tags come beside."""
NEAR_TURNS = 8
"""How often others may be taken past a lane's oldest unit."""

Kept = tuple[str, Where | None]
"""Ready units of this kind and filter, which are kept for a claim of theirs."""


@dataclass(frozen=True, slots=True)
class Taken:
    """lease None: nothing was taken. needed_bytes: cut by the credit, which had to be this much for
    more, or any. slots: the rows, for `Store.table`; they hold until the next change."""

    lease: int | None = None
    units: int = 0
    needed_bytes: int = 0
    slots: Array | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class _Found:
    """The first units of a lane that are not kept for others: positions in its buffer, and in
    which order they are to be taken. whole: all of the lane up to the last one of them."""

    ids: Array
    positions: Array
    whole: bool = True
    oldest: int = -1
    """where they are ordered by where they lie: the position of the first one of all"""
    blocked: bool = False
    needed_bytes: int = 0

    def first(self, count: int) -> _Found:
        return replace(self, ids=self.ids[:count], positions=self.positions[:count])


def take(
    state: State,
    stage: Stage,
    want: Want,
    holder: int,
    now: float,
    claim: int,
    credit: PullCredit | None,
    sealed: bool,
    kept: Sequence[Kept],
) -> Taken:
    """See `Store.take`."""
    if want.unit not in ("rows", "groups"):
        raise ProtocolError(f"a claim is for rows or groups, not {want.unit!r}")
    units = stage.units(want.unit)
    lane, ready = units.lane(want.where), units.ready(want.where)
    if want.budget_tag is None:
        least = 1 if sealed else max(1, min(want.minimum, want.count))
        if ready < least or want.count < 1:
            return Taken()
        far = credit is not None and state.fields.scattered
        look = max(NEAR_UNITS, want.count) if far and ready > want.count else want.count
        picked = _first(state, stage, want.unit, lane, min(ready, look), kept)
        if len(picked.ids) > want.count:
            assert credit is not None
            near = _near(state, stage, want.unit, lane, picked, credit.address)
            picked = near.first(want.count)
    else:
        least = 1
        picked = _within_budget(state, stage, want, lane, kept)
    fields = credit.fields if credit else None
    picked = _within_message(state, stage, want, picked, least, fields)
    if credit is not None and credit.most_bytes:
        picked = _within_credit(state, stage, want, picked, least, credit)
    full = picked.blocked or picked.needed_bytes or sealed or want.budget_tag is None
    if len(picked.ids) < least or not full:
        return Taken(needed_bytes=picked.needed_bytes)
    ids = _consume(lane, picked)
    lease = _lease(state, stage, want.unit, ids, holder, now, claim)
    return Taken(lease.number, len(ids), picked.needed_bytes, lease.slots)


def _consume(lane: Lane, picked: _Found) -> Array:
    """The units leave their lane. They are in its order again."""
    if picked.oldest < 0:
        if picked.whole:
            lane.consume(int(picked.positions[-1]))
        return picked.ids
    order = np.argsort(picked.positions, kind="stable")
    passed = picked.positions[order[0]] != picked.oldest
    lane.passed_over = lane.passed_over + 1 if passed else 0
    return picked.ids[order]


def _lease(
    state: State, stage: Stage, unit: str, ids: Array, holder: int, now: float, claim: int
) -> Lease:
    if unit == "rows":
        slots = ids
        stage.take_rows(slots)
    else:
        _, slots = stage.take_groups(ids)
    lease = Lease(
        number=next(state.lease_numbers),
        stage=stage,
        unit=unit,
        slots=slots,
        incarnations=state.incarnation[slots],
        left=np.ones(len(slots), np.bool_),
        holder=holder,
        started=now,
        claim=claim,
    )
    state.leases.add(lease)
    return lease


def _first(
    state: State, stage: Stage, unit: str, lane: Lane, count: int, kept: Sequence[Kept]
) -> _Found:
    """The first `count` units that are not kept for others, fewer where there are not so many."""
    look = count
    while True:
        ids, positions = lane.first(look)
        if not kept:
            return _Found(ids, positions)
        mine = ~_are_kept(state, stage, unit, ids, kept)
        if np.count_nonzero(mine) >= count or len(ids) < look:
            chosen = mine.nonzero()[0][:count]
            whole = not len(chosen) or int(chosen[-1]) == len(chosen) - 1
            return _Found(ids[chosen], positions[chosen], whole)
        look *= 2


def _are_kept(state: State, stage: Stage, unit: str, ids: Array, kept: Sequence[Kept]) -> Array:
    """Per unit: is it, or a unit that it has rows in common with, kept for another claim."""
    result: Array = np.zeros(len(ids), np.bool_)
    for of, where in kept:
        if of == unit:
            result |= stage.units(unit).is_ready(ids, where)
        elif unit == "groups":
            counts, slots = state.groups.members.gather(ids)
            hit = stage.rows.is_ready(slots.astype(np.int64), where)
            result |= _per_unit(hit.astype(np.int64), counts) > 0
        else:
            groups = state.group[ids]
            grouped = (groups != UNGROUPED).nonzero()[0]
            result[grouped] |= stage.groups.is_ready(groups[grouped], where)
    return result


def _near(state: State, stage: Stage, unit: str, lane: Lane, found: _Found, address: str) -> _Found:
    """The near units first; the oldest one before all where it was passed over too often."""
    far = np.array([peer != address for peer in hosts_of(state, stage, unit, found.ids)])
    order = np.argsort(far, kind="stable")
    if lane.passed_over >= NEAR_TURNS:
        order = np.concatenate([order[order == 0], order[order != 0]])
    oldest = int(found.positions[0])
    return replace(found, ids=found.ids[order], positions=found.positions[order], oldest=oldest)


def hosts_of(state: State, stage: Stage, unit: str, ids: Array) -> list[str]:
    """The address of the peer that has the largest value of each unit, of the stage's fields."""
    slots, counts = _rows_of(state, unit, ids)
    owners, nbytes = state.fields.largest_at(slots, stage.mask or ~0)
    if counts is not None:
        of = np.repeat(np.arange(len(ids)), counts)
        owners = owners[np.lexsort((nbytes, of))][np.cumsum(counts) - 1]
    return [state.fields.owners[number].peer for number in owners.tolist()]


def _within_budget(
    state: State, stage: Stage, want: Want, lane: Lane, kept: Sequence[Kept]
) -> _Found:
    """As many units from the front as fit the sum of a tag, at most `count` if that is set, and at
    least one."""
    assert want.budget_tag is not None
    most = want.count if want.count > 0 else stage.units(want.unit).ready(want.where)
    look = min(_FIRST_LOOK, most)
    while True:
        found = _first(state, stage, want.unit, lane, look, kept)
        slots, rows = _rows_of(state, want.unit, found.ids)
        sums = np.cumsum(_per_unit(state.tags.numbers(want.budget_tag, slots), rows))
        # at least one: a unit heavier than every budget would be in the way for ever
        fitting = max(int(np.searchsorted(sums, want.budget, side="right")), min(1, len(sums)))
        if fitting < len(found.ids) or len(found.ids) < look or look >= most:
            break
        look = min(2 * look, most)
    # a full count ends a claim as a full budget does
    blocked = fitting < len(found.ids) or (0 < want.count <= fitting)
    full = bool(fitting) and float(sums[fitting - 1]) >= want.budget
    return replace(found.first(fitting), blocked=blocked or full)


def _within_message(
    state: State,
    stage: Stage,
    want: Want,
    picked: _Found,
    least: int,
    fields: list[str] | None,
) -> _Found:
    """Cut what was picked to what one message tells of. FrameTooLarge where that is too little."""
    if not state.fields.may_tell(len(state.index), GRANTED_BYTES):
        return picked
    slots, rows = _rows_of(state, want.unit, picked.ids)
    if not state.fields.may_tell(len(slots), GRANTED_BYTES):
        return picked
    sums = np.cumsum(_per_unit(state.fields.told_bytes(slots, fields, stage.name), rows))
    fitting = int(np.searchsorted(sums, GRANTED_BYTES, side="right"))
    if fitting == len(picked.ids):
        return picked
    if fitting < least:
        raise FrameTooLarge(
            f"{counted(least, want.unit.removesuffix('s'), want.unit)} with their small values "
            f"are {int(sums[least - 1])} bytes of a message, the limit is {GRANTED_BYTES}: claim "
            "fewer rows at a time (or with min=), or fewer fields with fields=",
            size=int(sums[least - 1]),
            limit=GRANTED_BYTES,
        )
    return replace(picked.first(fitting), blocked=True)


def _within_credit(
    state: State, stage: Stage, want: Want, picked: _Found, least: int, credit: PullCredit
) -> _Found:
    """Cut what was picked to the bytes that the claim's peer can have pulled."""
    slots, rows = _rows_of(state, want.unit, picked.ids)
    at, records = state.fields.elsewhere(slots, credit.fields, credit.address, stage.name)
    if not len(records):
        return picked
    sums = np.cumsum(_per_unit(pulled_per_row(at, records, len(slots)), rows))
    sums += np.where(sums > 0, rounding(records), 0)
    fitting = int(np.searchsorted(sums, credit.most_bytes, side="right"))
    if fitting == len(picked.ids):
        return picked
    enough = min(max(least, fitting + 1), len(picked.ids))
    return replace(picked.first(fitting), blocked=False, needed_bytes=int(sums[enough - 1]))


def _rows_of(state: State, unit: str, ids: Array) -> tuple[Array, Array | None]:
    """The rows of units, and how many each has (None: one)."""
    if unit == "rows":
        return ids, None
    counts, slots = state.groups.members.gather(ids)
    return slots.astype(np.int64), counts


def _per_unit(values: Array, counts: Array | None) -> Array:
    """Sums over the rows of each unit."""
    if counts is None:
        return values
    sums = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
    ends = np.cumsum(counts)
    result: Array = sums[ends] - sums[ends - counts]
    return result
