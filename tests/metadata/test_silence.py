"""Who is called lost, and when an authority rather doubts itself."""

from __future__ import annotations

from dataplane.metadata.roster.silence import (
    ALONE_S,
    DOUBT_S,
    FRESH_S,
    RETURN_S,
    SILENT_S,
    Silence,
)
from dataplane.wire.tables import Owner

KEEPER, B, C, D = (Owner(name, number) for number, name in enumerate("abcd", 1))
BEAT_S = 0.4
AWAY_S = 2.6
"""From a cut to the moment in which its other side is known to be away."""


class Clock:
    """A keeper that runs: its own beats, and those of the members that are heard."""

    def __init__(self, *others: Owner) -> None:
        self.others: tuple[Owner, ...] = others
        self.silence = Silence(KEEPER.peer)
        self.now = 100.0
        self.run(2.0, *others)

    def run(self, seconds: float, *heard: Owner) -> list[Owner]:
        """Who is called lost meanwhile."""
        lost: list[Owner] = []
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for one in heard:
                self.silence.heard(one, self.now)
            lost += self.judge()
        return lost

    def judge(self) -> list[Owner]:
        lost = self.silence.lost([KEEPER, *self.others], self.now)
        self.others = tuple(one for one in self.others if one not in lost)
        return lost

    def away(self, *gone: Owner) -> None:
        for one in gone:
            self.silence.away(one, self.now)


def test_one_that_cannot_be_reached_is_lost_at_once_where_others_are_heard() -> None:
    clock = Clock(B, C)
    assert not clock.run(AWAY_S, C)
    clock.away(B)
    assert clock.judge() == [B]


def test_a_keeper_that_is_cut_off_from_everybody_calls_nobody_lost() -> None:
    clock = Clock(B, C, D)
    assert not clock.run(AWAY_S)
    clock.away(B)
    assert not clock.judge()
    assert clock.silence.doubted == [B]
    clock.away(C, D)
    assert not clock.run(ALONE_S - 5)
    assert not clock.run(10, B, C, D)
    assert not clock.silence.doubted


def test_after_the_cut_everybody_has_time_to_be_heard_again() -> None:
    clock = Clock(B, C, D)
    clock.run(AWAY_S)
    clock.away(B, C, D)
    clock.run(10)
    assert not clock.run(RETURN_S - BEAT_S, B, C)
    assert clock.run(2 * RETURN_S, B, C) == [D]


def test_most_members_may_be_silent_for_a_bounded_time() -> None:
    clock = Clock(B, C, D)
    clock.run(AWAY_S, D)
    clock.away(B, C)
    assert not clock.run(DOUBT_S - 1, D)
    assert set(clock.run(2, D)) == {B, C}


def test_the_only_other_peer_is_called_lost_after_a_doubt() -> None:
    clock = Clock(B)
    clock.run(AWAY_S)
    clock.away(B)
    assert not clock.run(DOUBT_S - 1)
    assert clock.run(2) == [B]


def test_everybody_is_called_lost_in_the_end() -> None:
    clock = Clock(B, C)
    clock.run(AWAY_S)
    clock.away(B, C)
    assert set(clock.run(ALONE_S + 1)) == {B, C}


def test_proof_of_a_death_ends_the_doubt() -> None:
    clock = Clock(B)
    clock.run(AWAY_S)
    clock.away(B)
    assert not clock.judge()
    clock.silence.dead(B)
    assert clock.judge() == [B]


def test_the_dead_do_not_make_a_majority_of_the_silent() -> None:
    clock = Clock(B, C, D)
    clock.run(AWAY_S, D)
    clock.away(B, C)
    assert not clock.judge()
    clock.silence.dead(B)
    assert clock.judge() == [B]
    assert clock.run(RETURN_S + 2 * BEAT_S, D) == [C]


def test_who_can_be_reached_and_says_nothing_is_lost_later() -> None:
    clock = Clock(B, C)
    assert not clock.run(SILENT_S - 1, C)
    assert clock.run(2, C) == [B]


def test_a_keeper_that_slept_blames_nobody_for_it() -> None:
    clock = Clock(B, C)
    clock.now += 4000
    clock.away(B)
    assert not clock.judge()
    assert not clock.run(SILENT_S, B, C)
    clock.now += 4000
    clock.silence.heard(C, clock.now)  # so that nobody doubts
    clock.away(B)
    assert not clock.judge()


def test_a_new_authority_hears_of_members_soon_or_calls_them_lost() -> None:
    clock = Clock()
    clock.others = (B, C)
    for one in (B, C):
        clock.silence.expect(one, clock.now, 3.0)
    assert not clock.run(2.0, C)
    assert clock.run(2.0, C) == [B]


def test_who_was_away_before_the_authority_began_needs_no_more_time_than_it_takes_to_hear() -> None:
    clock = Clock()
    clock.others = (B, C)
    clock.silence.expect(C, clock.now, 3.0)
    clock.away(B)
    assert clock.judge() == [B]
    assert FRESH_S < AWAY_S
