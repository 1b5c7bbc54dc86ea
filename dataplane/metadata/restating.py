"""Whose shards moved by a roster, so that their new peer asks what is known of their partitions."""

from __future__ import annotations

import numpy as np

from dataplane.metadata.columns import Array
from dataplane.metadata.roster import Roster


def gained(old: Roster, new: Roster) -> dict[str, Array]:
    """Member -> per shard, whether its process was given it by the new roster.

    A process knows nothing of what another one at its address served; the first that is seen there
    counts as another, for it may have been started when rosters had long moved things to and fro.
    """
    numbers: dict[tuple[str, int], int] = {}
    moved = _lives(old, numbers)[old.primaries] != _lives(new, numbers)[new.primaries]
    after = np.unique(new.primaries[moved]).tolist()
    given = {new.members[member]: moved & (new.primaries == member) for member in after}
    return dict(sorted(given.items()))


def _lives(roster: Roster, numbers: dict[tuple[str, int], int]) -> Array:
    """A number for each member's process; equal ones have equal numbers."""
    pairs = zip(roster.members, roster.incarnations, strict=True)
    return np.array([numbers.setdefault(pair, len(numbers)) for pair in pairs])
