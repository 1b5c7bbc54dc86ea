"""A partition's definition, its seal and its end, as its shard keeps them."""

from __future__ import annotations

import pytest

from dataplane.errors import (
    GroupClosed,
    LimitExceeded,
    PartitionConflict,
    PartitionSealed,
    RowsDropped,
    StageUndefined,
)
from dataplane.metadata.shard import inspection
from dataplane.metadata.shard.journal import snapshot
from dataplane.metadata.shard.store import Store, check_definition
from dataplane.wire.journal import LogRecord
from dataplane.wire.limits import MAX_STAGES
from dataplane.wire.messages import Put, Seal
from dataplane.wire.tables import Definition, Owner
from tests.metadata.observed import carried_over, observed
from tests.metadata.stores import OWNERS, put, store

TRAIN = Definition(stages={"train": ["tokens"]}, group_size=2, groups=2, free="acked")


def phase_of(one: Store) -> str:
    return one.phase


def test_declaring_again_is_the_same_and_anything_else_conflicts() -> None:
    s = Store("step-1", TRAIN, 1)
    s.check_same(TRAIN)
    with pytest.raises(PartitionConflict, match="group_size=2 .this call: 4."):
        s.check_same(Definition(stages=TRAIN.stages, group_size=4, groups=2, free="acked"))


def test_what_cannot_be_is_refused_and_not_ignored() -> None:
    for size in (0, -1, 1 << 31):
        with pytest.raises(LimitExceeded, match="group_size="):
            check_definition("p", Definition(group_size=size))
    with pytest.raises(LimitExceeded, match="512"):
        check_definition("p" * 513, Definition())


def test_a_stage_can_be_added_where_rows_stay() -> None:
    s = store(stages={})
    s.declare_stage("eval", ["tokens"])
    s.declare_stage("eval", ["tokens"])
    assert s.definition.stages == {"eval": ["tokens"]}
    s.check_same(Definition(stages={}))  # as it was declared first
    s.check_same(Definition(stages={"eval": ["tokens"]}))
    for number in range(1, MAX_STAGES):
        s.declare_stage(f"stage-{number}", ["tokens"])
    with pytest.raises(LimitExceeded, match=f"already has {MAX_STAGES} stages"):
        s.declare_stage("one more", ["tokens"])


def test_a_stage_cannot_be_added_where_acked_rows_are_freed() -> None:
    with pytest.raises(StageUndefined, match="stages cannot be added later"):
        Store("step-1", TRAIN, 1).declare_stage("eval", ["tokens"])


def test_the_partition_seals_itself_at_its_number_of_closed_groups() -> None:
    """Dropped ones do not count; and no record says so, for it follows from those of the puts."""
    ops: list[LogRecord] = []
    s = Store("step-1", TRAIN, 1, emit=ops.append)
    put(s, [1, 2], ["p", "p"])
    s.drop(groups=["p"])
    put(s, [3, 4], ["q", "q"])
    assert phase_of(s) == "open"
    put(s, [5, 6, 7], ["r", "r", "s"])
    assert phase_of(s) == "sealed" and s.closed_groups == 2
    with pytest.raises(PartitionSealed):
        put(s, [8], ["t"])
    assert not any(isinstance(op, Seal) for op in ops)
    copy = Store("step-1", TRAIN, 1)
    carried_over(copy, ops)
    s.freed()
    assert observed(copy) == observed(s)


def test_a_seal_is_one_record_however_often_it_is_asked_for() -> None:
    ops: list[LogRecord] = []
    s = Store("step-1", TRAIN, 1, emit=ops.append)
    put(s, [1], ["p"])
    s.seal()
    s.seal()
    assert [type(op) for op in ops] == [Put, Seal]


def test_a_copy_knows_the_lost_rows_by_name_and_number_however_it_was_made() -> None:
    s = store()
    put(s, ["a", "b"])
    s.lost(OWNERS[0])
    s.losses.note([f"x{i}" for i in range(70_000)])
    assert s.losses.after(0)[2] == 70_002 - 65_536
    copy = Store("step-1", s.definition, 1)
    carried_over(copy, list(snapshot(s)))
    assert copy.losses.total == 70_002
    at, theirs = 0, 0
    while at < 70_002:
        one, other = s.losses.after(at), copy.losses.after(theirs)
        assert one == other
        at, theirs = one[1], other[1]
    assert s.lost(Owner("b", 9)) == 0 and s.losses.total == 70_002


def test_groups_that_are_short_at_the_seal_are_dropped_unless_they_are_to_be_kept() -> None:
    for keep_short in (False, True):
        ops: list[LogRecord] = []
        s = Store("p", Definition(stages={"s": ["tokens"]}, group_size=2), 1)
        s.emit = ops.append
        put(s, [1, 2, 3], ["p", "p", "short"])
        assert s.seal(keep_short) == int(keep_short)
        assert len(s) == 2 + keep_short
        assert inspection.stats(s)["short_groups"] == int(not keep_short)
        assert s.counts("s", "groups").ready == 1 + keep_short
        with pytest.raises(GroupClosed if keep_short else RowsDropped):
            put(s, [4], ["short"]) if not keep_short else s.close("short", 2)
        copy = Store("p", s.definition, 1)
        carried_over(copy, ops)
        dumped = Store("p", s.definition, 1)
        carried_over(dumped, list(snapshot(s)))
        s.freed()
        assert observed(copy) == observed(s)
        assert observed(dumped) == observed(s)
