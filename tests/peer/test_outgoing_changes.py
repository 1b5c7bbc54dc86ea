"""The numbers under which a peer asks for changes, and the floors below which it asks for none."""

from __future__ import annotations

import asyncio
import time

import pytest

from dataplane.errors import Unavailable
from dataplane.peer.requests import outgoing_changes
from dataplane.peer.requests.outgoing_changes import ChangeNumbers
from dataplane.wire.messages import OVERDUE
from dataplane.wire.tables import Change, Owner

ME = Owner("tcp://10.0.0.1:7101", 7)
SOON_S = 30.0


async def begun(changes: ChangeNumbers, partition: str = "p", wait_s: float = SOON_S) -> Change:
    return await changes.begin(partition, 1, time.monotonic() + wait_s)


async def test_the_floor_is_the_lowest_change_of_the_partition_that_is_not_over() -> None:
    changes = ChangeNumbers(ME)
    one, two = await begun(changes), await begun(changes)
    assert one == Change(ME, 1, 1) and two == Change(ME, 2, 1)
    assert await begun(changes, "q") == Change(ME, 3, 3), "another shard answers by itself"
    changes.end("p", 1, two)
    assert (await begun(changes)).floor == 1
    changes.end("p", 1, one)
    changes.end("p", 1, one)
    assert await begun(changes) == Change(ME, 5, 4)


async def test_a_change_waits_while_too_many_are_above_the_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing_changes, "MAX_CHANGES_ABOVE_FLOOR", 3)
    changes = ChangeNumbers(ME)
    first, *others = [await begun(changes) for _ in range(3)]
    for one in others:
        changes.end("p", 1, one)
    waiting = asyncio.ensure_future(begun(changes))
    await asyncio.sleep(0)
    assert not waiting.done() and (await begun(changes, "q")).number == 4
    pending = "partition 'p': 3 changes from this host are pending"
    with pytest.raises(Unavailable, match=pending) as refused:
        await begun(changes, wait_s=0.01)
    assert refused.value.details[OVERDUE]  # a client whose deadline ended it gets DeadlineExceeded
    changes.end("p", 1, first)
    assert await waiting == Change(ME, 5, 5)


async def test_a_peer_keeps_nothing_of_partitions_whose_changes_are_over() -> None:
    changes = ChangeNumbers(ME)
    for partition in map(str, range(1_000)):
        changes.end(partition, 1, await begun(changes, partition))
    assert repr(changes) == "<ChangeNumbers 0 pending, of 0 partitions>"
