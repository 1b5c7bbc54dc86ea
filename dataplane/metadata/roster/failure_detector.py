"""Which members are lost: judged on evidence of their death, never on lateness alone.

Sans-I/O: evidence and times in, lost members out. `Contacts` keeps what one peer finds out itself
about the processes and hosts that it watches. `FailureDetector` belongs to the roster keeper. It
joins the keeper's own contacts with the messages it hears and with what other members report.

A member is lost on one of four grounds:

- process gone: its own host says so (`Contacts.ended`);
- all processes gone: every port of it is refused for REFUSED_S without a break;
- host gone: its kernel answers neither the keeper nor one more member for UNREACHED_S, and the
  keeper hears nothing from it in that time;
- silent: it sends no message for `lost_after_s`. Except on the first ground, a keeper that hears
under half of the members first suspects its own network. Time in which the keeper did not run
counts against nobody. Nor does time in which it heard no member and then heard one again, for a
minute at most: a dead member is lost among slow ones too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

HEARD_S = 3.0
"""The keeper hears a member while the last message from it is younger than this."""
REFUSED_S = 5.0
UNREACHED_S = 7.0
GAP_S = 2.0
"""A streak of refusals or silence breaks if two observations are further apart."""
DOUBT_S = 5.0
"""How much longer a keeper waits if it hears under half of the members."""
ALONE_S = 60.0
"""A keeper of two or more other members declares none lost until it has heard none for this
long."""
RECENT_S = 60.0
"""Members lost this recently without proof of death count as silent."""
RETURN_S = 5.0
"""After a doubt, every member has this long to be heard again."""
STALL_S = 1.2
"""A keeper that paused for longer than this ignores the pause: it could hear nobody."""


@dataclass(slots=True)
class _Streak:
    """An unbroken streak of equal observations."""

    since: float
    last: float

    def go_on(self, since: float, now: float) -> None:
        if since - self.last > GAP_S:
            self.since = since
        self.last = now


class Contacts:
    """What one peer has observed about the processes that it watches."""

    def __init__(self) -> None:
        self._ended: set[Owner] = set()
        self._refused: dict[Owner, _Streak] = {}
        self._unreached: dict[Owner, _Streak] = {}

    # evidence

    def ended(self, peer: Owner) -> None:
        """Note that the process's own host reports its exit."""
        self._ended.add(peer)

    def answered(self, peer: Owner) -> None:
        """Note that the kernel of its host answered, and that a process listens on one of its
        ports."""
        self._refused.pop(peer, None)
        self._unreached.pop(peer, None)

    def refused(self, peer: Owner, now: float) -> None:
        """Note that every port of the process was just refused."""
        self._unreached.pop(peer, None)
        self._refused.setdefault(peer, _Streak(now, now)).go_on(now, now)

    def unanswered(self, peer: Owner, since: float, now: float) -> None:
        """Note that the kernel of its host has answered nothing since `since`."""
        self._refused.pop(peer, None)
        streak = self._unreached.setdefault(peer, _Streak(since, now))
        streak.since = min(streak.since, since)
        streak.go_on(since, now)

    def forget(self, peer: Owner) -> None:
        self.answered(peer)
        self._ended.discard(peer)

    # what follows from it

    def has_ended(self, peer: Owner) -> bool:
        return peer in self._ended

    def is_refused(self, peer: Owner) -> bool:
        """Whether all its ports have been refused for REFUSED_S."""
        streak = self._refused.get(peer)
        return streak is not None and streak.last - streak.since >= REFUSED_S

    def is_unreached(self, peer: Owner) -> bool:
        """Whether the kernel of its host has answered nothing for UNREACHED_S."""
        streak = self._unreached.get(peer)
        return streak is not None and streak.last - streak.since >= UNREACHED_S

    def unreached(self) -> list[Owner]:
        """All unreached processes, as a member reports them to the keeper."""
        return [peer for peer in self._unreached if self.is_unreached(peer)]


