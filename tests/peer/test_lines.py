"""Who waits for room, or for a budget, gets it in the order of asking."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from dataplane.errors import BackPressure
from dataplane.memory.admission import Admission
from dataplane.memory.space import Space
from dataplane.peer.budgets import Budgets
from dataplane.peer.room import Room
from dataplane.wire.records import U8

PAGE = 4096


def pages(count: int) -> list[Any]:
    return [np.array([count * PAGE], U8)]


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_small_reservation_does_not_overtake_a_large_one() -> None:
    space = Space(16 * PAGE)
    host: Any = SimpleNamespace(space=space, now=lambda: 0.0)
    room = Room(host)
    held = [space.reserve(1, Admission.PULL, pages(4))[1] for _ in range(4)]
    order = []

    async def ask(who: int, count: int) -> None:
        await room.reserve(who, Admission.PULL, pages(count), 20)
        order.append(who)

    asked = [asyncio.create_task(ask(who, n)) for who, n in ((2, 8), (3, 4), (4, 4))]
    await settled()
    for extents, served in zip(held, ([], [2], [2, 3], [2, 3, 4]), strict=True):
        space.give_back(1, extents)
        if len(served) < 3:
            assert room.at_once(5, Admission.PULL, pages(1)) is None
        room.pump()
        await settled()
        assert order == served
    await asyncio.gather(*asked)


async def test_a_full_budget_lets_in_who_came_first() -> None:
    host: Any = SimpleNamespace(now=lambda: 0.0)
    budgets, free, order = Budgets(host), 0, []

    async def ask(who: int) -> None:
        nonlocal free
        await budgets._wait(("put", 1), lambda: free > 0, BackPressure, 20.0)
        free -= 1
        order.append(who)

    asked = [asyncio.create_task(ask(who)) for who in (1, 2, 3)]
    await settled()
    assert len(budgets) == 3
    for served in ([1], [1, 2], [1, 2, 3], [1, 2, 3, 4]):
        free += 1
        if len(asked) < 4:
            asked.append(asyncio.create_task(ask(4)))
            await asyncio.sleep(0)
        budgets.look()
        await settled()
        assert order == served
    await asyncio.gather(*asked)


async def test_a_client_that_holds_all_it_may_keeps_no_other_waiting() -> None:
    held = {1: 100, 2: 0}
    host: Any = SimpleNamespace(now=lambda: 0.0, space=SimpleNamespace(held_bytes=held.get))
    budgets = Budgets(host, client_bytes=100)
    slow = asyncio.create_task(budgets._wait_for_client(1, 60, 20.0, is_writer=False))
    await settled()
    async with asyncio.timeout(0):  # at once
        await budgets._wait_for_client(2, 60, 20.0, is_writer=False)
    assert len(budgets) == 1 and not slow.done()
    held[1] = 40
    budgets.look()
    await slow
