"""Whoever waits until this peer may answer for its shards."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import Unavailable
from dataplane.metadata.roster.authority import Authority
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.host import LEASE_S, POLL_S, SUCCESSION_S, Serving
from dataplane.wire.peering import Beat
from dataplane.wire.tables import Owner

HERE, THERE = Owner("tcp://10.0.0.1:7101", 1), Owner("tcp://10.0.0.2:7101", 2)


class Clock:
    """A primary, and the time as it has it."""

    def __init__(self, in_sync: bool) -> None:
        made = Authority(Roster.from_seeds([HERE.peer, THERE.peer]), 77, keeper=THERE.peer)
        for owner in (HERE, THERE):
            made.beat(owner, made.roster.epoch, Beat())
        made.beat(HERE, made.roster.epoch, Beat(synced=in_sync))
        self.now = 100.0
        host: Any = SimpleNamespace(
            name="a", address=HERE.peer, roster=made.roster, now=lambda: self.now
        )
        self.serving = Serving(host)

    def is_sure_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.serving.is_sure()


def test_a_primary_answers_only_shortly_after_it_asked_what_its_backup_confirmed() -> None:
    clock = Clock(in_sync=True)
    clock.serving.heard = clock.now
    assert not clock.serving.is_sure()  # the keeper's word does not replace the backup's
    asked = clock.now
    clock.now += 0.4  # on its way
    clock.serving.confirmed(THERE, asked)
    assert clock.is_sure_after(LEASE_S - 0.5)
    assert not clock.is_sure_after(0.2)
    clock.serving.confirmed(THERE, clock.now)
    clock.serving.confirmed(THERE, asked)  # an answer that was overtaken
    assert clock.serving.is_sure()
    clock.serving.confirmed(HERE, clock.now)  # of a backup before
    assert not clock.serving.is_sure()


def test_without_a_backup_in_sync_the_keeper_confirms() -> None:
    clock = Clock(in_sync=False)
    clock.serving.confirmed(THERE, clock.now)
    clock.serving.heard = clock.now - LEASE_S
    assert not clock.serving.is_sure()
    clock.serving.heard = clock.now
    assert clock.is_sure_after(LEASE_S - 0.1)
    assert not clock.is_sure_after(0.2)


def test_a_promoted_backup_waits_until_the_old_primary_has_fallen_silent() -> None:
    clock = Clock(in_sync=False)
    confirmed_at = clock.now
    clock.now += 0.7
    clock.serving.succeed(confirmed_at)
    clock.serving.heard = clock.now
    assert not clock.serving.is_sure()
    clock.now = confirmed_at + SUCCESSION_S
    clock.serving.heard = clock.now
    assert clock.serving.is_sure()
    assert SUCCESSION_S > LEASE_S


class Unsure(Serving):
    """Until the test says so."""

    sure = False

    def is_sure(self) -> bool:
        return self.sure


def unsure() -> Unsure:
    roster = Roster.from_seeds([HERE.peer, THERE.peer])
    host: Any = SimpleNamespace(name="a", address=HERE.peer, roster=roster, now=time.monotonic)
    return Unsure(host)


async def test_who_waits_goes_on_in_the_order_in_which_they_came() -> None:
    """A client gives its part in a plan back, and asks for the next one: in this order."""
    serving, went = unsure(), list[int]()

    async def wait(number: int) -> None:
        await serving.until_sure(math.inf)
        went.append(number)

    waiting = []
    for number in range(5):
        waiting.append(asyncio.create_task(wait(number)))
        await asyncio.sleep(POLL_S / 3)
    serving.sure = True
    for number in range(5, 10):  # who comes now overtakes nobody, sure as this peer is
        waiting.append(asyncio.create_task(wait(number)))
        await asyncio.sleep(POLL_S / 3)
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert went == list(range(len(waiting))) and not serving.waiting
    await serving.until_sure(0.0)


async def test_a_wait_that_is_in_vain_ends_in_time_and_holds_up_nobody() -> None:
    serving = unsure()
    patient = asyncio.create_task(serving.until_sure(math.inf))
    with pytest.raises(Unavailable, match="no backup in sync"):
        await serving.until_sure(time.monotonic() + 0.01)
    given_up = asyncio.create_task(serving.until_sure(math.inf))
    await asyncio.sleep(0)
    given_up.cancel()
    serving.sure = True
    await asyncio.wait_for(patient, 10)
    assert given_up.cancelled() and not serving.waiting
