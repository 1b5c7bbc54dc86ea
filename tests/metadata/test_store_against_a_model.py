"""The store against a naive model: every operation in any order, everything compared after each."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dataplane.errors import (
    DataplaneError,
    FieldExists,
    GroupClosed,
    InvalidCall,
    InvalidRows,
    LeaseExpired,
    PartitionConflict,
    PartitionSealed,
    RowsDropped,
    RowsGone,
    TagConflict,
)
from dataplane.metadata.shard import inspection, puts, rows_out
from dataplane.metadata.tables.keys import format_minted, parse_minted
from dataplane.wire.journal import Unit
from dataplane.wire.messages import Finish, Want
from dataplane.wire.tables import Shape
from tests.chunk_numbers import indexes
from tests.metadata.observed import accounts
from tests.metadata.store_model import (
    OWNERS,
    STAGES,
    WHERE,
    Group,
    Lease,
    Model,
    Part,
    Row,
    group_key,
    is_inline,
    row_key,
)
from tests.metadata.stores import brought, wrote

KEYS = st.integers(0, 9)
SOME_KEYS = st.lists(KEYS, min_size=1, max_size=5, unique=True)
FIELDS = st.sampled_from([list(names) for names in ("", "a", "b", "ab", "ab", "ca", "abc")])


ENDS = st.sampled_from(["ack", "ack", "ack", "go", "leave"])


class StoreMachine(Model, RuleBasedStateMachine):
    # rows in

    @rule(
        keys=SOME_KEYS,
        group=st.none() | st.integers(0, 3),
        mixed=st.booleans(),
        fields=FIELDS,
        holes=st.booleans(),
        mode=st.sampled_from(["plain", "plain", "replace"]),
        version=st.none() | st.integers(0, 4),
    )
    def put(
        self,
        keys: list[int],
        group: int | None,
        mixed: bool,
        fields: list[str],
        holes: bool,
        mode: str,
        version: int | None,
    ) -> None:
        groups: list[int | None] = [None if mixed and i % 2 else group for i, _ in enumerate(keys)]
        here = {name: [not (holes and i == 1) for i in range(len(keys))] for name in fields}
        made = {name: self.column(name, here[name]) for name in fields}
        expected = self.put_error(keys, groups, here, mode == "plain")
        message = self.rows_message(keys, groups)
        columns = [column for column, _ in made.values()]
        tags = {} if version is None else {"v": [version], "n": list(range(len(keys)))}
        how = {"replace": mode == "replace", "holder": 1 + len(keys) % 2}
        asked = wrote(message, columns, OWNERS, tags, **how)
        if expected:
            with pytest.raises(tuple(expected)):
                puts.plan_put(self.store, asked)
            with pytest.raises(tuple(expected)):
                self.store.put(asked)
            return
        puts.plan_put(self.store, asked)
        closed, outcome = self.store.closed_groups, self.store.put(asked)
        over = [
            i
            for i, key in enumerate(keys)
            if mode == "plain" and key in self.rows and self.is_repeated(key, i, here)
        ]
        assert outcome.there == len(over)
        new, arrived = [key for key in keys if key not in self.rows], next(self.clock)
        for key, number in zip(keys, groups, strict=True):
            if key in new:
                self.rows[key] = Row(number, arrived)
                if number is not None:
                    self.groups.setdefault(number, Group(self.group_size, arrived)).seen += 1
        put = [i for i in range(len(keys)) if i not in over]
        targets = [self.rows[keys[i]] for i in put]
        written = {name: [chunks[i] for i in put] for name, (_, chunks) in made.items()}
        self.write(targets, written, mode)
        for row, tag in zip(targets, put, strict=True):
            if version is not None:
                row.tags |= {"v": version, "n": tag}
        before = self.made
        self.settle(next(self.clock))
        assert self.store.closed_groups - closed == self.made - before

    def is_repeated(self, key: int, place: int, fields: dict[str, list[bool]]) -> bool:
        has = self.has(self.rows[key], place, fields)
        return bool(has) and all(has)

    @rule(
        size=st.integers(1, 3),
        whole=st.booleans(),
        fields=FIELDS,
        version=st.none() | st.integers(0, 4),
    )
    def put_new_rows(self, size: int, whole: bool, fields: list[str], version: int | None) -> None:
        """Rows and groups that nobody has heard of, as most puts bring."""
        fresh = 100 * next(self.clock)
        keys = [fresh + i for i in range(size)]
        self.put(keys, fresh if whole else None, False, fields, False, "plain", version)
        if whole and self.group_size is None and not self.sealing:
            self.close(fresh, size)

    @rule(number=st.integers(0, 3), size=st.integers(1, 4))
    def close(self, number: int, size: int) -> None:
        group = self.groups.get(number)
        error: type[DataplaneError] | None = None
        if self.group_size is not None and size > self.group_size:
            error = InvalidRows
        elif group is None and number in self.dropped_groups:
            error = RowsDropped
        elif group is None and self.sealing:
            error = PartitionSealed
        elif group is not None and group.closed and size != group.seen:
            error = GroupClosed
        elif group is not None and not group.closed and size < group.seen:
            error = InvalidRows
        if error:
            with pytest.raises(error):
                self.store.close(format_minted(group_key(number)), size)
            return
        closed = self.store.close(format_minted(group_key(number)), size)
        before = self.made
        self.groups.setdefault(number, Group(size, next(self.clock))).expected = size
        self.settle(next(self.clock))
        assert closed == self.made - before

    @rule(keys=SOME_KEYS, version=st.integers(0, 4), expect=st.none() | st.integers(0, 4))
    def tag(self, keys: list[int], version: int, expect: int | None) -> None:
        message = self.rows_message(keys)
        wanted = None if expect is None else {"v": expect}
        if not all(key in self.rows for key in keys):
            with pytest.raises(RowsGone):
                self.store.tag(message, {"v": [version]}, wanted)
        elif wanted and any(self.rows[key].tags.get("v") != expect for key in keys):
            with pytest.raises(TagConflict):
                self.store.tag(message, {"v": [version]}, wanted)
        else:
            self.store.tag(message, {"v": [version]}, wanted)
            for key in keys:
                self.rows[key].tags["v"] = version

    # rows out

    @rule(
        stage=st.sampled_from(sorted(STAGES)),
        unit=st.sampled_from(["rows", "groups"]),
        count=st.integers(1, 4),
        least=st.integers(1, 4),
        sealed=st.booleans(),
        filtered=st.booleans(),
        holder=st.integers(1, 2),
    )
    def take(
        self,
        stage: str,
        unit: Unit,
        count: int,
        least: int,
        sealed: bool,
        filtered: bool,
        holder: int,
    ) -> None:
        ready = self.ready(stage, unit, filtered)
        want = Want(unit, count, min(least, count), WHERE if filtered else None)
        taken = self.store.take(stage, want, holder, 0.0, sealed=sealed)
        enough = len(ready) >= (1 if sealed else min(least, count))
        assert taken.units == (min(count, len(ready)) if enough else 0)
        assert (taken.lease is None) == (not enough)
        if taken.lease is None:
            return
        table = rows_out.table(self.store, taken.lease, stage=stage)
        keys = self.keys_of(table.rows)
        found = self.values_in(table, len(keys))
        for i, key in enumerate(keys):
            mine = {name: column[i] for name, column in found.items() if column[i]}
            assert mine == self.rows[key].seen_by(stage)
        picked: dict[int, None] = {}
        for key in keys:
            one = key if unit == "rows" else self.rows[key].group
            assert one is not None
            picked[one] = None
        assert len(picked) == taken.units
        assert set(picked) <= ready.keys()
        if not filtered:
            stamps = [ready[one] for one in picked]
            assert stamps == sorted(stamps), "units come oldest first"
            assert all(stamp >= stamps[-1] for one, stamp in ready.items() if one not in picked)
        rows = [self.rows[key] for key in keys]
        if unit == "groups":
            assert all(len(self.members(g)) == keys_in for g, keys_in in self.per_group(rows))
        for row in rows:
            row.state[stage] = "leased"
            if row.group is not None:
                group = self.groups[row.group]
                group.state[stage] = "leased" if unit == "groups" else "split"
        self.leases[taken.lease] = Lease(stage, rows, [True] * len(rows), holder)

    @rule(
        pick=st.integers(0, 20),
        outcome=st.sampled_from(["ack", "ack", "release", "release", "drop", "keep"]),
        some=st.booleans(),
        adds=FIELDS,
        version=st.none() | st.integers(0, 4),
    )
    def finish(
        self, pick: int, outcome: str, some: bool, adds: list[str], version: int | None
    ) -> None:
        if not self.leases:
            with pytest.raises(LeaseExpired):
                self.store.finish(Finish(10_000, "ack"))
            return
        number = sorted(self.leases)[pick % len(self.leases)]
        lease = self.leases[number]
        positions = [i for i, left in enumerate(lease.left) if left]
        index = None
        if some:
            positions = positions[::2]
            index = np.array(positions, "<u4").tobytes()
        adds = adds if outcome != "drop" else []
        made = {name: self.column(name, [True] * len(positions)) for name in adds}
        columns = [column for column, _ in made.values()]
        tags = {} if version is None else {"v": [version] * len(positions)}
        op = Finish(number, outcome, index, brought(columns, OWNERS), tags)  # type: ignore[arg-type]
        released = outcome == "release"
        if any(
            name in row.values and (released or row.writer[name] != lease.stage)
            for name in made
            for i in positions
            if self.is_live(row := lease.rows[i])
        ):
            before = inspection.stats(self.store)
            with pytest.raises(FieldExists):
                self.store.finish(op)
            assert inspection.stats(self.store) == before
            return
        kept = self.store.finish(op)
        there = [i for i in positions if self.is_live(lease.rows[i])]
        rows = [lease.rows[i] for i in there]
        columns_there = {
            name: [chunks[positions.index(i)] for i in there] for name, (_, chunks) in made.items()
        }
        if released:
            self.note_progress(rows, columns_there, lease.stage)
        else:
            assert kept == self.write(rows, columns_there, "keep", lease.stage)
        for row in rows if outcome in ("ack", "keep") else ():
            self.end_progress(row, lease.stage, None if outcome == "ack" else adds)
        for row in rows:
            row.tags |= {} if version is None else {"v": version}
        self.settle(next(self.clock))
        self.end(lease, outcome, positions, rows)
        if outcome != "keep" and not any(lease.left):
            del self.leases[number]

    @rule(holder=st.integers(1, 2), count=st.integers(1, 5), ahead=st.integers(0, 1))
    def admit(self, holder: int, count: int, ahead: int) -> None:
        """No more groups are unfinished than there are places for, by those who ask."""
        self.store.advance(self.store.permits.version + ahead)
        error = PartitionSealed if self.sealing else InvalidCall
        if self.sealing or self.group_size is None or count > 4:
            with pytest.raises((error, InvalidCall)):
                self.store.admit(next(self.clock), holder, count, 1, 2)
            return
        unfinished = len(self.groups) - self.store.permits.done
        room = 4 - unfinished - self.store.permits.left
        if self.store.admit(next(self.clock), holder, count, 1, 2):
            assert count <= room

    @rule(at=st.integers(0, 3))
    def a_permit_is_over(self, at: int) -> None:
        permits = self.store.permits
        before, numbers = permits.left, list(permits.given)[at : at + 1]
        self.store.take_back(numbers)
        assert permits.left <= before and permits.given.keys().isdisjoint(numbers)

    @rule(holder=st.integers(1, 2))
    def a_holder_dies(self, holder: int) -> None:
        held = sorted(number for number, lease in self.leases.items() if lease.holder == holder)
        back = 0
        for stage, plan in list(self.plans.items()):
            if any(one.holder == holder and not one.acked for one in plan.parts.values()):
                back += self.comes_back(self.plans.pop(stage).lease)
        assert self.store.release_holder(holder) == back + self.requeue(held)

    @rule(
        stage=st.sampled_from(sorted(STAGES)),
        rank=st.integers(0, 1),
        holder=st.integers(1, 2),
        shape=st.builds(
            Shape,
            ranks=st.sampled_from([1, 1, 1, 2]),
            balance=st.sampled_from([None, None, None, "v"]),
            unit=st.sampled_from(["rows", "rows", "rows", "groups"]),
        ),
        comes=st.integers(0, 3),
        then=st.lists(ENDS, max_size=2),
    )
    def take_part_in_a_plan(
        self, stage: str, rank: int, holder: int, shape: Shape, comes: int, then: list[str]
    ) -> None:
        rank %= shape.ranks
        if not comes and not self.plans:
            self.all_becomes_ready()
        plan = self.plans.get(stage)
        rows = [row for row in self.rows.values() if row.state[stage] != "acked"]
        mine = [] if plan is None else [p for p in plan.parts.values() if p.rank == rank]
        ready = self.sealing and rows and all(row.state[stage] == "ready" for row in rows)
        if plan is None and ready and shape.balance and any("v" not in r.tags for r in rows):
            error: type[DataplaneError] = InvalidRows
        elif plan is not None and plan.shape != shape:
            error = PartitionConflict
        elif any(p.holder == holder and not p.acked for p in mine):
            error = InvalidCall
        else:
            member = self.store.join(stage, shape, rank, holder, 0.0)
            waits = not ready if plan is None else mine and all(p.acked for p in mine)
            assert (member is None) == bool(waits)
            if member is not None:
                plan = plan or self.begin_plan(stage, shape)
                plan.parts[member.number] = Part(rank, holder)
                for outcome in then:
                    self.end_a_part_of_a_plan(0, outcome)
            return
        with pytest.raises(error):
            self.store.join(stage, shape, rank, holder, 0.0)

    def all_becomes_ready(self) -> None:
        """No row comes any more, none lacks a field, nobody has one leased."""
        self.clock = itertools.count(max(self.seals_after, next(self.clock)))
        self.seal(False)
        self.a_holder_dies(1)
        self.a_holder_dies(2)
        for key in list(self.rows):
            self.put([key], None, False, ["a", "b"], False, "replace", None)

    @rule(pick=st.integers(0, 20), outcome=ENDS)
    def end_a_part_of_a_plan(self, pick: int, outcome: str) -> None:
        parts = [
            (plan, number)
            for plan in self.plans.values()
            for number, part in plan.parts.items()
            if not part.acked
        ]
        if not parts:
            return
        plan, number = parts[pick % len(parts)]
        if outcome == "ack":
            plan.parts[number].acked = True
            self.store.finish(Finish(number, "ack"))
        elif outcome == "go":
            self.store.finish(Finish(number, "release"))
        else:
            member = self.store.leases.member(number)
            assert member is not None
            self.store.finish(Finish(member.number, "leave"))
            del plan.parts[number]
        if outcome == "go" or not plan.parts:
            self.comes_back(self.plans.pop(plan.lease.stage).lease)
        else:
            self.end_plan_if_done(plan)

    @rule(keys=SOME_KEYS)
    def drop_rows(self, keys: list[int]) -> None:
        there = [key for key in keys if key in self.rows]
        assert self.store.drop(rows=self.rows_message(keys))[0] == len(there)
        self.dropped_rows |= set(keys)
        self.remove(there, dropped=True)
        self.settle(next(self.clock))

    @rule(number=st.integers(0, 3))
    def drop_group(self, number: int) -> None:
        there = [key for key, row in self.rows.items() if row.group == number]
        assert self.store.drop(groups=[format_minted(group_key(number))])[0] == len(there)
        self.dropped_groups.add(number)
        self.remove(there, dropped=True)
        if number in self.groups and not self.groups[number].closed:
            del self.groups[number]
        self.settle(next(self.clock))

    @rule()
    def drop_what_matches(self) -> None:
        there = [key for key, row in self.rows.items() if row.tags.get("v", -1) >= 4]
        assert self.store.drop(where=["ge", "v", 4])[0] == len(there)
        self.remove(there, dropped=True)
        self.settle(next(self.clock))

    @rule(stage=st.sampled_from(sorted(STAGES)))
    def reset(self, stage: str) -> None:
        stamp = next(self.clock)
        self.store.reset(stage)
        for row in self.rows.values():
            if row.state[stage] == "acked":
                row.state[stage], row.stamp[stage] = "ready", stamp
        for number, group in self.groups.items():
            if group.state[stage] in ("split", "acked") and self.members(number):
                group.state[stage] = "pending"
        self.settle(stamp)

    @rule()
    def a_peer_dies(self) -> None:
        if len(self.references) < 6:
            return

        def are_there(chunks: list[int]) -> bool:
            return any(r % 2 == 1 and not is_inline(r) for r in chunks)

        for row in self.rows.values():
            for (stage, name), chunks in list(row.progress.items()):
                if are_there(chunks):
                    self.end_progress(row, stage, [name])
        hit = [key for key, row in self.rows.items() if any(map(are_there, row.values.values()))]
        groups = {self.rows[key].group for key in hit} - {None}
        gone = [k for k, row in self.rows.items() if k in hit or row.group in groups]
        before = self.store.losses.total
        assert self.store.lost(OWNERS[1]) == len(gone)
        named = {parse_minted(str(name)) for name in self.store.losses.after(before)[0]}
        assert named == set(map(row_key, gone))
        for number in groups:
            assert number is not None
            group = self.groups.pop(number)
            self.made -= group.counted
        for key in gone:
            # nobody need tell a dead peer, so its references just go
            self.references -= set(self.rows[key].chunks)
            del self.rows[key]
        self.settle(next(self.clock))

    @rule(keep_short=st.booleans())
    def seal(self, keep_short: bool) -> None:
        if next(self.clock) < self.seals_after:
            return
        first = not self.sealing
        self.sealing = True
        self.store.seal(keep_short)
        short = first and self.group_size is not None and not keep_short
        for number in list(self.groups):
            group = self.groups[number]
            if group.closed:
                continue
            if group.seen and short:
                self.dropped_groups.add(number)
                self.remove([n for n, r in self.rows.items() if r.group == number], dropped=True)
            group.expected = group.seen
            if not group.seen or short:
                del self.groups[number]
        self.settle(next(self.clock))

    # what must hold

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.store) == len(self.rows)
        assert self.store.closed_groups == self.made
        units: dict[str, list[Row | Group]]
        units = {"rows": [*self.rows.values()], "groups": [*self.groups.values()]}
        for stage, where, unit in itertools.product(STAGES, (None, WHERE), units):
            states = Counter(one.state[stage] for one in units[unit])
            ready = len(self.ready(stage, unit, where is not None))
            left = states.total() - states["acked"] - (states["ready"] - ready)
            to_come = states["pending"] + ready + states["leased"]
            expected = (ready, states["pending"] + ready, to_come, left)
            assert self.store.counts(stage, unit, where) == expected

    @invariant()
    def it_counts_what_is_there(self) -> None:
        assert accounts(self.store) == []

    @invariant()
    def permits_agree(self) -> None:
        permits = self.store.permits
        acked = [g for g in self.groups.values() if set(g.state.values()) == {"acked"}]
        assert permits.done <= len(self.groups)
        if permits.counts:
            assert permits.done >= len(acked) or self.free == "acked"
        given = permits.given.values()
        assert all(0 <= one.left <= one.count for one in given)
        assert sum(one.left for one in given) == permits.left

    @invariant()
    def rows_agree(self) -> None:
        slots, more = rows_out.read(self.store)
        assert not more
        table = rows_out.table(self.store, slots)
        keys = self.keys_of(table.rows)
        assert sorted(keys) == sorted(self.rows)
        found = self.values_in(table, len(keys))
        for i, key in enumerate(keys):
            row = self.rows[key]
            assert {name: column[i] for name, column in found.items() if column[i]} == row.values
            tags = {name: column[i] for name, column in table.tags.items()}
            assert {n: v for n, v in tags.items() if v is not None} == row.tags
            assert self.group_at(table.rows, i) == row.group

    @invariant()
    def every_reference_is_in_a_row_or_was_freed(self) -> None:
        for owner, chunks, counts in self.store.freed():
            assert set(counts.tolist()) == {1}
            freed = set(indexes(chunks))
            assert not freed & self.references
            assert {r % 2 for r in freed} == {OWNERS.index(owner)}
            assert not any(map(is_inline, freed))
        kept = [r for row in self.rows.values() for r in row.chunks]
        assert bool(self.store.inline_bytes) == any(map(is_inline, kept))


class KeepingMachine(StoreMachine):
    free = "drop"
    group_size = None


COMMON = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
TestFreeingWhatIsAcked = StoreMachine.TestCase
TestFreeingWhatIsAcked.settings = COMMON
TestKeepingUntilDropped = KeepingMachine.TestCase
TestKeepingUntilDropped.settings = COMMON
