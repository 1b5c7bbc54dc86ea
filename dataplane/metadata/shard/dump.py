"""A store as the operations that rebuild it: for a learner, a promotion, a drain, a checkpoint.

Carried out on an empty store they make an equal one; on a store with other rows, the union of the
two. What was freed and not yet told is left out: who takes over tells owners what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dataplane.metadata.shard.leases import Lease, Plan
from dataplane.metadata.shard.replay import FINISHED, GONE, IN_HAND
from dataplane.metadata.shard.rows_out import names_of, table
from dataplane.metadata.shard.state import UNGROUPED, State
from dataplane.metadata.shard.store import Store
from dataplane.metadata.shard.units import ACKED, LEASED, SPLIT
from dataplane.metadata.tables.columns import Array
from dataplane.wire.journal import (
    Added,
    Buried,
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
from dataplane.wire.peering import AddStage
from dataplane.wire.records import U4, U8
from dataplane.wire.tables import Column, Rows, Scalar

MAX_OP_BYTES = 8 << 20
"""More about rows than this is told in several operations; a message takes `MAX_FRAME_BYTES`."""

_GROUP_STATES = (("leased", LEASED), ("acked", ACKED), ("split", SPLIT))


def dump(store: Store, rows_per_op: int = 4096) -> Iterator[Op]:
    """The operations, each about at most `rows_per_op` rows, groups or keys (a lease is one).

    The store must not change until the last one was taken. Leases begin anew where they are
    carried out, with all the time that they had at first.
    """
    assert 0 < rows_per_op <= MAX_ROWS_PER_MESSAGE
    state = store.state
    for name, stage in state.stages.items():
        yield AddStage(store.partition, store.generation, name, list(stage.fields))
    yield from _permits(state)
    yield from _groups(state, rows_per_op)
    yield from _rows(store, rows_per_op)
    yield from _standings(state, rows_per_op)
    yield from _added(state, rows_per_op)
    yield from _progress(state, rows_per_op)
    for lease in state.leases:
        yield _held(state, lease)
    for plan in state.leases.plans:
        yield _planned(plan)
    keys, freed = state.tombstones.all()
    for at in range(0, len(keys), rows_per_op):
        part = slice(at, at + rows_per_op)
        yield Buried(keys[part].tobytes(), freed[part].astype(np.uint8).tobytes())
    fields = [name for name in state.fields.names if state.fields.known([name])]
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
    groups = state.groups
    for ids in _parts(groups.live(), many):
        keys = groups.index.keys[ids].tobytes()
        yield Sized(
            keys,
            names_of(groups.names, ids, keys),
            groups.expected[ids].astype(U4).tobytes(),
            (groups.seen[ids] - groups.members.counts[ids]).astype(U4).tobytes(),
            groups.dropped[ids].astype(U4).tobytes(),
            groups.closed(ids).astype(np.uint8).tobytes(),
            state.permits.begun[ids].astype(U8).tobytes() if state.permits.counts else b"",
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
    live = state.live()
    _, members = state.groups.members.gather(state.groups.live())
    slots = np.concatenate([live[state.group[live] == UNGROUPED], members.astype(np.int64)])
    for part in _parts(slots, many):
        yield from _written(store, part)


def _written(store: Store, slots: Array) -> Iterator[Op]:
    """Rows in one operation, or in more where that would be too large for a message."""
    state = store.state
    found = table(state, slots, None, tags=False)
    tags = list(state.tags.held(slots))
    nbytes = len(found.inline) + _nbytes(found.columns, [values for _, _, values in tags])
    if len(slots) > 1 and nbytes > MAX_OP_BYTES:
        for half in np.array_split(slots, 2):
            yield from _written(store, half)
        return
    all_have = {name: values for name, present, values in tags if present.all()}
    yield Wrote(
        found.rows, found.columns, found.specs, found.owners, all_have, "add", inline=found.inline
    )
    for name, present, values in tags:
        if name not in all_have:
            rows = Rows(state.index.keys[slots[present]].tobytes())
            yield Tag(store.partition, store.generation, rows, {name: values})


def _nbytes(columns: list[Column], tags: list[list[Scalar]]) -> int:
    """About what these take in a message: all that may be large."""
    texts = sum(len(one) for values in tags for one in values if isinstance(one, str))
    return texts + sum(len(c.values) + len(c.leaf_counts) + len(c.leaves) for c in columns)


def _standings(state: State, many: int) -> Iterator[Op]:
    rows, groups = state.index.keys, state.groups.index.keys
    for name, stage in state.stages.items():
        for ids in _parts(stage.rows.ready_ids(), many):
            yield Standing(name, "rows", "ready", rows[ids].tobytes())
        for ids in _parts((stage.rows.state == ACKED).nonzero()[0], many):
            yield Standing(name, "rows", "acked", rows[ids].tobytes())
        for ids in _parts(stage.groups.ready_ids(), many):
            yield Standing(name, "groups", "ready", groups[ids].tobytes())
        for word, number in _GROUP_STATES:
            for ids in _parts((stage.groups.state == number).nonzero()[0], many):
                yield Standing(name, "groups", word, groups[ids].tobytes())  # type: ignore[arg-type]


def _added(state: State, many: int) -> Iterator[Op]:
    for name, stage in state.stages.items():
        for mask in np.unique(stage.wrote[stage.wrote != 0]).tolist():
            fields = [field for field, bit in state.fields.names.items() if mask >> bit & 1]
            for ids in _parts((stage.wrote == mask).nonzero()[0], many):
                yield Added(name, fields, state.index.keys[ids].tobytes())


def _progress(state: State, many: int) -> Iterator[Op]:
    live = state.live()
    for stage, known in state.fields.progress.items():
        mask = np.uint64(sum(1 << bit for bit in known.values()))
        for slots in _parts(live[(state.fields.present[live] & mask) != 0], many):
            yield from _progress_of(state, stage, slots)


def _progress_of(state: State, stage: str, slots: Array) -> Iterator[Op]:
    """In one operation, or in more where that would be too large for a message."""
    columns, specs, owners, inline = state.fields.gather(slots, (), stage)
    if len(slots) > 1 and len(inline) + _nbytes(columns, []) > MAX_OP_BYTES:
        for half in np.array_split(slots, 2):
            yield from _progress_of(state, stage, half)
        return
    keys = state.index.keys[slots].tobytes()
    yield Progressed(stage, keys, columns, specs, owners, inline)


def _held(state: State, lease: Lease) -> Held:
    there = lease.left & (state.incarnation[lease.slots] == lease.incarnations)
    left = np.where(lease.left, np.where(there, IN_HAND, GONE), FINISHED)
    return Held(
        lease.stage.name,
        lease.unit,  # type: ignore[arg-type]
        lease.number,
        left.astype(np.uint8).tobytes(),
        state.index.keys[lease.slots[there]].tobytes(),
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


def _parts(ids: Array, many: int) -> Iterator[Array]:
    return (ids[at : at + many] for at in range(0, len(ids), many))
