"""A naive model of a store: rows in a dict, group states worked out from scratch each time.

It also counts every reference to a chunk: each is either in a row, or was reported as freed exactly
once. The state machine beside it drives both and compares them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dataplane.errors import (
    DataplaneError,
    FieldExists,
    GroupClosed,
    InvalidRows,
    PartitionSealed,
    RowsDropped,
)
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables.keys import mint_many
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.tables import Definition, Owner, Rows, Shape, Table
from tests.metadata.stores import INLINE_AT, Column, Value, numbers

STAGES = {"s1": ["a"], "s2": ["a", "b"]}
OWNERS = [Owner("near", 1), Owner("far", 2)]
WHERE = ["ge", "v", 2]


def row_key(number: int) -> bytes:
    return mint_many(7, number, 1)


def group_key(number: int) -> bytes:
    return mint_many(8, number, 1)


def is_inline(number: int) -> bool:
    """Whether the value with this number is inline; its bytes say the number."""
    return number % 5 == 0


RETURNED = -(1 << 30)
"""Added to when a unit came, it is the stamp of one that came back: it is before all others."""


@dataclass
class Row:
    group: int | None
    arrived: int
    values: dict[str, list[int]] = field(default_factory=dict)
    writer: dict[str, str | None] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    progress: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """by stage and field"""
    state: dict[str, str] = field(default_factory=lambda: dict.fromkeys(STAGES, "pending"))
    stamp: dict[str, int] = field(default_factory=dict)

    @property
    def chunks(self) -> list[int]:
        every = [*self.values.values(), *self.progress.values()]
        return [one for chunks in every for one in chunks]

    def seen_by(self, stage: str) -> dict[str, list[int]]:
        """Its values as the stage gets them: its progress too, where there is no such field."""
        mine = {name: chunks for (of, name), chunks in self.progress.items() if of == stage}
        return mine | self.values


@dataclass
class Group:
    expected: int | None
    arrived: int
    seen: int = 0
    dropped: int = 0
    closed: bool = False
    counted: bool = False
    state: dict[str, str] = field(default_factory=lambda: dict.fromkeys(STAGES, "pending"))
    stamp: dict[str, int] = field(default_factory=dict)


@dataclass
class Lease:
    stage: str
    rows: list[Row]
    left: list[bool]
    holder: int


@dataclass
class Part:
    rank: int
    holder: int
    acked: bool = False


@dataclass
class Plan:
    lease: Lease
    shape: Shape
    parts: dict[int, Part] = field(default_factory=dict)


class Model:
    """What a store should hold, beside the store that holds it."""

    free: Literal["acked", "drop"] = "acked"
    group_size: int | None = 3
    seals_after = 60

    def __init__(self) -> None:
        super().__init__()
        definition = Definition(stages=STAGES, free=self.free, group_size=self.group_size)
        self.store = Store("p", definition, 1)
        self.rows: dict[int, Row] = {}
        self.groups: dict[int, Group] = {}
        self.dropped_rows: set[int] = set()
        self.dropped_groups: set[int] = set()
        self.leases: dict[int, Lease] = {}
        self.plans: dict[str, Plan] = {}
        self.sealing = False
        self.made = 0
        self.now = 0.0
        self.clock = itertools.count(1)
        self.chunks = itertools.count(1)
        self.references: set[int] = set()

    # the model's own bookkeeping

    def members(self, number: int) -> list[Row]:
        return [row for row in self.rows.values() if row.group == number]

    def is_live(self, row: Row) -> bool:
        return any(row is one for one in self.rows.values())

    def settle(self, stamp: int, returned: bool = False) -> None:
        for row in self.rows.values():
            for stage, fields in STAGES.items():
                if row.state[stage] == "pending" and set(fields) <= row.values.keys():
                    row.state[stage], row.stamp[stage] = "ready", stamp
        for number in list(self.groups):
            group = self.groups[number]
            if not group.closed and group.seen == group.expected:
                group.closed = True
            if group.closed and not group.counted and group.dropped < group.seen:
                group.counted = True
                self.made += 1
            live = self.members(number)
            if group.closed and not live:
                if group.counted and group.dropped == group.seen:
                    self.made -= 1
                del self.groups[number]
                continue
            for stage in STAGES:
                since = group.arrived + RETURNED if returned else stamp
                self.settle_group(group, live, stage, since)

    def settle_group(self, group: Group, live: list[Row], stage: str, stamp: int) -> None:
        states = [row.state[stage] for row in live]
        whole = group.closed and bool(live)
        if whole and set(states) == {"acked"}:
            then = "acked"
        elif group.state[stage] == "split" or "acked" in states:
            then = "split"
        elif whole and set(states) == {"ready"}:
            then = "ready"
        else:
            then = "leased" if group.state[stage] == "leased" else "pending"
        if then == "ready" and group.state[stage] != "ready":
            group.stamp[stage] = stamp
        group.state[stage] = then

    def remove(self, numbers: list[int], dropped: bool) -> None:
        for number in numbers:
            row = self.rows.pop(number)
            self.references -= set(row.chunks)
            if dropped:
                self.dropped_rows.add(number)
                if row.group is not None:
                    self.groups[row.group].dropped += 1

    def free_acked(self) -> None:
        if self.free == "acked":
            done = [n for n, row in self.rows.items() if set(row.state.values()) == {"acked"}]
            self.remove(done, dropped=False)

    # what goes in

    def column(self, name: str, here: list[bool]) -> tuple[Column, list[list[int]]]:
        """A column in which every value has a chunk of its own, and the number of each row's."""
        numbers = [[next(self.chunks)] if present else [] for present in here]
        return Column(name, [self.value(*one) if one else None for one in numbers]), numbers

    @staticmethod
    def value(number: int) -> Value:
        """The value with this number: its chunk's, or what its inline bytes say."""
        if is_inline(number):
            return Value(number, 8, INLINE_AT, number.to_bytes(8, "little"))
        return Value(number, 10, number % 2)

    def rows_message(self, keys: list[int], groups: list[int | None] | None = None) -> Rows:
        column = b"".join(map(row_key, keys))
        if groups is None:
            return Rows(column)
        table = list(dict.fromkeys(g for g in groups if g is not None))
        index = [NO_GROUP if g is None else table.index(g) for g in groups]
        return Rows(column, None, np.array(index, "<u4").tobytes(), b"".join(map(group_key, table)))

    def put_error(
        self, keys: list[int], groups: list[int | None], fields: dict[str, list[bool]], plain: bool
    ) -> set[type[DataplaneError]]:
        """Every error that this put may raise; the store raises one of them."""
        errors: set[type[DataplaneError]] = set()
        joining: Counter[int] = Counter()
        for i, (key, group) in enumerate(zip(keys, groups, strict=True)):
            row = self.rows.get(key)
            if row is None:
                errors |= {RowsDropped} if key in self.dropped_rows else set()
                errors |= {PartitionSealed} if self.sealing else set()
                if group is not None:
                    joining[group] += 1
                elif self.group_size is not None:
                    errors.add(InvalidRows)
                continue
            if group is not None and row.group != group:
                errors.add(InvalidRows)
            has = self.has(row, i, fields)
            if plain and any(has) and not all(has):
                errors.add(FieldExists)
        for number, count in joining.items():
            joined = self.groups.get(number)
            expected = joined.expected if joined else self.group_size
            if joined is None and number in self.dropped_groups:
                errors.add(RowsDropped)
            if joined and joined.closed:
                errors.add(GroupClosed)
            if expected is not None and (joined.seen if joined else 0) + count > expected:
                errors.add(GroupClosed)
        return errors

    def has(self, row: Row, place: int, fields: dict[str, list[bool]]) -> list[bool]:
        """Of the fields that a put brings for this row, which it has."""
        return [name in row.values for name, here in fields.items() if here[place]]

    def write(
        self,
        rows: list[Row],
        columns: dict[str, list[list[int]]],
        mode: str,
        stage: str | None = None,
    ) -> dict[str, int]:
        kept: Counter[str] = Counter()
        for name, column in columns.items():
            for row, chunks in zip(rows, column, strict=True):
                if not chunks:
                    continue
                if name in row.values and mode == "keep":
                    kept[name] += 1
                    continue
                self.references -= set(row.values.get(name, ()))
                row.values[name] = chunks
                row.writer[name] = stage
                self.references |= set(chunks)
        return dict(kept)

    def note_progress(
        self, rows: list[Row], columns: dict[str, list[list[int]]], stage: str
    ) -> None:
        for name, column in columns.items():
            for row, chunks in zip(rows, column, strict=True):
                self.end_progress(row, stage, [name])
                row.progress[stage, name] = chunks
                self.references |= set(chunks)

    def end_progress(self, row: Row, stage: str, names: list[str] | None = None) -> None:
        for of, name in list(row.progress):
            if of == stage and (names is None or name in names):
                self.references -= set(row.progress.pop((of, name)))

    def per_group(self, rows: list[Row]) -> list[tuple[int, int]]:
        return list(Counter(row.group for row in rows if row.group is not None).items())

    def keys_of(self, rows: Rows) -> list[int]:
        keys = [rows.keys[i : i + 16] for i in range(0, len(rows.keys), 16)]
        return [int.from_bytes(key[8:], "big") for key in keys]

    def ready(self, stage: str, unit: str, filtered: bool) -> dict[int, int]:
        """Ready units and since when."""

        def matches(row: Row) -> bool:
            return not filtered or row.tags.get("v", -1) >= 2

        if unit == "rows":
            return {
                number: row.stamp[stage]
                for number, row in self.rows.items()
                if row.state[stage] == "ready" and matches(row)
            }
        return {
            number: group.stamp[stage]
            for number, group in self.groups.items()
            if group.state[stage] == "ready" and all(map(matches, self.members(number)))
        }

    def end(self, lease: Lease, outcome: str, positions: list[int], rows: list[Row]) -> None:
        if outcome == "keep":
            return
        stamp = next(self.clock)
        for i in positions:
            lease.left[i] = False
        if outcome == "drop":
            self.remove([n for n, row in self.rows.items() if row in rows], dropped=True)
        for row in rows:
            if outcome == "release":
                row.state[lease.stage] = "ready"
                row.stamp[lease.stage] = row.arrived + RETURNED
            elif outcome == "ack":
                row.state[lease.stage] = "acked"
        self.settle(stamp, outcome == "release")
        if outcome == "ack":
            self.free_acked()
            self.settle(stamp)

    def requeue(self, numbers: list[int]) -> int:
        """Leases end."""
        return sum([self.comes_back(self.leases.pop(number)) for number in numbers])

    def comes_back(self, lease: Lease) -> int:
        rows = [
            row
            for row, left in zip(lease.rows, lease.left, strict=True)
            if left and self.is_live(row)
        ]
        self.end(lease, "release", [], rows)
        return len(rows)

    def begin_plan(self, stage: str, shape: Shape) -> Plan:
        """All that a stage has left is leased: by whole groups where no row is without."""
        rows = [row for row in self.rows.values() if row.state[stage] != "acked"]
        ready = [number for number, one in self.groups.items() if one.state[stage] == "ready"]
        whole = sum(len(self.members(number)) for number in ready) == len(rows)
        for row in rows:
            row.state[stage] = "leased"
            if row.group is not None:
                self.groups[row.group].state[stage] = "leased" if whole else "split"
        plan = self.plans[stage] = Plan(Lease(stage, rows, [True] * len(rows), 0), shape)
        return plan

    def end_plan_if_done(self, plan: Plan) -> None:
        done = all(one.acked for one in plan.parts.values())
        if done and {one.rank for one in plan.parts.values()} == set(range(plan.shape.ranks)):
            del self.plans[plan.lease.stage]
            there = [row for row in plan.lease.rows if self.is_live(row)]
            self.end(plan.lease, "ack", list(range(len(plan.lease.rows))), there)

    def group_at(self, rows: Rows, i: int) -> int | None:
        if not rows.group_index:
            return None
        index = int(np.frombuffer(rows.group_index, "<u4")[i])
        if index == NO_GROUP:
            return None
        return int.from_bytes(rows.group_keys[16 * index + 8 : 16 * index + 16], "big")

    def values_in(self, table: Table, count: int) -> dict[str, list[list[int]]]:
        """Of each field, per row the number of its value."""
        return {
            field: [[] if one is None else [_number(one)] for one in found]
            for field, found in numbers(table.values, count).items()
        }


def _number(found: int | bytes) -> int:
    if isinstance(found, int):
        return found
    number = int.from_bytes(found, "little")
    assert is_inline(number)
    return number
