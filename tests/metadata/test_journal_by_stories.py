"""A copy after every step of long random stories is as its primary: each kind of record, mixed.

Weighted so that rows live long enough to be leased, added to, moved, lost and put again; the model
beside it (`test_journal_against_a_model`) knows what is right, this only that both are alike.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest

from dataplane.errors import DataplaneError
from dataplane.metadata.shard import checkpoint
from dataplane.metadata.shard.journal import snapshot
from dataplane.metadata.shard.replicas import named_by
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables.bits import bits_of, bytes_of, rows_of
from dataplane.metadata.tables.keys import hash_name, keys_in, mint_many
from dataplane.wire.checkpoint import Progress, Restore
from dataplane.wire.journal import LogRecord, Lost, Relocated, encode
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.messages import Finish, Put, Want
from dataplane.wire.packed import U8
from dataplane.wire.tables import (
    INLINE,
    Chunk,
    Definition,
    Owner,
    Piece,
    Rows,
    Shape,
    Values,
)
from tests.chunk_numbers import chunk_numbers
from tests.metadata.observed import accounts, carried_over, observed

OWNERS = [Owner("near", 1), Owner("far", 2), Owner("third", 3)]
LAYOUTS = [b"of arrays", b"of objects"]
STAGES = {"s1": ["a"], "s2": ["a", "b"]}
FIELDS = ["a", "a", "b", "c"]
SHAPES = [Shape(1), Shape(2), Shape(2, balance="v"), Shape(1, unit="groups")]
STEPS = 120


End = Literal["ack", "release", "drop", "keep", "leave"]
ENDS: list[End] = ["ack", "ack", "ack", "release", "release", "drop", "keep"]
MEMBER_ENDS: list[End] = ["ack", "ack", "release", "leave"]


class Story:
    def __init__(self, seed: int) -> None:
        self.any = random.Random(seed)
        self.definition = Definition(
            stages=self.any.choice([STAGES, STAGES, {"s1": ["a"]}, {}]),
            free=self.any.choice(["acked", "acked", "drop"]),
            group_size=self.any.choice([None, None, 1, 3]),
            groups=self.any.choice([None, None, None, 9]),
        )
        self.numbers, self.chunks = itertools.count(1), itertools.count(1)
        self.permits, self.claims = itertools.count(1), itertools.count(1)
        self.minted, self.other = itertools.count(1), itertools.count(1)
        self.described: list[Chunk] = []
        """chunks that messages named"""
        self.kept = set[tuple[Owner, int]]()
        """chunks to which the store has a reference"""
        self.ops: list[LogRecord] = []
        self.told: Counter[str] = Counter()
        self.store, self.copy = self.empty(), self.empty()
        self.store.emit = self.ops.append
        self.now = 0.0
        self.dumped: list[bytes] = []
        """what a dump is to tell that is under way"""
        self.pieces: Iterator[LogRecord] = iter(())

    def empty(self) -> Store:
        return Store("p", self.definition, 1, self.numbers)

    def play(self) -> None:
        steps = [getattr(self, name) for name in dir(self) if name.startswith("do_")]
        weights = [WEIGHTS.get(step.__name__[3:], 2) for step in steps]
        for step in self.any.choices(steps, weights, k=STEPS):
            self.now += 1.0
            with contextlib.suppress(DataplaneError):
                step()
            self.ship()
        self.do_begin_a_dump()
        self.store.clear()
        self.ship()
        self.tell_some(None)

    def ship(self) -> None:
        self.told.update(type(op).__name__ for op in self.ops)
        carried_over(self.copy, self.ops, self.now)
        self.count_references()
        self.ops.clear()
        assert whole(self.store) == whole(self.copy)
        assert accounts(self.copy) == []

    def count_references(self) -> None:
        """Each message brings one to each chunk that it names; of those the store keeps one."""
        held = Counter(dict.fromkeys(self.kept, 1))
        for op in self.ops:
            for owner, chunks, _ in named_by(op):
                held.update([(owner, number) for number in chunks.tolist()])
            if isinstance(op, Relocated):
                columns = [np.frombuffer(r, U8) for r in (op.chunks, op.to_chunks)]
                for number, there in zip(*[one.tolist() for one in columns], strict=True):
                    held[op.to_owner, there] += (op.owner, number) in held
            if isinstance(op, Lost):
                held = Counter({name: many for name, many in held.items() if name[0] != op.owner})
        for owner, chunks, counts in self.store.freed():
            numbers = chunks.tolist()
            held.subtract(dict(zip([(owner, n) for n in numbers], counts.tolist(), strict=True)))
        self.kept = {(one.owner, one.number) for one in self.store.chunks}
        assert +held == dict.fromkeys(self.kept, 1) and min(held.values(), default=0) >= 0

    # what there is

    def key(self) -> tuple[bytes, Any]:
        name = self.any.randrange(30)
        return hash_name(name), name

    def some(self, of: Any, most: int = 4) -> list[Any]:
        of = list(of)
        return self.any.sample(of, min(len(of), self.any.randint(1, most)))

    @property
    def stage(self) -> str:
        return self.any.choice(list(self.store.stages) or ["s1"])

    def values(self, count: int, fields: list[str] | None = None) -> Values:
        """Of some fields, in chunks of one or several of them, for some or all rows; some are named
        again that rows have already, or had."""
        fields = fields or list(dict.fromkeys(self.some(FIELDS, 3)))
        chunks, pieces = list[Chunk](), list[Piece]()
        start = 0
        while start < len(fields):
            columns = list(range(start, min(len(fields), start + self.any.randint(1, 2))))
            start += len(columns)
            left = [row for row in range(count) if fields == ["a", "b"] or self.any.random() < 0.85]
            while left:
                many = self.any.randint(1, len(left))
                rows, left = left[:many], left[many:]
                pieces.append(self.piece(chunks, columns, rows))
        return Values(fields, [*OWNERS, INLINE], LAYOUTS, chunks, pieces)

    def piece(self, chunks: list[Chunk], columns: list[int], rows: list[int]) -> Piece:
        """Rows that lie in a chunk one behind the other, or anyhow."""
        again = self.any.choice(self.described) if self.described else None
        more = self.any.choice([0, 0, 1, 3])
        if self.any.random() < 0.25:
            chunk = Chunk(len(OWNERS), 0, len(rows) + more, 16, 0, next(self.chunks).to_bytes(16))
        elif again and self.any.random() < 0.4 and again.rows >= len(rows):
            chunk = again
        else:
            owner = self.any.choice([0, 0, 0, 1, 2])
            number = 1 << 32 | next(self.chunks)
            chunk = Chunk(owner, number, len(rows) + more, 10, self.any.randrange(2))
            self.described = [*self.described[-20:], chunk]
        if not chunk.number or chunk not in chunks:
            chunks.append(chunk)
        at = chunks.index(chunk)
        given = bytes_of(bits_of(row - rows[0] for row in rows))
        fields = (*columns, -1) if self.any.random() < 0.3 else tuple(columns)
        if self.any.random() < 0.5:
            first = self.any.randint(0, chunk.rows - len(rows))
            return Piece(at, fields, rows[0], given, first)
        places = [self.any.randrange(chunk.rows) for _ in rows]
        return Piece(at, fields, rows[0], given, 0, np.array(places, "<u4").tobytes())

    def tags(self, count: int) -> dict[str, Any]:
        if self.any.random() < 0.4:
            return {}
        one: list[Any] = [1, 2.5, True, "x", "y"]
        return {
            "v": [self.any.choice([1, 2, 3]) for _ in range(count)],
            **({"t": [self.any.choice(one[3:])]} if self.any.random() < 0.4 else {}),
        }

    # rows in

    def do_put(self) -> None:
        count = self.any.randint(1, 5)
        if self.any.random() < 0.6:
            found = dict(self.key() for _ in range(count))
            keys, given = list(found), list(found.values())
        else:
            keys, given = [mint_many(3, next(self.minted), 1) for _ in range(count)], None
        table: list[Any] = []
        index = [NO_GROUP] * len(keys)
        if self.definition.group_size is not None or self.any.random() < 0.6:
            table = self.some(range(8), 2)
            index = sorted(self.any.randrange(len(table)) for _ in keys)
            table = [table[at] for at in sorted({*index})]
            index = [sorted({*index}).index(at) for at in index]
        rows = Rows(b"".join(keys), given)
        if table:
            rows = Rows(
                b"".join(keys), given, np.array(index, "<u4").tobytes(),
                b"".join(map(hash_name, table)), table,
            )  # fmt: skip
        op = Put("p", 1, rows, self.values(len(keys)), self.tags(len(keys)))
        op.replace = self.any.random() < 0.33
        op.reuse = self.any.random() < 0.2
        op.holder = self.any.randint(1, 3)
        self.store.put(op)

    def do_close(self) -> None:
        group = self.any.randrange(8)
        self.store.close(group, self.any.randint(1, 4))

    def do_tag(self) -> None:
        keys = self.some(keys_in(self.store.rows.keys))
        expect = {"v": self.any.choice([1, 2])} if self.any.random() < 0.3 else None
        self.store.tag(Rows(b"".join(keys)), self.tags(len(keys)), expect)

    def do_restore(self) -> None:
        """What another store had, under names that are perhaps here."""
        other = Story(self.any.randrange(1 << 30))
        other.definition, other.minted = self.definition, itertools.count(1000 + next(self.other))
        other.store = other.empty()
        for _ in range(3):
            with contextlib.suppress(DataplaneError):
                other.do_put()
        survey = checkpoint.survey(other.store, 0)
        saved = checkpoint.save(other.store, survey.groups, survey.rows, 1 << 40)
        table = saved.table
        closed = survey.closed_groups
        op = Restore("p", 1, table.rows, table.values, table.tags, saved.progress, closed)
        self.store.restore(op if len(table.rows.keys) else restored_nothing(closed))

    # rows out and back

    def do_take(self) -> None:
        where = self.any.choice([None, None, ["ge", "v", 2]])
        count = self.any.randint(1, 3)
        want = Want(self.any.choice(["rows", "groups"]), count, self.any.randint(1, count), where)
        if self.any.random() < 0.2:
            want = Want(want.unit, 0, 1, where, "v", 4.0)
        sealed = self.store.sealed
        holder = self.any.randint(1, 3)
        self.store.take(self.stage, want, holder, self.now, next(self.claims), sealed=sealed)

    def do_consume(self) -> None:
        """Some rows, by every stage that they are ready for: where they had given names, these are
        remembered."""
        for stage in list(self.store.stages):
            want = Want("rows", 4, 1)
            taken = self.store.take(stage, want, 1, self.now, next(self.claims))
            if taken.lease is not None:
                self.store.finish(Finish(taken.lease, "ack"))

    def do_finish(self) -> None:
        lease = self.any.choice(list(self.store.leases) or [None])
        if lease is None or not lease.holder:  # a plan has it
            return
        left = [at for part in lease.unfinished() for at in part.at]
        index = None
        if self.any.random() < 0.5:
            left = self.some(left, 3)
            index = np.array(left, "<u4").tobytes()
        outcome = self.any.choice(ENDS)
        op = Finish(lease.number, outcome, index)
        if self.any.random() < 0.5 and outcome != "drop":
            op.values = self.values(len(left))
        op.tags = self.tags(len(left))
        self.store.finish(op)

    def do_end_of_a_holder(self) -> None:
        self.store.release_holder(self.any.randint(1, 3))

    def do_join(self) -> None:
        if self.any.random() < 0.7:  # else there is hardly ever a plan
            for lease in list(self.store.leases):
                if lease.holder:
                    self.store.finish(Finish(lease.number, "release"))
            for key in keys_in(self.store.rows.keys):
                values = self.values(1, ["a", "b"])
                op = Put("p", 1, Rows(key), values, {"v": [1]}, replace=True)
                self.store.put(op)
            self.store.seal(True)
        shape, holder = self.any.choice(SHAPES), self.any.randint(1, 3)
        rank = self.any.randrange(shape.ranks)
        self.store.join(self.stage, shape, rank, holder, self.now, next(self.claims))

    def do_end_of_a_part(self) -> None:
        members = [m for plan in self.store.leases.plans.values() for m in plan.members.values()]
        if not members:
            return
        member = self.any.choice(members)
        what = self.any.choice(MEMBER_ENDS)
        self.store.finish(Finish(member.number, what))

    def do_drop(self) -> None:
        how = self.any.randrange(4)
        if how == 0:
            self.store.drop(where=["eq", "v", 3])
        elif how == 1:
            self.store.drop(groups=self.some(range(8), 1))
        else:
            keys = self.some([*keys_in(self.store.rows.keys), self.key()[0]], 2)
            self.store.drop(rows=Rows(b"".join(keys)))

    def do_reset(self) -> None:
        self.store.reset(self.stage)

    def do_declare(self) -> None:
        fields = self.any.choice([["a"], ["c"], []])
        self.store.declare_stage(f"late {self.any.randrange(3)}", fields)

    def do_seal(self) -> None:
        self.store.seal(self.any.random() < 0.5)

    # peers come and go

    def do_lose(self) -> None:
        self.store.lost(self.any.choice(OWNERS[1:]))

    def do_relocate(self) -> None:
        held = self.store.holdings()
        if not held:
            return
        owner, chunks, _ = self.any.choice(held)
        chunks = chunks[sorted(self.some(range(len(chunks)), 5))]
        there = chunk_numbers([(next(self.chunks), 1) for _ in chunks])
        self.store.relocate(owner, chunks, self.any.choice(OWNERS), there)

    # how far producers run ahead

    def do_admit(self) -> None:
        permit, holder = next(self.permits), self.any.randint(1, 3)
        self.store.admit(permit, holder, self.any.randint(1, 3), 1, 3)

    def do_take_back(self) -> None:
        self.store.take_back(self.some(self.store.permits.given, 2))

    def do_advance(self) -> None:
        self.store.advance(self.store.permits.version + self.any.randint(0, 1))

    # other copies

    def do_begin_a_dump(self) -> None:
        self.tell_some(None)
        many = self.any.randint(1, 5)
        self.dumped = [encode(op) for op in snapshot(self.store, many)]
        pieces = snapshot(self.store, many)
        self.pieces = itertools.chain([next(pieces)], pieces)

    def do_tell_some_of_the_dump(self) -> None:
        self.tell_some(self.any.randint(1, 5))

    def tell_some(self, count: int | None) -> None:
        """Whatever happened since the dump began, its pieces are what they were then. None: all."""
        pieces = list(itertools.islice(self.pieces, count))
        expected = self.dumped[: len(pieces) if count else None]
        assert [encode(op) for op in pieces] == expected
        del self.dumped[: len(pieces)]

    def do_make_the_copy_anew(self) -> None:
        self.tell_some(None)
        self.ship()
        self.copy = self.empty()
        carried_over(self.copy, list(snapshot(self.store, self.any.randint(1, 5))), self.now)

    def do_promote_the_copy(self) -> None:
        self.ship()
        self.store.emit = None
        self.store, self.copy = self.copy, self.store
        self.store.emit = self.ops.append
        if self.any.random() < 0.7:
            self.do_make_the_copy_anew()


WEIGHTS = {
    "put": 26,
    "take": 24,
    "finish": 16,
    "consume": 6,
    "close": 5,
    "tag": 5,
    "seal": 1,
    "lose": 1,
}
WEIGHTS |= {"relocate": 4, "drop": 2, "end_of_a_holder": 2, "admit": 3, "join": 2, "reset": 1}


def restored_nothing(closed: int) -> Restore:
    return Restore("p", 1, Rows(b""), Values(), {}, Progress(), closed)


def whole(store: Store) -> dict[str, Any]:
    """All that can be seen, and what later records go by."""
    return observed(store) | {
        "numbers": store.last_number,
        "places": {
            (block.number, row): key
            for block in store.blocks.values()
            for row, key in zip(
                rows_of(block.live), keys_in(block.keys_of(block.live)), strict=True
            )
        },
        "group numbers": {key: (g.number, g.given) for key, g in store.groups.items()},
        "answers": list(store.answers.records()),
        "forgotten": store.tombstones.forgotten,
        "all fields": dict(sorted(store.fields.items())),
        "lease order": [lease.number for lease in store.leases],
        "left": {lease.number: [bin(bits) for bits in lease.left] for lease in store.leases},
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_is_as_its_primary_after_every_step(seed: int) -> None:
    Story(seed).play()
