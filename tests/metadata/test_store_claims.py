"""Claims and leases at one store."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from dataplane.errors import (
    FrameTooLarge,
    InvalidRows,
    LeaseExpired,
    RowsGone,
)
from dataplane.metadata.shard import rows_out
from dataplane.metadata.shard.store import Store
from dataplane.metadata.shard.takes import LOCAL_UNITS, PullCredit, Taken
from dataplane.metadata.tables.bits import all_of, bytes_of, rows_of
from dataplane.wire.journal import Unit
from dataplane.wire.limits import MAX_FRAME_BYTES
from dataplane.wire.messages import Finish, Want
from dataplane.wire.tables import Chunk, Name, Owner, Piece, Values
from tests.chunk_numbers import indexes
from tests.metadata.stores import (
    INLINE_AT,
    OWNERS,
    Column,
    Value,
    finish,
    keys_of,
    named,
    put,
    store,
    take,
    values,
    wrote,
)


def test_a_claim_is_exact_unless_it_has_a_minimum_or_no_more_can_come() -> None:
    s = store()
    put(s, [1, 2, 3])
    assert take(s, "reward", Want("rows", 4, 4)) == Taken()
    assert keys_of(s, take(s, "reward", Want("rows", 2, 2))) == [1, 2]
    put(s, [4, 5])
    assert take(s, "reward", Want("rows", 9, 3)).units == 3
    put(s, [6])
    assert take(s, "reward", Want("rows", 9, 9), sealed=True).units == 1


def test_a_budget_returns_when_the_next_row_would_not_fit() -> None:
    s = store()
    put(s, [1, 2, 3], length=[30, 40, 20])
    want = Want("rows", 0, 0, None, "length", 100)
    assert take(s, "reward", want) == Taken()
    assert take(s, "reward", want).lease is None
    put(s, [4], length=[50])
    taken = take(s, "reward", want)
    assert taken.units == 3
    assert keys_of(s, taken) == [1, 2, 3]
    rest = take(s, "reward", want, sealed=True)
    assert rest.units == 1


def test_a_row_larger_than_the_whole_budget_is_taken_by_itself() -> None:
    s = store()
    put(s, [1, 2], length=[200, 1])
    taken = take(s, "reward", Want("rows", 0, 0, None, "length", 100))
    assert keys_of(s, taken) == [1]


def test_a_budget_of_groups_sums_over_all_their_rows() -> None:
    s = store(group_size=2, stages={"train": ["tokens"]})
    put(s, [1, 2, 3, 4, 5, 6], ["p", "p", "q", "q", "r", "r"], length=[10, 20, 30, 5, 30, 20])
    taken = take(s, "train", Want("groups", 0, 0, None, "length", 70))
    assert taken.units == 2
    assert keys_of(s, taken) == [1, 2, 3, 4]


def test_a_budget_looks_at_as_many_rows_as_it_needs() -> None:
    s = store()
    put(s, list(range(1_000)), length=[1])
    taken = take(s, "reward", Want("rows", 0, 0, None, "length", 700.5))
    assert taken.units == 700


def test_no_more_bytes_are_taken_than_the_claims_peer_may_pull() -> None:
    s = store(group_size=2, stages={"train": ["tokens"]})
    put(s, [1, 2, 3, 4], ["p", "p", "q", "q"], nbytes=1_000)  # 1,024 B each, where they are pulled
    groups = Want("groups", 2, 2)
    refused = take(s, "train", groups, credit=PullCredit("b", 12_287))
    assert refused == Taken(needed_bytes=4 * 1_024 + 8_192)
    taken = take(s, "train", groups, credit=PullCredit("b", 12_287), sealed=True)
    assert (taken.units, taken.needed_bytes) == (1, 12_288)
    assert take(s, "train", Want("rows", 2, 2), credit=PullCredit("b", 10_240)).units == 2


def test_a_claim_is_cut_to_the_small_values_that_a_message_carries() -> None:
    rows, names = 30_000, ["a", "b"]
    s = store(stages={"train": names})
    small = [Value(0, 1_024, INLINE_AT, bytes(1_024))] * 1_000
    for first in range(0, 2 * rows, 1_000):
        keys = named(list(range(first, first + 1_000)))
        columns = [Column(name, small) for name in names]
        s.put(wrote(keys, columns, OWNERS, {"n": [1] * 1_000}))
    for want in (Want("rows", 0, 0, None, "n", 1e9), Want("rows", 2 * rows, 1)):
        taken = take(s, "train", want)
        assert taken.lease is not None and 20_000 < taken.units < rows
        table = rows_out.table(s, taken.lease)
        inline = sum([len(chunk.inline) for chunk in table.values.chunks])
        assert 40 << 20 < inline < MAX_FRAME_BYTES
        s.release_holder(1)
        one = take(s, "train", want, credit=PullCredit("b", 1 << 30, ["a"]))
        assert 40_000 < one.units < 2 * rows
        s.release_holder(1)
    with pytest.raises(FrameTooLarge, match="claim fewer rows"):
        take(s, "train", Want("rows", rows, rows))
    assert take(s, "train", Want("rows", rows, rows), sealed=True).units > 20_000


def test_what_the_claims_peer_has_itself_needs_no_credit() -> None:
    s = store(stages={"train": ["tokens"]})
    put(s, [1, 2])
    taken = take(s, "train", Want("rows", 2, 2), credit=PullCredit("a", 1))
    assert taken.units == 2


def test_a_chunk_that_many_rows_share_is_pulled_once() -> None:
    s = store(stages={"train": ["tokens"]})
    image = values(1, 100_000) * 8
    s.put(wrote(named(list(range(8))), [Column("tokens", image)], OWNERS, {}))
    taken = take(s, "train", Want("rows", 8, 8), credit=PullCredit("b", 108_224))
    assert taken.units == 8


def test_fields_that_a_claim_does_not_fetch_need_no_credit() -> None:
    s = store()
    columns = [Column("tokens", values(1, 100_000)), Column("video", values(1, 100_000, first=1))]
    s.put(wrote(named([1]), columns, OWNERS, {}))
    want = Want("rows", 1, 1)
    assert take(s, "reward", want, credit=PullCredit("b", 108_224)).needed_bytes == 208_256
    assert take(s, "reward", want, credit=PullCredit("b", 108_224, ["tokens"])).units == 1


def test_rows_that_have_nothing_but_progress_elsewhere_are_counted_for_the_credit() -> None:
    s = store(stages={"train": []})
    s.put(wrote(named([1, 2]), [Column("tokens", [None, None])], [], {}))
    back = [Column("half", values(2, nbytes=1_000))]
    finish(s, take(s, "train", Want("rows", 2, 2)), "release", columns=back)
    some = PullCredit("b", 10_240)
    assert take(s, "train", Want("rows", 2, 1), credit=some).units == 2
    assert take(s, "train", Want("rows", 2, 1), credit=some).units == 0


def test_groups_of_different_sizes_never_mix() -> None:
    s = store(stages={"train": ["tokens"]})
    put(s, [1, 2, 3, 4, 5], ["p", "q", "p", "q", "q"])
    s.close("p", 2)
    s.close("q", 3)
    assert keys_of(s, take(s, "train", Want("groups", 1, 1))) == [1, 3]
    assert keys_of(s, take(s, "train", Want("groups", 1, 1))) == [2, 4, 5]


def test_a_filter_on_groups_means_all_rows_and_follows_tags_and_drops() -> None:
    s = store(group_size=2, stages={"train": ["tokens"]})
    put(s, [1, 2], ["p", "p"], version=[5, 6])
    want = Want("groups", 1, 1, ["ge", "version", 6])
    assert take(s, "train", want) == Taken()
    s.tag(named([1]), {"version": [7]})
    assert s.counts("train", "groups", want.where).ready == 1
    s.tag(named([2]), {"version": [1]})
    assert s.counts("train", "groups", want.where).ready == 0
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


def test_positions_in_a_lease_stay_when_some_rows_are_finished() -> None:
    s = store()
    put(s, [1, 2, 3])
    taken = take(s, "reward", Want("rows", 3, 3))
    finish(s, taken, "drop", index=np.array([1], "<u4").tobytes())
    assert keys_of(s, taken) == [1, 3]
    with pytest.raises(InvalidRows, match="already acked"):
        finish(s, taken, index=np.array([1], "<u4").tobytes())
    finish(s, taken, index=np.array([2], "<u4").tobytes(), tags={"done": [True]})
    finish(s, taken, "release")
    assert keys_of(s, take(s, "reward", Want("rows", 1, 1))) == [1]
    with pytest.raises(LeaseExpired):
        finish(s, taken)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0], [2, 3], [1]])
def test_values_go_to_the_rows_that_the_index_names(order: list[int]) -> None:
    """Also where a message is about all rows of a block, in another order than the block's."""
    s = store(group_size=4)
    put(s, [f"r{n}" for n in range(4)], ["g"] * 4)
    taken = take(s, "reward", Want("groups", 1, 1))
    one_chunk = Values(
        ["reward"],
        [OWNERS[0]],
        [b"layout"],
        [Chunk(0, 77, len(order), 64, 0)],
        [Piece(0, (0,), 0, bytes_of(all_of(len(order))))],
    )
    index = np.array(order, "<u4").tobytes()
    assert taken.lease is not None
    s.finish(Finish(taken.lease, "keep", index, values=one_chunk))
    (block,) = s.blocks.values()
    found = {}
    for part in block.values.parts:
        if "reward" in part.fields:
            for row in rows_of(part.live):
                (found[row],) = part.chunk_rows(1 << row)
    assert found == {row: place for place, row in enumerate(order)}


