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
from dataplane.metadata.tables.bits import in_bytes, rows_of
from dataplane.metadata.tables.pieces import Chunk
from dataplane.metadata.tables.tags import MISSING
from dataplane.wire.journal import LogRecord, decode, encode
from dataplane.wire.tables import Owner, Values

SIZES = ("metadata_bytes", "bytes_per_row", "bytes", "inline_bytes")
"""A dump describes an inline chunk of several blocks once for each operation that needs it."""


def carried_over(store: Store, ops: list[LogRecord], now: float = 0.0) -> None:
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
        "plans": {plan.lease.number: _plan(plan) for plan in state.leases.plans.values()},
        "tombstones": [one for part in state.tombstones.parts() for one in part.items()],
        "fields": sorted(rows_out.known(store, list(state.fields))),
        "phase": store.phase,
        "holdings": _holdings(store),
        "lost": store.losses.after(0),
        "permits": _permits(store),
        "stats": stats,
    }


def accounts(store: Store) -> list[str]:
    """What a store counts as it goes, counted anew: bytes, rows of each kind, queues, leases."""
    state, wrong = store, []
    blocks = list(state.blocks.values())
    used = sum(b.nbytes for b in blocks) + sum(g.nbytes_each for g in state.groups.values())
    uses = {one for block in blocks for one in block.values.chunks}
    inline = sum(len(one.inline) for one in uses)
    rows_in = Counter[Chunk]()
    for block in blocks:
        for chunk, bits in block.values.rows_by_chunk().items():
            rows_in[chunk] += bits.bit_count()
    dead = Counter[Owner]()
    for one in rows_in:
        if one.number and (unused := one.rows - rows_in[one]) > 0:
            dead[one.owner] += one.nbytes * unused // one.rows
    if any(one.live_rows != many for one, many in rows_in.items()):
        wrong.append("chunks miscount the rows that use them")
    owners = {one.owner for one in state.chunks} | {*dead}
    if any(state.dead_bytes(owner) != dead[owner] for owner in owners):
        wrong.append(f"dead bytes are {dict(dead)}, and are counted otherwise")
    if {*state.chunks} != {one for one in uses if one.number}:
        wrong.append("the chunks that rows use are not those that the store knows")
    if any(state.chunk(one.owner, one.number) is not one for one in state.chunks):
        wrong.append("a chunk is known under another name")
    if (used, inline) != (state.used_bytes, state.inline_bytes):
        wrong.append(f"{used} and {inline} bytes, not {state.used_bytes}, {state.inline_bytes}")
    there = {block.keys[row]: block for block in blocks for row in rows_of(block.live)}
    found = {key: state.index.get(key) for key in there}
    if there != found or len(there) != len(state.index):
        wrong.append(f"{len(there)} rows are there, {len(state.index)} in the index")
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
                wrong.append(
                    f"block {block.number} has rows of {stage.name!r} in no lease or queue"
                )
            if kinds[0] & fit or mine.ready & ~fit or sum(kinds) != block.live:
                wrong.append(f"block {block.number} stands wrong for {stage.name!r}")
        groups = Counter(group.states[stage.number] for group in state.groups.values())
        for unit, known in (("rows", rows), ("groups", groups)):
            if stage.units(unit).counts != [known[kind] for kind in range(5)]:
                wrong.append(f"{stage.name!r} miscounts {unit}: {stage.units(unit).counts}")
    return wrong


def _keys(parts: Any) -> list[bytes]:
    return [block.keys[row] for block, row in Rows(list(parts))]


def _rows(store: Store, stage: str = "") -> dict[bytes, Any]:
    rows = store.rows
    table = rows_out.table(store, rows, stage=stage)
    result: dict[bytes, Any] = {
        block.keys[row]: (block.name(row), block.group, {}, {}) for block, row in rows
    }
    keys = list(result)
    for field, found in cells(table.values, len(keys)).items():
        for key, cell in zip(keys, found, strict=True):
            if cell is not None:
                result[key][2][field] = cell
    for name, held in tags_held(rows).items():
        for key, value in zip(keys, held, strict=True):
            if value is not MISSING:
                result[key][3][name] = value
    return result


def cells(values: Values, rows: int) -> dict[str, list[Any]]:
    """Of each field, per row where its value is: in which chunk, row and column of it."""
    found: dict[str, list[Any]] = {field: [None] * rows for field in values.fields}
    for piece in values.pieces:
        chunk = values.chunks[piece.chunk]
        about = values.owners[chunk.owner], chunk.number, chunk.nbytes, chunk.inline
        places = np.frombuffer(piece.at, "<u4").tolist()
        for n, row in enumerate(rows_of(in_bytes(piece.given))):
            at = places[n] if places else piece.first + n
            for column, field in enumerate(piece.fields):
                if field >= 0:
                    assert found[values.fields[field]][piece.base + row] is None
                    found[values.fields[field]][piece.base + row] = *about, at, column
    return found


def _stage(store: Store, name: str) -> dict[str, Any]:
    state, stage = store, store.stages[name]
    standing = {block.keys[row]: (stage.of(block), 1 << row) for block, row in state.rows}
    return {
        "sums": (stage.acked_rows, stage.released_rows, stage.redelivered_rows),
        "fields": list(stage.fields),
        "rows": {
            key: [bool(bits & bit) for bits in (one.ready, one.leased, one.acked, one.returned)]
            for key, (one, bit) in standing.items()
        },
        "counts": (stage.rows.counts, stage.groups.counts),
        "groups": {one.key: one.states[stage.number] for one in state.groups.values()},
        "added": _added(store, name),
        "progress": {key: row[2] for key, row in _rows(store, name).items()},
        "ready_rows": _keys(stage.rows.plain),
        "ready_groups": [group.key for group, _ in stage.groups.plain],
    }


def _added(store: Store, stage: str) -> dict[bytes, list[str]]:
    """The fields of each row that a stage has added."""
    blocks = {id(block): block for block, _ in store.rows}
    added = {
        number: [(field, block.values.added(stage, field)) for field in sorted(store.fields)]
        for number, block in blocks.items()
    }
    return {
        block.keys[row]: [field for field, bits in added[id(block)] if bits >> row & 1]
        for block, row in store.rows
    }


def _lease(lease: Any) -> Any:
    positions = [
        "finished" if not left >> row & 1 else block.keys[row] if block.live >> row & 1 else "gone"
        for (block, bits), left in zip(lease.rows.parts, lease.left, strict=True)
        for row in rows_of(bits)
    ]
    return (lease.stage.name, positions, lease.holder, lease.claim)


def _plan(plan: Plan) -> Any:
    members = [(m.number, m.rank, m.holder, m.claim, m.acked) for m in plan.members.values()]
    return plan.lease.stage.name, plan.shape, plan.rows, members


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
        owner: dict(zip(chunks.tolist(), zip(counts.tolist(), strict=True), strict=True))
        for owner, chunks, counts in store.holdings()
    }
