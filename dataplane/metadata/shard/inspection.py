"""Answers for people about a store: why nothing is ready, and how large it is. Scans of the blocks
run in pieces, so that a peer can serve other calls in between."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dataplane.errors import (
    MAX_COMPARED,
    DataplaneError,
    RowsDropped,
    RowsGone,
    StreamEnd,
    joined,
    nearest,
)
from dataplane.metadata.shard import weights
from dataplane.metadata.shard.blocks import LEASED, PENDING, READY, UNKNOWN_SIZE, Block, Group
from dataplane.metadata.shard.leases import Lease, Plan
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables.keys import hash_name
from dataplane.metadata.tables.where import tags_of, wanted_values
from dataplane.wire.messages import Done
from dataplane.wire.tables import Name, Scalar, Where

PIECE = 8_192
"""Blocks and groups that are scanned before a peer serves other calls: about 10 ms."""
SHOWN_RANKS = 16
SHOWN_GROUPS = 3
SHOWN_TAGS = 3
MAX_OPEN_GROUPS = 1_000
"""Open groups in the statistics of a partition."""
IDLE_S = 30.0
"""A stage is idle when it has leased nothing and no claim has asked for its rows for this long: a
waiting claim asks at least every 20 s."""

Holder = tuple[int, str, int, float]
"""(session, stage, rows, seconds)"""
Idle = tuple[str, int, float | None]
"""A stage that has leased no rows: (stage, rows ready for it, seconds since a client last asked;
None: never)."""


class Look:
    """A search for what keeps the pending rows of a stage from a call. It scans PIECE blocks or
    groups at a time. Rows that change during the search may or may not count."""

    def __init__(
        self,
        state: State,
        name: str,
        unit: str,
        where: Where | None = None,
        budget_tag: str | None = None,
    ) -> None:
        """budget_tag: the tag by which the call weighs rows."""
        self.state, self.name, self.where, self.tag = state, name, where, budget_tag
        self.stage = state.stage(name)
        self.unit, self.units = unit, self.stage.units(unit)
        self.lacking = Counter[str]()
        """by field, the pending rows without it"""
        self.ready = Counter[str]()
        """by stage that has leased no rows, the pending rows that are ready for it"""
        self.alone = 0
        """rows without a group"""
        self.tag_values: dict[str, set[Scalar]] = {}
        """by tag that the filter compares with values, up to about MAX_COMPARED values of rows"""
        if where is not None and self.units.ready(where) < self.units.ready(None):
            self.tag_values = {tag: set() for tag, _ in wanted_values(where)}
        self.weightless = 0
        """the rows that have no weight"""
        self.such: Name = ""
        """one of these rows"""
        self.open_groups = 0
        self.empty: list[Group] = []
        """up to SHOWN_GROUPS open groups that never had a row"""
        self.begun: list[Group] = []
        """up to MAX_COMPARED open groups that had one"""
        self._blocks = iter(list(state.blocks.values()))
        self._groups = iter(list(state.groups.values()))

    def go_on(self) -> bool:
        """Scan the next PIECE blocks, then groups. Return whether there may be more."""
        blocks = list(itertools.islice(self._blocks, PIECE))
        groups = list(itertools.islice(self._groups, PIECE - len(blocks)))
        live = [block for block in blocks if block.live]
        self.alone += sum([block.live.bit_count() for block in live if not block.group])
        pending = [(block, rows) for block in live if (rows := self.stage.pending(block))]
        self.lacking += _lacking(self.stage, pending)
        for name, stage in self.state.stages.items():
            if not stage.rows.counts[LEASED]:
                ready = [(rows & stage.of(block).ready).bit_count() for block, rows in pending]
                self.ready[name] += sum(ready)
        for tag, there in self.tag_values.items():
            for block in live:
                if block.tags is not None and len(there) <= MAX_COMPARED:
                    there |= block.tags.values_of(tag, block.live)
        if self.tag:
            parts = [(b, self.stage.pending(b) | self.stage.of(b).ready) for b in live]
            if found := weights.weightless(parts, self.tag):
                self.weightless += len(found)
                self.such = found[0][0].name(found[0][1])
        for group in groups:
            if not group.closed:
                self.open_groups += 1
                some, most = (
                    (self.begun, MAX_COMPARED) if group.seen else (self.empty, SHOWN_GROUPS)
                )
                if len(some) < most:
                    some.append(group)
        return len(blocks) + len(groups) == PIECE


def missing(look: Look, now: float) -> dict[str, Any]:
    """Return why units are not ready: parts of `reasons.Facts`, by name. look: a complete search.

    leases: [(holder, stage, rows, seconds)] of clients that lease rows which this stage has yet
    to get, the longest first. producers: [(session, rows, seconds)] of clients that put rows.
    """
    state, stage, units, where = look.state, look.stage, look.units, look.where
    ready, counts = units.ready(where), units.count()
    ready_rows = look.ready | Counter({look.name: stage.rows.counts[READY]})
    short = [*look.empty, *look.begun][:SHOWN_GROUPS]
    return {
        "ready": ready,
        "units": counts.remaining,
        "leased": counts.to_come - counts.remaining,
        "excluded": units.ready(None) - ready,
        "alone": look.alone if look.unit == "groups" else 0,
        "split": counts.outstanding - counts.to_come,
        "missing": dict(look.lacking),
        "adders": {name: by for name in look.lacking if (by := _adder(state, name))},
        "near_fields": _near_fields(state, look.lacking),
        "unknown_tags": {
            tag: nearest(tag, sorted(state.tag_names)) for tag in _unknown_tags(state, where)
        },
        "unknown_values": _unknown_values(look) if units.ready(None) > ready else [],
        "idle": idle(state, now, ready_rows),
        "open_groups": look.open_groups,
        "short": [
            (group.name, group.seen, group.expected, _near_group(group, look.begun))
            for group in short
        ],
        "leases": _in_the_way(state, stage, now),
        "sealed": state.sealed,
        "put_rows": state.producers.rows,
        "groups_wanted": state.definition.groups or 0,
        "groups_closed": state.closed_groups,
        "producers": state.producers.latest(now),
        "lost": stage.lost,
        "weightless": [look.weightless, look.tag, look.such] if look.weightless else [],
    }


def _lacking(stage: Stage, pending: Sequence[tuple[Block, int]]) -> Counter[str]:
    """Return, per field of a stage, how many of its pending rows lack it. A field that all of them
    have has no entry."""
    found: Counter[str] = Counter()
    for field in stage.fields:
        need = [field]
        lack = [(rows & ~block.values.having(need)).bit_count() for block, rows in pending]
        if rows := sum(lack):
            found[field] = rows
    return found


def _near_fields(state: State, lacking: Mapping[str, int]) -> dict[str, str]:
    """For each missing field, a similarly named field that rows have. A field that a stage needs is
    suggested only if just one stage needs the missing field and no row has it."""
    needed = Counter(field for stage in state.stages.values() for field in set(stage.fields))
    known = [field for field, had in state.fields.items() if had]
    unneeded = [field for field in known if not needed[field]]
    found = {}
    for field in lacking:
        is_alone = needed[field] == 1 and not state.fields.get(field)
        if near := nearest(field, known if is_alone else unneeded):
            found[field] = near
    return found


def _near_group(group: Group, begun: list[Group]) -> Name:
    """Return another open group that has rows, of which this group without rows may be a
    misspelling; "" if there is none."""
    if group.seen:
        return ""
    others = [one.name for one in begun]
    alike = next((one for one in others if str(one) == str(group.name)), None)  # 7 and "7"
    return nearest(str(group.name), map(str, others)) if alike is None else alike


def _unknown_tags(state: State, where: Where | None, exists: bool = True) -> list[str]:
    """The tags of a filter that no row has ever had."""
    if where is None or not state.producers.rows:
        return []
    return sorted(tags_of(where, exists) - state.tag_names)


def unknown_tags(state: State, where: Where | None) -> dict[str, list[str]]:
    """Tags that a filter compares and no row has ever had, each with a similar existing name, or
    else with some existing names. `tag(…).exists()` is not reported."""
    found = {}
    for tag in _unknown_tags(state, where, exists=False)[:SHOWN_TAGS]:
        near = nearest(tag, sorted(state.tag_names))
        found[tag] = [near] if near else sorted(state.tag_names)[:SHOWN_TAGS]
    return found


def _unknown_values(look: Look) -> list[tuple[str, str, list[str], int]]:
    """The filter's comparisons with values that no row has: (tag, wanted values, up to SHOWN_TAGS
    existing values with the most similar first, number of further values). Tags with over
    MAX_COMPARED values are left out."""
    found = []
    for tag, values in wanted_values(look.where) if look.where is not None else ():
        there = look.tag_values.get(tag, set())
        if not 0 < len(there) <= MAX_COMPARED or not there.isdisjoint(values) or not values:
            continue
        named = {_brief(value): value for value in sorted(there, key=_order)}
        first = nearest(_brief(values[0]), named)
        shown = sorted(named, key=lambda name: name != first)[:SHOWN_TAGS]
        wanted = joined([_brief(value) for value in values[:SHOWN_TAGS]], " or ")
        found.append((tag, wanted, shown, len(there) - len(shown)))
    return found[:SHOWN_TAGS]


def _brief(value: Scalar) -> str:
    return f"{value!r:.40}"


def _order(value: Scalar) -> tuple[bool, Any]:
    """Numbers by size, before all others."""
    return (False, value) if isinstance(value, int | float) else (True, repr(value))


def is_idle(asked_s: float | None) -> bool:
    """Whether no client has claimed from a stage for IDLE_S. asked_s: seconds since the last claim;
    None: there was none."""
    return asked_s is None or asked_s >= IDLE_S


def idle(state: State, now: float, ready: Mapping[str, int] | None = None) -> list[Idle]:
    """Return the `unleased` stages that no client claims from."""
    return [one for one in unleased(state, now, ready) if is_idle(one[2])]


def unleased(state: State, now: float, ready: Mapping[str, int] | None = None) -> list[Idle]:
    """The stages that have leased no rows and have rows ready. ready: how many rows count, by
    stage; None: all that are ready."""
    found: list[Idle] = []
    for name, stage in state.stages.items():
        if stage.rows.counts[LEASED]:
            continue
        asked = None if stage.claimed_at is None else now - stage.claimed_at
        rows = stage.rows.counts[READY] if ready is None else ready.get(name, 0)
        if rows:
            found.append((name, rows, asked))
    return found


def lacks(state: State, blocks: Sequence[Block]) -> Counter[tuple[str, str]]:
    """Return how many rows of these blocks lack a field that a stage needs: (stage, field) → rows.
    Blocks that are no longer in the store have none."""
    found: Counter[tuple[str, str]] = Counter()
    for name, stage in state.stages.items():
        if stage.rows.counts[PENDING]:
            pending = [(b, rows) for b in blocks if b.live and (rows := stage.pending(b))]
            for field, rows in _lacking(stage, pending).items():
                found[name, field] = rows
    return found


def unfinished(state: State, group: Group) -> dict[str, Any]:
    """Why a group is not complete. lacks: field → (the stage that needs it, the stage that adds
    it, a similar field that rows have). of: how many rows it gets, 0 if it is closed, -1 if
    unknown."""
    lacks: dict[str, tuple[str, str, str]] = {}
    for name, stage in state.stages.items():
        mine = [(block, rows) for block in group.blocks if (rows := stage.pending(block))]
        lacking = _lacking(stage, mine)
        near = _near_fields(state, lacking)
        for field in lacking:
            lacks.setdefault(field, (name, _adder(state, field), near.get(field, "")))
    return {
        "group": group.name,
        "rows": group.seen,
        "of": 0 if group.closed else group.expected,
        "lacks": lacks,
    }


def key_status(state: State, name: Name) -> Done | DataplaneError | None:
    """Whether a row with this key exists: `Done`, the error if it never can, or None if not yet."""
    key = hash_name(name)
    if key in state.index:
        return Done()
    row = f"row {name!r} of partition {state.partition!r}"
    if state.tombstones.freed(key):
        return RowsGone(
            f"{row} was freed after every stage had acked it: read rows before the "
            "last stage acks them",
            keys=[name],
        )
    if state.tombstones.dropped(key):
        return RowsDropped(
            f"{row} was dropped, so it will never appear: stop waiting for it, "
            "or put it again with reuse=True",
            keys=[name],
        )
    if state.sealed:
        return StreamEnd(
            f"partition {state.partition!r} is sealed and has no row "
            f"{name!r}, so the row will never appear: stop waiting for it"
        )
    return None


def around_key(state: State, name: Name, now: float) -> dict[str, Any]:
    """Return what a shard knows about a key that a call waits for: parts of `reasons.Facts` by
    name, and `near`: a similar key of a row, or ""."""
    blocks = itertools.islice(reversed(state.blocks.values()), MAX_COMPARED)
    keys = [one for block in blocks for one in block.names or ()]
    alike = next((one for one in keys if str(one) == str(name)), None)  # 7 and "7"
    return {
        "put_rows": state.producers.rows,
        "producers": state.producers.latest(now),
        "near": nearest(str(name), map(str, keys)) if alike is None else alike,
    }


def holders(state: State, now: float) -> list[Holder]:
    """Which clients lease rows, of which stage, how many and for how many seconds."""
    return _holders(state, lambda lease: lease.many_left, now)


def _holders(state: State, counted: Callable[[Lease], int], now: float) -> list[Holder]:
    """counted: how many rows of a lease count. A plan's rows count for a member that has yet to
    ack."""
    held: dict[tuple[int, str], tuple[int, float]] = {}
    for lease in state.leases:
        if many := counted(lease):
            plan = None if lease.holder else state.leases.plans.get(lease.stage.name)
            working = [] if plan is None else plan.working
            one = working[0].holder if working else lease.holder, lease.stage.name
            rows, age = held.get(one, (0, 0.0))
            held[one] = rows + many, max(age, now - lease.started)
    return [(holder, stage, rows, age) for (holder, stage), (rows, age) in held.items()]


def _adder(state: State, field: str) -> str:
    """The stage that has added this field to some row of the oldest blocks; "" where none has."""
    for block in itertools.islice(state.blocks.values(), PIECE):
        for part in block.values.parts:
            if part.by in state.stages and field in part.fields:
                return part.by
    return ""


def _in_the_way(state: State, stage: Stage, now: float) -> list[Holder]:
    def wanted(lease: Lease) -> int:
        if lease.stage is stage:
            return len(lease.held)
        parts = lease.held.parts
        return sum([(bits & stage.pending(block)).bit_count() for block, bits in parts])

    found = _holders(state, wanted, now)
    return sorted(found, key=lambda one: -one[3])


def stats(state: State) -> dict[str, Any]:
    """Figures of one store. bytes counts each chunk once."""
    total = state.inline_bytes + sum([chunk.nbytes for chunk in state.chunks])
    rows = len(state.index)
    return {
        "rows": rows,
        "groups": len(state.groups),
        "closed_groups": state.closed_groups,
        "bytes": total,
        "inline_bytes": state.inline_bytes,
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


def open_groups(state: State) -> list[dict[str, Any]]:
    """The open groups, the oldest first: how many rows each has, and how many it expects (None if
    unknown)."""
    still_open = (group for group in state.groups.values() if not group.closed)
    return [
        {
            "group": group.name,
            "rows": group.seen,
            "of": None if group.expected == UNKNOWN_SIZE else group.expected,
        }
        for group in itertools.islice(still_open, MAX_OPEN_GROUPS)
    ]


def _stage_stats(state: State, stage: Stage) -> dict[str, Any]:
    rows, groups, plan = stage.rows, stage.groups, state.leases.plans.get(stage.name)
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
    """The ranks of a plan, the first ones that have yet to ack, and the first ones that are absent.
    A rank acks once, after all its steps, so the shard does not know single steps."""
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