def test_rows_dropped_while_leased_are_passed_over() -> None:
    s = store()
    put(s, [1, 2])
    taken = take(s, "reward", Want("rows", 2, 2))
    s.drop(rows=named([1]))
    put(s, [3])  # in the slot of the dropped row
    assert taken.lease is not None
    with pytest.raises(RowsGone):
        rows_out.table(s, taken.lease)
    s.freed()
    finish(s, taken, columns=[Column("reward", values(2, 4, first=49))])
    assert s.stage("reward").acked_rows == 1
    ((owner, chunks, counts),) = s.freed()
    assert (owner, indexes(chunks), counts.tolist()) == (OWNERS[0], [50], [1])
    assert s.counts("train").ready == 1
    assert s.counts("reward").ready == 1


def at(peer: str, s: Store, keys: list[int], groups: list[int] | None = None) -> None:
    """Rows whose tokens lie at a peer."""
    columns = [Column("tokens", values(len(keys), first=keys[0]))]
    s.put(wrote(named(keys, groups), columns, [Owner(peer, 7)], {}))


def claimed(
    s: Store,
    peer: str,
    count: int,
    unit: Unit = "rows",
    stage: str = "reward",
    in_order: bool = False,
) -> list[Name]:
    want = Want(unit, count, count, in_order=in_order)
    return keys_of(s, take(s, stage, want, credit=PullCredit(peer, 1 << 30)))


