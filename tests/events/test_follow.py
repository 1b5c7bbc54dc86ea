"""A follower of a plane's events: each event once, and what is lost in between is said."""

from __future__ import annotations

import random

import pytest

from dataplane.events.follow import OVERLAP_S, SILENT_S, Follower
from dataplane.events.merge import Event
from dataplane.wire.events import Kind, Reason


def put(number: int, at: float, incarnation: int = 1, peer: str = "a", **more: float) -> Event:
    of = {"number": number, "incarnation": incarnation}
    return Event(Kind.PUT, at, peer, **of | more)  # type: ignore[arg-type]


def missing(reason: Reason, rows: int = 0, peer: str = "a", incarnation: int = 1) -> Event:
    return Event(Kind.MISSING, 0.0, peer, reason=reason, rows=rows, incarnation=incarnation)


def told(events: list[Event]) -> list[tuple[str, int]]:
    """Kind and number of events, and of what is missing its reason and how many."""
    return [
        (str(e.reason), e.rows) if e.kind is Kind.MISSING else ("put", e.number) for e in events
    ]


def test_an_event_that_several_looks_bring_is_new_once() -> None:
    follower, events = Follower(), [put(n, float(n)) for n in range(1, 40)]
    found = list[Event]()
    for asked in range(1, 41, 3):
        since = follower.since(asked)
        due = [e for e in events if e.at <= asked and (since is None or e.at > since)]
        found += follower.take(due, asked).events
    assert found == events


def test_a_peer_that_restarts_counts_from_1_again_and_no_event_is_lost() -> None:
    """All of it within the overlap of two looks, so the numbers of both incarnations meet."""
    follower, overlap = Follower(), OVERLAP_S / 10
    before = [put(n, n * overlap) for n in (1, 2, 3)]
    assert follower.take(before, 4 * overlap).events == before
    after = [put(n, (4 + n) * overlap, incarnation=2) for n in (1, 2, 3, 4)]
    look = follower.take([*before[1:], *after], 9 * overlap)
    assert told(look.events) == [("restarted", 0), *[("put", n) for n in (1, 2, 3, 4)]]
    assert follower.take(after, 10 * overlap).events == []


def test_events_that_were_overwritten_between_two_looks_are_counted() -> None:
    follower = Follower()
    first = follower.take([missing(Reason.OVERWRITTEN, 6), put(7, 1.0)], 1.0)
    assert told(first.events) == [("overwritten", 6), ("put", 7)]
    later = follower.take([missing(Reason.OVERWRITTEN, 9), put(10, 2.0)], 2.0)
    assert told(later.events) == [("overwritten", 2), ("put", 10)]
    # It has overwritten more since then, all of which earlier looks had brought.
    assert follower.take([missing(Reason.OVERWRITTEN, 9), put(10, 2.0)], 3.0).events == []


@pytest.mark.parametrize("is_first", [True, False])
def test_events_before_the_time_that_was_asked_for_are_not_missing(is_first: bool) -> None:
    follower = Follower()
    if not is_first:
        follower.take([], 1.0)
    assert told(follower.take([put(7, 2.0)], 2.0).events) == [("put", 7)]


def test_while_a_peer_is_silent_the_looks_ask_for_what_it_missed() -> None:
    follower, silent = Follower(), missing(Reason.SILENT)
    assert follower.since(100.0) is None
    assert follower.take([put(1, 99.0)], 100.0).until == 100.0
    for asked in (110.0, 120.0):
        look = follower.take([silent], asked)
        assert (look.until, look.now) == (100.0, [silent])
    assert follower.since(130.0) == 100.0 - OVERLAP_S
    assert follower.since(500.0) == 500.0 - SILENT_S - OVERLAP_S  # it has a limit
    assert follower.take([], 500.0).until == 500.0


def test_events_of_a_peer_that_was_silent_since_it_began_are_missing() -> None:
    follower = Follower()
    follower.take([missing(Reason.SILENT)], 100.0)
    assert told(follower.take([put(5, 200.0)], 200.0).events) == [("overwritten", 4), ("put", 5)]


def test_clocks_that_differ_put_off_the_time_until_which_all_is_known() -> None:
    follower = Follower()
    assert follower.take([put(1, 9.0, uncertain=0.25)], 10.0).until == 9.75
    assert follower.since(11.0) == 9.75 - OVERLAP_S


@pytest.mark.parametrize("seed", range(20))
def test_events_of_many_peers_are_taken_once_in_any_order_of_their_times(seed: int) -> None:
    """A peer's clock is measured again, so its numbers and its times may disagree a little."""
    rng = random.Random(seed)
    events = [
        put(n, n / 10 + rng.uniform(-0.2, 0.2), incarnation=peer, peer=str(peer))
        for peer in (1, 2, 3)
        for n in range(1, 100)
    ]
    events.sort(key=lambda e: e.at)
    follower, found = Follower(), list[Event]()
    for asked in range(12):
        since = follower.since(float(asked))
        # A peer answers with a run of its numbers, from the first that is late enough.
        due = list[Event]()
        for peer in ("1", "2", "3"):
            mine = sorted((e for e in events if e.peer == peer), key=lambda e: e.number)
            low = min([e.number for e in mine if since is None or e.at > since], default=100)
            due += [e for e in mine if low <= e.number <= 10 * asked]
        found += follower.take(sorted(due, key=lambda e: e.at), float(asked)).events
    assert sorted(found, key=lambda e: (e.peer, e.number)) == sorted(
        events, key=lambda e: (e.peer, e.number)
    )
