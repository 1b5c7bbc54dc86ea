"""Follow the events of a plane: ask all peers again and again, and take each event once.

No I/O: the caller asks for the events since `Follower.since`, and hands over the answer. An event
is known by its peer's incarnation and its number, because a peer that restarts counts from 1 again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from dataplane.events.merge import Event
from dataplane.latest import Latest
from dataplane.wire.events import Kind, Reason

OVERLAP_S = 1.0
"""Each look asks again for the events of this many seconds, because the clocks of peers differ."""
SILENT_S = 60.0
"""After a look that a peer did not answer, the next looks ask for what happened since the last
complete look, up to this many seconds back."""
MAX_PEERS = 65_536
"""The follower remembers this many peers at most."""


class NewEvents(msgspec.Struct, frozen=True):
    """The result of one look.

    - `events`: events that no earlier look brought, the earliest first. If events of a peer are
      lost for good, an event of kind `Kind.MISSING` precedes the peer's next event: `reason` says
      why, and `rows` how many, 0 if that is unknown.
    - `now`: waits and leases that have not ended, and peers that did not answer.
    - `until`: all events before this time have been asked for, on the clock of `Event.at`.
    """

    events: list[Event]
    now: list[Event]
    until: float


class Follower:
    """Remembers which events have been taken, by peer."""

    def __init__(self) -> None:
        self._newest = Latest[int, int](MAX_PEERS)
        """The number of the newest event of each incarnation."""
        self._incarnations = Latest[str, int](MAX_PEERS)
        """The last incarnation of each peer."""
        self._has_looked = False
        self._complete = -math.inf
        """When the last look began that every peer answered."""
        self._is_complete = True
        """Whether every peer answered the last look."""
        self._uncertain = 0.0

    def since(self, now: float) -> float | None:
        """Return the time since which events are due, None for all of them. `now`: on this host's
        clock."""
        return self._until(now) - OVERLAP_S if self._has_looked else None

    def take(self, events: Sequence[Event], asked: float) -> NewEvents:
        """Return the new events. `events`: as `merged` returns them. `asked`: when the plane was
        asked, on this host's clock."""
        by, now = defaultdict[int, list[Event]](list), list[Event]()
        overwritten = dict[int, int]()
        for e in events:
            if e.number:
                by[e.incarnation].append(e)
            elif e.kind is Kind.MISSING and e.reason is Reason.OVERWRITTEN:
                overwritten[e.incarnation] = e.rows
            else:
                now.append(e)
        new = [one for mine in by.values() for one in self._new(mine, overwritten)]
        self._has_looked = True
        self._is_complete = not any(e.reason is Reason.SILENT for e in now)
        self._uncertain = max([e.uncertain for e in events], default=0.0)
        if self._is_complete:
            self._complete = asked
        return NewEvents(sorted(new, key=lambda e: e.at), now, self._until(asked))

    def _until(self, asked: float) -> float:
        return max(self._complete, asked - SILENT_S) - self._uncertain

    def _new(self, mine: list[Event], overwritten: dict[int, int]) -> Iterator[Event]:
        """Yield the new events of one incarnation, each after the gap before it."""
        # Peers' clocks are measured again and again, so times may order them otherwise.
        mine.sort(key=lambda e: e.number)
        incarnation = mine[0].incarnation
        if incarnation not in self._newest:
            yield from self._first(mine[0], overwritten.get(incarnation, 0))
        for e in mine:
            newest = self._newest[incarnation]
            if e.number > newest:
                if e.number > newest + 1:
                    yield _gap(e, Reason.OVERWRITTEN, e.number - newest - 1)
                self._newest[incarnation] = e.number
                yield e

    def _first(self, first: Event, overwritten: int) -> Iterator[Event]:
        """Yield the gap before the first event of an incarnation. `overwritten`: how many events
        the peer itself calls lost."""
        many = overwritten if self._is_complete else first.number - 1
        if self._incarnations.get(first.peer, first.incarnation) != first.incarnation:
            yield _gap(first, Reason.RESTARTED)
        elif many:
            yield _gap(first, Reason.OVERWRITTEN, many)
        self._incarnations[first.peer] = first.incarnation
        self._newest[first.incarnation] = first.number - 1


def _gap(before: Event, reason: Reason, many: int = 0) -> Event:
    return Event(
        Kind.MISSING,
        before.at,
        before.peer,
        reason=reason,
        rows=many,
        incarnation=before.incarnation,
    )
