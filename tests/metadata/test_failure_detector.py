"""Who is called lost, on which ground and when; and when a keeper doubts itself instead."""

from __future__ import annotations

from dataplane.launch.settings import LOST_AFTER_S
from dataplane.metadata.roster.failure_detector import (
    ALONE_S,
    DOUBT_S,
    GAP_S,
    HEARD_S,
    REFUSED_S,
    RETURN_S,
    UNREACHED_S,
    Contacts,
    FailureDetector,
)
from dataplane.wire.tables import Owner

KEEPER, B, C, D, E = (Owner(name, number) for number, name in enumerate("abcde", 1))
BEAT_S = 0.4
SLACK_S = 4 * BEAT_S


class Clock:
    """A keeper that runs. Each run says whom it hears, who refuses and whose kernel is silent."""

    def __init__(self, *others: Owner) -> None:
        self.others = others
        self.contacts = Contacts()
        self.detector = FailureDetector(KEEPER.peer, self.contacts, LOST_AFTER_S)
        self.now = 100.0
        self.run(2.0, hears=others)

    def run(
        self,
        seconds: float,
        hears: tuple[Owner, ...] = (),
        refused: tuple[Owner, ...] = (),
        unreached: tuple[Owner, ...] = (),
        reporters: tuple[Owner, ...] = (),
    ) -> list[Owner]:
        """Who is called lost meanwhile. reporters: members that report `unreached` as well."""
        lost: list[Owner] = []
        for _ in range(round(seconds / BEAT_S)):
            before, self.now = self.now, self.now + BEAT_S
            for one in self.others:
                if one in refused:
                    self.contacts.refused(one, self.now)
                elif one in unreached:
                    self.contacts.unanswered(one, before, self.now)
                else:
                    self.contacts.answered(one)
            for one in hears:
                self.detector.heard(one, self.now)
                told = unreached if one in reporters and self.contacts.unreached() else ()
                self.detector.reported(one, told)
            lost += self.judge()
        return lost

    def judge(self) -> list[Owner]:
        lost = self.detector.lost([KEEPER, *self.others], self.now)
        self.others = tuple(one for one in self.others if one not in lost)
        return lost


def test_a_process_whose_host_says_that_it_has_ended_is_lost_at_once() -> None:
    clock = Clock(B, C, D)
    clock.contacts.ended(B)
    assert clock.judge() == [B]


def test_proof_of_a_death_needs_no_majority_and_counts_among_no_silent() -> None:
    clock = Clock(B, C, D)
    for one in (B, C):
        clock.contacts.ended(one)
    assert clock.judge() == [B, C]
    assert clock.run(LOST_AFTER_S + SLACK_S) == [D]  # the only other member: the grounds alone


def test_a_stopped_process_is_lost_after_the_time_that_is_set_and_not_before() -> None:
    clock = Clock(B, C)
    assert not clock.run(LOST_AFTER_S - SLACK_S, hears=(C,))
    assert clock.run(2 * SLACK_S, hears=(C,)) == [B]


def test_one_message_within_the_time_keeps_a_slow_member() -> None:
    clock = Clock(B, C)
    for _ in range(3):
        assert not clock.run(LOST_AFTER_S - SLACK_S, hears=(C,))
        assert not clock.run(BEAT_S, hears=(B, C))


def test_a_host_that_refuses_every_port_without_a_break_has_no_process_left() -> None:
    clock = Clock(B, C)
    assert not clock.run(REFUSED_S - SLACK_S, hears=(C,), refused=(B,))
    assert clock.run(2 * SLACK_S, hears=(C,), refused=(B,)) == [B]


def test_a_firewall_that_rejects_for_a_while_is_no_death() -> None:
    clock = Clock(B, C)
    for _ in range(3):
        assert not clock.run(REFUSED_S - SLACK_S, hears=(C,), refused=(B,))
        assert not clock.run(BEAT_S, hears=(C,))  # one port took a connection


def test_who_is_heard_is_alive_whatever_its_ports_say() -> None:
    """The keeper's own output is rejected: it hears all others, and all of them seem to refuse."""
    clock = Clock(B, C)
    assert not clock.run(4 * REFUSED_S, hears=(B, C), refused=(B, C))


def test_refusals_that_lie_apart_are_no_streak() -> None:
    contacts = Contacts()
    for now in range(0, 40, int(GAP_S) + 1):
        contacts.refused(B, float(now))
        assert not contacts.is_refused(B)


def test_a_host_that_neither_the_keeper_nor_another_member_reaches_is_gone() -> None:
    clock = Clock(B, C, D)
    lost = clock.run(UNREACHED_S - SLACK_S, hears=(C, D), unreached=(B,), reporters=(C,))
    assert not lost
    assert clock.run(2 * SLACK_S, hears=(C, D), unreached=(B,), reporters=(C,)) == [B]


def test_a_member_that_was_heard_between_two_cuts_is_not_gone() -> None:
    """The watched connections of the keeper and of another member missed that moment."""
    clock, cut = Clock(B, C, D), {"unreached": (B,), "reporters": (C,)}
    assert not clock.run(5.0, hears=(C, D), **cut)
    assert not clock.run(BEAT_S, hears=(B, C, D), **cut)
    assert not clock.run(5.0, hears=(C, D), **cut)
    assert not clock.run(60.0, hears=(B, C, D))
    assert not clock.run(UNREACHED_S - SLACK_S, hears=(C, D), **cut)
    assert clock.run(2 * SLACK_S, hears=(C, D), **cut) == [B]


