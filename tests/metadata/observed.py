"""Everything that can be seen of a store, by key, so that two stores can be compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataplane.metadata.shard.leases import Plan
from dataplane.metadata.shard.replay import apply
from dataplane.metadata.shard.store import Store
from dataplane.wire.journal import Op, decode_ops, encode_ops
from dataplane.wire.limits import ABSENT
from dataplane.wire.records import VALUE
from dataplane.wire.tables import INLINE, Table

SIZES = ("metadata_bytes", "bytes_per_row")


def carried_over(store: Store, ops: list[Op], now: float = 0.0) -> None:
    """Apply operations as they arrive: as bytes. What is freed here is told elsewhere."""
    for op in decode_ops(encode_ops(ops)):
        apply(store, op, now)
    store.freed()


def observed(store: Store) -> dict[str, Any]:
    """Rows, groups, stages, leases and the rest; equal for stores that behave alike."""
    state = store.state
    rows, groups = state.index.keys, state.groups.index.keys
    stats = {name: value for name, value in store.stats().items() if name not in SIZES}
    return {
        "rows": _rows(store),
        "groups": {
            groups[g].tobytes(): (
                state.groups.name(g),
                *(int(c[g]) for c in (state.groups.expected, state.groups.seen)),
                *(int(c[g]) for c in (state.groups.dropped, state.groups.phase)),
                _keys(rows, state.groups.members.gather(np.array([g]))[1]),
            )
            for g in state.groups.live().tolist()
        },
        "stages": {name: _stage(store, name) for name in state.stages},
        "leases": {lease.number: _lease(store, lease) for lease in state.leases},
        "plans": {plan.lease.number: _plan(plan) for plan in state.leases.plans},
        "tombstones": [
            (tuple(key), freed)
            for key, freed in zip(*(one.tolist() for one in state.tombstones.all()), strict=True)
        ],
        "fields": sorted(store.known(list(state.fields.names))),
        "phase": store.phase,
        "holdings": _holdings(store),
        "lost": store.losses.after(0),
        "permits": _permits(store),
        "stats": stats,
    }


def _keys(keys: Any, ids: Any) -> list[bytes]:
    return [keys[i].tobytes() for i in ids.tolist()]


def _rows(store: Store, stage: str = "") -> dict[bytes, Any]:
    state = store.state
    slots = state.live()
    table = store.table(slots, stage=stage)
    result: dict[bytes, Any] = {}
    for slot in slots.tolist():
        group = int(state.group[slot])
        joined = None if group < 0 else state.groups.index.keys[group].tobytes()
        result[state.index.keys[slot].tobytes()] = (state.name(slot), joined, {}, {})
    keys = list(result)
    for one in table.columns:
        values, leaves = (np.frombuffer(c, VALUE).tolist() for c in (one.values, one.leaves))
        counts = np.frombuffer(one.leaf_counts, "<u4").tolist() or [0] * len(values)
        for key, value, count in zip(keys, values, counts, strict=True):
            records = [value, *leaves[:count]]
            leaves = leaves[count:]
            if value[5] != ABSENT:
                result[key][2][one.field] = [
                    (*_place(table, r), table.specs[r[3]], table.owners[r[5]]) for r in records
                ]
    for name, present, held in state.tags.held(slots):
        for at, value in zip(present.nonzero()[0].tolist(), held, strict=True):
            result[keys[at]][3][name] = value
    return result


def _place(table: Table, record: tuple[int, ...]) -> tuple[Any, ...]:
    """Range, generation, length and delta of a value; of one that lives in the store, its bytes."""
    at, generation, nbytes, _, delta, owner = record
    if table.owners[owner] == INLINE:
        return (table.inline[at : at + nbytes],)
    return at, generation, nbytes, delta


def _stage(store: Store, name: str) -> dict[str, Any]:
    state, stage = store.state, store.state.stages[name]
    rows, groups = state.index.keys, state.groups.index.keys
    return {
        "acked_rows": stage.acked_rows,
        "fields": list(stage.fields),
        "rows": {rows[i].tobytes(): (int(stage.rows.state[i]),) for i in state.live().tolist()},
        "groups": {
            groups[i].tobytes(): (int(stage.groups.state[i]),) for i in state.groups.live().tolist()
        },
        "added": {
            rows[i].tobytes(): tuple(
                field
                for field, bit in state.fields.names.items()
                if len(stage.wrote) and int(stage.wrote[i]) >> bit & 1
            )
            for i in state.live().tolist()
        },
        "progress": {key: row[2] for key, row in _rows(store, name).items()},
        "ready_rows": _keys(rows, stage.rows.ready_ids()),
        "ready_groups": _keys(groups, stage.groups.ready_ids()),
    }


def _lease(store: Store, lease: Any) -> Any:
    state = store.state
    there = lease.left & (state.incarnation[lease.slots] == lease.incarnations)
    positions: list[Any] = [
        "finished" if not left else state.index.keys[slot].tobytes() if here else "gone"
        for left, here, slot in zip(lease.left, there, lease.slots.tolist(), strict=True)
    ]
    return (lease.stage.name, lease.unit, positions, lease.holder, lease.claim)


def _plan(plan: Plan) -> Any:
    members = [(m.number, m.rank, m.holder, m.claim, m.acked) for m in plan.members.values()]
    return plan.lease.stage.name, plan.shape, plan.laid, members


def _permits(store: Store) -> Any:
    state, permits = store.state, store.permits
    groups = state.groups.live().tolist() if permits.counts else []
    begun = {state.groups.index.keys[g].tobytes(): int(permits.begun[g]) for g in groups}
    given = {
        one.number: (one.holder, one.version, one.count, one.left) for one in permits.given.values()
    }
    known = permits.version, permits.limits, permits.trained, permits.done
    return permits.counts, known, given, begun


def _holdings(store: Store) -> dict[Any, Any]:
    return {
        owner: dict(zip(ranges.tolist(), zip(counts.tolist(), strict=True), strict=True))
        for owner, ranges, counts in store.holdings()
    }
