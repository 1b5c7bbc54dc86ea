"""The home of a stage: whom it orders from, when it completes, and that no claim waits in vain."""

from __future__ import annotations

import pytest

from dataplane.errors import ProtocolError
from dataplane.metadata.counts import Counts, Lane
from dataplane.metadata.homes import MAX_WATCHED, NEAR_TURNS, StageHome
from dataplane.metadata.instructions import (
    ClaimId,
    Complete,
    Ended,
    Instruction,
    Order,
    Return,
    Starved,
    Unmeetable,
    Watch,
)
from dataplane.wire.messages import Want

PLAIN = Lane("rows")


def rows(count: int, minimum: int | None = None, where: list[object] | None = None) -> Want:
    return Want("rows", count, count if minimum is None else minimum, where)


def budget(total: float) -> Want:
    return Want("rows", 0, 0, None, "length", total)


def has(ready: int, remaining: int | None = None, outstanding: int | None = None) -> Counts:
    remaining = ready if remaining is None else remaining
    outstanding = remaining if outstanding is None else outstanding
    return Counts(ready, ready, remaining, remaining, outstanding, outstanding)


def claim(number: int, peer: str = "a") -> ClaimId:
    return ClaimId(peer, number)


def orders(instructions: list[Instruction]) -> list[tuple[int, str, int]]:
    """(claim's number, supplying peer, units) of every order."""
    return [
        (one.claim.number, one.peer, one.want_remaining.count)
        for one in instructions
        if isinstance(one, Order)
    ]


def test_a_claim_is_ordered_only_when_it_can_be_met_in_full() -> None:
    home = StageHome("ab")
    home.demand(claim(1), rows(8))
    home.report("a", PLAIN, has(3), False)
    home.report("b", PLAIN, has(4), False)
    assert orders(home.instructions()) == []
    home.report("b", PLAIN, has(5), False)
    assert orders(home.instructions()) == [(1, "a", 3), (1, "b", 5)]
    home.supplied(claim(1), "a", 3, 0.0, False)
    assert home.instructions() == []
    home.supplied(claim(1), "b", 5, 0.0, False)
    assert home.instructions() == [Complete(claim(1), 8)]
    assert not home.hungry


def test_the_claimants_own_peer_supplies_first_and_then_the_fullest() -> None:
    home = StageHome("abcd")
    for peer, ready in zip("abcd", (2, 9, 2, 30), strict=True):
        home.report(peer, PLAIN, has(ready), False)
    home.demand(claim(1, "c"), rows(8))
    assert orders(home.instructions()) == [(1, "c", 2), (1, "d", 6)]


def test_an_order_that_one_peer_can_meet_alone_is_all_or_nothing() -> None:
    home = StageHome("ab")
    home.report("a", PLAIN, has(8), False)
    home.demand(claim(1), rows(8))
    (order,) = home.instructions()
    assert isinstance(order, Order) and order.exact
    assert order.want_remaining == rows(8)


def test_claims_of_one_lane_are_met_in_the_order_in_which_they_came() -> None:
    home = StageHome("a")
    home.demand(claim(1), rows(8))
    home.demand(claim(2), rows(2))
    home.report("a", PLAIN, has(4), False)
    assert orders(home.instructions()) == []  # the second would overtake the first
    home.report("a", PLAIN, has(10), False)
    assert orders(home.instructions()) == [(1, "a", 8)]
    home.supplied(claim(1), "a", 8, 0.0, False)
    out = home.instructions()
    assert out[0] == Complete(claim(1), 8, told=True)
    assert orders(out) == [(2, "a", 2)]


def test_a_supplier_that_gave_less_leaves_the_head_with_what_it_holds() -> None:
    home = StageHome("ab")
    home.report("a", PLAIN, has(4), False)
    home.report("b", PLAIN, has(4), False)
    home.demand(claim(1), rows(8))
    home.instructions()
    home.supplied(claim(1), "a", 4, 0.0, False)
    home.supplied(claim(1), "b", 1, 0.0, False)
    assert home.instructions() == [Watch(PLAIN, True, "b")]  # its counts were wrong: ask again
    home.report("b", PLAIN, has(0), False)
    assert home.instructions() == []
    home.report("a", PLAIN, has(2), False)  # it holds partial grants, so anything helps
    assert orders(home.instructions()) == [(1, "a", 2)]
    home.supplied(claim(1), "a", 2, 0.0, False)
    home.report("b", PLAIN, has(7), False)
    assert orders(home.instructions()) == [(1, "b", 1)]
    home.supplied(claim(1), "b", 1, 0.0, False)
    assert home.instructions() == [Complete(claim(1), 8)]


