"""Which members are lost: those that are silent while others are heard.

Sans-I/O: signs of life and times in, the lost out; the authority's part that doubts itself. Where
most members fall silent at once, it is rather the authority that is cut off, so it waits before it
calls them lost one after the other. Time in which it did not run itself counts against nobody.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

FRESH_S = 1.2
"""A member says every 0.4 s that it lives, and is silent when it did not for so long. Less than it
takes to find out that somebody cannot be reached: whoever is cut off knows it by then."""
SILENT_S = 10.0
"""A peer that can be reached, and yet says nothing for so long, is lost."""
DOUBT_S = 5.0
"""So long most members may be silent before those that cannot be reached are called lost."""
ALONE_S = 60.0
"""The same where nobody is heard, of two or more: nobody is there to take anything over either."""
RETURN_S = 2.0
"""After a doubt all have so long to be heard again."""


class Silence:
    """me: the address of the peer that listens."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._heard: dict[Owner, float] = {}
        self._patience_s: dict[Owner, float] = {}
        self._away: set[Owner] = set()
        self._dead: set[Owner] = set()
        self._ran_at = 0.0
        self._doubts_since: float | None = None
        self._sure_at = 0.0
        self.doubted: list[Owner] = []
        """that would be lost, but for the doubt"""

    def __contains__(self, address: str) -> bool:
        return any(owner.peer == address for owner in self._heard)

    # events

    def heard(self, peer: Owner, now: float) -> None:
        """It lives."""
        self._run(now)
        self._heard[peer] = now
        self._patience_s.pop(peer, None)
        self._away.discard(peer)

    def away(self, peer: Owner, now: float) -> None:
        """It cannot be reached."""
        self._run(now)
        self._heard.setdefault(peer, -math.inf)
        self._away.add(peer)

    def dead(self, peer: Owner) -> None:
        """Its process is gone for sure, and says nothing of who else can be reached."""
        self._dead.add(peer)

    def expect(self, peer: Owner, now: float, within_s: float) -> None:
        """A sign of life so soon, or it is lost."""
        self._run(now)
        self._heard[peer], self._patience_s[peer] = now, within_s

    # what follows from them

    def lost(self, members: Sequence[Owner], now: float) -> list[Owner]:
        """Those that are lost; they are forgotten here. members: that were seen, in this life."""
        self._run(now)
        others = [owner for owner in members if owner.peer != self._me]
        for one in others:
            self._heard.setdefault(one, now)
        living = [one for one in others if one not in self._dead]
        due = [one for one in living if self._is_due(one, now)]
        if not self._may_call(due, living, now):
            self.doubted, due = due, []
        else:
            self.doubted = []
        lost = due + [one for one in others if one in self._dead]
        self._keep({*others} - {*lost})
        return lost

    def _is_due(self, one: Owner, now: float) -> bool:
        silent_s = now - self._heard[one]
        return silent_s > (FRESH_S if one in self._away else self._patience_s.get(one, SILENT_S))

    def _may_call(self, due: list[Owner], living: list[Owner], now: float) -> bool:
        """Whether it is they that are cut off, as far as can be told."""
        silent = [one for one in living if now - self._heard[one] > FRESH_S]
        if 2 * len(silent) <= len(living):
            if self._doubts_since is not None:
                log.info("%d of %d members are heard again", len(living) - len(silent), len(living))
                self._doubts_since, self._sure_at = None, now + RETURN_S
            return now >= self._sure_at
        if self._doubts_since is None:
            if not due:
                return True
            log.warning("%d of %d members are silent: is it they?", len(silent), len(living))
            self._doubts_since = now
        alone = len(silent) == len(living) > 1
        return now - self._doubts_since > (ALONE_S if alone else DOUBT_S)

    def _run(self, now: float) -> None:
        """Whoever did not run heard nobody: as if no time had passed."""
        missed_s = now - self._ran_at
        self._ran_at = now
        if missed_s > FRESH_S:
            self._heard = {owner: at + missed_s for owner, at in self._heard.items()}
            if self._doubts_since is not None:
                self._doubts_since += missed_s

    def _keep(self, owners: set[Owner]) -> None:
        self._heard = {owner: at for owner, at in self._heard.items() if owner in owners}
        self._patience_s = {o: s for o, s in self._patience_s.items() if o in owners}
        self._away &= owners
        self._dead &= owners
