"""Claims that wait: how one is taken back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from dataplane.metadata.roster import Roster
from dataplane.peer import outcomes
from dataplane.peer.claims import Claims, Waiting
from dataplane.wire.messages import Body, Claim, Done, Want
from dataplane.wire.peering import Withdraw

HERE, THERE = "tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"


async def test_a_claim_is_taken_back_also_where_a_roster_comes_that_moves_nothing() -> None:
    """Or else it stays at its home, which goes on, and all claims behind it wait for ever."""
    told: list[tuple[Callable[[], str | None], Body]] = []

    async def insist(find: Callable[[], str | None], body: Body) -> None:
        told.append((find, body))

    def spawn(work: Awaitable[Any]) -> asyncio.Future[Any]:
        return asyncio.ensure_future(work)

    before = Roster.from_seeds([HERE, THERE])
    host: Any = SimpleNamespace(address=HERE, incarnation=1, roster=before)
    mesh: Any = SimpleNamespace(handlers={}, on_parted=[], insist=insist, spawn=spawn)
    credit: Any = SimpleNamespace(back=lambda number: None)
    supplying: Any = SimpleNamespace(release=None)
    claims = Claims(host, mesh, *[None] * 6, supplying, credit)  # type: ignore[arg-type]
    entry: Any = SimpleNamespace(name="p", generation=1)
    want = Claim("p", 1, "s", Want("rows", 1, 1))
    await claims._give_up(7, Waiting(entry, THERE), entry, want)
    await asyncio.sleep(0)
    ((find, body),) = told
    assert isinstance(body, Withdraw) and body.number == 7
    synced = np.ones(before.shards, np.bool_)
    host.roster = dataclasses.replace(before, epoch=(before.epoch[0], 2), in_sync=synced)
    assert find() == THERE
    moved = np.zeros(before.shards, np.uint16)
    host.roster = dataclasses.replace(before, epoch=(before.epoch[0], 3), primaries=moved)
    assert find() is None  # its home forgot it by itself


async def test_a_claim_queues_again_however_often_the_link_to_its_home_breaks() -> None:
    """It may wait for days: three breaks in all that time are nobody's fault."""
    done = Done()

    class Breaking(Claims):
        breaks = 10

        async def _queue_once(self, session: Any, entry: Any, body: Claim) -> Body:
            self.breaks -= 1
            if self.breaks:
                raise outcomes.HomeAway
            return done

    mesh: Any = SimpleNamespace(handlers={}, on_parted=[])
    host: Any = SimpleNamespace(incarnation=1, now=asyncio.get_running_loop().time)
    claims = Breaking(host, mesh, *[None] * 8)  # type: ignore[arg-type]
    want = Claim("p", 1, "s", Want("rows", 1, 1))
    entry: Any = SimpleNamespace(name="p")
    assert await claims._queue(None, entry, want) is done  # type: ignore[arg-type]