def test_units_are_not_ordered_twice_from_counts_that_are_older_than_the_grant() -> None:
    home = StageHome("a")
    home.report("a", PLAIN, has(5), False)
    home.demand(claim(1), rows(4))
    home.demand(claim(2), rows(4))
    home.instructions()
    home.supplied(claim(1), "a", 4, 0.0, False)
    assert orders(home.instructions()) == []


def test_a_minimum_is_enough() -> None:
    home = StageHome("a")
    home.demand(claim(1), rows(8, minimum=3))
    home.report("a", PLAIN, has(2), False)
    assert orders(home.instructions()) == []
    home.report("a", PLAIN, has(5), False)
    (order,) = home.instructions()
    assert isinstance(order, Order)
    assert order.want_remaining == rows(5, minimum=3)
    home.supplied(claim(1), "a", 5, 0.0, False)
    assert home.instructions() == [Complete(claim(1), 5, told=True)]


def test_a_grant_that_completes_its_claim_says_so_whatever_the_counts_say_later() -> None:
    home = StageHome("a")
    home.sealed(True)
    home.report("a", PLAIN, has(3), True)
    home.demand(claim(1), rows(8))
    (order,) = home.instructions()[-1:]
    assert isinstance(order, Order) and order.exact
    home.report("a", PLAIN, has(5), True)  # rows came back meanwhile
    home.supplied(claim(1), "a", 3, 0.0, False)
    assert home.instructions() == [Complete(claim(1), 3, told=True)]


def test_a_sealed_partition_completes_with_less_and_then_ends() -> None:
    home = StageHome("ab")
    home.demand(claim(1), rows(8))
    home.demand(claim(2), rows(8))
    home.sealed(True)
    assert home.instructions() == [Watch(PLAIN, True, "a"), Watch(PLAIN, True, "b")]
    home.report("a", PLAIN, has(3), True)
    assert home.instructions() == []  # b may have taken rows before it knew
    home.report("b", PLAIN, has(1), True)
    assert orders(home.instructions()) == [(1, "a", 3), (1, "b", 1)]
    home.supplied(claim(1), "a", 3, 0.0, False)
    home.supplied(claim(1), "b", 1, 0.0, False)
    assert home.instructions() == [Complete(claim(1), 4)]
    home.report("a", PLAIN, has(0, 0, 3), True)
    home.report("b", PLAIN, has(0, 0, 0), True)
    assert home.instructions() == []  # leased rows may still come back
    home.report("a", PLAIN, has(0, 0, 0), True)
    assert home.instructions() == [Ended(claim(2))]
    home.demand(claim(3), rows(1))
    assert home.instructions() == [Ended(claim(3))]


def test_counts_from_before_the_seal_end_nothing() -> None:
    home = StageHome("a")
    home.report("a", PLAIN, has(0), False)
    home.sealed(True)
    home.demand(claim(1), rows(1))
    assert home.instructions() == [Watch(PLAIN, True, "a")]
    home.report("a", PLAIN, has(1), False)  # sent before this peer heard of it
    assert orders(home.instructions()) == [(1, "a", 1)]


def test_rows_that_come_back_after_the_seal_are_handed_out_again() -> None:
    home = StageHome("a")
    home.sealed(True)
    home.demand(claim(1), rows(4))
    home.report("a", PLAIN, has(0, 0, 4), True)
    home.instructions()
    home.report("a", PLAIN, has(4), True)
    assert orders(home.instructions()) == [(1, "a", 4)]


def test_a_withdrawn_head_makes_room_for_the_next() -> None:
    home = StageHome("a")
    home.demand(claim(1), rows(8))
    home.demand(claim(2), rows(2))
    home.report("a", PLAIN, has(4), False)
    home.instructions()
    home.withdraw(claim(1))
    assert orders(home.instructions()) == [(2, "a", 2)]
    home.supplied(claim(1), "a", 2, 0.0, False)  # an answer that comes too late
    assert home.instructions() == []


def test_a_budget_goes_from_peer_to_peer_until_the_next_unit_does_not_fit() -> None:
    home = StageHome("ab")
    home.report("a", PLAIN, has(2), False)
    home.report("b", PLAIN, has(9), False)
    home.demand(claim(1), budget(100.0))
    (first,) = home.instructions()
    assert isinstance(first, Order) and first.peer == "a" and first.want_remaining.budget == 100.0
    home.supplied(claim(1), "a", 2, 60.0, False)
    (second,) = home.instructions()
    assert isinstance(second, Order) and second.peer == "b" and second.want_remaining.budget == 40.0
    home.supplied(claim(1), "b", 3, 35.0, True)
    assert home.instructions() == [Complete(claim(1), 5)]


