"""What of an owner's ranges may move: those that only rows name which nobody has leased."""

from __future__ import annotations

from dataplane.wire.messages import Want
from dataplane.wire.tables import Column, Owner
from tests.metadata.stores import OWNERS, SPECS, keys_of, named, put, store, take, values


def test_rows_in_somebodys_hands_are_not_idle() -> None:
    s = store(stages={"train": ["tokens"]})
    put(s, [1, 2, 3], nbytes=5_000)
    ranges, counts, lengths = s.idle(OWNERS[0])
    assert ranges["range"].tolist() == [0, 1, 2]
    assert (counts.tolist(), lengths.tolist()) == ([1, 1, 1], [5_000] * 3)
    taken = take(s, "train", Want("rows", 1, 1))
    assert keys_of(s, taken) == [1]
    assert s.idle(OWNERS[0])[0]["range"].tolist() == [1, 2]
    assert not len(s.idle(Owner("b", 7))[0])


def test_a_range_that_rows_share_is_named_once_for_each() -> None:
    s = store(stages={"train": ["tokens"]})
    s.put(named([1, 2, 3]), [Column("tokens", values(1) * 3)], SPECS, OWNERS, {})
    assert s.idle(OWNERS[0])[1].tolist() == [3]
    take(s, "train", Want("rows", 1, 1))
    assert s.idle(OWNERS[0])[1].tolist() == [2]  # fewer than the range has: it stays


def test_stats_say_where_the_bytes_lie_after_they_moved() -> None:
    s = store(stages={"train": ["tokens"]})
    put(s, [1, 2], nbytes=5_000)
    ranges, _, _ = s.idle(OWNERS[0])
    s.relocate(OWNERS[0], ranges[:1], Owner("b", 8), ranges[:1])
    assert s.stats()["bytes_at"] == {"a": 5_000, "b": 5_000}
