"""The home of a stage: what it orders, when a claim completes, and that none waits in vain."""

from __future__ import annotations

import pytest

from dataplane.errors import ProtocolError
from dataplane.metadata.counts import Counts
from dataplane.metadata.homes import NEAR_TURNS, StageHome
from dataplane.metadata.instructions import (
    ClaimId,
    Complete,
    Ended,
    Instruction,
    Order,
    Starved,
    Unmeetable,
)
from dataplane.wire.messages import Want


def rows(count: int, minimum: int | None = None, where: list[object] | None = None) -> Want:
    return Want("rows", count, count if minimum is None else minimum, where)


def budget(total: float, tag: str = "length") -> Want:
    return Want("rows", 0, 0, None, tag, total)


def has(ready: int, remaining: int | None = None, outstanding: int | None = None) -> Counts:
    remaining = ready if remaining is None else remaining
    outstanding = remaining if outstanding is None else outstanding
    return Counts(ready, ready, remaining, remaining, outstanding, outstanding)


def claim(number: int, peer: str = "a") -> ClaimId:
    return ClaimId(peer, number)


def orders(instructions: list[Instruction]) -> list[tuple[int, int]]:
    """(claim's number, units) of every order."""
    return [
        (one.claim.number, one.want_remaining.count)
        for one in instructions
        if isinstance(one, Order)
    ]


class Shard:
    """Figures by filter, and a home that reads them. near: units by the peer where they lie."""

    def __init__(self, **near: int) -> None:
        self.near = near
        self._figures: dict[str, Counts] = {}
        self.home = StageHome(lambda where: self._figures[str(where)], lambda lane: near)
        self.has(0)

    def has(
        self,
        ready: int,
        remaining: int | None = None,
        outstanding: int | None = None,
        *,
        where: list[object] | None = None,
        sealed: bool = False,
    ) -> StageHome:
        self._figures[str(where)] = has(ready, remaining, outstanding)
        self.home.changed(sealed)
        return self.home


def test_a_claim_is_ordered_only_when_it_can_be_met_in_full() -> None:
    shard = Shard()
    home = shard.has(7)
    home.demand(claim(1), rows(8))
    assert orders(home.instructions()) == []
    shard.has(9)
    (order,) = home.instructions()
    assert order == Order(claim(1), rows(8), exact=True)
    shard.has(1)
    home.supplied(claim(1), 8, 0.0, False)
    assert home.instructions() == [Complete(claim(1), told=True)]
    assert not home.hungry


def test_claims_of_one_lane_are_met_in_the_order_in_which_they_came() -> None:
    shard = Shard()
    home = shard.has(4)
    home.demand(claim(1), rows(8))
    home.demand(claim(2), rows(2))
    assert orders(home.instructions()) == []  # the second would overtake the first
    shard.has(10)
    assert orders(home.instructions()) == [(1, 8)]
    shard.has(2)
    home.supplied(claim(1), 8, 0.0, False)
    out = home.instructions()
    assert out[0] == Complete(claim(1), told=True)
    assert orders(out) == [(2, 2)]


def test_an_order_that_came_too_late_is_given_again_when_there_is_enough() -> None:
    shard = Shard()
    home = shard.has(8)
    home.demand(claim(1), rows(8))
    assert orders(home.instructions()) == [(1, 8)]
    shard.has(3)  # others took some before
    home.supplied(claim(1), 0, 0.0, False)
    assert home.instructions() == []
    shard.has(8)
    assert orders(home.instructions()) == [(1, 8)]


def test_units_are_not_ordered_twice() -> None:
    home = Shard().has(5)
    home.demand(claim(1), rows(4))
    home.demand(claim(2), budget(100.0))
    (first, second) = home.instructions()
    assert isinstance(first, Order) and isinstance(second, Order)
    assert second.want_remaining.budget == 100.0
    home.demand(claim(3), budget(1.0, "other"))
    assert home.instructions() == []  # four and one of the five are on their way


def test_a_minimum_is_enough() -> None:
    shard = Shard()
    home = shard.has(2)
    home.demand(claim(1), rows(8, minimum=3))
    assert orders(home.instructions()) == []
    shard.has(5)
    (order,) = home.instructions()
    assert isinstance(order, Order)
    assert order.want_remaining == rows(5, minimum=3)
    home.supplied(claim(1), 5, 0.0, False)
    assert home.instructions() == [Complete(claim(1), told=True)]