def test_a_budget_waits_for_rows_until_it_is_full_or_the_partition_is_sealed() -> None:
    home = StageHome("a")
    home.report("a", PLAIN, has(2), False)
    home.demand(claim(1), budget(100.0))
    home.instructions()
    home.supplied(claim(1), "a", 2, 60.0, False)
    assert home.instructions() == []
    home.sealed(True)
    home.report("a", PLAIN, has(0, 0, 2), True)
    assert home.instructions()[-1] == Complete(claim(1), 2)


def test_a_budget_that_is_used_up_exactly_is_complete() -> None:
    home = StageHome("a")
    home.report("a", PLAIN, has(2), False)
    home.demand(claim(1), budget(60.0))
    home.instructions()
    home.supplied(claim(1), "a", 2, 60.0, False)
    assert home.instructions() == [Complete(claim(1), 2)]


def test_a_budget_below_every_next_unit_is_told_so() -> None:
    home = StageHome("ab")
    home.report("a", PLAIN, has(1), False)
    home.report("b", PLAIN, has(1), False)
    home.demand(claim(1), budget(10.0))
    home.supplied(claim(1), "a", 0, 0.0, True)
    assert orders(home.instructions()) == [(1, "a", 0), (1, "b", 0)]
    home.supplied(claim(1), "b", 0, 0.0, True)
    assert home.instructions() == [Unmeetable(claim(1))]


def test_lanes_take_turns() -> None:
    home = StageHome("a")
    fresh = ["ge", "version", 6]
    home.demand(claim(1), rows(4))
    home.demand(claim(2), rows(4))
    home.demand(claim(3), rows(4, where=fresh))
    home.instructions()
    home.report("a", PLAIN, has(8), False)
    home.report("a", Lane.of(rows(4, where=fresh)), has(8), False)
    assert orders(home.instructions()) == [(1, "a", 4), (3, "a", 4)]


def test_two_heads_never_hold_what_the_other_lacks() -> None:
    home = StageHome("ab")
    fresh = ["ge", "version", 6]
    home.demand(claim(1), rows(4))
    home.demand(claim(2), rows(4, where=fresh))
    home.instructions()
    for lane in (PLAIN, Lane.of(rows(4, where=fresh))):
        for peer in "ab":
            home.report(peer, lane, has(2), False)
    # Both need both peers, and the four rows are the same ones, which no count can tell.
    assert len(orders(home.instructions())) == 4
    home.supplied(claim(1), "a", 2, 0.0, False)
    home.supplied(claim(2), "a", 0, 0.0, False)
    home.supplied(claim(2), "b", 2, 0.0, False)
    home.supplied(claim(1), "b", 0, 0.0, False)
    assert Return(claim(1)) in home.instructions()
    home.report("a", Lane.of(rows(4, where=fresh)), has(2), False)  # what came back
    assert orders(home.instructions()) == [(2, "a", 2)]


def test_a_filter_is_watched_from_its_first_claim_until_others_push_it_out() -> None:
    home = StageHome("a")
    first = rows(1, where=["eq", "tag", 0])
    home.demand(claim(0), first)
    assert home.instructions() == [Watch(Lane.of(first), True)]
    home.withdraw(claim(0))
    for number in range(1, MAX_WATCHED + 1):
        home.demand(claim(number), rows(1, where=["eq", "tag", number]))
    assert [one for one in home.instructions() if not getattr(one, "on", True)] == [
        Watch(Lane.of(first), False)
    ]


def test_orders_carry_what_is_left_of_the_claims_credit() -> None:
    home = StageHome("ab")
    home.report("a", PLAIN, has(2), False)
    home.report("b", PLAIN, has(9), False)
    home.demand(claim(1), budget(100.0), credit_bytes=1000)
    (first,) = home.instructions()
    home.supplied(claim(1), "a", 2, 60.0, False, nbytes=700)
    (second,) = home.instructions()
    assert isinstance(first, Order) and isinstance(second, Order)
    assert (first.credit_bytes, second.credit_bytes) == (1000, 300)