class FailureDetector:
    """Decides which members are lost. me: address of the keeper. contacts: its own observations."""

    def __init__(self, me: str, contacts: Contacts, lost_after_s: float) -> None:
        self._me = me
        self._contacts = contacts
        self._lost_after_s = lost_after_s
        self._heard: dict[Owner, float] = {}
        self._excused_s: dict[Owner, float] = {}
        """seconds without any message since the member was last heard; they do not count"""
        self._reports: dict[Owner, frozenset[Owner]] = {}
        self._recent: dict[Owner, float] = {}
        """members lost without proof, and when"""
        self._ran_at = 0.0
        self._any_heard_at = 0.0
        self._doubts_since: float | None = None
        self._sure_at = 0.0

    def __contains__(self, address: str) -> bool:
        return any(owner.peer == address for owner in self._heard)

    # evidence

    def heard(self, peer: Owner, now: float) -> None:
        """Note a message of this process."""
        self._run(now)
        deaf_s = now - self._any_heard_at
        self._excused_s.pop(peer, None)
        self._heard[peer] = self._any_heard_at = now
        if deaf_s > HEARD_S:  # the other members are heard a moment later
            self._excuse(deaf_s, [one for one in self._heard if one != peer], now)

    def reported(self, by: Owner, unreached: Iterable[Owner]) -> None:
        """Note which hosts a member cannot reach now. Replaces its previous report."""
        self._reports[by] = frozenset(unreached)

    # what follows from it

    def lost(self, members: Sequence[Owner], now: float) -> list[Owner]:
        """Return the members that are lost, and forget them. members: the processes that were
        seen; one without a message so far counts as heard now."""
        self._run(now)
        others = [owner for owner in members if owner.peer != self._me]
        for one in others:
            if one not in self._heard:
                self._heard[one] = self._any_heard_at = now
        ended = [one for one in others if self._contacts.has_ended(one)]
        alive = [one for one in others if one not in ended]
        due = [one for one in alive if self._is_due(one, alive, now)]
        if not self._may_lose(due, alive, now):
            due = []
        for one in due:
            self._recent[one] = now
        lost = [*due, *ended]
        self._keep({*others} - {*lost}, now)
        return lost

    def _hears(self, one: Owner, now: float) -> bool:
        return now - self._heard[one] <= HEARD_S

    def _is_due(self, one: Owner, alive: list[Owner], now: float) -> bool:
        silent_s = now - self._heard[one]
        if silent_s >= self._lost_after_s:
            return True
        if silent_s >= REFUSED_S and self._contacts.is_refused(one):
            return True
        # On a flapping link, one connection may fail at every attempt while another one works.
        if silent_s < UNREACHED_S or not self._contacts.is_unreached(one):
            return False
        others = [other for other in alive if other != one and self._hears(other, now)]
        return not others or any(one in self._reports.get(other, ()) for other in others)

    def _may_lose(self, due: list[Owner], alive: list[Owner], now: float) -> bool:
        """Whether the members seem to be gone, rather than the keeper's own network. With one other
        member, the grounds alone decide."""
        heard = sum(self._hears(one, now) for one in alive)
        back = {one.peer for one in alive}
        total = len(alive) + sum(one.peer not in back for one in self._recent)
        if total < 2 or 2 * heard >= total:
            if self._doubts_since is not None:
                log.info("roster keeper: reconnected; %d of %d peers are reachable", heard, total)
                self._doubts_since, self._sure_at = None, now + RETURN_S
            return now >= self._sure_at or not any(map(self._is_excusable, due))
        if self._doubts_since is None:
            if not due:
                return True
            log.warning(
                "roster keeper: only %d of %d peers are reachable. This host's own "
                "network may have failed, so the keeper is not declaring any peer lost for now",
                heard,
                total,
            )
            self._doubts_since = now
        if not heard and now - self._any_heard_at < ALONE_S:
            return False
        return now - self._doubts_since >= DOUBT_S

    def _run(self, now: float) -> None:
        """Do not count a pause of the keeper, because it could hear nobody."""
        missed_s = now - self._ran_at
        self._ran_at = now
        if missed_s > STALL_S:
            self._skip(missed_s)

    def _excuse(self, seconds: float, members: list[Owner], now: float) -> None:
        """Do not count these seconds against these members, up to ALONE_S in total for each."""
        for one in members:
            before_s = self._excused_s.get(one, 0.0)
            more_s = min(seconds, ALONE_S - before_s)
            if more_s > 0:
                self._excused_s[one] = before_s + more_s
                self._heard[one] += more_s
                if self._doubts_since is not None:
                    self._doubts_since = now

    def _is_excusable(self, one: Owner) -> bool:
        return self._excused_s.get(one, 0.0) < ALONE_S

    def _skip(self, seconds: float) -> None:
        """Shift every time by these seconds, so that they count against no member."""
        self._heard = {owner: at + seconds for owner, at in self._heard.items()}
        self._any_heard_at += seconds
        if self._doubts_since is not None:
            self._doubts_since += seconds

    def _keep(self, owners: set[Owner], now: float) -> None:
        self._heard = {owner: at for owner, at in self._heard.items() if owner in owners}
        self._excused_s = {one: s for one, s in self._excused_s.items() if one in owners}
        self._reports = {one: told for one, told in self._reports.items() if one in owners}
        self._recent = {one: at for one, at in self._recent.items() if now - at < RECENT_S}
