"""How far producers run ahead of the trainer, and what becomes of permits and places."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dataplane.errors import InvalidCall, PartitionConflict, PartitionSealed
from dataplane.metadata.shard import inspection
from dataplane.metadata.shard.journal import snapshot
from dataplane.metadata.shard.store import Store
from dataplane.wire.journal import LogRecord
from dataplane.wire.messages import Want
from dataplane.wire.tables import Definition, Name, Owner
from tests.metadata.observed import carried_over, observed
from tests.metadata.stores import OWNERS, Column, finish, keys_of, named, put, take, values, wrote

STAGES = {"reward": ["tokens"], "train": ["tokens", "reward"]}
ONE = Want("groups", 1, 1)


def store(free: Any = "acked", size: int | None = 2, emit: Any = None) -> Store:
    return Store("s", Definition(stages=STAGES, free=free, group_size=size), 1, emit=emit)


def admit(
    s: Store, count: int, number: int = 1, holder: int = 7, lag: int = 1, per: int = 2
) -> bool:
    return s.admit(number, holder, count, lag, per)


def begin(s: Store, group: Name, rows: int = 2, holder: int = 7, fields: Any = ("tokens",)) -> None:
    keys: list[Name] = [f"{group}-{i}" for i in range(rows)]
    columns = [Column(name, values(rows)) for name in fields]
    s.put(wrote(named(keys, [group] * rows), columns, OWNERS, {}, holder=holder))


def row(s: Store, group: str, at: int, holder: int) -> None:
    """One row, put again where it is there."""
    columns = [Column("tokens", values(1))]
    s.put(
        wrote(
            named([f"{group}-{at}"], [group]),
            columns,
            OWNERS,
            {},
            replace=True,
            holder=holder,
        )
    )


def train(s: Store, outcome: str = "ack") -> Name:
    """One group goes through both stages."""
    reward = take(s, "reward", ONE)
    finish(s, reward, columns=[Column("reward", values(2))])
    taken = take(s, "train", ONE)
    group = str(keys_of(s, taken)[0]).split("-")[0]
    finish(s, taken, outcome)
    return group


def test_a_group_takes_a_place_from_its_permit_to_the_advance_after_its_last_ack() -> None:
    s = store()
    assert admit(s, 3, 1) and admit(s, 1, 2) and not admit(s, 1, 3)
    begin(s, "a")
    assert (s.permits.left, s.permits.unfinished(s)) == (3, 1)
    assert not admit(s, 1, 3)
    train(s)
    assert not admit(s, 1, 3)
    s.take_back([1, 2])
    s.advance(1)
    assert admit(s, 4, 3) and not admit(s, 1, 4)


def test_groups_use_the_permits_of_their_session_and_no_others() -> None:
    s = store()
    assert admit(s, 1, 1, holder=7) and admit(s, 1, 2, holder=7) and admit(s, 1, 3, holder=8)
    begin(s, "a", holder=7)
    begin(s, "b", holder=9)  # who was not permitted is counted all the same
    assert [(n, one.left) for n, one in s.permits.given.items()] == [(1, 0), (2, 1), (3, 1)]
    assert not admit(s, 1, 4)
    s.release_holder(8)
    assert admit(s, 1, 4)
    s.take_back([1, 2, 99])
    assert s.permits.left == 1


def test_what_is_not_used_returns_at_the_end_of_its_own_with_and_nobody_elses_goes() -> None:
    s = store()
    assert admit(s, 1, 1)  # a long rollout
    for number in range(2, 300):
        assert admit(s, 1, number)  # a short one, that puts nothing
        s.take_back([number])
    assert list(s.permits.given) == [1] and s.permits.left == 1
    assert admit(s, 2, 300)
    begin(s, "a")  # of the short one, with the long one's permit
    s.take_back([300])
    assert s.permits.left == 1
    begin(s, "b")
    assert s.permits.left == 0 and list(s.permits.given) == [1]
    s.take_back([1])
    assert admit(s, 2, 301) and not admit(s, 1, 302)


def test_permits_of_withs_that_always_overlap_hold_no_old_version() -> None:
    s = store()
    assert admit(s, 1, 0, lag=0, per=4)
    for number in range(1, 20):
        assert admit(s, 1, number, lag=0, per=4)
        begin(s, f"{number}")
        s.take_back([number - 1])
        train(s)
        s.advance(number)
    assert inspection.stats(s)["admission"]["lag"] <= 1


@pytest.mark.parametrize("free", ["acked", "drop"])
@pytest.mark.parametrize("how", ["dropped", "dropped at the end", "lost", "reset"])
def test_what_will_never_be_trained_gives_its_place_back_at_once(free: Any, how: str) -> None:
    s = store(free)
    assert admit(s, 4)
    for group in "abcd":
        begin(s, group)
    if how == "dropped":
        s.drop(rows=named([f"{g}-{i}" for g in "abcd" for i in range(2)]))
    elif how == "dropped at the end":
        for _ in "abcd":
            train(s, "drop")
    elif how == "lost":
        s.lost(OWNERS[0])
    else:
        for _ in "abcd":
            train(s)
        s.advance(1)
        s.reset("train")
    assert s.permits.unfinished(s) == 0
    assert admit(s, 4, 2)


def test_a_kept_group_is_finished_once() -> None:
    s = store("drop")
    assert admit(s, 2, 1, per=1)
    begin(s, "a")
    train(s)
    s.reset("train")
    finish(s, take(s, "train", ONE))
    assert (s.permits.trained, s.permits.done) == ({0: 1}, 1)
    s.drop(rows=named(["a-0", "a-1"]))
    assert (s.permits.trained, s.permits.done) == ({0: 1}, 0)


def test_what_is_not_all_there_holds_the_places_of_what_overtook_it() -> None:
    s = store()
    assert admit(s, 4)
    begin(s, "slow", rows=1)
    for version, group in enumerate("abc"):
        begin(s, group)
        train(s)
        s.advance(version + 1)
    assert not admit(s, 1, 2)
    told = inspection.stats(s)["admission"]
    assert (told["lag"], told["held_groups"], told["slowest"]) == (3, 3, ["slow"])
    columns = [Column("tokens", values(1))]
    s.put(wrote(named(["slow-1"], ["slow"]), columns, OWNERS, {}))
    finish(s, take(s, "reward", ONE), columns=[Column("reward", values(2))])
    assert admit(s, 3, 2)


def test_what_can_never_be_is_said_at_once() -> None:
    s = store()
    with pytest.raises(InvalidCall, match="at most 4 groups"):
        admit(s, 5)
    with pytest.raises(InvalidCall):
        admit(s, 1, lag=-1)
    with pytest.raises(InvalidCall, match="no group_size"):
        admit(store(size=None), 1)
    assert admit(s, 1)
    with pytest.raises(PartitionConflict, match="the same max_lag and per_version"):
        admit(s, 1, 2, per=3)
    s.seal()
    with pytest.raises(PartitionSealed):
        admit(s, 1, 2)


def test_the_trainers_version_only_grows() -> None:
    s = store()
    s.advance(5)
    s.advance(5)
    with pytest.raises(InvalidCall, match="already at version 5"):
        s.advance(4)
    assert s.permits.version == 5


@pytest.mark.parametrize("seed", range(6))
def test_no_group_is_trained_later_than_its_version_and_the_lag(seed: int) -> None:
    """Rollouts of any length, one row after the other and some without an end for long; producers
    that die, groups that are dropped; a trainer that takes what is ready, in whatever batches."""
    rng = random.Random(seed)
    free: Any = rng.choice(["acked", "drop"])
    lag, per = rng.choice([0, 1, 1, 2, 3]), rng.choice([1, 2, 3, 5])
    ops: list[LogRecord] = []
    s, successor = store(free, emit=ops.append), store(free)
    begun: dict[str, int] = {}
    rolling: dict[str, int] = {}
    trained, version, most, number = 0, 0, 0, 0
    for step in range(400):
        if rng.random() < 0.6 and len(rolling) < 40:
            number += 1
            count = rng.randint(1, min(3, (lag + 1) * per))
            if s.admit(number, number, count, lag, per):
                groups = [f"{number}.{i}" for i in range(rng.randint(0, count))]
                for group in groups:
                    begun[group] = version
                    rolling[group] = step + rng.choice((1, 2, 5, 60))
                    if rng.random() < 0.5:
                        row(s, group, 0, number)
                if not groups or rng.random() < 0.1:  # it dies, and what it has begun is cancelled
                    s.release_holder(number)
                    s.drop(groups=list(groups))
                    for group in groups:
                        del rolling[group]
        for group in [group for group, until in rolling.items() if step >= until]:
            del rolling[group]
            holder = int(group.split(".")[0])
            for at in (0, 1):
                row(s, group, at, holder)
            if not any(int(other.split(".")[0]) == holder for other in rolling):
                s.release_holder(holder)
        reward = take(s, "reward", Want("groups", 4, 1))
        if reward.lease is not None and rng.random() < 0.1:
            finish(s, reward, "drop")
        elif reward.rows is not None:
            finish(s, reward, columns=[Column("reward", values(len(reward.rows)))])
        taken = take(s, "train", Want("groups", min(rng.randint(1, 3), per - trained), 1))
        if taken.lease is not None:
            names = {str(key).split("-")[0] for key in keys_of(s, taken)}
            most = max([most, *(version - begun[name] for name in names)])
            assert most <= lag
            finish(s, taken)
            trained += len(names)
        oldest = s.permits.oldest(s)
        s.permits.look_again()
        assert oldest == s.permits.oldest(s)
        if rng.random() < 0.9:  # else nobody asks for a while
            s.permits.oldest(s)
        if trained == per:
            version, trained = version + 1, 0
            s.advance(version)
    assert version >= 3
    assert s.permits.unfinished(s) + s.permits.left <= (lag + 1) * per
    carried_over(successor, ops)
    fresh = store(free)
    carried_over(fresh, list(snapshot(s, 3)))
    assert observed(successor)["permits"] == observed(fresh)["permits"] == observed(s)["permits"]


def test_a_successor_knows_permits_versions_and_what_is_finished() -> None:
    ops: list[LogRecord] = []
    s = store("drop", emit=ops.append)
    begin(s, "before")
    train(s)
    s.advance(3)
    assert admit(s, 2, 5)
    begin(s, "a")
    s.advance(4)
    train(s)
    fresh, successor = store("drop"), store("drop")
    carried_over(successor, ops)
    carried_over(fresh, list(snapshot(s)))
    assert observed(s)["permits"] == observed(successor)["permits"] == observed(fresh)["permits"]
    for one in (s, successor, fresh):
        one.emit = None
        assert one.permits.left == 1 and inspection.stats(one)["admission"]["finished_groups"] == 1
        assert one.permits.given[5].version == 3
        put(one, ["b-0"], ["b"], fields=("tokens",))
        assert not admit(one, 3, 6) and admit(one, 1, 6)
        one.lost(Owner("elsewhere", 1))