def test_rows_that_are_local_to_the_claimant_are_taken_before_older_ones() -> None:
    s = store()
    at("a", s, [1, 2, 3])
    at("b", s, [4, 5])
    at("a", s, [6])
    assert claimed(s, "b", 2) == [4, 5]
    assert claimed(s, "b", 1) == [1]
    assert claimed(s, "c", 2) == [2, 3]
    assert claimed(s, "a", 1) == [6]


@pytest.mark.parametrize(("older", "taken"), [(LOCAL_UNITS - 1, 100), (LOCAL_UNITS, 0)])
def test_only_among_the_next_rows_those_that_are_local_go_first(older: int, taken: int) -> None:
    s = store()
    at("a", s, list(range(older)))
    at("b", s, [100])
    assert claimed(s, "b", 1) == [taken]


def test_a_claim_in_order_takes_older_rows_before_local_ones() -> None:
    s = store()
    for key, peer in enumerate("aabb", 1):
        at(peer, s, [key])
    assert claimed(s, "b", 1, in_order=True) == [1]
    assert claimed(s, "b", 1) == [3]
    assert claimed(s, "b", 2, in_order=True) == [2, 4]


@pytest.mark.parametrize("unit", ["rows", "groups"])
@pytest.mark.parametrize("seed", range(10))
def test_claims_in_order_take_the_oldest_units_whoever_wrote_them(seed: int, unit: Unit) -> None:
    """Also those that came back, from whichever leases and in whichever order these ended."""
    rng, s = random.Random(seed), store(free="drop")
    numbers, ready, leases = itertools.count(), list[int](), list[tuple[Taken, list[int]]]()
    for _ in range(300):
        count, peer = rng.randint(1, 4), rng.choice("abc")
        if rng.random() < 0.4:
            keys = [next(numbers) for _ in range(count)]
            sizes = [Value(key, 8, INLINE_AT, bytes(8)) for key in keys]
            column = Column("tokens", sizes if rng.random() < 0.5 else values(count, first=keys[0]))
            groups = keys if unit == "groups" else None  # of one row each
            s.put(wrote(named(keys, groups), [column], [Owner(peer, 7)], {}))
            for key in groups or ():
                s.close(key, 1)
            ready += keys
        elif leases and rng.random() < 0.5:
            taken, keys = leases.pop(rng.randrange(len(leases)))
            outcome: Any = rng.choice(["ack", "release"])
            finish(s, taken, outcome)
            ready = sorted(ready + keys) if outcome == "release" else ready
        elif len(ready) >= count:
            want = Want(unit, count, count, in_order=True)
            taken = take(s, "reward", want, credit=PullCredit(peer, 1 << 30))
            assert keys_of(s, taken) == ready[:count]
            leases.append((taken, ready[:count]))
            del ready[:count]
    assert len(s.peers) > 1


