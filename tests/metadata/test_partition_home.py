"""The home of a partition: declarations, generations, the two phases of a seal."""

from __future__ import annotations

import pytest

from dataplane.errors import (
    LimitExceeded,
    PartitionConflict,
    PartitionGone,
    PartitionUndefined,
    StageUndefined,
)
from dataplane.metadata.partition_home import Broadcast, PartitionHome
from dataplane.wire.limits import MAX_STAGES
from dataplane.wire.tables import Definition

TRAIN = Definition(stages={"train": ["tokens"]}, group_size=8, groups=4, free="acked")


def opened(definition: Definition = TRAIN) -> tuple[PartitionHome, int]:
    home = PartitionHome("step-1", "ab")
    return home, home.define(definition, 1000).generation


def test_declaring_again_attaches_and_anything_else_conflicts() -> None:
    home, generation = opened()
    assert home.define(TRAIN, 2000).generation == generation
    assert home.define(None, 2000).definition == TRAIN
    with pytest.raises(PartitionConflict, match="group_size=8 .now 4."):
        home.define(Definition(stages=TRAIN.stages, group_size=4, groups=4, free="acked"), 2000)


def test_what_this_version_does_not_have_is_refused_and_not_ignored() -> None:
    home = PartitionHome("p", ["a"])
    for size in (0, -1, 1 << 31):
        with pytest.raises(LimitExceeded, match="groups of"):
            home.define(Definition(group_size=size), 1)
    with pytest.raises(LimitExceeded, match="512"):
        PartitionHome("p" * 513, ["a"]).define(Definition(), 1)
    assert not home.defined


def test_attaching_to_what_nobody_declared_says_how_to_declare_it() -> None:
    with pytest.raises(PartitionUndefined, match="stages="):
        PartitionHome("step-1", "ab").define(None, 1000)


def test_who_has_no_rows_is_told_and_not_waited_for() -> None:
    home = PartitionHome("step-1", "ab", "k")
    generation = home.define(TRAIN, 1000).generation
    home.seal(generation)
    assert home.silent == set("abk")
    assert home.missing(generation, "sealing") == set("ab")
    for phase in ("sealing", "sealed"):
        for peer in "ab":
            home.phase_ack(peer, generation, phase)  # type: ignore[arg-type]
    assert home.record.phase == "sealed"
    assert home.silent == {"k"}
    home.instructions()
    home.members("abk")
    assert home.missing(generation, "sealed") == {"k"}  # it may have rows from here on
    home.members("ab", "kn")
    assert home.instructions() == [Broadcast("sealed", generation)]  # for who is new
    home.drop(generation)
    for peer in "ab":
        home.phase_ack(peer, generation, "dropped")
    assert home.is_over


def test_a_seal_reaches_every_peer_before_it_is_final() -> None:
    home, generation = opened()
    home.seal(generation)
    home.seal(generation)
    assert home.instructions() == [Broadcast("sealing", generation)]
    home.phase_ack("a", generation, "sealing")
    assert home.record.phase == "sealing"
    home.phase_ack("b", generation, "sealing")
    assert home.instructions() == [Broadcast("sealed", generation)]
    assert home.record.phase == "sealed"
    home.seal(generation)
    assert home.instructions() == []


def test_the_partition_seals_itself_at_its_number_of_closed_groups() -> None:
    home, generation = opened()
    home.tally("a", generation, 3)
    home.tally("a", generation, 2)  # one was dropped
    home.tally("b", generation, 1)
    assert home.instructions() == []
    home.tally("b", generation, 2)
    assert home.instructions() == [Broadcast("sealing", generation)]
    assert repr(home) == f"<PartitionHome 'step-1' sealing, generation {generation}>"


def test_a_dead_peer_is_not_waited_for() -> None:
    home, generation = opened()
    home.seal(generation)
    home.phase_ack("a", generation, "sealing")
    home.members(["a"])
    assert home.record.phase == "sealed"


def test_a_newcomer_hears_of_the_phase_and_is_waited_for() -> None:
    home, generation = opened()
    home.seal(generation)
    home.phase_ack("a", generation, "sealing")
    assert home.instructions() == [Broadcast("sealing", generation)]
    home.members(["a", "b", "c"])
    assert home.instructions() == [Broadcast("sealing", generation)]
    assert home.silent == {"b", "c"}
    home.phase_ack("b", generation, "sealing")
    home.phase_ack("c", generation, "sealing")
    assert home.record.phase == "sealed"


def test_a_drop_that_is_asked_for_again_changes_nothing() -> None:
    home, generation = opened()
    home.drop(generation)
    home.phase_ack("a", generation, "dropped")
    home.drop(generation)
    assert home.instructions() == [Broadcast("dropped", generation)]
    assert home.missing(generation, "dropped") == {"b"}


def test_a_home_is_over_when_every_peer_knows_of_the_drop_and_when_nothing_was_declared() -> None:
    assert PartitionHome("step-1", "ab").is_over
    home, generation = opened()
    assert not home.is_over
    home.drop(generation)
    home.phase_ack("a", generation, "dropped")
    assert not home.is_over
    home.phase_ack("b", generation, "dropped")
    assert home.is_over
    home.define(TRAIN, 2000)
    assert not home.is_over


def test_a_dropped_partition_comes_back_under_a_larger_generation() -> None:
    home, generation = opened()
    home.drop(generation)
    assert home.instructions() == [Broadcast("dropped", generation)]
    with pytest.raises(PartitionUndefined):
        home.define(None, 1000)
    again = home.define(Definition(), 999).generation  # the clock went backwards
    assert again > generation
    for late in (home.seal, home.drop):
        with pytest.raises(PartitionGone):
            late(generation)
    home.tally("a", generation, 99)
    home.phase_ack("a", generation, "open")
    assert home.record.phase == "open"


def test_a_stage_can_be_added_where_rows_stay() -> None:
    home, generation = opened(Definition())
    record = home.add_stage(generation, "eval", ["tokens"])
    assert record.definition.stages == {"eval": ["tokens"]}
    home.add_stage(generation, "eval", ["tokens"])
    assert home.define(Definition(), 2000).definition.stages == {"eval": ["tokens"]}
    with pytest.raises(PartitionConflict):
        home.add_stage(generation, "eval", ["reward"])
    for number in range(1, MAX_STAGES):
        home.add_stage(generation, f"stage-{number}", ["tokens"])
    with pytest.raises(LimitExceeded):
        home.add_stage(generation, "one more", ["tokens"])


def test_a_stage_cannot_be_added_where_acked_rows_are_freed() -> None:
    home, generation = opened()
    with pytest.raises(StageUndefined, match="declare it with the partition"):
        home.add_stage(generation, "eval", ["tokens"])
