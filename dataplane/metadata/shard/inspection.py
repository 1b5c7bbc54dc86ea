"""What people ask of a store: why is nothing ready, how large is it. Slow paths that may scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dataplane.metadata.shard.leases import Lease, Plan
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.state import UNGROUPED, State
from dataplane.metadata.shard.units import ACKED, LEASED, PENDING, READY
from dataplane.metadata.tables.columns import Array
from dataplane.wire.tables import Where

SHOWN_RANKS = 16


def missing(
    state: State, stage: Stage, unit: str, now: float, where: Where | None = None
) -> dict[str, Any]:
    """Why units are not ready: `reasons.Facts` by name, with `missing` for its `lacking`.

    leases: [(holder, stage, rows, seconds)] of those who hold rows that this stage still has to
    get, the longest first.
    """
    live = state.live()
    pending = live[stage.rows.state[live] == PENDING]
    lacking = {}
    for name in stage.fields:
        rows = int(np.count_nonzero(~state.fields.have(name, pending)))
        if rows:
            lacking[name] = rows
    units = stage.units(unit)
    ready = units.ready(where)
    return {
        "ready": ready,
        "units": units.remaining,
        "excluded": units.ready(None) - ready,
        "alone": int(np.count_nonzero(state.group[live] == UNGROUPED)) if unit == "groups" else 0,
        "missing": lacking,
        "adders": {name: by for name in lacking if (by := _adder(state, name))},
        "open_groups": len(state.groups.open()),
        "leases": _in_the_way(state, stage, pending, now),
    }


def holders(state: State, now: float) -> list[tuple[int, str, int, float]]:
    """Who has rows leased, of which stage, how many and for how many seconds."""
    held: dict[tuple[int, str], tuple[int, float]] = {}
    for lease in state.leases:
        one = _holder(lease), lease.stage.name
        rows, age = held.get(one, (0, 0.0))
        left = int(np.count_nonzero(lease.left))
        held[one] = rows + left, max(age, now - lease.started)
    return [(holder, stage, rows, age) for (holder, stage), (rows, age) in held.items()]


def _holder(lease: Lease) -> int:
    """Of a plan, one that has yet to ack."""
    working = [] if lease.plan is None else lease.plan.working
    return working[0].holder if working else lease.holder


def _adder(state: State, field: str) -> str:
    """The stage that has added this field to some row; "" where none has."""
    mask = np.uint64(state.fields.known_mask([field]))
    return next((name for name, one in state.stages.items() if (one.wrote & mask).any()), "")


def _in_the_way(
    state: State, stage: Stage, pending: Array, now: float
) -> list[tuple[int, str, int, float]]:
    waited_for = np.zeros(len(state.group), np.bool_)
    waited_for[pending] = True
    held: dict[tuple[int, str], tuple[int, float]] = {}
    for lease in state.leases:
        slots = state.held(lease, lease.left.nonzero()[0])
        mine = stage.rows.state[slots] == LEASED if lease.stage is stage else waited_for[slots]
        rows = int(np.count_nonzero(mine))
        if rows:
            one = _holder(lease), lease.stage.name
            before, age = held.get(one, (0, 0.0))
            held[one] = (before + rows, max(age, now - lease.started))
    found = [(holder, of, rows, age) for (holder, of), (rows, age) in held.items()]
    return sorted(found, key=lambda one: -one[3])


@dataclass(frozen=True, slots=True)
class Figures:
    """stages: rows by stage, and by what they are for it. admission: the trainer's version, and how
    many the slowest group is behind it; 0, 0 without."""

    rows: int
    groups: int
    tombstones: int
    metadata_bytes: int
    stages: dict[str, dict[str, int]]
    admission: tuple[int, int]


def figures(state: State) -> Figures:
    """The part of `stats` that costs the same however many rows there are, but for the lag when the
    group was finished that was the slowest."""
    permits, stages = state.permits, {}
    for name, stage in state.stages.items():
        counts = stage.rows.counts
        states = {"pending": PENDING, "ready": READY, "leased": LEASED, "acked": ACKED}
        stages[name] = {word: counts[number] for word, number in states.items()}
    return Figures(
        rows=len(state.index),
        groups=len(state.groups),
        tombstones=len(state.tombstones),
        metadata_bytes=state.nbytes,
        stages=stages,
        admission=(permits.version, permits.version - permits.oldest(state)),
    )


def stats(state: State) -> dict[str, Any]:
    """Figures of one store. bytes counts every value, shared ranges once a value."""
    live = state.live()
    total, packed, inline = state.fields.volume(live)
    return {
        "rows": len(live),
        "groups": len(state.groups),
        "closed_groups": state.closed_groups,
        "bytes": total,
        "packed_bytes": packed,
        "inline_bytes": inline,
        "bytes_at": state.fields.bytes_at(live),
        "tombstones": len(state.tombstones),
        "tombstones_forgotten": state.tombstones.forgotten,
        "leases": len(state.leases),
        "metadata_bytes": state.nbytes,
        "bytes_per_row": state.nbytes / len(live) if len(live) else 0.0,
        "sealed": state.sealed,
        "short_groups": state.short_groups,
        "lost_rows": state.losses.total,
        "admission": state.permits.stats(state) if state.permits.counts else {},
        "stages": {name: _stage_stats(state, stage) for name, stage in state.stages.items()},
    }


def _stage_stats(state: State, stage: Stage) -> dict[str, Any]:
    counts, plan = stage.counts(None), state.leases.plan(stage.name)
    return {
        "fields": list(stage.fields),
        "ready_rows": counts.ready_rows,
        "leased_rows": stage.rows.counts[LEASED],
        "outstanding_rows": counts.outstanding_rows,
        "acked_rows": stage.acked_rows,
        "ready_groups": counts.ready_groups,
        "leased_groups": stage.groups.counts[LEASED],
        "outstanding_groups": counts.outstanding_groups,
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