def test_rows_that_a_host_has_read_for_one_stage_are_local_to_it_for_the_next() -> None:
    s = store(stages={"reference": ["tokens"], "train": ["tokens"]})
    at("a", s, [1, 2])
    at("a", s, [3, 4])
    assert claimed(s, "b", 2, stage="reference") == [1, 2]
    assert claimed(s, "b", 1, stage="reference") == [3]
    assert claimed(s, "c", 1, stage="reference") == [4]  # of a block, the last reader counts
    assert claimed(s, "c", 2, stage="train") == [3, 4]
    assert claimed(s, "b", 2, stage="train") == [1, 2]


def test_groups_that_a_host_has_read_for_one_stage_are_local_to_it_for_the_next() -> None:
    s = store(stages={"reference": ["tokens"], "train": ["tokens"]}, group_size=2)
    for group in range(4):
        at("a", s, [2 * group, 2 * group + 1], [group, group])
    for peer in ("b", "c", "b"):
        claimed(s, peer, 1, "groups", "reference")
    found = [claimed(s, peer, 1, "groups", "train") for peer in ("c", "b", "b", "c")]
    assert found == [[2, 3], [0, 1], [4, 5], [6, 7]]


def test_rows_are_not_local_to_a_host_that_has_read_only_small_fields() -> None:
    s = store(stages={"reward": ["text"], "train": ["tokens", "text"]})
    s.add_stage("reference", ["tokens"])
    for key in (1, 2):
        large, small = values(1, 1 << 20, first=key), values(1, first=90 + key)
        columns = [Column("tokens", large), Column("text", small)]
        s.put(wrote(named([key]), columns, [Owner("a", 7)], {}))
    for stage, field, second in (("reference", "tokens", "c"), ("reward", "text", "b")):
        for peer in ("a", second):
            take(s, stage, Want("rows", 1, 1), credit=PullCredit(peer, 1 << 30, [field]))
    assert claimed(s, "b", 1, stage="train") == [1]
    s.release_holder(1)
    assert claimed(s, "c", 1, stage="train") == [2]


def test_inline_values_are_not_local_to_a_claim_without_an_address() -> None:
    s = store()
    at("a", s, [1])
    at("b", s, [2])
    s.put(wrote(named([3]), [Column("tokens", [Value(0, 8, INLINE_AT, bytes(8))])]))
    assert keys_of(s, take(s, "reward", Want("rows", 1, 1))) == [1]


def test_a_group_is_local_to_the_host_of_its_largest_value() -> None:
    s = store(group_size=2)
    at("a", s, [1, 2], [1, 1])
    at("b", s, [3, 4], [2, 2])
    small = [Column("reward", values(2, nbytes=4, first=90))]
    s.put(wrote(named([3, 4], [2, 2]), small, [Owner("a", 7)], {}))
    assert claimed(s, "b", 1, "groups") == [3, 4]


def test_local_rows_are_cut_to_the_credit_and_the_others_stay() -> None:
    s = store()
    at("a", s, [1])
    at("b", s, [2, 3, 4])
    want = Want("rows", 3, 1)
    taken = take(s, "reward", want, credit=PullCredit("c", 20_480))
    assert keys_of(s, taken) == [1]
    rest = take(s, "reward", Want("rows", 3, 3), credit=PullCredit("b", 1))
    assert keys_of(s, rest) == [2, 3, 4]


def test_local_rows_stay_in_what_the_credit_cuts() -> None:
    """The oldest would go first by age, and what costs nothing would be cut off behind them."""
    s = store()
    at("a", s, [1, 2])
    at("b", s, [3, 4])
    at("a", s, [5, 6])
    taken = take(s, "reward", Want("rows", 3, 1), credit=PullCredit("b", 1))
    assert keys_of(s, taken) == [3, 4]


def test_what_is_kept_for_another_claim_is_not_taken() -> None:
    s = store(group_size=2, stages={"train": ["tokens"]})
    put(s, [1, 2, 3, 4, 5, 6], ["p", "p", "q", "q", "r", "r"], version=[1, 1, 2, 2, 1, 1])
    row, group = Want("rows", 1, 1), Want("groups", 1, 1)
    newer = ["ge", "version", 2]
    assert take(s, "train", row, kept=[("rows", None)]).lease is None
    assert take(s, "train", row, kept=[("groups", None)]).lease is None
    assert take(s, "train", Want("groups", 3, 3), kept=[("rows", newer)]).lease is None
    assert keys_of(s, take(s, "train", Want("groups", 2, 2), kept=[("rows", newer)])) == [
        1,
        2,
        5,
        6,
    ]
    assert take(s, "train", group, kept=[("groups", newer)]).lease is None
    some = Want("rows", 1, 1, newer)
    assert take(s, "train", some, kept=[("rows", newer)]).lease is None
    assert keys_of(s, take(s, "train", group, kept=[("groups", ["ge", "version", 3])])) == [3, 4]


