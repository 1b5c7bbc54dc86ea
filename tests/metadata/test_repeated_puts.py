"""A put that is repeated after its rows were consumed and freed makes nothing anew."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.errors import FieldExists, PartitionSealed, RowsDropped
from dataplane.metadata.shard import inspection, puts, rows_out
from dataplane.metadata.shard.journal import snapshot
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables.keys import format_minted, mint_many
from dataplane.wire.journal import LogRecord
from dataplane.wire.messages import PutDone, Want
from dataplane.wire.tables import Definition, Name
from tests.metadata.observed import carried_over, observed
from tests.metadata.stores import OWNERS, Column, finish, named, take, values, wrote

ONCE = Definition(stages={"s": ["x"]}, free="acked")


def put(
    to: Store, keys: list[Name], groups: list[Name | None] | None = None, **how: Any
) -> PutDone:
    columns = [Column("x", values(len(keys)))]
    tags = {"v": list(range(len(keys)))}
    return to.put(wrote(named(keys, groups), columns, OWNERS, tags, **how))


def consume(s: Store, count: int, unit: str = "rows") -> None:
    finish(s, take(s, "s", Want(unit, count, count)))  # type: ignore[arg-type]


def freed(s: Store) -> int:
    return sum(int(counts.sum()) for _, _, counts in s.freed())


def test_rows_that_are_gone_are_passed_over_and_what_they_brought_is_let_go() -> None:
    s = Store("p", ONCE, 1)
    put(s, ["a", "b"])
    consume(s, 2)
    assert freed(s) == 2
    outcome = put(s, ["a", "c", "b", "d"])
    assert (outcome.gone, len(s)) == (2, 2)
    assert freed(s) == 2
    table = rows_out.table(s, rows_out.read(s)[0])
    assert sorted(zip(table.rows.names or (), table.tags["v"], strict=True)) == [("c", 1), ("d", 3)]
    plan = puts.plan_put(s, wrote(named(["a", "b"]), [Column("x", values(2))]))
    assert not len(plan.new)
    assert put(s, ["a", "b"]).gone == 2
    assert inspection.stats(s)["tombstones"] == 2


def test_rows_that_are_there_are_passed_over_whole_and_the_missing_ones_enter() -> None:
    s = Store("p", Definition(free="drop"), 1)
    put(s, ["a", "b"])
    columns = [Column("x", values(4)), Column("y", values(4, first=4))]
    with pytest.raises(
        FieldExists,
        match=r"put \(for example, row 'a' has field 'x'\)",
    ):
        s.put(wrote(named(["a", "b", "c", "d"]), columns, OWNERS))
    outcome = put(s, ["c", "a", "d", "b"])
    # The chunks of the rows that were there, and that of c, which a had already.
    assert (outcome.there, outcome.gone, len(s), freed(s)) == (2, 0, 4, 3)
    table = rows_out.table(s, rows_out.read(s)[0])
    assert dict(zip(table.rows.names or (), table.tags["v"], strict=True)) == {
        "a": 0,  # what was there stays, tags too
        "b": 1,
        "c": 0,
        "d": 2,
    }
    assert put(s, ["a", "b"]).there == 2


def test_a_group_that_is_gone_takes_no_rows_however_they_are_called() -> None:
    s = Store("p", Definition(stages={"s": ["x"]}, free="acked", group_size=2, groups=2), 1)
    put(s, ["a", "b"], ["g", "g"])
    consume(s, 1, "groups")
    assert put(s, ["c", "d"], ["g", "g"]).gone == 2
    outcome = put(s, ["e", "f", "a", "b"], ["h", "h", "g", "g"])
    assert (outcome.gone, s.closed_groups) == (2, 2)
    assert s.sealed  # by two groups, of which none was counted twice
    assert put(s, ["a", "b"], ["g", "g"]).gone == 2  # also then
    with pytest.raises(PartitionSealed):
        put(s, ["new", "rows"], ["i", "i"])


@pytest.mark.parametrize("closes_first", [True, False])
def test_a_group_that_is_gone_is_not_opened_by_closing_it_again(closes_first: bool) -> None:
    """Else it would stay until the seal, and take a place of those that `admit` bounds."""
    ops: list[LogRecord] = []
    s = Store("p", ONCE, 1, emit=ops.append)
    put(s, ["a", "b"], ["g", "g"])
    for closes in (closes_first, not closes_first):
        if closes:
            s.close("g", 2)
        else:
            consume(s, 2)
    assert (len(s.groups), s.closed_groups) == (0, 1)
    assert s.close("g", 2) == 0
    assert (len(s.groups), s.closed_groups) == (0, 1)
    assert put(s, ["a", "c"], ["g", "g"]).gone == 2
    s.seal()
    assert s.close("g", 2) == 0
    s.freed()
    copy = Store("p", ONCE, 1)
    carried_over(copy, ops)
    assert observed(copy) == observed(s)


def test_old_names_may_be_used_for_new_rows_also_those_of_dropped_ones() -> None:
    s = Store("p", ONCE, 1)
    put(s, ["a", "b"], ["g", "g"])
    s.close("g", 2)
    consume(s, 2)
    s.drop(rows=named(["c"]))
    s.drop(groups=["h"])
    for keys, groups in ((["c"], None), (["x"], ["h"])):
        with pytest.raises(RowsDropped):
            put(s, keys, groups)  # type: ignore[arg-type]
    assert put(s, ["a", "b", "c", "x"], ["g", "g", None, "h"], reuse=True).gone == 0
    assert (len(s), inspection.stats(s)["tombstones"]) == (4, 0)
    consume(s, 4)
    assert put(s, ["a", "c"]).gone == 2


def test_rows_that_were_lost_or_have_no_given_name_are_not_remembered() -> None:
    s = Store("p", ONCE, 1)
    put(s, ["a"])
    s.lost(OWNERS[0])
    assert put(s, ["a"]).gone == 0
    minted = named([format_minted(mint_many(1, 1, 1))])
    s.put(wrote(minted, [Column("x", values(1))], OWNERS, {}))
    consume(s, 2)
    assert inspection.stats(s)["tombstones"] == 1


def test_a_copy_passes_the_same_rows_over_however_it_was_made() -> None:
    ops: list[LogRecord] = []
    s = Store("p", ONCE, 1, emit=ops.append)
    put(s, ["a", "b", "c"], ["g", "g", None])
    s.close("g", 2)
    consume(s, 3)
    s.drop(rows=named(["d"]))
    put(s, ["b", "e"])
    put(s, ["c"], reuse=True)
    s.freed()
    replayed, dumped = Store("p", ONCE, 1), Store("p", ONCE, 1)
    carried_over(replayed, ops)
    carried_over(dumped, list(snapshot(s, 1)))
    assert observed(replayed) == observed(s)
    assert observed(dumped)["tombstones"] == observed(s)["tombstones"]
    for copy in (replayed, dumped):
        assert (put(copy, ["a", "z"], ["g", "g"]).gone, put(copy, ["b"]).gone) == (2, 1)
