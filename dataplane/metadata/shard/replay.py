"""Operations of a journal, carried out on a store as they were on the one that told them.

Nothing here waits for time or asks a lane: the operation says which rows. What does not fit the
store is a typed error, raised before anything changes in what this operation is about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dataplane.errors import DataplaneError, ProtocolError
from dataplane.memory.extents import some
from dataplane.metadata.shard import finishes, plans
from dataplane.metadata.shard.leases import Lease, Member, Plan
from dataplane.metadata.shard.permits import DONE, Permit
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.store import Store
from dataplane.metadata.shard.units import ACKED, LEASED, PENDING, READY, SPLIT
from dataplane.metadata.tables.columns import Array
from dataplane.metadata.tables.groups import CLOSED
from dataplane.metadata.tables.incoming import RowsIn, columns_in, rows_in
from dataplane.metadata.tables.key_index import KeyIndex, pairs, repeated
from dataplane.metadata.tables.small_values import check_inline
from dataplane.wire.checkpoint import Restore
from dataplane.wire.journal import (
    Added,
    Buried,
    Discarded,
    Ended,
    Expected,
    Held,
    Joined,
    Leased,
    Left,
    Lost,
    LostBefore,
    Op,
    Paced,
    Permitted,
    Planned,
    Progressed,
    Relocated,
    Returned,
    Sealed,
    Sized,
    Standing,
    Summary,
    Wrote,
)
from dataplane.wire.messages import Advance, Finish, Reset, Tag, Unadmit
from dataplane.wire.peering import AddStage
from dataplane.wire.records import KEY, RANGE, U4, U8, column
from dataplane.wire.tables import Name, Rows

FINISHED, IN_HAND, GONE = range(3)
"""What `Held.left` says of a position."""

_BYTE, _F8 = np.dtype("u1"), np.dtype("<f8")
_STATES = {"ready": READY, "leased": LEASED, "acked": ACKED, "split": SPLIT}


def apply(store: Store, op: Op, now: float = 0.0) -> None:
    """Carry out an operation on a store that records nothing itself; leases begin at `now`.

    ProtocolError when the store is not as the operation expects: a replica is then broken, and is
    made anew from a dump. References that go are collected at a replica as well: drain `freed` and
    forget them, for the primary tells their owners.
    """
    assert store.emit is None
    try:
        _HOW[type(op)](store, op, now)
    except DataplaneError as exc:
        raise ProtocolError(
            f"{type(op).__name__} does not fit this copy of partition {store.partition!r}, which "
            f"must be made anew: {exc}",
            partition=store.partition,
        ) from exc


# what happens to a store while it is used


def _wrote(store: Store, op: Wrote, now: float) -> None:
    if op.mode == "add":
        _add_rows(store, op)
        return
    replace, keep = op.mode == "replace", op.mode == "keep"
    store.put(
        op.rows,
        op.columns,
        op.specs,
        op.owners,
        op.tags,
        replace=replace,
        keep=keep,
        reuse=op.reuse,
        inline=op.inline,
        holder=op.holder,
    )


def _leased(store: Store, op: Leased, now: float) -> None:
    state = store.state
    stage = state.stage(op.stage)
    _new_lease(store, op.lease)
    if op.unit == "rows":
        slots = _all_in(stage.rows.state, _known(state.index, op.keys, "row"), READY, "row")
        stage.take_rows(slots)
    else:
        groups = _known(state.groups.index, op.group_keys, "group")
        _all_in(stage.groups.state, groups, READY, "group")
        slots = state.groups.members.gather(groups)[1].astype(np.int64)
        if state.index.keys[slots].tobytes() != op.keys:  # in another order, as after a dump
            members, slots = slots, _known(state.index, op.keys, "row")
            if not np.array_equal(np.sort(members), np.sort(slots)):
                raise ProtocolError("a claim of whole groups has other rows than these groups")
        stage.take_groups(groups)
    left = np.ones(len(slots), np.bool_)
    incarnations = state.incarnation[slots]
    _enter_lease(store, op, stage, slots, incarnations, left, now)


def _returned(store: Store, op: Returned, now: float) -> None:
    plans.give_back_all(store.state, op.leases)


def _joined(store: Store, op: Joined, now: float) -> None:
    leases = store.state.leases
    plan = leases.plan(op.stage)
    if plan is None:
        lease = finishes.lease_of(store.state, op.lease)
        plan = Plan(lease, op.shape, plans.laid(store.state, lease, op.shape))
        leases.add_plan(plan)
    if plan.lease.number != op.lease or plan.shape != op.shape:
        raise ProtocolError(f"stage {op.stage!r} has another plan")
    _new_lease(store, op.member)
    leases.add_member(Member(op.member, plan, op.rank, op.holder, op.claim))


def _left(store: Store, op: Left, now: float) -> None:
    member = store.state.leases.member(op.member)
    if member is None:
        raise ProtocolError(f"nobody takes part in a plan as {op.member}")
    plans.leave(store.state, member)


def _finish(store: Store, op: Finish, now: float) -> None:
    store.finish(
        op.lease,
        op.outcome,
        op.index,
        op.columns,
        op.specs,
        op.owners,
        op.tags,
        inline=op.inline,
    )


def _tag(store: Store, op: Tag, now: float) -> None:
    store.tag(op.rows, op.tags)


def _discarded(store: Store, op: Discarded, now: float) -> None:
    if op.where is not None:
        store.drop(where=op.where)
    elif op.rows:
        store.drop(rows=Rows(op.rows))
    else:
        keys = column(op.groups, KEY)
        store.drop(groups=[key.tobytes() for key in keys])


def _expected(store: Store, op: Expected, now: float) -> None:
    store.close(op.group, op.n, op.name)


def _reset(store: Store, op: Reset, now: float) -> None:
    store.reset(op.stage)


def _add_stage(store: Store, op: AddStage, now: float) -> None:
    store.declare_stage(op.stage, op.fields)


def _sealed(store: Store, op: Sealed, now: float) -> None:
    store.seal(op.keep_short)
    store.state.short_groups += op.short_groups


def _permitted(store: Store, op: Permitted, now: float) -> None:
    permits = store.permits
    if permits.limits is None or op.permit in permits.given or op.count < 1:
        raise ProtocolError(f"permit {op.permit} is here already, or nothing says for what it is")
    if not 0 <= op.used <= op.count:
        raise ProtocolError(f"permit {op.permit} for {op.count} groups was used for {op.used}")
    permits.enter(Permit(op.permit, op.holder, op.version, op.count, op.count - op.used))


def _unadmit(store: Store, op: Unadmit, now: float) -> None:
    store.take_back(op.permits)


def _advance(store: Store, op: Advance, now: float) -> None:
    store.advance(op.version)


def _ended(store: Store, op: Ended, now: float) -> None:
    store.clear()


def _lost(store: Store, op: Lost, now: float) -> None:
    store.lost(op.owner)


def _relocated(store: Store, op: Relocated, now: float) -> None:
    ranges = column(op.ranges, RANGE)
    there = column(op.to_ranges, RANGE, len(ranges))
    reach = column(op.reach, U8, len(ranges)) if op.reach else None
    store.relocate(op.owner, ranges, op.to_owner, there, reach)


def _restored(store: Store, op: Restore, now: float) -> None:
    store.restore(op)


def _paced(store: Store, op: Paced, now: float) -> None:
    permits = store.permits
    if op.version < permits.version or op.per_version < 0 or op.max_lag < 0:
        raise ProtocolError(f"the trainer goes from version {permits.version} to {op.version}")
    permits.version = op.version
    permits.begin(store.state)
    permits.limits = (op.max_lag, op.per_version) if op.per_version else None
    for version, groups in op.trained:
        permits.trained[version] = permits.trained.get(version, 0) + groups


# what a dump adds


def _sized(store: Store, op: Sized, now: float) -> None:
    groups = store.state.groups
    keys = _new_keys(groups.index, op.keys, "group")
    expected, gone, dropped = (
        column(one, U4, len(keys)).astype(np.int32) for one in (op.expected, op.gone, op.dropped)
    )
    if (dropped > gone).any() or (gone < 0).any():
        raise ProtocolError("more rows of a group were dropped than are gone")
    closed = column(op.closed, _BYTE, len(keys)).astype(np.bool_)
    ids = store.state.add_groups(keys, _names(op.names, len(keys)), 0)
    groups.expected[ids], groups.seen[ids], groups.dropped[ids] = expected, gone, dropped
    groups.phase[ids[closed]] = CLOSED
    if op.begun:
        begun = column(op.begun, U8, len(keys)).astype(np.int64)
        if not store.permits.counts or (begun < 0).any():
            raise ProtocolError("groups are begun at versions, and nothing says at which they are")
        store.permits.begun[ids] = begun
        store.permits.look_again()
        store.permits.done += int(np.count_nonzero(begun == DONE))


def _add_rows(store: Store, op: Wrote) -> None:
    state = store.state
    rows = rows_in(op.rows)
    _new_keys(state.index, op.rows.keys, "row")
    columns = columns_in(op.columns, rows.count, len(op.specs), len(op.owners))
    check_inline(columns, op.owners, op.inline)
    state.fields.check_room([one.field for one in columns])
    state.tags.check(op.tags, rows.count)
    groups = _groups_of(store, rows)
    slots = state.add_rows(rows.keys, rows.names, groups)
    numbers = state.fields.intern(op.specs, op.owners, op.inline)
    for one in columns:
        state.fields.write(slots, one, numbers, keep=False)
    state.tags.set(slots, op.tags)


def _groups_of(store: Store, rows: RowsIn) -> Array | None:
    if rows.group is None or not len(rows.group_keys):
        return None
    groups = store.state.groups.index.find(rows.group_keys)
    if (groups < 0).any():
        raise ProtocolError("rows of a group that was not told before")
    return np.where(rows.group >= 0, groups[rows.group], -1)


def _standing(store: Store, op: Standing, now: float) -> None:
    state = store.state
    stage = state.stage(op.stage)
    to = _STATES[op.state]
    if op.unit == "groups":
        groups = _known(state.groups.index, op.keys, "group")
        stage.groups.move(_all_in(stage.groups.state, groups, PENDING, "group"), to)
        return
    slots = _all_in(stage.rows.state, _known(state.index, op.keys, "row"), PENDING, "row")
    if to == READY:
        stage.make_ready(slots, front=False)
    elif to == ACKED:
        stage.ack(slots)
    else:
        raise ProtocolError(f"rows do not stand as {op.state!r} without a lease")


def _added(store: Store, op: Added, now: float) -> None:
    state = store.state
    state.fields.check_room(op.fields)
    slots = _known(state.index, op.keys, "row")
    state.stage(op.stage).add(slots, state.fields.mask(op.fields))


def _progressed(store: Store, op: Progressed, now: float) -> None:
    state = store.state
    stage = state.stage(op.stage)
    slots = _known(state.index, op.keys, "row")
    columns = columns_in(op.columns, len(slots), len(op.specs), len(op.owners))
    check_inline(columns, op.owners, op.inline)
    state.fields.check_progress_room(stage.name, [one.field for one in columns])
    numbers = state.fields.intern(op.specs, op.owners, op.inline)
    for one in columns:
        state.fields.write_progress(stage.name, slots, one, numbers)


def _held(store: Store, op: Held, now: float) -> None:
    state = store.state
    stage = state.stage(op.stage)
    marks = column(op.left, _BYTE)
    in_hand = (marks == IN_HAND).nonzero()[0]
    known = _all_in(stage.rows.state, _known(state.index, op.keys, "row"), PENDING, "row")
    if len(known) != len(in_hand) or not (marks != FINISHED).any() or int(marks.max()) > GONE:
        raise ProtocolError(f"lease {op.lease} has {len(known)} rows for {len(in_hand)} positions")
    _new_lease(store, op.lease)
    # a row that is gone is one whose incarnation has passed, as in a lease that saw it go
    slots = np.zeros(len(marks), np.int64)
    slots[in_hand] = known
    incarnations = state.incarnation[slots] - np.uint32(1)
    incarnations[in_hand] += np.uint32(1)
    stage.rows.move(known, LEASED)
    _enter_lease(store, op, stage, slots, incarnations, marks != FINISHED, now)


def _planned(store: Store, op: Planned, now: float) -> None:
    leases = store.state.leases
    lease = finishes.lease_of(store.state, op.lease)
    numbers = column(op.members, U8).tolist()
    holders, claims = (column(one, U8, len(numbers)).tolist() for one in (op.holders, op.claims))
    ranks, acked = column(op.ranks, U4, len(numbers)), column(op.acked, _BYTE, len(numbers))
    plan = Plan(lease, op.shape, op.laid)
    if lease.stage.name != op.stage or leases.plan(op.stage) is not None:
        raise ProtocolError(f"stage {op.stage!r} has another plan")
    for weights in op.laid.weights.values():
        column(weights, _F8, len(lease.slots))
    leases.add_plan(plan)
    for number, holder, claim, rank, done in zip(
        numbers, holders, claims, ranks.tolist(), acked.tolist(), strict=True
    ):
        _new_lease(store, number)
        leases.add_member(Member(number, plan, rank, holder, claim, bool(done)))


def _buried(store: Store, op: Buried, now: float) -> None:
    keys = _different(op.keys, "key")
    freed = column(op.freed or bytes(len(keys)), _BYTE, len(keys)).astype(np.bool_)
    ends = np.append(np.flatnonzero(np.diff(freed)) + 1, len(keys)).tolist()
    for first, end in zip([0, *ends], ends, strict=False):
        store.state.tombstones.add(keys[first:end], bool(freed[first]))


def _lost_before(store: Store, op: LostBefore, now: float) -> None:
    store.losses.total += op.missed
    store.losses.note(op.names)


def _summary(store: Store, op: Summary, now: float) -> None:
    state = store.state
    state.fields.check_room(op.fields)
    state.fields.know(op.fields)
    state.closed_groups += op.closed_groups
    state.tombstones.forgotten += op.forgotten
    state.leases.remember(column(op.finished, U8).tolist())
    for name, rows in op.lost.items():
        state.stage(name).lost += rows
    for name, rows in op.acked.items():
        state.stage(name).acked_rows = rows


# checks


def _different(keys: bytes, what: str) -> Array:
    column(keys, KEY)
    found = pairs(keys)
    if len(repeated(found)):
        raise ProtocolError(f"a {what} is named twice")
    return found


def _known(index: KeyIndex, keys: bytes, what: str) -> Array:
    ids = index.find(_different(keys, what))
    if some(ids < 0):
        raise ProtocolError(f"{int((ids < 0).sum())} of {len(ids)} {what}s are not here")
    return ids


def _new_keys(index: KeyIndex, keys: bytes, what: str) -> Array:
    found = _different(keys, what)
    there = index.find(found) >= 0
    if there.any():
        raise ProtocolError(f"{int(there.sum())} of {len(found)} {what}s are here already")
    return found


def _all_in(states: Array, ids: Array, expected: int, what: str) -> Array:
    """These ids, all of which must have this state."""
    other = states[ids] != expected
    if some(other):
        raise ProtocolError(f"{int(other.sum())} of {len(ids)} {what}s are in another state")
    return ids


def _names(names: list[Name] | None, count: int) -> list[Name] | None:
    if names is not None and len(names) != count:
        raise ProtocolError(f"{len(names)} names for {count} groups")
    return names


def _new_lease(store: Store, number: int) -> None:
    if store.is_leased(number):
        raise ProtocolError(f"there is a lease {number} already")


def _enter_lease(
    store: Store,
    op: Leased | Held,
    stage: Stage,
    slots: Array,
    incarnations: Array,
    left: Array,
    now: float,
) -> None:
    store.state.leases.add(
        Lease(op.lease, stage, op.unit, slots, incarnations, left, op.holder, now, op.claim)
    )


_HOW: dict[type[Any], Callable[[Store, Any, float], None]] = {
    Wrote: _wrote,
    Leased: _leased,
    Returned: _returned,
    Joined: _joined,
    Left: _left,
    Finish: _finish,
    Tag: _tag,
    Discarded: _discarded,
    Expected: _expected,
    Reset: _reset,
    AddStage: _add_stage,
    Sealed: _sealed,
    Ended: _ended,
    Permitted: _permitted,
    Unadmit: _unadmit,
    Advance: _advance,
    Paced: _paced,
    Lost: _lost,
    Relocated: _relocated,
    Restore: _restored,
    Sized: _sized,
    Standing: _standing,
    Added: _added,
    Progressed: _progressed,
    Held: _held,
    Planned: _planned,
    Buried: _buried,
    Summary: _summary,
    LostBefore: _lost_before,
}