RED: list[object] = ["eq", "color", "red"]
COLORED: list[object] = ["exists", "color"]
KEPT: list[tuple[str, list[object] | None]] = [
    (unit, where) for unit in ("rows", "groups") for where in (None, RED, COLORED)
]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_not_kept_is_the_same_however_often_claims_looked_before(seed: int) -> None:
    """Rows, their tags and their groups change at random between two looks."""
    rng = random.Random(seed)
    looked, fresh = both = [store(stages={"train": ["tokens", "reward"]}) for _ in range(2)]
    units: list[Unit] = ["rows", "groups"]
    forms = [(unit, where, kept) for unit in units for where in (None, RED) for kept in KEPT]
    no_room = PullCredit("b", 1)  # so that a look leases nothing
    to_come = rng.sample(range(90), 90)
    lacking, there = list[int](), set[Name]()
    leases = list[tuple[list[Taken], list[Name]]]()

    def groups_of(key: int) -> list[Name | None]:
        return [None if key >= 60 else f"group-{key // 3}"]

    for _ in range(300):
        step = rng.choice(["put", "put", "fill", "fill", "tag", "drop", "take", "take", "end"])
        color = rng.choice(["red", "blue"])
        some = rng.choice(sorted(there, key=str)) if there else None
        if step == "put" and to_come:
            new = to_come.pop()
            for s in both:
                put(s, [new], groups_of(new), color=[color])
                if new < 60:
                    s.close(f"group-{new // 3}", 3)
            lacking.append(new)
            there.add(new)
        elif step == "fill" and lacking:
            new = lacking.pop(rng.randrange(len(lacking)))
            for s in both:
                put(s, [new], groups_of(new), ("reward",))
        elif step == "tag" and some is not None:
            for s in both:
                s.tag(named([some]), {"color": [color]})
        elif step == "drop" and some is not None and rng.random() < 0.3:
            for s in both:
                s.drop(named([some]))
            there.discard(some)
            lacking = [key for key in lacking if key != some]
        elif step == "take":
            want = Want(rng.choice(units), 1, 1, rng.choice([None, RED]))
            taken = [take(s, "train", want) for s in both]
            assert len({one.units for one in taken}) == 1
            if taken[0].units:
                leases.append((taken, keys_of(fresh, taken[1])))
        elif step == "end" and leases:
            ended, keys = leases.pop(rng.randrange(len(leases)))
            outcome = rng.choice(["release", "ack"])
            for s, one in zip(both, ended, strict=True):
                finish(s, one, outcome)
            there -= set(keys) if outcome == "ack" else set()
        for unit, where, kept in rng.sample(forms, 6):
            look = Want(unit, 99, 1, where)
            assert not take(looked, "train", look, credit=no_room, kept=[kept]).units
    found = 0
    for unit, where, kept in forms:
        taken = [take(s, "train", Want(unit, 99, 1, where), kept=[kept]) for s in both]
        assert len({one.units for one in taken}) == 1, (unit, where, kept)
        if taken[0].units:
            found += len(keys := keys_of(fresh, taken[1]))
            assert sorted(keys_of(looked, taken[0]), key=str) == sorted(keys, key=str)
            for s, one in zip(both, taken, strict=True):
                finish(s, one, "release")
    assert found


def test_rows_that_come_back_are_counted_and_again_when_they_are_handed_out_anew() -> None:
    s = store()
    put(s, [1, 2, 3])
    stage = s.stage("reward")

    def sums() -> tuple[int, int, int]:
        return stage.released_rows, stage.redelivered_rows, stage.acked_rows

    first = take(s, "reward", Want("rows", 3, 3))
    finish(s, first, index=b"\0\0\0\0")
    finish(s, first, "release", index=b"\1\0\0\0")
    assert sums() == (1, 0, 1)
    s.release_holder(1)
    assert sums() == (2, 0, 1)
    finish(s, take(s, "reward", Want("rows", 1, 1)))
    assert sums() == (2, 1, 2)
    s.reset("reward")  # what was acked is delivered again on purpose
    take(s, "reward", Want("rows", 3, 3))
    assert sums() == (2, 2, 2)
