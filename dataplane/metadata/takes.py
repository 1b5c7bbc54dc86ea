"""Taking ready units from a lane under a lease.

A take is met from the front of one lane, whole or not at all unless it may be partial; what it
costs depends on the units taken, never on how many rows there are. Of the first ready units, those
whose largest value lies on the claimant's host go first, eight times past the oldest at most: where
writers and readers share hosts, rows stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from dataplane.errors import ProtocolError
from dataplane.metadata.columns import Array
from dataplane.metadata.credit import PullCredit, pulled_per_row, rounding
from dataplane.metadata.lanes import Lane
from dataplane.metadata.leases import Lease
from dataplane.metadata.stages import Stage
from dataplane.metadata.state import State
from dataplane.wire.messages import Want

_FIRST_LOOK = 64
NEAR_UNITS = 64
"""How far into a lane units are looked for that lie near whoever claims."""
NEAR_TURNS = 8
"""How often others may be taken past a lane's oldest unit."""


@dataclass(frozen=True, slots=True)
class Taken:
    """lease None: nothing was taken. amount: sum of the budget's tag. blocked: the next ready unit
    would not fit into the budget (with units 0: it is larger than the whole budget). nbytes: what
    the claim's peer has to pull. needed_bytes: cut by the credit, which had to be this much.
    slots: the rows, for `Store.table`; they hold until the next change."""

    lease: int | None = None
    units: int = 0
    amount: float = 0.0
    blocked: bool = False
    nbytes: int = 0
    needed_bytes: int = 0
    slots: Array | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class _Picked:
    ids: Array
    last: int  # position up to which all of the lane was picked; -1: not its first units
    amount: float
    blocked: bool
    nbytes: int = 0
    needed_bytes: int = 0


def take(
    state: State,
    stage: Stage,
    want: Want,
    holder: int,
    now: float,
    lease_ms: int,
    partial: bool,
    sealed: bool,
    credit: PullCredit | None,
) -> Taken:
    """See `Store.take`."""
    if want.unit not in ("rows", "groups"):
        raise ProtocolError(f"a claim is for rows or groups, not {want.unit!r}")
    lane = stage.units(want.unit).lane(want.where)
    ready = stage.units(want.unit).ready(want.where)
    if want.budget_tag is None:
        least = 1 if partial or sealed else max(1, min(want.minimum, want.count))
        if ready < least or want.count < 1:
            return Taken()
        if credit is not None and ready > want.count and len(state.fields.owners) > 1:
            picked = _near(state, stage, want, lane, credit.address)
        else:
            ids, positions = lane.first(min(ready, want.count))
            picked = _Picked(ids, int(positions[-1]), 0.0, False)
    else:
        least = 1
        picked = _within_budget(state, stage, want, lane)
        if not (picked.blocked or partial or sealed) or not len(picked.ids):
            return Taken(blocked=picked.blocked)
    if credit is not None:
        picked = _within_credit(state, want, lane, picked, credit)
        if len(picked.ids) < least:
            return Taken(blocked=picked.blocked, needed_bytes=picked.needed_bytes)
    lane.consume(picked.last)
    lease = _lease(state, stage, want.unit, picked.ids, holder, now, lease_ms)
    return Taken(
        lease.number,
        len(picked.ids),
        picked.amount,
        picked.blocked,
        picked.nbytes,
        picked.needed_bytes,
        lease.slots,
    )


def _lease(
    state: State, stage: Stage, unit: str, ids: Array, holder: int, now: float, lease_ms: int
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
        deadline=now + lease_ms / 1000 if lease_ms else None,
    )
    state.leases.add(lease)
    return lease


def _near(state: State, stage: Stage, want: Want, lane: Lane, address: str) -> _Picked:
    """`want.count` units of a lane that has more: the near ones first, else the oldest."""
    ids, positions = lane.first(max(NEAR_UNITS, want.count))
    far = np.array([peer != address for peer in hosts_of(state, stage, want.unit, ids)])
    if lane.passed_over >= NEAR_TURNS:
        far[0] = False
    chosen = np.sort(np.argsort(far, kind="stable")[: want.count])
    lane.passed_over = lane.passed_over + 1 if chosen[0] else 0
    oldest = int(chosen[-1]) == len(chosen) - 1
    return _Picked(ids[chosen], int(positions[chosen[-1]]) if oldest else -1, 0.0, False)


def hosts_of(state: State, stage: Stage, unit: str, ids: Array) -> list[str]:
    """The address of the peer that has the largest value of each unit, of the stage's fields."""
    slots, counts = _rows_of(state, unit, ids)
    owners, nbytes = state.fields.largest_at(slots, stage.mask or ~0)
    if counts is not None:
        of = np.repeat(np.arange(len(ids)), counts)
        owners = owners[np.lexsort((nbytes, of))][np.cumsum(counts) - 1]
    return [state.fields.owners[number].peer for number in owners.tolist()]


def _within_budget(state: State, stage: Stage, want: Want, lane: Lane) -> _Picked:
    """As many units from the front as fit the sum of a tag, and at most `count` if that is set."""
    assert want.budget_tag is not None
    most = want.count if want.count > 0 else stage.units(want.unit).ready(want.where)
    look = min(_FIRST_LOOK, most)
    while True:
        ids, positions = lane.first(look)
        slots, rows = _rows_of(state, want.unit, ids)
        sums = np.cumsum(_per_unit(state.tags.numbers(want.budget_tag, slots), rows))
        fitting = int(np.searchsorted(sums, want.budget, side="right"))
        if fitting < len(ids) or len(ids) < look or look >= most:
            break
        look = min(2 * look, most)
    amount = float(sums[fitting - 1]) if fitting else 0.0
    # a full count ends a claim as a full budget does
    blocked = fitting < len(ids) or (0 < want.count <= fitting)
    return _Picked(ids[:fitting], int(positions[fitting - 1]) if fitting else -1, amount, blocked)


def _within_credit(
    state: State, want: Want, lane: Lane, picked: _Picked, credit: PullCredit
) -> _Picked:
    """Cut what was picked to the bytes that the claim's peer may pull."""
    slots, rows = _rows_of(state, want.unit, picked.ids)
    at, records = state.fields.elsewhere(slots, credit.fields, credit.address)
    if not len(records):
        return picked
    sums = np.cumsum(_per_unit(pulled_per_row(at, records, len(slots)), rows))
    sums += np.where(sums > 0, rounding(records), 0)
    fitting = int(np.searchsorted(sums, credit.may_pull(), side="right"))
    if fitting == len(picked.ids):
        return replace(picked, nbytes=int(sums[-1]))
    enough = min(max(want.minimum, fitting + 1), len(picked.ids))
    ids = picked.ids[:fitting]
    amount = 0.0
    if want.budget_tag is not None:
        taken, _ = _rows_of(state, want.unit, ids)
        amount = float(state.tags.numbers(want.budget_tag, taken).sum())
    last, nbytes = -1, 0
    if fitting:
        nbytes = int(sums[fitting - 1])
        last = -1 if picked.last < 0 else int(lane.first(fitting)[1][-1])
    return _Picked(ids, last, amount, False, nbytes, int(sums[enough - 1]))


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
