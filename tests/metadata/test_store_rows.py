"""The life of rows at one store, and what is read of them."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from dataplane.errors import (
    FieldExists,
    FieldUnknown,
    PartitionConflict,
    PartitionSealed,
    ProtocolError,
    RowsDropped,
    RowsGone,
    StageUndefined,
)
from dataplane.metadata.shard import inspection, rows_out
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables import tags
from dataplane.metadata.tables.keys import format_minted_many, mint_many
from dataplane.wire.messages import Finish, Put, Want
from dataplane.wire.tables import (
    Change,
    Chunk,
    Definition,
    Name,
    Owner,
    Piece,
    Rows,
    Scalar,
    Values,
)
from tests.chunk_numbers import indexes
from tests.metadata import observed
from tests.metadata.stores import (
    OWNERS,
    STAGES,
    Column,
    Value,
    brought,
    change,
    finish,
    named,
    numbers,
    put,
    store,
    take,
    values,
    whole,
    wrote,
)
from tests.metadata.test_journal import copy_of


def test_a_row_is_freed_when_all_stages_acked_it_and_not_before() -> None:
    s = store(free="acked")
    put(s, [1], fields=("tokens", "reward"))
    finish(s, take(s, "reward", Want("rows", 1, 1)))
    assert len(s) == 1
    finish(s, take(s, "train", Want("rows", 1, 1)))
    assert len(s) == 0
    put(s, [1])  # a freed key may be put again


def test_dropping_7_of_8_rows_frees_their_bytes() -> None:
    s = store(group_size=8)
    put(s, list(range(8)), ["p"] * 8, nbytes=1_000)
    assert s.drop(rows=named(list(range(7)))) == (7, 7_000)
    ((_, chunks, _),) = s.freed()
    assert sorted(indexes(chunks)) == list(range(1, 8))
    assert inspection.stats(s)["bytes"] == 1_000


def test_a_late_put_of_a_dropped_row_or_group_learns_it() -> None:
    s = store(group_size=8)
    put(s, [1], ["p"])
    s.drop(groups=["p"])
    again: list[tuple[list[Name], list[Name | None] | None]] = [([1], None), ([2], ["p"])]
    for keys, groups in again:
        with pytest.raises(RowsDropped) as caught:
            put(s, keys, groups)
        assert "dropped" in str(caught.value)
    assert s.closed_groups == 0


def test_a_put_of_dropped_rows_says_whether_to_go_on_or_to_leave_them_out() -> None:
    one = store(group_size=2)
    put(one, [1, 2], ["p", "p"])
    one.drop(groups=["p"])
    again = "A restarted producer should continue with its next"
    for keys, groups, says in (
        (
            [1, 2],
            ["p", "p"],
            f"2 rows of this put .for example key 1. were dropped .*{again} rows. To put new rows",
        ),
        (
            [3, 4],
            ["p", "p"],
            f"1 group of this put .'p'. was dropped .*{again} groups. To put new rows in",
        ),
        (
            [1, 9],
            ["p", "q"],
            "1 row of this put .key 1. was dropped .* Leave the dropped rows out and repeat",
        ),
        (
            [8, 9],
            ["p", "q"],
            "1 group of this put .'p'. was dropped .* Leave the dropped groups out and repeat",
        ),
    ):
        with pytest.raises(RowsDropped, match=says):
            put(one, list(keys), list(groups))


def test_a_seal_forbids_new_rows_but_not_new_fields() -> None:
    s = store()
    put(s, [1], ["p"])
    put(s, [1], fields=("reward",))
    assert s.counts("train", "groups").ready == 0
    assert s.seal() == 1
    with pytest.raises(PartitionSealed):
        put(s, [2])
    put(s, [1], fields=("more",))
    assert s.counts("train", "groups").ready == 1


def test_groups_that_were_dropped_do_not_count_as_made() -> None:
    s = store(group_size=2)
    put(s, [1, 2, 3, 4], ["p", "p", "q", "q"])
    assert s.closed_groups == 2
    s.drop(groups=["p"])
    assert s.closed_groups == 1


def test_a_group_that_lost_a_row_is_reported_and_may_be_put_again() -> None:
    s = store(group_size=2)
    far = Owner("far", 3)
    put(s, [1, 3], ["p", "q"])
    s.put(wrote(named([2], ["p"]), [Column("tokens", values(1))], [far], {}))
    assert s.lost(far) == 2 and sorted(s.losses.latest()) == [1, 2]
    assert len(s.groups) == 1
    assert s.closed_groups == 0
    put(s, [1, 2], ["p", "p"])
    assert s.counts("reward", "groups").ready == 1


def test_values_that_a_stage_added_before_stay_and_are_counted() -> None:
    s = store(free="drop")
    put(s, [1])
    finish(s, take(s, "reward", Want("rows", 1, 1)), columns=[Column("reward", values(1, 4, 20))])
    put(s, [2])
    s.freed()
    s.reset("reward")
    added = [Column("reward", values(2, 4, first=9))]
    kept = finish(s, take(s, "reward", Want("rows", 2, 2)), columns=added)
    assert kept == {"reward": 1}
    ((_, chunks, _),) = s.freed()
    assert len(chunks) == 1 and indexes(chunks)[0] in (10, 11)


def test_a_value_of_another_writer_is_not_silently_kept() -> None:
    s = store(free="drop")
    put(s, [1, 2])
    put(s, [1], fields=("reward",))
    lease = take(s, "reward", Want("rows", 2, 2))
    with pytest.raises(FieldExists, match="a writer other than stage 'reward'"):
        finish(s, lease, columns=[Column("reward", values(2, 4, first=9))])
    finish(s, lease)  # nothing of it was stored, and the lease goes on
    finish(s, take(s, "train", Want("rows", 1, 1)))
    s.reset("reward")
    again = [Column("reward", values(2, first=30))]
    s.put(wrote(named([1, 2]), again, OWNERS, {}, replace=True))
    lease = take(s, "reward", Want("rows", 2, 2))
    with pytest.raises(FieldExists):
        finish(s, lease, columns=[Column("reward", values(2, 4, first=20))])


def test_a_stage_declared_later_gets_the_rows_that_are_there() -> None:
    s = store(stages={}, free="drop", group_size=2)
    put(s, [1, 2, 3], ["p", "p", "q"])
    s.declare_stage("late", ["tokens"])
    assert (s.counts("late").ready, s.counts("late", "groups").ready) == (3, 1)
    s.declare_stage("late", ["tokens"])
    with pytest.raises(PartitionConflict, match="claim for another stage"):
        s.declare_stage("late", ["other"])
    with pytest.raises(StageUndefined, match="stages cannot be added later"):
        store(free="acked").declare_stage("late", ["tokens"])


def test_missing_says_what_is_missing_and_who_holds_it() -> None:
    s = store(group_size=2)
    put(s, [1, 2, 3, 4, 5], ["p", "p", "q", "q", "r"])
    put(s, [1, 2], fields=("reward",))
    s.take("reward", Want("groups", 2, 2), 42, now=10.0)
    look = inspection.Look(s, "train", "groups")
    assert not look.go_on()
    found = inspection.missing(look, now=100.0)
    says = {
        "ready": 1,
        "units": 3,
        "excluded": 0,
        "alone": 0,
        "missing": {"reward": 3},
        "adders": {},
        "open_groups": 1,
        "short": [("r", 1, 2, "")],
        "leases": [(42, "reward", 2, 90.0)],
        "put_rows": 5,
    }
    assert {name: found[name] for name in says} == says


def test_only_stages_whose_counts_changed_are_told() -> None:
    s = store()
    assert s.dirty() == set(STAGES)
    assert s.dirty() == set()
    put(s, [1])
    s.dirty()
    taken = take(s, "reward", Want("rows", 1, 1))
    assert s.dirty() == {"reward"}
    finish(s, taken, columns=[Column("reward", values(1, 4, 20))])
    assert s.dirty() == {"reward", "train"}


@pytest.mark.parametrize("gone", [[], [3], [2, 3, 4], list(range(8))])
def test_a_read_goes_on_behind_the_last_row_also_where_that_has_gone(gone: list[int]) -> None:
    """It was RowsGone, of a read that names no row."""
    s = store()
    for block in (range(6), range(6, 8), range(8, 10)):
        put(s, list(block))
    read = rows_out.read(s, limit=4)
    names, after = rows_out.table(s, read[0]).rows.names or [], rows_out.place_of(read[0])
    assert read[1] and names == [0, 1, 2, 3]
    for name in gone:
        s.drop(rows=named([name]))
    for copy in (s, copy_of(s)):
        rest, more = rows_out.read(copy, limit=9, after=after)
        assert not more
        assert rows_out.table(copy, rest).rows.names == [n for n in range(4, 10) if n not in gone]


def test_a_read_goes_on_behind_nothing_else() -> None:
    with pytest.raises(ProtocolError, match="expected 10 bytes, got 16"):
        rows_out.read(store(), after=bytes(16))


def test_a_read_goes_on_behind_the_last_row() -> None:
    s = store()
    put(s, list(range(10)), odd=[i % 2 for i in range(10)])
    slots, more = rows_out.read(s, limit=4)
    assert more
    first = rows_out.table(s, slots, ["tokens"]).rows
    rest, more = rows_out.read(s, limit=9, after=rows_out.place_of(slots))
    assert not more
    assert [*(first.names or []), *(rows_out.table(s, rest, []).rows.names or [])] == list(
        range(10)
    )
    slots, more = rows_out.read(s, where=["eq", "odd", 1], limit=2)
    assert (rows_out.table(s, slots, []).rows.names, more) == ([1, 3], True)
    with pytest.raises(RowsGone) as caught:
        rows_out.read(s, rows=named([1, 99]))
    assert caught.value.details["keys"] == [99]


def test_a_table_carries_only_what_it_uses_and_tells_what_is_absent() -> None:
    s = store()
    put(s, [1, "two"], score=[1.5, 2.5])
    note = [Column("note", [Value(7, 9), None])]
    told = brought(note)
    told.layouts[0] = b"of notes"
    s.put(Put("p", 1, named([1, "two"]), told))
    table = rows_out.table(s, rows_out.read(s)[0], ["note"])
    assert (table.rows.names, table.tags) == ([1, "two"], {"score": [1.5, 2.5]})
    assert numbers(table.values, 2) == {"note": [7, None]}
    assert (table.values.owners, table.values.layouts) == (OWNERS, [b"of notes"])
    with pytest.raises(FieldUnknown, match="tokens"):
        rows_out.table(s, rows_out.read(s)[0], ["nothing"])
    assert rows_out.known(s, ["note", "nothing"]) == ["note"]


def test_minted_keys_need_no_names() -> None:
    s = store()
    keys = mint_many(9, 0, 2)
    s.put(wrote(Rows(keys), [Column("tokens", values(2))], OWNERS, {}))
    assert rows_out.table(s, rows_out.read(s)[0]).rows == Rows(keys)
    put(s, ["given"])
    shown = format_minted_many(keys)
    assert rows_out.table(s, rows_out.read(s)[0]).rows.names == [*shown, "given"]


def test_a_row_can_take_a_chunk_over_from_another_row() -> None:
    """The message names the chunk, so one reference stays, whichever row came first."""
    for keys in (["a", "b"], ["b", "a"]):
        s = store(free="drop")
        for key, number in (("a", 1), ("b", 2)):
            s.put(wrote(named([key]), [Column("tokens", [Value(number, 9)])]))
        of = {"a": Value(3, 9), "b": Value(1, 9)}
        s.put(wrote(named(list(keys)), [Column("tokens", [of[k] for k in keys])], replace=True))
        let_go = [number for _, r, c in s.freed() for number in indexes(r) * int(c[0])]
        assert sorted(let_go) == [1, 2]  # of two references to 1, one
        assert sorted(chunk.number for chunk in s.chunks) == [1, 3]


def test_a_chunk_that_is_known_is_not_described_as_another() -> None:
    s = store(free="drop")
    s.put(wrote(named(["a"]), [Column("tokens", [Value(1, 9)])]))
    with pytest.raises(ProtocolError, match="differs from the stored chunk"):
        s.put(wrote(named(["b"]), [Column("tokens", [Value(1, 10)])]))
    assert len(s) == 1 and s.freed() == []


def test_a_row_costs_less_than_500_bytes_of_metadata() -> None:
    s = store(group_size=8)
    count = 32_768  # a message describes 4096 chunks at most
    for turn in range(6):
        index = (np.arange(count) // 8).astype("<u4").tobytes()
        rows = Rows(
            mint_many(2, turn * count, count),
            None,
            index,
            mint_many(3, turn * count, count // 8),
        )
        chunks = [Chunk(0, 1 + turn * count + at, 8, 9_000, 0) for at in range(0, count, 8)]
        pieces = [Piece(at, (0, 1, 2, 3), 8 * at, b"\xff") for at in range(len(chunks))]
        brings = Values(["tokens", "reward", "x", "y"], OWNERS, [b"layout"], chunks, pieces)
        tags: dict[str, list[Scalar]] = {"version": [turn], "length": list(range(count))}
        s.put(Put("p", 1, rows, brings, tags))
    assert inspection.stats(s)["bytes_per_row"] < 500
    assert repr(s) == ("<Store 'step-1' generation 1, open: 196608 rows, 24576 groups, 0 leases>")


def test_texts_of_tags_are_kept_once_while_rows_have_them_and_then_go() -> None:
    s = store()
    for i in range(2):
        put(s, [i], status=["".join(["go", "ing"])], at=[f"place {i}"])
    one, other = rows_out.table(s, rows_out.read(s)[0]).tags["status"]
    assert one is other
    for first in (0, 2_500):
        many = range(first, first + 2_500)
        put(s, [f"k{i}" for i in many], at=[f"place {i}" for i in many])
    assert len(tags._texts) <= 4_096


def test_what_long_names_and_texts_of_tags_take_is_counted() -> None:
    s = store()
    put(s, ["a"], note=["x" * 10_000])
    put(s, ["b"], note=["x"])
    s.tag(named(["b"]), {"note": ["y" * 20_000]})
    assert 30_000 < s.used_bytes < 32_000
    s.tag(named(["a", "b"]), {"note": [None]})
    assert s.used_bytes < 2_000
    put(s, ["c" * 512])
    assert s.used_bytes > 2_000


def test_a_freed_row_and_a_group_of_the_same_name_are_two_things() -> None:
    s = store(group_size=1, stages={"s": ["tokens"]}, free="acked")
    put(s, [1], [7])
    taken = take(s, "s", Want("rows", 1, 1))
    assert taken.lease is not None
    s.finish(Finish(taken.lease, "ack"))
    put(s, [2], [1])
    assert len(s) == 1


def test_a_drained_partition_that_nobody_drops_keeps_next_to_nothing() -> None:
    """A run of ten thousand steps may have as many. A shard remembers what a caller may repeat."""
    numbers, size = itertools.count(1), 8
    drained, sizes = list[Store](), list[int]()

    def alone(numbers: Iterator[int]) -> Change:
        """The only change of its caller that is not over."""
        number = next(numbers)
        return change(number, floor=number)

    tracemalloc.start()
    for _ in range(8):
        s = Store("p", Definition({"s": ["x"]}, group_size=size, free="acked"), 1)
        drained.append(s)
        for n in range(200):
            keys, group = mint_many(2, n * size, size), mint_many(3, n, 1)
            rows = Rows(keys, None, bytes(4 * size), group)
            s.put(wrote(rows, [Column("x", values(size))], change=alone(numbers)))
            s.freed()
        while (taken := take(s, "s", Want("groups", 8, 1))).lease is not None:
            finish(s, taken, change=alone(numbers))
        s.freed()
        s.seal()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert not any(len(s) for s in drained)
    assert [len(s.answers) for s in drained] == [1] * len(drained)
    assert max(after - before for before, after in pairwise(sizes[2:])) < 24 << 10


@pytest.mark.parametrize(("nbytes", "rows"), [(2, 4), (0, 4), (3, 100)])
def test_a_chunk_of_fewer_bytes_than_rows_ends_row_by_row(nbytes: int, rows: int) -> None:
    """Its dead bytes round to 0 for most of its life."""
    s = Store("p", Definition({"s": ["x"]}, free="acked"), 1)
    s.put(Put("p", 1, named(["other"]), whole(["x"], 1, 1, 4096)))
    s.put(Put("p", 1, named(list(range(rows))), whole(["x"], rows, 2, nbytes)))
    lease = take(s, "s", Want("rows", rows + 1, rows + 1)).lease
    assert lease is not None
    for at in range(rows, -1, -1):
        s.finish(Finish(lease, "ack", np.array([at], "<u4").tobytes()))
        assert not observed.accounts(s)
    assert not len(s) and not len(s.leases)
