"""A peer that leaves goes when it is known who lives: what it has of the dead may be the last."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.metadata.authority import Authority
from dataplane.metadata.roster import Roster
from dataplane.peer import leaving
from dataplane.peer.leaving import FATE_S, Leaving
from dataplane.wire.tables import Owner

HERE, HEIR, DEAD = (Owner(f"tcp://10.0.0.{i}:7101", i) for i in (1, 2, 3))
TURNS = 50
"""Of the loop, in which whoever does not wait has long gone on."""


class Plane:
    """Of three, as the peer that leaves sees it."""

    def __init__(self) -> None:
        self.authority = Authority(Roster.from_seeds([o.peer for o in (HERE, HEIR, DEAD)]), 77)
        for owner in (HERE, HEIR, DEAD):
            self.authority.beat(owner, self.authority.roster.epoch)
        self.now = 100.0
        self.away: set[str] = set()
        self.met = {owner.peer: owner.incarnation for owner in (HEIR, DEAD)}
        self.said = False
        self.told, self.left = asyncio.Event(), asyncio.Event()
        self.host: Any = SimpleNamespace(
            address=HERE.peer, owner=HERE, name="here", solo=False, entries={}, silent=False
        )
        self.host.now = lambda: self.now
        self.host.progress = SimpleNamespace(settled=self._done)
        mesh: Any = SimpleNamespace(door=SimpleNamespace(under_way=0))
        mesh.others = SimpleNamespace(is_away=self.away.__contains__, incarnation=self.met.get)
        door: Any = SimpleNamespace(close=self._done, under_way=0)
        membership: Any = SimpleNamespace(
            may_leave=lambda: True, leave=self._leave, left=self.left, clear=None
        )
        nothing: Any = None
        self.leaving = Leaving(
            self.host, mesh, membership, nothing, nothing, door, nothing, nothing
        )
        self.turn()

    async def _done(self, *_: object) -> None:
        pass

    def _leave(self) -> None:
        self.said = True
        self.left.set()

    def turn(self) -> None:
        """The next roster is in force here, and this peer's backup has all."""
        self.authority.beat(HERE, self.authority.roster.epoch, synced=True)
        self.host.roster = self.authority.roster


async def _turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


@pytest.mark.parametrize("returned", [False, True], ids=["away", "back as a new process"])
async def test_who_leaves_stays_until_a_dead_member_is_called_lost(
    monkeypatch: pytest.MonkeyPatch, returned: bool
) -> None:
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    plane = Plane()
    if returned:
        plane.met[DEAD.peer] += 1
    else:
        plane.away.add(DEAD.peer)
    plane.told.set()
    leaves = asyncio.create_task(plane.leaving.leave(plane.told))
    await _turns()
    assert not plane.said and not plane.host.silent  # its shards are served meanwhile
    plane.authority.lost(DEAD)
    plane.turn()
    await asyncio.wait_for(leaves, 10)
    assert plane.said


async def test_it_does_not_wait_for_ever_for_one_that_others_may_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaving, "POLL_S", 0.0)
    plane = Plane()
    plane.away.add(DEAD.peer)
    plane.told.set()
    leaves = asyncio.create_task(plane.leaving.leave(plane.told))
    await _turns()
    assert not plane.said
    plane.now += FATE_S
    await asyncio.wait_for(leaves, 10)
    assert plane.said


async def test_where_all_live_it_goes_at_once() -> None:
    plane = Plane()
    plane.told.set()
    await asyncio.wait_for(plane.leaving.leave(plane.told), 10)
    assert plane.said