def test_a_host_that_another_member_still_reaches_is_not_gone() -> None:
    clock = Clock(B, C, D)
    assert not clock.run(LOST_AFTER_S - SLACK_S, hears=(C, D), unreached=(B,))
    assert clock.run(2 * SLACK_S, hears=(C, D), unreached=(B,)) == [B]  # it is silent, though


def test_a_cut_that_heals_in_time_loses_nobody() -> None:
    clock = Clock(B, C, D)
    assert not clock.run(5.0, hears=(C, D), unreached=(B,), reporters=(C, D))
    assert not clock.run(60.0, hears=(B, C, D))


def test_with_one_other_member_the_grounds_alone_decide() -> None:
    clock = Clock(B)
    assert not clock.run(UNREACHED_S - SLACK_S, unreached=(B,))
    assert clock.run(2 * SLACK_S, unreached=(B,)) == [B]


def test_a_keeper_that_hears_nobody_of_two_or_more_loses_nobody_for_a_minute() -> None:
    clock = Clock(B, C, D)
    assert not clock.run(ALONE_S - SLACK_S, unreached=(B, C, D))
    assert not clock.run(60.0, hears=(B, C, D))


def test_a_keeper_that_hears_nobody_gives_up_in_the_end() -> None:
    clock = Clock(B, C)
    assert set(clock.run(ALONE_S + SLACK_S, unreached=(B, C))) == {B, C}


def test_time_in_which_the_keeper_heard_nobody_counts_against_no_member() -> None:
    clock = Clock(B, C, D)
    clock.run(ALONE_S - SLACK_S, unreached=(B, C, D))
    assert not clock.run(LOST_AFTER_S - SLACK_S, hears=(B, C))
    assert clock.run(2 * SLACK_S, hears=(B, C)) == [D]


def test_the_first_member_that_is_heard_after_a_cut_loses_no_other() -> None:
    """Its report and the keeper's own looks are still of the time of the cut."""
    clock = Clock(B, C, D)
    clock.run(30.0, unreached=(B, C, D))
    cut = clock.run(HEARD_S - BEAT_S, hears=(B,), unreached=(C, D), reporters=(B,))
    assert not cut
    assert not clock.run(60.0, hears=(B, C, D))


def test_a_dead_member_is_lost_although_the_others_are_heard_seldom() -> None:
    """What passed between two messages of slow members counted against nobody, for ever."""
    gap_s = HEARD_S + 2 * BEAT_S
    for slow in ((C,), (C, D)):
        clock, lost = Clock(B, *slow), list[Owner]()
        for _ in range(round((ALONE_S + LOST_AFTER_S + DOUBT_S) / gap_s) + 2):
            lost += clock.run(gap_s, unreached=(B,))
            lost += clock.run(BEAT_S, hears=slow, unreached=(B,))
        assert lost == [B], slow


def test_a_keeper_that_hears_half_again_gives_the_others_time_to_be_heard() -> None:
    clock = Clock(B, C, D)
    assert not clock.run(REFUSED_S + DOUBT_S - SLACK_S, hears=(B,), refused=(C, D))
    assert not clock.run(RETURN_S - SLACK_S, hears=(B, C), refused=(D,))
    assert clock.run(2 * SLACK_S, hears=(B, C), refused=(D,)) == [D]


def test_a_keeper_that_hears_under_half_waits_longer() -> None:
    clock = Clock(B, C, D)
    due_s = REFUSED_S + DOUBT_S
    assert not clock.run(due_s - SLACK_S, hears=(D,), refused=(B, C))
    assert set(clock.run(2 * SLACK_S, hears=(D,), refused=(B, C))) == {B, C}


def test_members_that_were_lost_a_moment_ago_count_among_the_silent() -> None:
    """Each loss must not make the next one easier."""
    clock = Clock(B, C, D, E)
    due_s = REFUSED_S + SLACK_S
    assert set(clock.run(due_s, hears=(D, E), refused=(B, C))) == {B, C}
    assert not clock.run(due_s, hears=(E,), refused=(D,))
    assert clock.run(DOUBT_S, hears=(E,), refused=(D,)) == [D]


def test_a_member_that_returned_is_no_silent_one() -> None:
    clock = Clock(B, C, D)
    assert clock.run(REFUSED_S + SLACK_S, hears=(C, D), refused=(B,)) == [B]
    clock.others = (Owner(B.peer, 9), C, D)
    assert clock.run(REFUSED_S + SLACK_S, hears=(clock.others[0], D), refused=(C,)) == [C]


def test_a_keeper_that_was_stopped_blames_nobody_for_it() -> None:
    clock = Clock(B, C)
    clock.now += 4000
    assert not clock.judge()
    assert not clock.run(LOST_AFTER_S - SLACK_S, hears=(B,))


def test_a_keeper_that_has_just_begun_hears_of_members_by_the_same_grounds() -> None:
    clock = Clock()
    clock.others = (B, C)
    assert not clock.run(LOST_AFTER_S - SLACK_S, hears=(C,))
    assert clock.run(2 * SLACK_S, hears=(C,)) == [B]
