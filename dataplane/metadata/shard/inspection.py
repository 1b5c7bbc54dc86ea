"""What people ask of a store: why is nothing ready, how large is it. Slow paths that may scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dataplane.metadata.shard import weights
from dataplane.metadata.shard.blocks import LEASED, READY
from dataplane.metadata.shard.leases import Lease, Plan
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables.values import by_tables
from dataplane.wire.tables import INLINE, Where

SHOWN_RANKS = 16

Holder = tuple[int, str, int, float]
"""(session, stage, rows, seconds)"""


def missing(
    state: State,
    name: str,
    unit: str,
    now: float,
    where: Where | None = None,
    budget_tag: str | None = None,
) -> dict[str, Any]:
    """Why units are not ready: parts of `reasons.Facts` by name.

    leases: [(holder, stage, rows, seconds)] of those who hold rows that this stage still has to
    get, the longest first. budget_tag: by which the claim that asks weighs rows.
    """
    stage = state.stage(name)
    pending = {b.number: rows for b in state.blocks.values() if (rows := stage.pending(b))}
    lacking = {}
    for field in stage.fields:
        rows = sum(
            (bits & ~state.blocks[number].values.having([field])).bit_count()
            for number, bits in pending.items()
        )
        if rows:
            lacking[field] = rows
    units = stage.units(unit)
    ready = units.ready(where)
    alone = [b.live.bit_count() for b in state.blocks.values() if not b.group]
    return {
        "ready": ready,
        "units": units.count().remaining,
        "excluded": units.ready(None) - ready,
        "alone": sum(alone) if unit == "groups" else 0,
        "missing": lacking,
        "adders": {name: by for name in lacking if (by := _adder(state, name))},
        "open_groups": sum([not group.closed for group in state.groups.values()]),
        "leases": _in_the_way(state, stage, pending, now),
        "weightless": _weightless(state, stage, budget_tag) if budget_tag else [],
    }


def holders(state: State, now: float) -> list[Holder]:
    """Who has rows leased, of which stage, how many and for how many seconds."""
    return _holders(state, lambda lease: lease.many_left, now)


def _holders(state: State, counted: Callable[[Lease], int], now: float) -> list[Holder]:
    """counted: how many rows of a lease count. Of a plan's, one that has yet to ack has them."""
    held: dict[tuple[int, str], tuple[int, float]] = {}
    for lease in state.leases:
        if many := counted(lease):
            plan = None if lease.holder else state.leases.plan(lease.stage.name)
            working = [] if plan is None else plan.working
            one = working[0].holder if working else lease.holder, lease.stage.name
            rows, age = held.get(one, (0, 0.0))
            held[one] = rows + many, max(age, now - lease.started)
    return [(holder, stage, rows, age) for (holder, stage), (rows, age) in held.items()]


def _adder(state: State, field: str) -> str:
    """The stage that has added this field to some row; "" where none has."""
    return next(
        (
            name
            for block in state.blocks.values()
            for name, fields in (block.wrote or {}).items()
            if fields.get(field)
        ),
        "",
    )


def _in_the_way(state: State, stage: Stage, pending: dict[int, int], now: float) -> list[Holder]:
    def wanted(lease: Lease) -> int:
        if lease.stage is stage:
            return len(lease.held)
        parts = lease.held.parts
        return sum([(bits & pending.get(block.number, 0)).bit_count() for block, bits in parts])

    found = _holders(state, wanted, now)
    return sorted(found, key=lambda one: -one[3])


def _weightless(state: State, stage: Stage, tag: str) -> list[Any]:
    """How many rows that the stage may still get have no weight, the tag, and one of them."""
    parts = [
        (block, stage.pending(block) | stage.of(block).ready) for block in state.blocks.values()
    ]
    rows = weights.weightless(parts, tag)
    return [len(rows), tag, rows[0][0].name(rows[0][1])] if rows else []


def stats(state: State) -> dict[str, Any]:
    """Figures of one store. bytes counts every value, shared ranges once a value."""
    total = inline = 0
    for owners, records in by_tables(state.everything(), inline=True):
        total += int(records["nbytes"].sum(dtype=np.int64))
        if INLINE in owners:
            here = records["owner"] == owners.index(INLINE)
            inline += int(records["nbytes"][here].sum(dtype=np.int64))
    rows = len(state.index)
    return {
        "rows": rows,
        "groups": len(state.groups),
        "closed_groups": state.closed_groups,
        "bytes": total,
        "inline_bytes": inline,
        "tombstones": len(state.tombstones),
        "tombstones_forgotten": state.tombstones.forgotten,
        "leases": len(state.leases),
        "metadata_bytes": state.nbytes,
        "bytes_per_row": state.nbytes / rows if rows else 0.0,
        "sealed": state.sealed,
        "short_groups": state.short_groups,
        "lost_rows": state.losses.total,
        "admission": state.permits.stats(state) if state.permits.counts else {},
        "stages": {name: _stage_stats(state, stage) for name, stage in state.stages.items()},
    }


def _stage_stats(state: State, stage: Stage) -> dict[str, Any]:
    rows, groups, plan = stage.rows, stage.groups, state.leases.plan(stage.name)
    return {
        "fields": list(stage.fields),
        "ready_rows": rows.counts[READY],
        "leased_rows": rows.counts[LEASED],
        "outstanding_rows": rows.count().outstanding,
        "acked_rows": stage.acked_rows,
        "released_rows": stage.released_rows,
        "redelivered_rows": stage.redelivered_rows,
        "ready_groups": groups.counts[READY],
        "leased_groups": groups.counts[LEASED],
        "outstanding_groups": groups.count().outstanding,
        "plan": {} if plan is None else _plan_stats(plan),
    }


def _plan_stats(plan: Plan) -> dict[str, Any]:
    """Ranks, which of them have yet to ack, and which have not come (the first ones). A rank says
    once, with its ack, that it has done all its steps: the shard knows of no single ones."""
    came = {one.rank for one in plan.members.values()}
    working = {one.rank for one in plan.working}
    return {
        "ranks": plan.shape.ranks,
        "minibatches": plan.shape.minibatches,
        "epochs": plan.shape.epochs,
        "acked": len(came - working),
        "came": len(came),
        "working": sorted(working)[:SHOWN_RANKS],
        "absent": [rank for rank in range(plan.shape.ranks) if rank not in came][:SHOWN_RANKS],
    }