def test_a_grant_that_completes_its_claim_says_so_whatever_the_counts_say_later() -> None:
    shard = Shard()
    home = shard.has(3, sealed=True)
    home.demand(claim(1), rows(8))
    (order,) = home.instructions()
    assert isinstance(order, Order) and order.exact
    shard.has(5, sealed=True)  # rows came back meanwhile
    home.supplied(claim(1), 3, 0.0, False)
    assert home.instructions() == [Complete(claim(1), told=True)]


def test_a_sealed_partition_completes_with_less_and_then_ends() -> None:
    shard = Shard()
    home = shard.has(4)
    home.demand(claim(1), rows(8))
    home.demand(claim(2), rows(8))
    assert home.instructions() == []
    shard.has(4, sealed=True)
    assert orders(home.instructions()) == [(1, 4)]
    shard.has(0, 0, 4, sealed=True)
    home.supplied(claim(1), 4, 0.0, False)
    assert home.instructions() == [Complete(claim(1), told=True)]  # what is leased may come back
    shard.has(0, 0, 0, sealed=True)
    assert home.instructions() == [Ended(claim(2))]
    home.demand(claim(3), rows(1))
    assert home.instructions() == [Ended(claim(3))]


def test_a_sealed_partition_waits_for_rows_that_are_not_ready_yet() -> None:
    shard = Shard()
    home = shard.has(3, 5, sealed=True)
    home.demand(claim(1), rows(8))
    assert home.instructions() == []
    shard.has(5, 5, sealed=True)
    assert orders(home.instructions()) == [(1, 5)]


def test_rows_that_come_back_after_the_seal_are_handed_out_again() -> None:
    shard = Shard()
    home = shard.has(0, 0, 4, sealed=True)
    home.demand(claim(1), rows(4))
    assert home.instructions() == []
    shard.has(4, sealed=True)
    assert orders(home.instructions()) == [(1, 4)]


def test_a_withdrawn_head_makes_room_for_the_next() -> None:
    home = Shard().has(4)
    home.demand(claim(1), rows(8))
    home.demand(claim(2), rows(2))
    home.instructions()
    home.withdraw(claim(1))
    assert orders(home.instructions()) == [(2, 2)]
    home.supplied(claim(1), 2, 0.0, False)  # an answer that comes too late
    assert home.instructions() == []


def test_a_budget_takes_what_comes_until_the_next_unit_does_not_fit() -> None:
    shard = Shard()
    home = shard.has(2)
    home.demand(claim(1), budget(100.0))
    (first,) = home.instructions()
    assert isinstance(first, Order) and not first.exact and first.want_remaining.budget == 100.0
    shard.has(0)
    home.supplied(claim(1), 2, 60.0, False)
    assert home.instructions() == []
    shard.has(9)
    (second,) = home.instructions()
    assert isinstance(second, Order) and second.want_remaining.budget == 40.0
    shard.has(6)
    home.supplied(claim(1), 3, 35.0, True)
    assert home.instructions() == [Complete(claim(1))]


def test_a_budget_waits_for_rows_until_it_is_full_or_the_partition_is_sealed() -> None:
    shard = Shard()
    home = shard.has(2)
    home.demand(claim(1), budget(100.0))
    home.instructions()
    shard.has(0, 0, 2)
    home.supplied(claim(1), 2, 60.0, False)
    assert home.instructions() == []
    shard.has(0, 0, 2, sealed=True)
    assert home.instructions() == [Complete(claim(1))]


def test_a_budget_that_is_used_up_exactly_is_complete() -> None:
    shard = Shard()
    home = shard.has(3)
    home.demand(claim(1), budget(60.0))
    home.instructions()
    shard.has(1)
    home.supplied(claim(1), 2, 60.0, False)
    assert home.instructions() == [Complete(claim(1))]


def test_a_budget_below_the_next_unit_is_told_so() -> None:
    home = Shard().has(1)
    home.demand(claim(1), budget(10.0))
    assert orders(home.instructions()) == [(1, 0)]
    home.supplied(claim(1), 0, 0.0, True)
    assert home.instructions() == [Unmeetable(claim(1))]


