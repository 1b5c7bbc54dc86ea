"""Claims that wait at a shard: who is met with what, and that none waits in vain."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from dataplane.errors import (
    DataplaneError,
    InvalidRows,
    LimitExceeded,
    ProtocolError,
    StreamEnd,
    ValueTooLarge,
)
from dataplane.metadata.shard import plans
from dataplane.metadata.shard.claim_queue import KEEP_AFTER_S, ClaimQueue, Outcome
from dataplane.metadata.shard.store import Store
from dataplane.wire.events import Reason
from dataplane.wire.messages import Claimed, Finish, Want
from dataplane.wire.tables import Name, Owner, Shape
from tests.metadata.stores import Column, finish, keys_of, named, put, store, values, waiting, wrote

Shown = tuple[int, list[Name] | type[DataplaneError]]
"""A claim, and its keys or why it is over."""
EVEN: list[object] = ["eq", "even", True]


def rows(count: int, minimum: int | None = None, where: list[object] | None = None) -> Want:
    return Want("rows", count, count if minimum is None else minimum, where)


def budget(total: float, count: int = 0) -> Want:
    return Want("rows", count, 0, None, "length", total)


def raised(shard: Shard, act: Callable[[], object]) -> list[tuple[int, Any]]:
    """What became of claims, with their errors."""
    told: list[tuple[int, Any]] = []
    shown = shard.shown

    def note(outcome: Outcome) -> Shown:
        told.append((outcome[0].number, outcome[1]))
        return shown(outcome)

    shard.shown = note  # type: ignore[method-assign]
    act()
    shard.shown = shown  # type: ignore[method-assign]
    return told


class Shard:
    """A store of one stage and the claims that wait for it. now: the time; claims are made at 0
    unless they say otherwise."""

    def __init__(self, **definition: object) -> None:
        self.store: Store = store(**({"stages": {"s": ["tokens"]}} | definition))
        self.queue = ClaimQueue(self.store, "s")
        self.keep = True
        self.now = 0.0

    def put(self, first: int, count: int = 1, peer: str = "a", **tags: object) -> list[Shown]:
        keys = list(range(first, first + count))
        even = {"even": [key % 2 == 0 for key in keys]}
        columns = [Column("tokens", values(count, first=first))]
        self.store.put(wrote(named(keys), columns, [Owner(peer, 7)], {**even, **tags}))  # type: ignore[dict-item]
        return self.serve()

    def claim(
        self, number: int, want: Want, peer: str = "a", since: float = 0.0, most_bytes: int = 0
    ) -> list[Shown]:
        self.queue.add(waiting(number, want, peer=peer, since=since, most_bytes=most_bytes))
        return self.serve()

    def seal(self) -> list[Shown]:
        self.store.seal()
        return self.serve()

    def serve(self) -> list[Shown]:
        """(claim, keys) of each that was met, (claim, why) of each that is over."""
        return [self.shown(one) for one in self.queue.serve(self.now, self.keep)]

    def shown(self, outcome: Outcome) -> Shown:
        claim, what = outcome
        if isinstance(what, DataplaneError):
            return claim.number, type(what)
        assert isinstance(what, Claimed)
        return claim.number, keys_of(self.store, what)


def test_a_claim_is_met_only_in_full_and_holds_nothing_before() -> None:
    shard = Shard()
    assert shard.put(0, 7) == []
    assert shard.claim(1, rows(8)) == []
    assert shard.store.counts("s").ready == 7
    assert shard.put(7, 2) == [(1, [0, 1, 2, 3, 4, 5, 6, 7])]
    assert not len(shard.queue)


def test_a_short_claim_blocks_nobody_for_a_second_and_keeps_its_place() -> None:
    shard = Shard()
    shard.put(0, 6)
    assert shard.claim(1, rows(8)) == []
    shard.now = KEEP_AFTER_S
    assert shard.claim(2, rows(2), since=1.0) == [(2, [0, 1])]
    shard.now = 1.5
    assert shard.claim(3, rows(2), since=1.5) == []  # 1 has been short for over a second
    assert shard.claim(4, budget(1.0), since=1.5) == []
    assert shard.claim(1, rows(8), since=1.5) == []  # the same call again: it keeps its age
    assert shard.put(6, 7, length=[0]) == [(1, list(range(2, 10))), (3, [10, 11])]


def test_a_claim_that_waited_at_another_peer_has_been_short_there_too() -> None:
    shard = Shard()
    assert shard.claim(1, rows(8), since=-5.0) == []
    shard.put(0, 6)
    assert shard.claim(2, rows(2)) == []


def test_a_claim_that_fails_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, take, met = Shard(), Store.take, list[object]()

    def fails_for_one(self: Store, stage: str, want: Want, holder: int, *more: Any) -> Any:
        if more[1] == 1 and want.count == 3:
            raise RuntimeError("a bug")
        return take(self, stage, want, holder, *more)

    monkeypatch.setattr(Store, "take", fails_for_one)
    shard.now = 5.0
    for number, want in ((1, rows(3)), (2, rows(2)), (3, rows(1, where=["eq", "even", True]))):
        shard.claim(number, want)
    monkeypatch.setattr(shard, "shown", lambda outcome: met.append(outcome[0].number))
    with pytest.raises(RuntimeError, match="a bug"):
        shard.put(0, 3)
    assert met == [2, 3]
    with pytest.raises(RuntimeError, match="a bug"):
        shard.put(3, 3)
    monkeypatch.setattr(Store, "take", take)
    shard.serve()
    assert met == [2, 3, 1]


def test_a_minimum_is_enough() -> None:
    shard = Shard()
    shard.put(0, 2)
    assert shard.claim(1, rows(8, minimum=3)) == []
    assert shard.put(2, 3) == [(1, [0, 1, 2, 3, 4])]


def test_a_sealed_partition_meets_with_less_and_then_ends() -> None:
    shard = Shard()
    shard.put(0, 4)
    shard.claim(1, rows(8))
    shard.claim(2, rows(8))
    ((met, keys),) = shard.seal()
    assert (met, keys) == (1, [0, 1, 2, 3])
    (lease,) = shard.store.leases
    shard.store.finish(Finish(lease.number, "ack"))
    assert shard.serve() == [(2, StreamEnd)]
    assert shard.claim(3, rows(1)) == [(3, StreamEnd)]


def test_groups_of_which_rows_were_taken_singly_keep_no_claim_of_groups_waiting() -> None:
    shard = Shard(group_size=2)
    put(shard.store, [1, 2, 3, 4], ["g", "g", "h", "h"])
    shard.claim(1, rows(1))
    shard.claim(2, Want("groups", 1, 1))
    assert shard.claim(3, Want("groups", 1, 1)) == []
    assert shard.seal() == []  # the other group may come back
    whole = shard.store.leases.of_claim(2)
    assert whole is not None
    shard.store.finish(Finish(whole.number, "ack"))
    assert shard.serve() == [(3, StreamEnd)]
    assert shard.claim(4, rows(1)) == [(4, [2])]


def test_a_claim_of_groups_ends_as_soon_as_a_younger_one_splits_the_last_group() -> None:
    shard = Shard()
    put(shard.store, [1], ["p"])
    put(shard.store, [2], ["p"], fields=("text",))  # not ready yet
    shard.store.seal()
    assert shard.claim(1, Want("groups", 1, 1)) == []
    assert shard.claim(2, rows(1)) == [(2, [1]), (1, StreamEnd)]


def test_rows_that_come_back_after_the_seal_are_handed_out_again() -> None:
    shard = Shard()
    shard.put(0, 4)
    shard.claim(1, rows(4))
    shard.seal()
    assert shard.claim(2, rows(4)) == []
    shard.store.release_holder(1)
    assert shard.serve() == [(2, [0, 1, 2, 3])]


def test_rows_that_were_kept_for_a_withdrawn_claim_go_to_the_next() -> None:
    shard = Shard()
    shard.now = 5.0
    shard.put(0, 4)
    shard.claim(1, rows(8))
    shard.claim(2, rows(2))
    assert shard.queue.withdraw(1) and not shard.queue.withdraw(1)
    assert shard.serve() == [(2, [0, 1])]


def test_a_budget_holds_nothing_until_the_next_row_would_not_fit() -> None:
    shard = Shard()
    assert shard.claim(1, budget(100.0)) == []
    assert shard.put(0, 2, length=[30, 30]) == []
    assert shard.store.counts("s").ready == 2
    assert shard.put(2, 2, length=[35, 10]) == [(1, [0, 1, 2])]


def test_a_budget_is_met_where_it_is_used_up_exactly_or_nothing_more_can_come() -> None:
    shard = Shard()
    shard.claim(1, budget(60.0))
    assert shard.put(0, 2, length=[30, 30]) == [(1, [0, 1])]
    shard.claim(2, budget(60.0))
    assert shard.put(2, 1, length=[30]) == []
    assert shard.seal() == [(2, [2])]


def test_a_budget_takes_at_least_one_row() -> None:
    shard = Shard()
    shard.put(0, 2, length=[30])
    assert shard.claim(1, budget(10.0)) == [(1, [0])]
    assert shard.claim(2, budget(10.0)) == [(2, [1])]


def test_a_budget_also_ends_with_its_count() -> None:
    shard = Shard()
    shard.put(0, 5, length=[1])
    assert shard.claim(1, budget(100.0, count=3)) == [(1, [0, 1, 2])]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "9", None, -1, -0.5, True])
def test_a_row_whose_tag_is_no_weight_ends_a_claim_by_budget_with_its_name(bad: Any) -> None:
    shard = Shard()
    shard.put(0, 2, length=[10, 10])
    assert shard.claim(1, budget(50.0)) == []
    ((claim, why),) = raised(shard, lambda: shard.put(2, 2, length=[bad, 10]))
    assert claim == 1 and isinstance(why, InvalidRows)
    assert (
        "but budget= needs a finite, non-negative number in this tag. 1 row has no valid number"
        in why.message
    )
    assert f"tag 'length' of row 2 is {bad!r}" in why.message
    assert why.details["keys"] == [2]
    assert shard.claim(2, budget(20.0)) == [(2, [0, 1])]  # what comes before it is not in its way
    shard.store.tag(named([2]), {"length": [30]})
    assert shard.claim(3, budget(40.0)) == [(3, [2, 3])]


def test_rows_without_the_tag_are_told_apart_from_rows_with_another_one() -> None:
    shard = Shard()
    shard.claim(1, budget(50.0))
    ((_, why),) = raised(shard, lambda: shard.put(0, 3, lenght=[10]))
    assert isinstance(why, InvalidRows) and why.details["rows"] == 3
    assert "row 0 has no tag 'length'" in why.message
    assert "Other tags of this partition: 'even', 'lenght'" in why.message


def test_a_group_with_a_row_without_weight_ends_a_claim_of_groups_by_budget() -> None:
    shard = Shard(group_size=2)
    put(shard.store, ["a", "b", "c", "d"], ["g", "g", "h", "h"], length=[1, 1, 1, float("nan")])
    want = Want("groups", 0, 0, None, "length", 2.5)
    ((_, why),) = raised(shard, lambda: shard.claim(1, want))
    assert isinstance(why, InvalidRows) and "of row 'd' is nan" in why.message
    shard.store.drop(groups=["h"])
    assert shard.claim(2, want) == [] and shard.seal() == [(2, ["a", "b"])]


def test_a_budget_is_met_by_weights_that_change_while_its_claim_waits() -> None:
    shard = Shard()
    shard.put(0, 3, length=[10])
    assert shard.claim(1, budget(50.0)) == []
    shard.store.tag(named([1]), {"length": [40]})
    assert shard.serve() == [(1, [0, 1])]


def test_a_budget_is_met_when_one_message_holds_no_more_of_what_its_claim_would_take() -> None:
    shard = Shard()
    assert shard.claim(1, budget(1e9), "b", most_bytes=60_000) == []
    for key in range(6):
        assert shard.put(key, length=[1]) == []
    assert shard.put(6, length=[1]) == [(1, [0, 1, 2, 3, 4, 5])]


def test_ten_weights_of_a_tenth_fit_a_budget_of_one() -> None:
    shard = Shard()
    shard.put(0, 11, length=[0.1])
    assert shard.claim(1, budget(1.0)) == [(1, list(range(10)))]


def test_a_waiting_budget_costs_each_put_the_same_however_many_rows_are_ready() -> None:
    shard, began = Shard(), time.process_time()
    shard.claim(1, budget(1e9))
    for key in range(4_000):
        assert shard.put(key, length=[1]) == []
    assert time.process_time() - began < 10  # 24 s where each put looks at every row


def test_waiting_budgets_of_many_hosts_do_not_look_at_every_row_at_each_put() -> None:
    shard, began = Shard(), time.process_time()
    for number in range(32):
        shard.claim(number + 1, budget(1e9), f"host-{number}")
    for key in range(1_500):
        assert shard.put(key, length=[1]) == []
    assert time.process_time() - began < 10  # over 100 s where a queue remembers one


def test_a_put_that_serves_nobody_does_not_look_at_each_of_many_equal_claims() -> None:
    shard, began = Shard(), time.process_time()
    for number in range(2_000):
        shard.queue.add(waiting(number + 1, rows(3_000)))
    for key in range(2_000):
        assert shard.put(key) == []
    assert time.process_time() - began < 10


def test_claims_behind_a_short_one_do_not_look_at_what_it_keeps_at_each_put() -> None:
    shard, began = Shard(), time.process_time()
    shard.now = 5.0
    shard.claim(1, rows(9_000))
    shard.claim(2, rows(8, where=EVEN))
    shard.claim(3, Want("rows", 0, 0, ["eq", "even", False], "length", 1.0))
    for key in range(8_000):
        assert shard.put(key, length=[1]) == []
    assert time.process_time() - began < 10


ODD: list[object] = ["eq", "even", False]
OF_ALL: list[object] = ["exists", "length"]


@pytest.mark.parametrize(
    ("older", "younger"),
    [
        (rows(9_000), Want("groups", 1, 1)),
        (rows(9_000, where=EVEN), Want("groups", 1, 1)),
        (rows(9_000, where=OF_ALL), rows(1, where=EVEN)),
        (rows(9_000, where=OF_ALL), Want("rows", 0, 0, EVEN, "length", 9.0)),
        (Want("groups", 9_000, 9_000), rows(1)),
        (Want("groups", 9_000, 9_000, OF_ALL), rows(1, where=ODD)),
    ],
)
def test_a_claim_of_another_form_does_not_look_at_what_is_kept_at_each_put(
    older: Want, younger: Want
) -> None:
    assert _calls_of_a_put(older, younger, 1_000) < 2 * _calls_of_a_put(older, younger, 100)


def _calls_of_a_put(older: Want, younger: Want, groups: int) -> int:
    """Return the number of function calls in a put that serves no claim while `groups` groups are
    ready."""
    shard = Shard(group_size=2)
    shard.now = 5.0
    names, flags = [number // 2 for number in range(2 * groups)], [True, False] * groups
    for at in range(0, 2 * groups, 2):
        put(shard.store, [at, at + 1], names[at : at + 2], even=flags[:2], length=[1, 1])
    shard.queue.add(waiting(1, older))
    shard.queue.add(waiting(2, younger, since=1.0))
    assert shard.serve() == []
    with counted_calls() as calls:
        put(shard.store, [-2, -1], [-1, -1], even=[True, False], length=[1, 1])
        assert shard.serve() == []
    return len(calls)


def test_a_claim_beside_kept_rows_of_one_block_does_not_look_at_all_of_them_at_each_put() -> None:
    shard = Shard(stages={"s": ["tokens", "reward"]})
    shard.now = 5.0
    put(shard.store, list(range(1_000)), even=[True] * 1_000, length=[1] * 1_000)
    shard.claim(1, rows(9_000, where=OF_ALL))
    shard.claim(2, rows(1, where=EVEN), since=1.0)
    made = list[int]()
    for row in range(400):
        with counted_calls() as calls:
            put(shard.store, [row], fields=("reward",))
            assert shard.serve() == []
        made.append(len(calls))
    assert made[399] < made[39] + 100


def test_a_put_to_a_large_group_beside_a_claim_of_groups_does_not_test_each_row_of_it() -> None:
    shard = Shard()
    shard.now = 5.0
    shard.queue.add(waiting(1, Want("groups", 9_000, 9_000, OF_ALL)))
    shard.queue.add(waiting(2, rows(1), since=1.0))
    made = list[int]()
    for row in range(200):
        with counted_calls() as calls:
            put(shard.store, [row], ["large"], length=[1])
            assert shard.serve() == []
        made.append(len(calls))
    assert made[199] - made[99] < 10 * (199 - 99)


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Yield a list that collects the names of the functions that the body calls. A generator counts
    once per item."""
    calls = list[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def test_filters_of_waiting_claims_are_kept_however_many_there_are() -> None:
    shard, began = Shard(), time.process_time()
    for number in range(80):
        shard.claim(number + 1, rows(1_000, where=["eq", "length", number]))
    for key in range(500):
        assert shard.put(key, length=[key % 80]) == []
    assert time.process_time() - began < 10  # 15 s where each put sorts all rows by 80 filters


def test_claims_that_ask_again_after_a_failover_come_into_their_order() -> None:
    shard, began, many = Shard(), time.process_time(), 20_000
    for number in range(many):
        shard.queue.add(waiting(number + 1, rows(1), since=float(-number)))
    assert shard.queue.before(1) == many - 1
    assert shard.put(0, 2) == [(many, [0]), (many - 1, [1])]
    assert time.process_time() - began < 10  # 37 s where each sorts all others


def test_what_its_host_can_never_pull_fails_at_once() -> None:
    shard = Shard()
    shard.put(0, 4)
    assert shard.claim(1, rows(4), "b", most_bytes=30_000) == [(1, ValueTooLarge)]
    assert shard.claim(2, rows(4, minimum=1), "b", most_bytes=30_000) == [(2, [0, 1])]
    assert shard.claim(3, rows(2), "a", most_bytes=30_000) == [(3, [2, 3])]


def test_a_repeated_claim_keeps_its_place_and_is_met_once() -> None:
    shard = Shard()
    shard.claim(1, rows(2), since=1.0)
    shard.claim(2, rows(1), since=2.0)
    assert shard.claim(1, rows(2), since=9.0) == []
    assert [one.number for one in shard.queue] == [1, 2] and len(shard.queue) == 2
    assert shard.put(0, 3) == [(1, [0, 1]), (2, [2])]


def test_a_claim_that_moves_here_goes_where_its_age_puts_it() -> None:
    shard = Shard()
    for number, since in ((1, 5.0), (2, 8.0), (3, 2.0), (4, 6.0)):
        shard.claim(number, rows(1), since=since)
    assert [shard.queue.before(number) for number in (3, 1, 4, 2)] == [0, 1, 2, 3]
    assert [number for number, _ in shard.put(0, 4)] == [3, 1, 4, 2]


def test_claims_of_several_filters_are_met_in_the_order_in_which_they_came() -> None:
    shard = Shard()
    for number, where in ((1, None), (2, EVEN), (3, EVEN), (4, None)):
        shard.claim(number, rows(2, where=where), since=float(number))
    assert [number for number, _ in shard.put(0, 12)] == [1, 2, 3, 4]


def test_a_claim_of_nothing_or_by_no_filter_is_refused() -> None:
    shard = Shard()
    for want in (rows(0), rows(1, where=["no such", "filter"])):
        with pytest.raises(ProtocolError):
            shard.claim(1, want)
    assert not len(shard.queue)


def test_a_claim_whose_units_cannot_be_looked_for_is_over_and_others_are_met() -> None:
    shard = Shard()

    def fail(*_: object) -> None:
        shard.store.take = take  # type: ignore[method-assign]
        raise ProtocolError("no such thing")

    take, shard.store.take = shard.store.take, fail  # type: ignore[method-assign,assignment]
    shard.claim(1, rows(1))
    shard.claim(2, rows(1))
    assert shard.put(0, 1) == [(1, ProtocolError), (2, [0])]


def test_repr_shows_how_many_wait() -> None:
    shard = Shard()
    shard.claim(1, rows(8))
    shard.claim(2, rows(8, where=EVEN))
    assert repr(shard.queue) == "<ClaimQueue of 's': 2 claims>"


# what is kept for older claims


def before_others() -> Shard:
    """A claim for many even rows that has been short for long, and a younger one for any."""
    shard = Shard()
    shard.now = 5.0
    shard.claim(1, rows(4, where=EVEN), since=1.0)
    shard.claim(30, rows(1), since=2.0)
    return shard


def test_a_younger_claim_gets_what_older_ones_do_not_match() -> None:
    shard = before_others()
    assert shard.put(100) == []
    assert shard.put(101) == [(30, [101])]
    for key in (102, 104):
        assert shard.put(key) == []
    assert shard.put(106) == [(1, [100, 102, 104, 106])]
    shard.claim(31, rows(1))
    assert shard.put(108) == [(31, [108])]


def test_nothing_is_kept_while_a_producer_waits() -> None:
    shard = before_others()
    shard.keep = False
    assert shard.put(100) == [(30, [100])]


def test_nothing_is_kept_for_a_claim_that_is_gone() -> None:
    shard = before_others()
    assert shard.put(100) == []
    shard.queue.withdraw(1)
    assert shard.serve() == [(30, [100])]


def test_of_three_each_leaves_to_the_older_ones_what_they_match() -> None:
    shard = Shard()
    shard.now = 5.0
    shard.claim(1, rows(2), since=1.0)
    shard.claim(2, rows(2, where=EVEN), since=2.0)
    shard.claim(3, rows(1, where=["eq", "even", False]), since=3.0)
    assert shard.put(102) == []
    assert shard.put(103) == [(1, [102, 103])]
    assert shard.put(104) == []
    assert shard.put(105) == [(3, [105])]
    assert shard.put(106) == [(2, [104, 106])]


def test_claims_with_a_minimum_take_only_what_is_not_kept() -> None:
    shard = Shard()
    shard.now = 5.0
    shard.claim(1, rows(4, where=EVEN))
    shard.claim(2, rows(9, minimum=2), since=1.0)
    assert shard.put(100, 3) == []
    assert shard.put(103, 1) == [(2, [101, 103])]
    assert shard.put(104, 4) == [(1, [100, 102, 104, 106])]


def test_a_budget_behind_a_claim_that_has_been_short_for_long_waits_also_at_the_seal() -> None:
    shard = Shard()
    shard.now = 5.0
    shard.put(0, 2, length=[1])
    assert shard.claim(1, rows(2, where=EVEN)) == []
    assert shard.claim(2, budget(9.0), since=1.0) == []
    assert shard.put(2, 1, length=[9]) == [(1, [0, 2])]  # 1 was enough to fill no budget
    assert shard.seal() == [(2, [1])]


def test_a_budget_is_short_and_kept_for_while_the_next_row_would_fit() -> None:
    shard = Shard()
    shard.now = 5.0
    shard.claim(1, budget(3.0))
    shard.claim(2, rows(1), since=1.0)
    assert shard.put(0, 2, length=[1]) == []
    assert shard.put(2, 2, length=[2]) == [(1, [0, 1]), (2, [2])]


def test_a_group_is_kept_for_a_claim_of_its_rows() -> None:
    shard = Shard(group_size=2)
    shard.now = 5.0
    shard.queue.add(waiting(1, rows(5)))
    shard.queue.add(waiting(2, Want("groups", 1, 1), since=1.0))
    put(shard.store, [1, 2], ["p", "p"])
    assert shard.serve() == []
    put(shard.store, [3, 4, 5, 6], ["q", "q", "r", "r"])
    assert shard.serve() == [(1, [1, 2, 3, 4, 5])]


def test_rows_are_kept_for_a_claim_of_groups_also_before_their_group_is_complete() -> None:
    """A row that is taken singly splits its group: the claim of groups would never be met."""
    shard = Shard(group_size=2)
    shard.now = 5.0
    shard.queue.add(waiting(1, Want("groups", 1, 1, EVEN)))
    shard.queue.add(waiting(2, rows(1), since=1.0))
    put(shard.store, [2], ["p"], even=[True])
    assert shard.serve() == []
    put(shard.store, [3], ["q"], even=[False])
    assert shard.serve() == [(2, [3])]
    put(shard.store, [4], ["p"], even=[True])
    assert shard.serve() == [(1, [2, 4])]


@pytest.mark.parametrize("small", [Want("groups", 1, 1), rows(1)])
def test_a_large_claim_is_met_beside_small_ones_a_second_after_it_came(small: Want) -> None:
    """Two small claims for each group that comes, which is put row by row."""
    shard, numbers, step_s = Shard(group_size=2), itertools.count(2), 0.01
    shard.queue.add(waiting(1, Want("groups", 64, 64)))
    kept_from = int(KEEP_AFTER_S / step_s) + 1
    met = dict[int, int]()
    for group in range(kept_from + 64):
        shard.now = group * step_s
        for row in (2 * group, 2 * group + 1):
            shard.queue.add(waiting(next(numbers), small, since=shard.now))
            put(shard.store, [row], [group])
            for claim, what in shard.queue.serve(shard.now):
                assert isinstance(what, Claimed)
                met[claim.number] = group
    assert met[1] == kept_from + 63 and len(met) > kept_from


def test_a_claim_that_waits_for_an_older_one_says_so() -> None:
    shard = Shard()
    shard.now = 5.0
    shard.put(0, 2, length=[1])
    shard.claim(1, rows(3, where=EVEN), since=1.0)
    assert shard.claim(2, rows(1), since=2.0) == [(2, [1])]
    assert shard.claim(4, rows(9), since=4.5) == []
    assert shard.claim(5, budget(9.0), since=4.8) == []
    assert [shard.queue.before(number) for number in (1, 4, 5)] == [0, 1, 2]
    reasons = {one.number: shard.queue.reason(one.number, shard.now) for one in shard.queue}
    assert reasons == {1: Reason.TOO_FEW, 4: Reason.TOO_FEW, 5: Reason.BEHIND}
    assert shard.claim(6, rows(1), since=5.0) == []
    assert shard.queue.reason(6, shard.now) == Reason.BEHIND


def test_finished_rows_leave_the_queue_as_it_is() -> None:
    shard = Shard()
    shard.put(0, 2)
    shard.queue.add(waiting(1, rows(1)))
    ((_, met),) = shard.queue.serve(0.0)
    assert isinstance(met, Claimed)
    shard.claim(2, rows(2))
    finish(shard.store, met, "release")
    assert shard.serve() == [(2, [0, 1])]


def test_rows_of_a_plan_are_held_by_its_ranks_and_by_nobody_else() -> None:
    shard = Shard()
    shard.put(1, 2)
    shard.store.seal()
    assert shard.store.join("s", Shape(ranks=2), 0, 7, 0.0) is not None
    assert shard.store.lessees == {7}
    assert shard.store.release_holder(7) == 2 and not shard.store.lessees


def test_ranks_that_wait_for_a_plan_cost_a_put_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shard, asked = Shard(), 0
    join = shard.store.join

    def counted(*how: object) -> object:
        nonlocal asked
        asked += 1
        return join(*how)  # type: ignore[arg-type]

    monkeypatch.setattr(shard.store, "join", counted)
    shape = Shape(ranks=3)
    for rank in range(3):
        shard.queue.add(waiting(rank, rows(0), rank, plan=shape, rank=rank))
    assert shard.put(0, 4) == [] and not asked
    shard.store.seal()
    with monkeypatch.context() as small:
        small.setattr(plans, "MAX_PLAN_ROWS", 3)
        told = list(shard.queue.serve(0.0))
        assert [type(what) for _, what in told] == [LimitExceeded] * 3
    for rank in range(3):
        shard.queue.add(waiting(rank, rows(0), rank, plan=shape, rank=rank))
    joined = list(shard.queue.serve(0.0))
    numbers = [what.lease for _, what in joined if isinstance(what, Claimed)]
    ranks = [shard.store.leases.member(number) for number in numbers]
    assert [one.rank for one in ranks if one is not None] == [0, 1, 2]
    with pytest.raises(
        ProtocolError,
        match="rank=3 is invalid for a plan with 3 ranks: expected a value from 0 to 2",
    ):
        shard.queue.add(waiting(9, rows(0), 1, plan=shape, rank=3))
    with pytest.raises(
        ProtocolError, match="is invalid for a plan with 3 ranks: expected a value from 1 to 87381"
    ):
        shard.queue.add(waiting(9, rows(0), 1, plan=Shape(3, 10**9), rank=0))
