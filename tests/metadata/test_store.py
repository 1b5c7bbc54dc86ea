"""What a peer sees of a store: claims with budgets and minima, bad input, the life of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataplane.errors import (
    DataplaneError,
    FieldExists,
    FieldUnknown,
    GroupClosed,
    InvalidRows,
    LeaseExpired,
    LimitExceeded,
    PartitionSealed,
    ProtocolError,
    RowsDropped,
    RowsGone,
    StageUndefined,
)
from dataplane.metadata import names
from dataplane.metadata.store import Store
from dataplane.metadata.takes import Taken
from dataplane.wire.limits import ABSENT, NO_GROUP
from dataplane.wire.messages import Want
from dataplane.wire.records import VALUE
from dataplane.wire.tables import Column, Definition, Name, Owner, Rows, Spec

SPECS = [Spec("array", "float32", (-1,)), Spec("object")]
OWNERS = [Owner("a", 7)]
STAGES = {"reward": ["tokens"], "train": ["tokens", "reward"]}


def store(**definition: Any) -> Store:
    return Store("step-1", Definition(**{"stages": STAGES, **definition}), 1)


def values(count: int, nbytes: int = 8_192, first: int = 0) -> bytes:
    records = np.zeros(count, VALUE)
    records["range"] = np.arange(first, first + count)
    records["nbytes"] = nbytes
    return records.tobytes()


def named(keys: list[Name], groups: list[Name | None] | None = None) -> Rows:
    if groups is None:
        return Rows(names.hash_names(keys), keys)
    table = list(dict.fromkeys(group for group in groups if group is not None))
    index = [NO_GROUP if group is None else table.index(group) for group in groups]
    return Rows(
        names.hash_names(keys),
        keys,
        np.array(index, "<u4").tobytes(),
        names.hash_names(table),
        table,
    )


def put(
    to: Store,
    keys: list[Name],
    groups: list[Name | None] | None = None,
    fields: tuple[str, ...] = ("tokens",),
    nbytes: int = 8_192,
    **tags: Any,
) -> None:
    columns = [Column(name, values(len(keys), nbytes)) for name in fields]
    to.put(named(keys, groups), columns, SPECS, OWNERS, tags, now=0.0)


def take(from_: Store, stage: str, want: Want, **options: Any) -> Taken:
    return from_.take(stage, want, 1, 0.0, **options)


def keys_of(from_: Store, taken: Taken) -> list[Name]:
    assert taken.lease is not None
    found = from_.table(taken.lease).rows.names
    assert found is not None
    return found


def finish(at: Store, taken: Taken, outcome: str = "ack", now: float = 0.0, **options: Any) -> Any:
    assert taken.lease is not None
    given = {"index": None, "columns": [], "specs": SPECS, "owners": OWNERS, "tags": {}} | options
    return at.finish(taken.lease, outcome, now=now, **given)


# claims


def test_a_claim_is_exact_unless_it_has_a_minimum_or_may_be_partial() -> None:
    s = store()
    put(s, [1, 2, 3])
    assert take(s, "reward", Want("rows", 4, 4)) == Taken()
    assert keys_of(s, take(s, "reward", Want("rows", 2, 2))) == [1, 2]
    put(s, [4, 5])
    assert take(s, "reward", Want("rows", 9, 3)).units == 3
    put(s, [6])
    assert take(s, "reward", Want("rows", 9, 9), partial=True).units == 1
    put(s, [7])
    assert take(s, "reward", Want("rows", 9, 9), sealed=True).units == 1


def test_a_budget_returns_when_the_next_row_would_not_fit() -> None:
    s = store()
    put(s, [1, 2, 3], length=[30, 40, 20])
    want = Want("rows", 0, 0, None, "length", 100)
    assert take(s, "reward", want) == Taken()
    assert take(s, "reward", want).lease is None
    put(s, [4], length=[50])
    taken = take(s, "reward", want)
    assert (taken.units, taken.amount, taken.blocked) == (3, 90.0, True)
    assert keys_of(s, taken) == [1, 2, 3]
    rest = take(s, "reward", want, sealed=True)
    assert (rest.units, rest.amount, rest.blocked) == (1, 50.0, False)


def test_a_row_larger_than_the_whole_budget_blocks_and_says_so() -> None:
    s = store()
    put(s, [1, 2], length=[200, 1])
    taken = take(s, "reward", Want("rows", 0, 0, None, "length", 100), partial=True)
    assert taken == Taken(None, 0, 0.0, True)
    assert s.counts("reward").ready_rows == 2


def test_a_budget_of_groups_sums_over_all_their_rows() -> None:
    s = store(group_size=2, stages={"train": ["tokens"]})
    put(s, [1, 2, 3, 4, 5, 6], ["p", "p", "q", "q", "r", "r"], length=[10, 20, 30, 5, 30, 20])
    taken = take(s, "train", Want("groups", 0, 0, None, "length", 70))
    assert (taken.units, taken.amount, taken.blocked) == (2, 65.0, True)
    assert keys_of(s, taken) == [1, 2, 3, 4]


def test_a_budget_looks_at_as_many_rows_as_it_needs() -> None:
    s = store()
    put(s, list(range(1_000)), length=[1])
    taken = take(s, "reward", Want("rows", 0, 0, None, "length", 700.5))
    assert (taken.units, taken.amount, taken.blocked) == (700, 700.0, True)


def test_no_more_bytes_are_taken_than_the_claimer_has_room_for() -> None:
    s = store(group_size=2, stages={"train": ["tokens"]})
    put(s, [1, 2, 3, 4], ["p", "p", "q", "q"], nbytes=1_000)
    assert take(s, "train", Want("groups", 2, 2), byte_limit=3_999).lease is None
    taken = take(s, "train", Want("groups", 2, 2), byte_limit=3_999, partial=True)
    assert taken.units == 1
    assert take(s, "train", Want("rows", 2, 2), byte_limit=2_000).units == 2


def test_groups_of_different_sizes_never_mix() -> None:
    s = store(stages={"train": ["tokens"]})
    put(s, [1, 2, 3, 4, 5], ["p", "q", "p", "q", "q"])
    s.close(names.hash_name("p"), 2)
    s.close(names.hash_name("q"), 3)
    assert keys_of(s, take(s, "train", Want("groups", 1, 1))) == [1, 3]
    assert keys_of(s, take(s, "train", Want("groups", 1, 1))) == [2, 4, 5]


def test_a_filter_on_groups_means_all_rows_and_follows_tags_and_drops() -> None:
    s = store(group_size=2, stages={"train": ["tokens"]})
    put(s, [1, 2], ["p", "p"], version=[5, 6])
    want = Want("groups", 1, 1, ["ge", "version", 6])
    assert take(s, "train", want) == Taken()
    s.tag(named([1]), {"version": [7]})
    assert s.counts("train", want.where).ready_groups == 1
    s.tag(named([2]), {"version": [1]})
    assert s.counts("train", want.where).ready_groups == 0
    s.drop(rows=named([2]))
    assert keys_of(s, take(s, "train", want)) == [1]


def test_a_dead_holders_rows_come_back_before_all_others() -> None:
    s = store()
    put(s, [1, 2, 3, 4])
    taken = s.take("reward", Want("rows", 2, 2), 77, 0.0)
    assert s.release_holder(77) == 2
    assert s.release_holder(77) == 0
    assert keys_of(s, take(s, "reward", Want("rows", 4, 4))) == [1, 2, 3, 4]
    with pytest.raises(LeaseExpired):
        finish(s, taken)


def test_a_late_ack_is_fenced_even_before_expiry_was_noticed() -> None:
    s = store()
    put(s, [1])
    taken = s.take("reward", Want("rows", 1, 1), 1, now=10.0, lease_ms=500)
    assert s.next_deadline() == 10.5
    with pytest.raises(LeaseExpired):
        finish(s, taken, now=10.5)
    assert [lease.number for lease in s.expire(10.5)] == [taken.lease]
    assert s.next_deadline() is None
    assert s.counts("reward").ready_rows == 1


def test_positions_in_a_lease_stay_when_some_rows_are_finished() -> None:
    s = store()
    put(s, [1, 2, 3])
    taken = take(s, "reward", Want("rows", 3, 3))
    finish(s, taken, "drop", index=np.array([1], "<u4").tobytes())
    assert keys_of(s, taken) == [1, 3]
    with pytest.raises(InvalidRows, match="before"):
        finish(s, taken, index=np.array([1], "<u4").tobytes())
    finish(s, taken, index=np.array([2], "<u4").tobytes(), tags={"done": [True]})
    finish(s, taken, "release")
    assert keys_of(s, take(s, "reward", Want("rows", 1, 1))) == [1]
    with pytest.raises(LeaseExpired):
        finish(s, taken)


def test_rows_dropped_while_leased_are_passed_over() -> None:
    s = store()
    put(s, [1, 2])
    taken = take(s, "reward", Want("rows", 2, 2))
    s.drop(rows=named([1]))
    put(s, [3])  # in the slot of the dropped row
    with pytest.raises(RowsGone):
        s.table(taken.lease)
    s.freed()
    done = finish(s, taken, columns=[Column("reward", values(2, 4, first=50))])
    assert (done.rows, done.gone) == (1, 1)
    ((owner, ranges, counts),) = s.freed()
    assert (owner, ranges["range"].tolist(), counts.tolist()) == (OWNERS[0], [50], [1])
    assert s.counts("train").ready_rows == 1
    assert s.counts("reward").ready_rows == 1


# life of rows


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
    ((_, ranges, _),) = s.freed()
    assert sorted(ranges["range"].tolist()) == list(range(7))
    assert s.stats()["bytes"] == 1_000


def test_a_late_put_of_a_dropped_row_or_group_learns_it() -> None:
    s = store(group_size=8)
    put(s, [1], ["p"])
    s.drop(groups=[names.hash_name("p")])
    for keys, groups in ([[1], None], [[2], ["p"]]):
        with pytest.raises(RowsDropped) as caught:
            put(s, keys, groups)
        assert "cancelled" in str(caught.value)
    assert s.closed_groups == 0


def test_a_seal_forbids_new_rows_but_not_new_fields() -> None:
    s = store()
    put(s, [1], ["p"])
    s.seal_begin()
    with pytest.raises(PartitionSealed):
        put(s, [2])
    put(s, [1], fields=("reward",))
    assert s.counts("train").ready_groups == 0
    assert s.seal_end() == 1
    assert s.counts("train").ready_groups == 1


def test_groups_that_were_dropped_do_not_count_as_made() -> None:
    s = store(group_size=2)
    put(s, [1, 2, 3, 4], ["p", "p", "q", "q"])
    assert s.closed_groups == 2
    s.drop(groups=[names.hash_name("p")])
    assert s.closed_groups == 1


def test_a_group_that_lost_a_row_is_reported_and_may_be_put_again() -> None:
    s = store(group_size=2)
    far = Owner("far", 3)
    put(s, [1, 3], ["p", "q"])
    s.put(named([2], ["p"]), [Column("tokens", values(1))], SPECS, [far], {}, now=0.0)
    lost = s.lost(far)
    assert (sorted(lost.rows.names or []), lost.groups) == ([1, 2], 1)
    assert s.closed_groups == 0
    put(s, [1, 2], ["p", "p"])
    assert s.counts("reward").ready_groups == 1


def test_values_that_were_added_before_stay_and_are_counted() -> None:
    s = store()
    put(s, [1, 2])
    put(s, [1], fields=("reward",))
    done = finish(
        s, take(s, "reward", Want("rows", 2, 2)), columns=[Column("reward", values(2, 4, first=9))]
    )
    assert done.kept == {"reward": 1}
    ((_, ranges, _),) = s.freed()
    assert ranges["range"].tolist() == [9]


def test_a_stage_declared_later_gets_the_rows_that_are_there() -> None:
    s = store(stages={}, free="drop", group_size=2)
    put(s, [1, 2, 3], ["p", "p", None])
    s.declare_stage("late", ["tokens"])
    assert (s.counts("late").ready_rows, s.counts("late").ready_groups) == (3, 1)
    s.declare_stage("late", ["tokens"])
    with pytest.raises(StageUndefined):
        s.declare_stage("late", ["other"])
    with pytest.raises(StageUndefined, match="may be gone"):
        store(free="acked").declare_stage("late", ["tokens"])


def test_missing_says_what_is_missing_and_who_holds_it() -> None:
    s = store(group_size=2)
    put(s, [1, 2, 3, 4, 5], ["p", "p", "q", "q", "r"])
    put(s, [1, 2], fields=("reward",))
    s.take("reward", Want("groups", 2, 2), 42, now=10.0)
    found = s.missing("train", "groups", now=100.0)
    assert found == {
        "ready": 1,
        "units": 3,
        "missing": {"reward": 3},
        "open_groups": 1,
        "leases": [(42, 2, 90.0)],
    }


def test_only_stages_whose_counts_changed_are_told() -> None:
    s = store()
    assert s.dirty() == set(STAGES)
    assert s.dirty() == set()
    put(s, [1])
    s.dirty()
    taken = take(s, "reward", Want("rows", 1, 1))
    assert s.dirty() == {"reward"}
    finish(s, taken, columns=[Column("reward", values(1, 4))])
    assert s.dirty() == {"reward", "train"}


# reading


def test_a_read_goes_on_behind_the_last_key() -> None:
    s = store()
    put(s, list(range(10)), odd=[i % 2 for i in range(10)])
    slots, more = s.read(limit=4)
    assert more
    first = s.table(slots, ["tokens"]).rows
    rest, more = s.read(limit=9, after=first.keys[-16:])
    assert not more
    assert [*(first.names or []), *(s.table(rest, []).rows.names or [])] == list(range(10))
    slots, more = s.read(where=["eq", "odd", 1], limit=2)
    assert (s.table(slots, []).rows.names, more) == ([1, 3], True)
    with pytest.raises(RowsGone) as caught:
        s.read(rows=named([1, 99]))
    assert caught.value.details["keys"] == [99]


def test_a_table_carries_only_what_it_uses_and_tells_what_is_absent() -> None:
    s = store()
    put(s, [1, "two"], score=[1.5, 2.5])
    records = np.zeros(2, VALUE)
    records["spec"], records["owner"] = 1, [0, ABSENT]
    s.put(named([1, "two"]), [Column("note", records.tobytes())], SPECS, OWNERS, {}, now=0.0)
    table = s.table(s.read()[0], ["note"])
    assert (table.rows.names, table.tags) == ([1, "two"], {"score": [1.5, 2.5]})
    found = np.frombuffer(table.columns[0].values, VALUE)
    assert found["owner"].tolist() == [0, ABSENT]
    assert table.specs[int(found["spec"][0])] == Spec("object")
    assert table.owners == OWNERS
    with pytest.raises(FieldUnknown, match="tokens"):
        s.table(s.read()[0], ["nothing"])


def test_minted_keys_need_no_names() -> None:
    s = store()
    keys = names.mint_many(3, 9, 0, 2)
    s.put(Rows(keys), [Column("tokens", values(2))], SPECS, OWNERS, {}, now=0.0)
    assert s.table(s.read()[0]).rows == Rows(keys)
    put(s, ["given"])
    shown = names.format_minted_many(keys)
    assert s.table(s.read()[0]).rows.names == [*shown, "given"]


# bad input


def damaged(**changes: Any) -> tuple[Rows, list[Column], dict[str, Any]]:
    rows = changes.pop("rows", named([1, 2], ["p", "p"]))
    column = Column("tokens", changes.pop("values", values(2)), **changes.pop("column", {}))
    return rows, changes.pop("columns", [column]), changes.pop("tags", {})


def wrong_records(**parts: int) -> bytes:
    records = np.zeros(2, VALUE)
    for name, value in parts.items():
        records[name] = value
    return records.tobytes()


KEYS = names.hash_names([1, 2])
PUTS: list[tuple[type[DataplaneError], dict[str, Any]]] = [
    (InvalidRows, {"rows": Rows(b"")}),
    (ProtocolError, {"rows": Rows(b"short")}),
    (InvalidRows, {"rows": Rows(KEYS[:16] * 2)}),
    (InvalidRows, {"rows": Rows(KEYS, [1])}),
    (ProtocolError, {"rows": Rows(KEYS, None, b"\x05\0\0\0" * 2, KEYS)}),
    (ProtocolError, {"rows": Rows(KEYS, None, b"\0", KEYS)}),
    (InvalidRows, {"rows": Rows(KEYS, None, bytes(8), KEYS[:16] * 2)}),
    (LimitExceeded, {"rows": Rows(names.mint_many(1, 1, 0, 65_537))}),
    (InvalidRows, {"values": values(3)}),
    (ProtocolError, {"values": b"x"}),
    (ProtocolError, {"values": wrong_records(spec=2)}),
    (ProtocolError, {"values": wrong_records(owner=1)}),
    (ProtocolError, {"column": {"leaves": values(1)}}),
    (ProtocolError, {"column": {"leaves": values(1), "leaf_counts": b"\x02\0\0\0" + bytes(4)}}),
    (LimitExceeded, {"column": {"leaf_counts": b"\xff\xff\xff\xff" + bytes(4)}}),
    (ProtocolError, {"column": {"leaf_counts": b"\0"}}),
    (InvalidRows, {"columns": [Column("f", values(2)), Column("f", values(2))]}),
    (InvalidRows, {"columns": [Column("", values(2))]}),
    (LimitExceeded, {"columns": [Column(f"f{i}", values(2)) for i in range(65)]}),
    (LimitExceeded, {"columns": [Column(f"f{i}", values(2)) for i in range(63)]}),
    (InvalidRows, {"tags": {"t": [1, 2, 3]}}),
    (FieldExists, {"rows": named([0, 1])}),
    (InvalidRows, {"rows": named([0], ["other"]), "columns": []}),
    (GroupClosed, {"rows": named([5, 6, 7], ["p"] * 3), "values": values(3)}),
    (GroupClosed, {"rows": named([5], ["full"]), "values": values(1)}),
]


@pytest.mark.parametrize(("error", "changes"), PUTS)
def test_a_bad_put_is_refused_and_changes_nothing(
    error: type[DataplaneError], changes: dict[str, Any]
) -> None:
    s = store(group_size=2)
    put(s, [0, 10, 11], [None, "full", "full"])
    before = (s.stats(), s.counts("reward"))
    rows, columns, tags = damaged(**changes)
    with pytest.raises(error):
        s.put(rows, columns, SPECS, OWNERS, tags, now=0.0)
    assert (s.stats(), s.counts("reward")) == before
    assert s.freed() == []


def test_a_bad_finish_is_refused_and_the_lease_goes_on() -> None:
    s = store()
    put(s, [1, 2])
    taken = take(s, "reward", Want("rows", 2, 2))
    bad: list[tuple[type[DataplaneError], str, dict[str, Any]]] = [
        (ProtocolError, "explode", {}),
        (InvalidRows, "release", {"columns": [Column("reward", values(2))]}),
        (InvalidRows, "ack", {"columns": [Column("reward", values(1))]}),
        (InvalidRows, "ack", {"index": np.array([2], "<u4").tobytes()}),
        (InvalidRows, "ack", {"index": np.array([0, 0], "<u4").tobytes()}),
        (InvalidRows, "ack", {"index": b"", "columns": [Column("reward", b"")]}),
        (ProtocolError, "ack", {"index": b"\0"}),
        (InvalidRows, "ack", {"tags": {"t": [1, 2, 3]}}),
    ]
    for error, outcome, options in bad:
        with pytest.raises(error):
            finish(s, taken, outcome, **options)
    assert finish(s, taken).rows == 2


def test_calls_about_unknown_things_are_refused() -> None:
    s = store(group_size=2)
    with pytest.raises(StageUndefined, match="train"):
        take(s, "trian", Want("rows", 1, 1))
    with pytest.raises(ProtocolError):
        take(s, "train", Want("tables", 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        take(s, "train", Want("rows", 1, 1, ["nonsense"]))
    with pytest.raises(LeaseExpired):
        s.table(99)
    with pytest.raises(InvalidRows):
        s.drop()
    with pytest.raises(InvalidRows):
        s.drop(rows=Rows(b""))
    with pytest.raises(InvalidRows):
        s.close(names.hash_name("p"), 3)
    with pytest.raises(ProtocolError):
        s.close(b"short", 1)


# size


def test_specs_of_rows_long_gone_do_not_pile_up() -> None:
    s = store(free="drop")
    for i in range(6_000):
        spec = Spec("array", "float32", (-1, i))
        s.put(named([i]), [Column("tokens", values(1))], [spec], OWNERS, {}, now=0.0)
        if i % 1_000 == 999:
            s.drop(where=["not", ["exists", "never"]])
            s.freed()
    assert len(s._state.fields._known.specs) < 4_200
    spec = Spec("array", "float32", (-1, 5_999))
    s.put(named(["last"]), [Column("tokens", values(1))], [spec], OWNERS, {}, now=0.0)
    assert s.table(s.read(rows=named(["last"]))[0]).specs == [spec]


def test_a_row_costs_less_than_300_bytes_of_metadata() -> None:
    s = store(group_size=8)
    count = 65_536
    for turn in range(3):
        index = (np.arange(count) // 8).astype("<u4").tobytes()
        rows = Rows(
            names.mint_many(1, 2, turn * count, count),
            None,
            index,
            names.mint_many(1, 3, turn * count, count // 8),
        )
        columns = [Column(name, values(count)) for name in ("tokens", "reward", "x", "y")]
        tags = {"version": [turn], "length": list(range(count))}
        s.put(rows, columns, SPECS, OWNERS, tags, now=0.0)
    assert s.stats()["bytes_per_row"] < 300
    assert repr(s) == ("<Store 'step-1' generation 1, open: 196608 rows, 24576 groups, 0 leases>")