def test_lanes_take_turns() -> None:
    fresh = ["ge", "version", 6]
    shard = Shard()
    home = shard.has(0, where=fresh)
    home.demand(claim(1), rows(4))
    home.demand(claim(2), rows(4))
    home.demand(claim(3), rows(4, where=fresh))
    shard.has(8)
    shard.has(8, where=fresh)
    assert orders(home.instructions()) == [(1, 4), (3, 4)]


def test_orders_carry_what_is_left_of_the_claims_credit() -> None:
    shard = Shard()
    home = shard.has(2)
    home.demand(claim(1), budget(100.0), credit_bytes=1000)
    (first,) = home.instructions()
    shard.has(9)
    home.supplied(claim(1), 2, 60.0, False, nbytes=700)
    (second,) = home.instructions()
    assert isinstance(first, Order) and isinstance(second, Order)
    assert (first.credit_bytes, second.credit_bytes) == (1000, 300)


def test_a_claim_whose_rows_exceed_its_credit_steps_aside_for_the_next() -> None:
    home = Shard().has(4)
    home.demand(claim(1), rows(4), credit_bytes=1000)
    home.demand(claim(2, "b"), rows(4), credit_bytes=0)
    home.instructions()
    home.supplied(claim(1), 0, 0.0, False, needed_bytes=4000)
    out = home.instructions()
    assert out[0] == Starved(claim(1), 4000)
    assert orders(out) == [(2, 4)]


def test_a_claim_with_a_minimum_or_a_budget_completes_with_what_its_credit_lets_in() -> None:
    for want in (rows(8, minimum=2), budget(100.0)):
        shard = Shard()
        home = shard.has(8)
        home.demand(claim(1, "b"), want, credit_bytes=1000)
        home.instructions()
        shard.has(5)
        home.supplied(claim(1, "b"), 3, 30.0, False, nbytes=900, needed_bytes=1200)
        told = want.budget_tag is None
        assert home.instructions() == [Complete(claim(1, "b"), told)]


def test_a_demand_that_is_sent_twice_counts_once() -> None:
    home = Shard().has(4)
    home.demand(claim(1), rows(2))
    home.demand(claim(1), rows(2))
    assert orders(home.instructions()) == [(1, 2)]


def test_a_claim_of_nothing_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Shard().home.demand(claim(1), rows(0))


def test_repr_shows_how_many_wait() -> None:
    home = Shard().has(3)
    home.demand(claim(1), rows(8))
    home.demand(claim(2), rows(8))
    assert repr(home) == "<StageHome open, 2 claims in 1 lanes>"


def test_a_claim_on_whose_host_all_lies_goes_before_the_head() -> None:
    shard = Shard(c=2)
    for number, peer in enumerate("abc", 1):
        shard.home.demand(claim(number, peer), rows(2))
    assert orders(shard.has(2).instructions()) == [(3, 2)]


def test_a_near_claim_that_its_host_cannot_meet_in_full_waits_its_turn() -> None:
    shard = Shard(b=1)
    shard.home.demand(claim(1, "a"), rows(1))
    shard.home.demand(claim(2, "b"), rows(2))
    assert orders(shard.has(1).instructions()) == [(1, 1)]


def test_a_near_claim_that_got_nothing_goes_back_behind_the_head() -> None:
    shard = Shard(b=2)
    home = shard.home
    home.demand(claim(1, "a"), rows(1))
    home.demand(claim(2, "b"), rows(2))
    shard.has(2)
    assert orders(home.instructions()) == [(2, 2)]
    shard.near["b"] = 1
    shard.has(1)  # a lane with a filter took one of them
    home.supplied(claim(2, "b"), 0, 0.0, False)
    assert orders(home.instructions()) == [(1, 1)]


def test_a_head_is_passed_over_so_often_and_no_more() -> None:
    shard = Shard(b=1)
    home = shard.home
    home.demand(claim(0, "a"), rows(1))
    served = []
    for number in range(1, NEAR_TURNS + 2):
        home.demand(claim(number, "b"), rows(1))
        shard.has(1)
        ((met, units),) = orders(home.instructions())
        shard.has(0)
        home.supplied(claim(met, "a" if met == 0 else "b"), units, 0.0, False)
        home.instructions()
        served.append(met)
    assert served == [*range(1, NEAR_TURNS + 1), 0]
