"""`plane.metrics()`: the sums of a client since the last call."""

from __future__ import annotations

import pytest

import dataplane
from dataplane import Partition, Plane
from dataplane.wire.events import Events
from dataplane.wire.messages import Failed, Stats, StatsDone
from tests.client.scripted_peer import ScriptedPeer


def test_metrics_that_fail_leave_their_sums_to_the_next(
    peer: ScriptedPeer, plane: Plane, part: Partition
) -> None:
    arena = {f"{name}_bytes": 0 for name in ("size", "used", "pinned", "cached", "spilled")}
    stats = {"arena": arena, "everywhere": {"partitions": {}}, "pulled_bytes": 0}
    peer.scripts[Stats] = lambda r, b: StatsDone({**stats, "carried_bytes": 0})
    peer.scripts[Events] = lambda r, b: Failed("Unavailable", "not now")
    part.put({"a": [1, 2, 3]})
    with pytest.raises(dataplane.Unavailable, match="not now"):
        plane.metrics("x")
    assert plane.metrics()["put/rows"] == 3
    assert plane.metrics()["put/rows"] == 0
