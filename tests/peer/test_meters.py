"""What a peer counts of its clients' calls."""

from __future__ import annotations

from dataplane.peer.watch.metrics import Meters
from dataplane.wire.messages import Failed, Put
from dataplane.wire.tables import Rows


def test_a_put_whose_small_values_the_shard_does_not_take_is_no_failure_yet() -> None:
    meters, put = Meters(), Put("p", 1, Rows(b""), [], [])
    meters.observe(put, Failed("ShardFull", "no room", {"values": True}), 0.0)
    assert not meters.failures.sums
    meters.observe(put, Failed("ShardFull", "no room"), 0.0)
    assert meters.failures.sums == {"ShardFull": 1}
