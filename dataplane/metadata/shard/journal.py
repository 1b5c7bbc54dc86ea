"""The operations of a journal: carried out on a store as they were on the one that told them, and a
store as the operations that rebuild it, for a learner, a promotion, a drain.

Nothing here waits for time or asks a lane: the operation says which rows. What does not fit the
store is a typed error, raised before anything changes in what this operation is about. Carried out
on an empty store a dump makes an equal one. What was freed and not yet told is left out of it: who
takes over tells owners what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from dataplane.errors import DataplaneError, ProtocolError
from dataplane.metadata.shard import finishes, plans
from dataplane.metadata.shard.blocks import (
    ACKED,
    LEASED,
    MAX_BLOCK_ROWS,
    PENDING,
    READY,
    SPLIT,
    Block,
    Group,
    Rows,
)
from dataplane.metadata.shard.checkpoint import sizes_in, sizes_of
from dataplane.metadata.shard.leases import Lease, Member, Plan
from dataplane.metadata.shard.permits import DONE, Permit
from dataplane.metadata.shard.puts import PutPlan, add_to, enter_rows
from dataplane.metadata.shard.rows_out import group_names, table, tags_held
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.state import State
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables import tags as tagging
from dataplane.metadata.tables.bits import first_of, rows_of
from dataplane.metadata.tables.incoming import different, rows_in
from dataplane.metadata.tables.tags import MISSING
from dataplane.metadata.tables.values import Values, joined, values_in
from dataplane.wire import tables as wire
from dataplane.wire.checkpoint import Restore
from dataplane.wire.journal import (
    Added,
    Buried,
    Declared,
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
from dataplane.wire.limits import MAX_ROWS_PER_MESSAGE
from dataplane.wire.messages import Advance, Finish, Reset, Tag, Unadmit
from dataplane.wire.records import KEY, RANGE, U4, U8, column
from dataplane.wire.tables import Column, Scalar

FINISHED, IN_HAND, GONE = range(3)
"""What `Held.left` says of a position."""

MAX_OP_BYTES = 8 << 20
"""More about rows than this is told in several operations; a message takes `MAX_FRAME_BYTES`."""

_GROUP_STATES = (("leased", LEASED), ("acked", ACKED), ("split", SPLIT))
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
    else:
        store.put(op)


def _leased(store: Store, op: Leased, now: float) -> None:
    state = store.state
    stage = state.stage(op.stage)
    _new_lease(store, op.lease)
    if op.unit == "rows":
        rows = _known_rows(state, op.keys)
        _all_ready(stage, rows)
        state.take_rows(stage, rows.parts)
    else:
        groups = _known_groups(state, op.group_keys)
        _all_in(stage, groups, READY)
        rows = Rows([(block, block.live) for group in groups for block in group.blocks])
        if rows.keys != op.keys:  # in another order, as after a dump
            members, rows = set(rows), _known_rows(state, op.keys)
            if members != set(rows):
                raise ProtocolError("a claim of whole groups has other rows than these groups")
        for group in groups:
            stage.lease_group(group)
    state.lease(stage, op.unit, rows, op.holder, now, op.claim, op.lease)


def _joined(store: Store, op: Joined, now: float) -> None:
    leases = store.state.leases
    plan = leases.plan(op.stage)
    if plan is None:
        lease = finishes.lease_of(store.state, op.lease)
        plan = Plan(lease, op.shape, plans.laid(lease, op.shape))
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


def _discarded(store: Store, op: Discarded, now: float) -> None:
    if op.where is not None:
        store.drop(where=op.where)
    elif op.rows:
        store.drop(rows=wire.Rows(op.rows))
    else:
        keys = column(op.groups, KEY)
        store.drop(groups=[key.tobytes() for key in keys])


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


def _relocated(store: Store, op: Relocated, now: float) -> None:
    ranges = column(op.ranges, RANGE)
    there = column(op.to_ranges, RANGE, len(ranges))
    reach = column(op.reach, U8, len(ranges)) if op.reach else None
    store.relocate(op.owner, ranges, op.to_owner, there, reach)


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
    state, permits = store.state, store.permits
    keys = _new_keys(state.groups, op.keys, "group")
    sizes = sizes_in(op, len(keys))
    begun = column(op.begun or bytes(8 * len(keys)), U8, len(keys)).astype(np.int64).tolist()
    if op.names is not None and len(op.names) != len(keys):
        raise ProtocolError(f"{len(op.names)} names for {len(keys)} groups")
    if op.begun and (not permits.counts or min(begun, default=0) < 0):
        raise ProtocolError("groups are begun at versions, and nothing says at which they are")
    for at, (key, (expected, gone, dropped, closed)) in enumerate(zip(keys, sizes, strict=True)):
        group = state.add_group(key, None if op.names is None else op.names[at], expected)
        group.seen, group.dropped, group.closed = gone, dropped, bool(closed)
        if op.begun:
            group.begun = begun[at]
            permits.done += begun[at] == DONE
    permits.look_again()


def _add_rows(store: Store, op: Wrote) -> None:
    state = store.state
    rows = rows_in(op.rows)
    _new_keys(state.index, op.rows.keys, "row")
    values = values_in(op.columns, rows.count, op.specs, op.owners, op.inline)
    state.check_fields(values.fields)
    tagging.check(op.tags, rows.count, state.tag_names)
    groups = [state.groups.get(key) for key in rows.group_keys]
    if None in groups:
        raise ProtocolError("rows of a group that was not told before")
    plan = PutPlan(rows, rows.count, op.tags, None, range(rows.count), groups, [])
    enter_rows(state, plan, values)


def _standing(store: Store, op: Standing, now: float) -> None:
    state = store.state
    stage = state.stage(op.stage)
    to = _STATES[op.state]
    if op.unit == "groups":
        groups = _known_groups(state, op.keys)
        _all_in(stage, groups, PENDING)
        for group in groups:
            stage.move_group(group, to)
        return
    rows = _pending(stage, _known_rows(state, op.keys))
    if to not in (READY, ACKED):
        raise ProtocolError(f"rows do not stand as {op.state!r} without a lease")
    for block, bits in rows.parts:
        stage.enter(block, bits, to)


def _added(store: Store, op: Added, now: float) -> None:
    state = store.state
    state.check_fields(op.fields)
    name = state.stage(op.stage).name
    for block, bits in _known_rows(state, op.keys).parts:
        for field in op.fields:
            add_to(block, name, field, bits)


def _progressed(store: Store, op: Progressed, now: float) -> None:
    state = store.state
    stage = state.stage(op.stage).name
    rows = _known_rows(state, op.keys)
    values = values_in(op.columns, len(rows), op.specs, op.owners, op.inline)
    state.check_fields(values.fields, stage)
    parts = [rows_of(bits) for _, bits in rows.parts]
    ends = list(accumulate(map(len, parts)))
    split = values.split([range(end - len(of), end) for of, end in zip(parts, ends, strict=True)])
    for (block, _), of, mine in zip(rows.parts, parts, split, strict=True):
        state.note_progress(block, stage, of, mine)


def _held(store: Store, op: Held, now: float) -> None:
    state = store.state
    stage = state.stage(op.stage)
    marks = column(op.left, _BYTE).tolist()
    known = list(_pending(stage, _known_rows(state, op.keys)))
    many = marks.count(IN_HAND)
    if len(known) != many or marks.count(FINISHED) == len(marks) or max(marks) > GONE:
        raise ProtocolError(f"lease {op.lease} has {len(known)} rows for {many} positions")
    _new_lease(store, op.lease)
    # a row that is gone, or finished, is one of a block that has no row any more
    nobody = {mark: Block(0, b"", MAX_BLOCK_ROWS, 0, b"", Values(0)) for mark in (FINISHED, GONE)}
    coming = iter(known)
    rows = Rows.of(
        next(coming) if mark == IN_HAND else (nobody[mark], at % MAX_BLOCK_ROWS)
        for at, mark in enumerate(marks)
    )
    for block, row in known:
        stage.enter(block, 1 << row, LEASED)
    lease = state.lease(stage, op.unit, rows, op.holder, now, op.claim, op.lease)
    lease.left = [0 if block is nobody[FINISHED] else bits for block, bits in rows.parts]


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
        column(weights, _F8, lease.count)
    leases.add_plan(plan)
    for number, holder, claim, rank, done in zip(
        numbers, holders, claims, ranks.tolist(), acked.tolist(), strict=True
    ):
        _new_lease(store, number)
        leases.add_member(Member(number, plan, rank, holder, claim, bool(done)))


def _buried(store: Store, op: Buried, now: float) -> None:
    keys = different(op.keys, "key")
    freed = column(op.freed or bytes(len(keys)), _BYTE, len(keys)).tolist()
    for key, was_freed in zip(keys, freed, strict=True):
        store.state.tombstones.add([key], bool(was_freed))


def _lost_before(store: Store, op: LostBefore, now: float) -> None:
    store.losses.total += op.missed
    store.losses.note(op.names)


def _summary(store: Store, op: Summary, now: float) -> None:
    state = store.state
    state.check_fields(op.fields)
    state.fields |= dict.fromkeys(op.fields, True)
    state.closed_groups += op.closed_groups
    state.tombstones.forgotten += op.forgotten
    state.leases.remember(column(op.finished, U8).tolist())
    for name, rows in op.lost.items():
        state.stage(name).lost += rows
    for name, rows in op.acked.items():
        state.stage(name).acked_rows = rows


# checks


def _known_rows(state: State, keys: bytes) -> Rows:
    many = len(column(keys, KEY))
    found = state.find(keys)
    if len(found) < many:
        raise ProtocolError(f"{many - len(found)} of {many} rows are not here")
    if len(found.parts) > 1:
        seen: dict[int, int] = {}
        for block, bits in found.parts:
            if seen.get(block.number, 0) & bits:
                raise ProtocolError("a row is named twice")
            seen[block.number] = seen.get(block.number, 0) | bits
    return found


def _known_groups(state: State, keys: bytes) -> list[Group]:
    wanted = different(keys, "group")
    found = [state.groups[key] for key in wanted if key in state.groups]
    if len(found) < len(wanted):
        raise ProtocolError(f"{len(wanted) - len(found)} of {len(wanted)} groups are not here")
    return found


def _new_keys(index: Mapping[bytes, object], keys: bytes, what: str) -> list[bytes]:
    found = different(keys, what)
    there = sum([key in index for key in found])
    if there:
        raise ProtocolError(f"{there} of {len(found)} {what}s are here already")
    return found


def _all_ready(stage: Stage, rows: Rows) -> None:
    other = sum([(bits & ~stage.of(block).ready).bit_count() for block, bits in rows.parts])
    if other:
        raise ProtocolError(f"{other} of {len(rows)} rows are not ready")


def _pending(stage: Stage, rows: Rows) -> Rows:
    """These rows, all of which must be pending."""
    other = sum([(bits & ~stage.pending(block)).bit_count() for block, bits in rows.parts])
    if other:
        raise ProtocolError(f"{other} of {len(rows)} rows are in another state")
    return rows


def _all_in(stage: Stage, groups: Sequence[Group], state: int) -> None:
    other = sum([group.states[stage.number] != state for group in groups])
    if other:
        raise ProtocolError(f"{other} of {len(groups)} groups are in another state")


def _new_lease(store: Store, number: int) -> None:
    if store.is_leased(number):
        raise ProtocolError(f"there is a lease {number} already")


# a dump


def dump(store: Store, rows_per_op: int = 4096) -> Iterator[Op]:
    """The operations, each about at most `rows_per_op` rows, groups or keys (a lease is one).

    The store must not change until the last one was taken. Leases begin anew where they are
    carried out, with all the time that they had at first.
    """
    assert 0 < rows_per_op <= MAX_ROWS_PER_MESSAGE
    state = store.state
    for name, stage in state.stages.items():
        yield Declared(name, list(stage.fields))
    yield from _permits_told(state)
    yield from _groups(state, rows_per_op)
    yield from _rows(store, rows_per_op)
    yield from _standings(state, rows_per_op)
    yield from _own_values(state, rows_per_op)
    yield from _progress(state, rows_per_op)
    for lease in state.leases:
        yield _lease_told(lease)
    for plan in state.leases.plans:
        yield _plan_told(plan)
    buried = state.tombstones.all()
    for at in range(0, len(buried), rows_per_op):
        keys, freed = zip(*buried[at : at + rows_per_op], strict=True)
        yield Buried(b"".join(keys), bytes(freed))
    fields = [name for name, had in state.fields.items() if had]
    finished = np.array(state.leases.finished, U8).tobytes()
    lost = {name: stage.lost for name, stage in state.stages.items() if stage.lost}
    acked = {name: stage.acked_rows for name, stage in state.stages.items() if stage.acked_rows}
    yield Summary(state.closed_groups, state.tombstones.forgotten, fields, finished, lost, acked)
    yield from _losses_told(state)
    if store.sealed:
        yield Sealed(short_groups=state.short_groups)


def _losses_told(state: State) -> Iterator[Op]:
    """Also how many names of lost rows are forgotten: they keep their numbers."""
    names, number, missed = state.losses.after(0)
    while names or missed:
        yield LostBefore(names, missed)
        names, number, missed = state.losses.after(number)


def _groups(state: State, many: int) -> Iterator[Op]:
    for some in _parts(list(state.groups.values()), many):
        keys = b"".join([one.key for one in some])
        begun = np.array([one.begun for one in some], U8).tobytes()
        yield Sized(
            keys,
            group_names(state, [one.key for one in some], keys),
            *sizes_of(some),
            begun if state.permits.counts else b"",
        )


def _permits_told(state: State) -> Iterator[Op]:
    permits = state.permits
    if permits.counts:
        max_lag, per_version = permits.limits or (0, 0)
        yield Paced(permits.version, max_lag, per_version, sorted(permits.trained.items()))
        for one in permits.given.values():
            used = one.count - one.left
            yield Permitted(one.number, one.holder, one.count, one.version, used)


def _rows(store: Store, many: int) -> Iterator[Op]:
    """Rows without a group, then the rows of each group in the order in which they joined it."""
    state = store.state
    blocks = [block for block in state.blocks.values() if not block.group]
    blocks += [block for group in state.groups.values() for block in group.blocks]
    for part in _rows_by(((block, block.live) for block in blocks), many):
        yield from _written(store, part)


def _written(store: Store, rows: Rows) -> Iterator[Op]:
    """Rows in one operation, or in more where that would be too large for a message."""
    state = store.state
    found, tags = table(state, rows, None, tags=False), tags_held(rows)
    nbytes = len(found.inline) + _nbytes(found.columns, tags.values())
    if len(rows) > 1 and nbytes > MAX_OP_BYTES:
        for half in _halves(rows):
            yield from _written(store, half)
        return
    all_have = {name: values for name, values in tags.items() if MISSING not in values}
    yield Wrote(
        found.rows, found.columns, found.specs, found.owners, all_have, "add", inline=found.inline
    )
    each = list(rows)
    for name, values in tags.items():
        if name not in all_have:
            having = [at for at, value in enumerate(values) if value is not MISSING]
            keys = b"".join([each[at][0].key(each[at][1]) for at in having])
            told = {name: [values[at] for at in having]}
            yield Tag(store.partition, store.generation, wire.Rows(keys), told)


def _halves(rows: Rows) -> list[Rows]:
    each, middle = list(rows), len(rows) + 1 >> 1
    return [Rows.of(each[:middle]), Rows.of(each[middle:])]


def _nbytes(columns: list[Column], tags: Iterable[list[Scalar]]) -> int:
    """About what these take in a message: all that may be large."""
    texts = sum(len(one) for values in tags for one in values if isinstance(one, str))
    return texts + sum(len(c.values) + len(c.leaf_counts) + len(c.leaves) for c in columns)


def _standings(state: State, many: int) -> Iterator[Op]:
    for name, stage in state.stages.items():
        for rows in _rows_by(stage.rows.plain, many):
            yield Standing(name, "rows", "ready", rows.keys)
        acked = ((block, stage.of(block).acked) for block in state.blocks.values())
        for rows in _rows_by(acked, many):
            yield Standing(name, "rows", "acked", rows.keys)
        for some in _parts([group for group, _ in stage.groups.plain], many):
            yield Standing(name, "groups", "ready", b"".join([one.key for one in some]))
        for word, number in _GROUP_STATES:
            those = [g for g in state.groups.values() if g.states[stage.number] == number]
            for some in _parts(those, many):
                keys = b"".join([one.key for one in some])
                yield Standing(name, "groups", word, keys)  # type: ignore[arg-type]


def _own_values(state: State, many: int) -> Iterator[Op]:
    for name in state.stages:
        for field in state.fields:
            added = ((block, block.added(name, field)) for block in state.blocks.values())
            for rows in _rows_by(added, many):
                yield Added(name, [field], rows.keys)


def _progress(state: State, many: int) -> Iterator[Op]:
    for stage in dict.fromkeys(stage for stage, _ in state.progress):
        having = ((b, b.live) for b in state.blocks.values() if stage in (b.progress or {}))
        for rows in _rows_by(having, many):
            yield from _progress_of(stage, rows)


def _progress_of(stage: str, rows: Rows) -> Iterator[Op]:
    """In one operation, or in more where that would be too large for a message."""
    given_back = [((b.progress or {})[stage], bits) for b, bits in rows.parts]
    found = joined([values.split([rows_of(bits)])[0] for values, bits in given_back])
    columns = found.columns()
    if len(rows) > 1 and len(found.inline) + _nbytes(columns, []) > MAX_OP_BYTES:
        for half in _halves(rows):
            yield from _progress_of(stage, half)
        return
    yield Progressed(stage, rows.keys, columns, found.specs, found.owners, found.inline)


def _lease_told(lease: Lease) -> Held:
    marks = [
        FINISHED if not left >> row & 1 else IN_HAND if block.live >> row & 1 else GONE
        for (block, bits), left in zip(lease.rows.parts, lease.left, strict=True)
        for row in rows_of(bits)
    ]
    return Held(
        lease.stage.name,
        lease.unit,  # type: ignore[arg-type]
        lease.number,
        bytes(marks),
        lease.held.keys,
        lease.holder,
        lease.claim,
    )


def _plan_told(plan: Plan) -> Planned:
    members = list(plan.members.values())
    return Planned(
        plan.lease.stage.name,
        plan.lease.number,
        plan.shape,
        plan.laid,
        np.array([one.number for one in members], U8).tobytes(),
        np.array([one.holder for one in members], U8).tobytes(),
        np.array([one.claim for one in members], U8).tobytes(),
        np.array([one.rank for one in members], U4).tobytes(),
        bytes(one.acked for one in members),
    )


def _parts(groups: Sequence[Group], many: int) -> Iterator[Sequence[Group]]:
    return (groups[at : at + many] for at in range(0, len(groups), many))


def _rows_by(parts: Iterable[tuple[Block, int]], many: int) -> Iterator[Rows]:
    """In pieces of at most so many rows."""
    found, room = list[tuple[Block, int]](), many
    for block, bits in parts:
        while bits:
            some = first_of(bits, room)
            found.append((block, some))
            bits ^= some
            room -= some.bit_count()
            if not room:
                yield Rows(found)
                found, room = [], many
    if found:
        yield Rows(found)


_HOW: dict[type[Any], Callable[[Store, Any, float], object]] = {
    Wrote: _wrote,
    Leased: _leased,
    Returned: lambda store, op, now: plans.give_back_all(store.state, op.leases),
    Joined: _joined,
    Left: _left,
    Finish: lambda store, op, now: store.finish(op),
    Tag: lambda store, op, now: store.tag(op.rows, op.tags),
    Discarded: _discarded,
    Expected: lambda store, op, now: store.close(op.group, op.n, op.name),
    Reset: lambda store, op, now: store.reset(op.stage),
    Declared: lambda store, op, now: store.declare_stage(op.stage, op.fields),
    Sealed: _sealed,
    Ended: lambda store, op, now: store.clear(),
    Permitted: _permitted,
    Unadmit: lambda store, op, now: store.take_back(op.permits),
    Advance: lambda store, op, now: store.advance(op.version),
    Paced: _paced,
    Lost: lambda store, op, now: store.lost(op.owner),
    Relocated: _relocated,
    Restore: lambda store, op, now: store.restore(op),
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
