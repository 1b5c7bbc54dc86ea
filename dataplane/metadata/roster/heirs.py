"""Who serves what a peer's shards held that is gone, or handed them over. Sans-I/O.

Kept by every peer from the rosters that it adopts. One that misses a roster learns from the next
who took over from whom in between: an heir speaks for all that it took over, step by step.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataplane.metadata.roster.roster import Roster
from dataplane.wire.tables import Owner


class Heirs:
    def __init__(self) -> None:
        self._heirs: dict[Owner, Owner] = {}
        self._since: dict[Owner, int] = {}
        """number of the roster under which it was taken over"""

    def __repr__(self) -> str:
        return f"<Heirs of {len(self._heirs)} processes>"

    def follow(self, old: Roster, new: Roster) -> None:
        """A newer roster is in force here."""
        for one in new.takeovers:
            if one.number > old.epoch[1]:
                self._enter(one.owner, one.heir, one.number)
        for owner in old.owners:  # a roster tells no more than the last of them
            heir = new.heir_of(old, owner)
            if heir not in (owner, self.heir(owner)):
                self._enter(owner, heir, new.epoch[1])

    def _enter(self, owner: Owner, heir: Owner, number: int) -> None:
        self._heirs[owner] = heir
        self._since[owner] = number
        self._heirs.pop(heir, None)  # it serves again, whoever took over from it

    def heir(self, owner: Owner) -> Owner:
        """Who serves it now: the peer itself, or the last who took over."""
        while owner in self._heirs:
            owner = self._heirs[owner]
        return owner

    def after(self, owner: Owner) -> Iterator[tuple[int, Owner]]:
        """Who took over one after the other, each with the number of the roster that said so."""
        while owner in self._heirs:
            heir = self._heirs[owner]
            yield self._since[owner], heir
            owner = heir
