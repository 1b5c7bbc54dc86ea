"""What is said of rows and partitions that were lost, and to whom."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from dataplane.memory.arena import Arena
from dataplane.memory.space import Space
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.host import Host


def test_whether_a_generation_was_lost_or_dropped_hangs_on_no_clock() -> None:
    """The host that declared it may have a clock that is an hour ahead, or behind."""
    seeds = ["tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"]
    first = dataclasses.replace(Roster.from_seeds(seeds), incarnations=(1, 2))
    arena = Arena.create(1 << 20, "test")
    host = Host("plane", "a", 1, seeds[0], first, arena, Space(1 << 20), itertools.count(1), (1, 1))
    ahead, behind, now = 4 * 10**18, 10**18, 2 * 10**18

    def reason(generation: int) -> Any:
        return host.gone("p", generation).details["reason"]

    for generation in (ahead, behind):
        host.note_generation("p", generation)
        assert reason(generation) == "dropped"  # no copy was ever lost
    lost = first.lost.copy()
    lost[first.bucket("p")] += 1
    host.turn(dataclasses.replace(first, epoch=(1, 3), lost=lost))
    assert [reason(one) for one in (ahead, behind)] == ["lost", "lost"]
    host.note_generation("p", now)  # declared anew, and dropped
    assert [reason(one) for one in (ahead, behind, now)] == ["lost", "lost", "dropped"]
    arena.close()
