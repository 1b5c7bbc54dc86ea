"""What a peer counts of its clients' calls."""

from __future__ import annotations

from dataplane.peer.meters import Meters
from dataplane.wire.messages import Failed, Put
from dataplane.wire.tables import Rows


def test_a_put_that_finds_no_room_for_what_it_carries_is_no_failure_yet() -> None:
    meters, refused = Meters(), Failed("BackPressure", "no room")
    meters.observe(Put("p", 1, Rows(b""), [], [], carried=bytes(64)), refused, 0.0)
    assert not meters.failures.sums
    meters.observe(Put("p", 1, Rows(b""), [], []), refused, 0.0)
    assert meters.failures.sums == {"BackPressure": 1}
