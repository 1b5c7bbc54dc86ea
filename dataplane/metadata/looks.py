"""What people ask of a store: why is nothing ready, how large is it. Slow paths that may scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dataplane.metadata.columns import Array
from dataplane.metadata.stages import Stage
from dataplane.metadata.state import State
from dataplane.metadata.units import ACKED, LEASED, PENDING, READY


def missing(state: State, stage: Stage, unit: str, now: float) -> dict[str, Any]:
    """Why units are not ready.

    ready, units: of how many that are neither leased nor done. missing: {field: rows that lack it}.
    open_groups: groups that wait for more rows. leases: [(holder, rows, seconds)] of those who hold
    rows that this stage still has to get, the longest first.
    """
    live = state.live()
    pending = live[stage.rows.state[live] == PENDING]
    lacking = {}
    for name in stage.fields:
        rows = int(np.count_nonzero(~state.fields.have(name, pending)))
        if rows:
            lacking[name] = rows
    units = stage.units(unit)
    return {
        "ready": units.ready(None),
        "units": units.remaining,
        "missing": lacking,
        "open_groups": len(state.groups.open()),
        "leases": _in_the_way(state, stage, pending, now),
    }


def _in_the_way(
    state: State, stage: Stage, pending: Array, now: float
) -> list[tuple[int, int, float]]:
    waited_for = np.zeros(len(state.group), np.bool_)
    waited_for[pending] = True
    held: dict[int, tuple[int, float]] = {}
    for lease in state.leases:
        slots = state.held(lease, lease.left.nonzero()[0])
        mine = stage.rows.state[slots] == LEASED if lease.stage is stage else waited_for[slots]
        rows = int(np.count_nonzero(mine))
        if rows:
            before, age = held.get(lease.holder, (0, 0.0))
            held[lease.holder] = (before + rows, max(age, now - lease.started))
    found = [(holder, rows, age) for holder, (rows, age) in held.items()]
    return sorted(found, key=lambda one: -one[2])


@dataclass(frozen=True, slots=True)
class Figures:
    """stages: rows by stage, and by what they are for it."""

    rows: int
    groups: int
    tombstones: int
    metadata_bytes: int
    stages: dict[str, dict[str, int]]


def figures(state: State) -> Figures:
    """The part of `stats` that costs the same however many rows there are."""
    stages = {}
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
    )


def stats(state: State) -> dict[str, Any]:
    """Figures of one store. bytes counts every value, shared ranges once a value."""
    live = state.live()
    total, packed = state.fields.volume(live)
    return {
        "rows": len(live),
        "groups": len(state.groups),
        "closed_groups": state.closed_groups,
        "bytes": total,
        "packed_bytes": packed,
        "bytes_at": state.fields.bytes_at(live),
        "tombstones": len(state.tombstones),
        "tombstones_forgotten": state.tombstones.forgotten,
        "leases": len(state.leases),
        "metadata_bytes": state.nbytes,
        "bytes_per_row": state.nbytes / len(live) if len(live) else 0.0,
        "sealing": state.sealing,
        "stages": {name: _stage_stats(stage) for name, stage in state.stages.items()},
    }


def _stage_stats(stage: Stage) -> dict[str, Any]:
    counts = stage.counts(None)
    return {
        "fields": list(stage.fields),
        "ready_rows": counts.ready_rows,
        "leased_rows": stage.rows.counts[LEASED],
        "outstanding_rows": counts.outstanding_rows,
        "ready_groups": counts.ready_groups,
        "leased_groups": stage.groups.counts[LEASED],
        "outstanding_groups": counts.outstanding_groups,
    }
