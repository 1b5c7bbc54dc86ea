"""A store as the operations that rebuild it: for a learner, a promotion, a drain, a checkpoint.

Carried out on an empty store they make an equal one; on a store with other rows, the union of the
two. What was freed and not yet told is left out: who takes over tells owners what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dataplane.metadata.shard.blocks import ACKED, LEASED, SPLIT, Block, Group, Rows
from dataplane.metadata.shard.leases import Lease, Plan
from dataplane.metadata.shard.replay import FINISHED, GONE, IN_HAND
from dataplane.metadata.shard.rows_out import group_names, table, tags_held
from dataplane.metadata.shard.state import State
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables.bits import first_of, rows_of
from dataplane.metadata.tables.tags import MISSING
from dataplane.metadata.tables.values import joined
from dataplane.wire import tables as wire
from dataplane.wire.journal import (
    Added,
    Buried,
    Declared,
    Held,
    LostBefore,
    Op,
    Paced,
    Permitted,
    Planned,
    Progressed,
    Sealed,
    Sized,
    Standing,
    Summary,
    Wrote,
)
from dataplane.wire.limits import MAX_ROWS_PER_MESSAGE
from dataplane.wire.messages import Tag
from dataplane.wire.records import U4, U8
from dataplane.wire.tables import Column, Scalar

MAX_OP_BYTES = 8 << 20
"""More about rows than this is told in several operations; a message takes `MAX_FRAME_BYTES`."""

_U4_MAX = (1 << 32) - 1
_GROUP_STATES = (("leased", LEASED), ("acked", ACKED), ("split", SPLIT))


def dump(store: Store, rows_per_op: int = 4096) -> Iterator[Op]:
    """The operations, each about at most `rows_per_op` rows, groups or keys (a lease is one).

    The store must not change until the last one was taken. Leases begin anew where they are
    carried out, with all the time that they had at first.
    """
    assert 0 < rows_per_op <= MAX_ROWS_PER_MESSAGE
    state = store.state
    for name, stage in state.stages.items():
        yield Declared(name, list(stage.fields))
    yield from _permits(state)
    yield from _groups(state, rows_per_op)
    yield from _rows(store, rows_per_op)
    yield from _standings(state, rows_per_op)
    yield from _added(state, rows_per_op)
    yield from _progress(state, rows_per_op)
    for lease in state.leases:
        yield _held(lease)
    for plan in state.leases.plans:
        yield _planned(plan)
    buried = state.tombstones.all()
    for at in range(0, len(buried), rows_per_op):
        keys, freed = zip(*buried[at : at + rows_per_op], strict=True)
        yield Buried(b"".join(keys), bytes(freed))
    fields = [name for name, had in state.fields.items() if had]
    finished = np.array(state.leases.finished, U8).tobytes()
    lost = {name: stage.lost for name, stage in state.stages.items() if stage.lost}
    acked = {name: stage.acked_rows for name, stage in state.stages.items() if stage.acked_rows}
    yield Summary(state.closed_groups, state.tombstones.forgotten, fields, finished, lost, acked)
    yield from _lost(state)
    if store.sealed:
        yield Sealed(short_groups=state.short_groups)


def _lost(state: State) -> Iterator[Op]:
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
            np.array([one.expected & _U4_MAX for one in some], U4).tobytes(),
            np.array([one.seen - one.live for one in some], U4).tobytes(),
            np.array([one.dropped for one in some], U4).tobytes(),
            bytes(one.closed for one in some),
            begun if state.permits.counts else b"",
        )


def _permits(state: State) -> Iterator[Op]:
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


def _added(state: State, many: int) -> Iterator[Op]:
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


def _held(lease: Lease) -> Held:
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


def _planned(plan: Plan) -> Planned:
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
