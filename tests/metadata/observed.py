"""Everything that can be seen of a store, by key, so that two stores can be compared."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from dataplane.metadata.shard import inspection, rows_out
from dataplane.metadata.shard.blocks import Rows
from dataplane.metadata.shard.journal import apply
from dataplane.metadata.shard.leases import Plan
from dataplane.metadata.shard.rows_out import tags_held
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables.bits import rows_of
from dataplane.metadata.tables.tags import MISSING
from dataplane.wire.journal import Op, decode, encode
from dataplane.wire.limits import ABSENT
from dataplane.wire.records import VALUE
from dataplane.wire.tables import INLINE, Table

SIZES = ("metadata_bytes", "bytes_per_row")


def carried_over(store: Store, ops: list[Op], now: float = 0.0) -> None:
    """Apply operations as they arrive: as bytes. What is freed here is told elsewhere."""
    for op in ops:
        apply(store, decode(encode(op)), now)
    store.freed()


def observed(store: Store) -> dict[str, Any]:
    """Rows, groups, stages, leases and the rest; equal for stores that behave alike."""
    state = store
    stats = {name: value for name, value in inspection.stats(store).items() if name not in SIZES}
    return {
        "rows": _rows(store),
        "groups": {
            one.key: (
                *(one.name, one.expected, one.seen, one.dropped, one.closed),
                _keys((block, block.live) for block in one.blocks),
            )
            for one in state.groups.values()
        },
        "stages": {name: _stage(store, name) for name in state.stages},
        "leases": {lease.number: _lease(lease) for lease in state.leases},
        "plans": {plan.lease.number: _plan(plan) for plan in state.leases.plans},
        "tombstones": [one for part in state.tombstones.parts() for one in part.items()],
        "fields": sorted(rows_out.known(store, list(state.fields))),
        "phase": store.phase,
        "holdings": _holdings(store),
        "lost": store.losses.after(0),
        "permits": _permits(store),
        "stats": stats,
    }


def accounts(store: Store) -> list[str]:
    """What a store counts as it goes, counted anew: bytes, rows of each kind, lanes, leases."""
    state, wrong = store, []
    blocks = list(state.blocks.values())
    used = sum(b.nbytes for b in blocks) + sum(g.nbytes_each for g in state.groups.values())
    inline = sum(block.inline_bytes for block in blocks)
    if (used, inline) != (state.used_bytes, state.inline_bytes):
        wrong.append(f"{used} and {inline} bytes, not {state.used_bytes}, {state.inline_bytes}")
    there = {block.key(row): block for block in blocks for row in rows_of(block.live)}
    if there != state.index:
        wrong.append(f"{len(there)} rows are there, {len(state.index)} in the index")
    gave = Counter((s, f) for b in blocks for s, v in (b.progress or {}).items() for f in v.fields)
    if gave != state.progress:
        wrong.append(f"there is progress of {gave}, not of {state.progress}")
    for stage in state.stages.values():
        leased: Counter[int] = Counter()
        for lease in state.leases:
            for block, bits in lease.held.parts if lease.stage is stage else ():
                leased[block.number] |= bits
        rows = Counter[int]()
        for block in blocks:
            mine, fit = stage.of(block), block.values.having(stage.fields)
            kinds = [stage.pending(block), mine.ready, mine.leased, mine.acked]
            rows.update({kind: bits.bit_count() for kind, bits in enumerate(kinds)})
            waits = stage.rows.plain.holds(block)
            if (mine.leased, mine.ready) != (leased[block.number], waits):
                wrong.append(f"block {block.number} has rows of {stage.name!r} in no lease or lane")
            if kinds[0] & fit or mine.ready & ~fit or sum(kinds) != block.live:
                wrong.append(f"block {block.number} stands wrong for {stage.name!r}")
        groups = Counter(group.states[stage.number] for group in state.groups.values())
        for unit, known in (("rows", rows), ("groups", groups)):
            if stage.units(unit).counts != [known[kind] for kind in range(5)]:
                wrong.append(f"{stage.name!r} miscounts {unit}: {stage.units(unit).counts}")
    return wrong


def _keys(parts: Any) -> list[bytes]:
    return [block.key(row) for block, row in Rows(list(parts))]


def _rows(store: Store, stage: str = "") -> dict[bytes, Any]:
    rows = store.rows
    table = rows_out.table(store, rows, stage=stage)
    result: dict[bytes, Any] = {
        block.key(row): (block.name(row), block.group, {}, {}) for block, row in rows
    }
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
    for name, held in tags_held(rows).items():
        for key, value in zip(keys, held, strict=True):
            if value is not MISSING:
                result[key][3][name] = value
    return result


def _place(table: Table, record: tuple[int, ...]) -> tuple[Any, ...]:
    """Range, generation, length and delta of a value; of one that lives in the store, its bytes."""
    at, generation, nbytes, _, delta, owner = record
    if table.owners[owner] == INLINE:
        return (table.inline[at : at + nbytes],)
    return at, generation, nbytes, delta


def _stage(store: Store, name: str) -> dict[str, Any]:
    state, stage = store, store.stages[name]
    standing = {block.key(row): (stage.of(block), 1 << row) for block, row in state.rows}
    return {
        "sums": (stage.acked_rows, stage.released_rows, stage.redelivered_rows),
        "fields": list(stage.fields),
        "rows": {
            key: [bool(bits & bit) for bits in (one.ready, one.leased, one.acked, one.returned)]
            for key, (one, bit) in standing.items()
        },
        "counts": (stage.rows.counts, stage.groups.counts),
        "groups": {one.key: one.states[stage.number] for one in state.groups.values()},
        "added": {
            block.key(row): sorted(f for f in state.fields if block.added(name, f) >> row & 1)
            for block, row in state.rows
        },
        "progress": {key: row[2] for key, row in _rows(store, name).items()},
        "ready_rows": _keys(stage.rows.plain),
        "ready_groups": [group.key for group, _ in stage.groups.plain],
    }


def _lease(lease: Any) -> Any:
    positions = [
        "finished" if not left >> row & 1 else block.key(row) if block.live >> row & 1 else "gone"
        for (block, bits), left in zip(lease.rows.parts, lease.left, strict=True)
        for row in rows_of(bits)
    ]
    return (lease.stage.name, positions, lease.holder, lease.claim)


def _plan(plan: Plan) -> Any:
    members = [(m.number, m.rank, m.holder, m.claim, m.acked) for m in plan.members.values()]
    return plan.lease.stage.name, plan.shape, plan.laid, members


def _permits(store: Store) -> Any:
    state, permits = store, store.permits
    groups = state.groups.values() if permits.counts else []
    begun = {one.key: one.begun for one in groups}
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