def test_a_claim_whose_rows_exceed_its_credit_steps_aside_for_the_next() -> None:
    home = StageHome("ab")
    home.report("b", PLAIN, has(4), False)
    home.demand(claim(1), rows(4), credit_bytes=1000)
    home.demand(claim(2, "b"), rows(4), credit_bytes=0)
    home.instructions()
    home.supplied(claim(1), "b", 0, 0.0, False, needed_bytes=4000)
    out = home.instructions()
    assert out[0] == Starved(claim(1), 4000)
    assert orders(out) == [(2, "b", 4)]  # the rows are still known to be there


def test_a_claim_with_a_minimum_or_a_budget_completes_with_what_its_credit_lets_in() -> None:
    for want in (rows(8, minimum=2), budget(100.0)):
        home = StageHome("a")
        home.report("a", PLAIN, has(8), False)
        home.demand(claim(1, "b"), want, credit_bytes=1000)
        home.instructions()
        home.supplied(claim(1, "b"), "a", 3, 30.0, False, nbytes=900, needed_bytes=1200)
        told = want.budget_tag is None
        assert home.instructions() == [Complete(claim(1, "b"), 3, told)]


def test_a_starved_claim_waits_for_its_other_suppliers_and_tells_what_is_missing() -> None:
    home = StageHome("abc")
    for peer in "ab":
        home.report(peer, PLAIN, has(2), False)
    home.demand(claim(1, "c"), rows(4), credit_bytes=1000)
    home.instructions()
    home.supplied(claim(1, "c"), "a", 1, 0.0, False, nbytes=600, needed_bytes=1200)
    assert home.instructions() == []
    home.supplied(claim(1, "c"), "b", 2, 0.0, False, nbytes=100)
    assert home.instructions() == [Starved(claim(1, "c"), 600)]  # beyond what it was granted


def test_a_dead_peer_supplies_nothing_and_asks_for_nothing() -> None:
    home = StageHome("ab")
    home.report("a", PLAIN, has(2), False)
    home.report("b", PLAIN, has(2), False)
    home.demand(claim(1), rows(4))
    home.demand(claim(2, "b"), rows(1))
    home.instructions()
    home.supplied(claim(1), "a", 2, 0.0, False)
    home.forget("b")
    assert home.instructions() == []
    home.report("a", PLAIN, has(2), False)
    assert orders(home.instructions()) == [(1, "a", 2)]
    home.supplied(claim(1), "a", 2, 0.0, False)
    assert home.instructions() == [Complete(claim(1), 4)]
    assert not home.hungry


def test_a_demand_that_is_sent_twice_counts_once() -> None:
    home = StageHome("a")
    home.report("a", PLAIN, has(4), False)
    home.demand(claim(1), rows(2))
    home.demand(claim(1), rows(2))
    assert orders(home.instructions()) == [(1, "a", 2)]


def test_a_claim_of_nothing_is_refused() -> None:
    with pytest.raises(ProtocolError):
        StageHome("a").demand(claim(1), rows(0))


def test_progress_and_repr_show_what_a_claim_waits_for() -> None:
    home = StageHome("a")
    home.report("a", PLAIN, has(3), False)
    home.demand(claim(1), rows(8))
    home.demand(claim(2), rows(8))
    assert home.progress(claim(2)) == {"ready": 3, "held": 0, "ahead": 1}
    assert repr(home) == "<StageHome open, 2 claims in 1 lanes>"


def near(**units: int) -> StageHome:
    return StageHome("p", lambda lane: units)


def test_a_claim_on_whose_host_all_lies_goes_before_the_head() -> None:
    home = near(c=2)
    for number, peer in enumerate("abc", 1):
        home.demand(claim(number, peer), rows(2))
    home.report("p", PLAIN, has(2), False)
    assert orders(home.instructions()) == [(3, "p", 2)]


def test_a_near_claim_that_its_host_cannot_meet_in_full_waits_its_turn() -> None:
    home = near(b=1)
    home.demand(claim(1, "a"), rows(1))
    home.demand(claim(2, "b"), rows(2))
    home.report("p", PLAIN, has(1), False)
    assert orders(home.instructions()) == [(1, "p", 1)]


def test_a_head_is_passed_over_so_often_and_no_more() -> None:
    home = near(b=1)
    home.demand(claim(0, "a"), rows(1))
    served = []
    for number in range(1, NEAR_TURNS + 2):
        home.demand(claim(number, "b"), rows(1))
        home.report("p", PLAIN, has(1), False)
        ((met, peer, units),) = orders(home.instructions())
        home.supplied(claim(met, "a" if met == 0 else "b"), peer, units, 0.0, False)
        home.instructions()
        served.append(met)
    assert served == [*range(1, NEAR_TURNS + 1), 0]
