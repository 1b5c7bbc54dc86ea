"""Answers that are waited for: each fails when its own time is up, and none before."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import uvloop

from dataplane.errors import Unavailable
from dataplane.peer.host import Progress
from dataplane.peer.tasks import in_time

SOON_S, LATER_S = 0.05, 20.0


def answer() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


async def two_of_three_are_late() -> None:
    now = time.monotonic()
    later, soon, sooner = answer(), answer(), answer()
    in_time(later, now + LATER_S, lambda: ValueError("later"))
    in_time(soon, now + 2 * SOON_S, lambda: ValueError("soon"))
    in_time(sooner, now + SOON_S, lambda: ValueError("sooner"))
    for one, word in ((sooner, "sooner"), (soon, "soon")):
        with pytest.raises(ValueError, match=word):
            await asyncio.wait_for(one, 10)
    assert not later.done()
    later.set_result(None)


async def test_each_answer_fails_at_its_own_time() -> None:
    await two_of_three_are_late()


def test_each_answer_fails_at_its_own_time_with_uvloop() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(two_of_three_are_late())


async def test_an_answer_that_came_first_is_left_alone() -> None:
    now = time.monotonic()
    came, late = answer(), answer()
    in_time(came, now + SOON_S, lambda: ValueError("came"))
    in_time(late, now + 2 * SOON_S, lambda: ValueError("late"))
    came.set_result("here")
    with pytest.raises(ValueError, match="late"):
        await asyncio.wait_for(late, 10)
    assert await came == "here"


async def test_what_was_done_is_reached_when_the_backup_has_it_and_not_before() -> None:
    progress = Progress()
    progress.required, progress.done = True, 2
    two = progress.reached(time.monotonic() + LATER_S)
    progress.done = 3
    three = progress.reached(time.monotonic() + LATER_S)
    progress.move(1)
    assert not two.done()
    progress.move(2)
    assert two.done() and not three.done()
    progress.required = False  # the roster names no backup any more
    progress.wake()
    await asyncio.wait_for(asyncio.gather(two, three), 10)


async def test_a_backup_that_says_nothing_is_told_of_in_time() -> None:
    progress = Progress()
    progress.required, progress.done = True, 1
    with pytest.raises(Unavailable, match="did not confirm"):
        await asyncio.wait_for(progress.reached(time.monotonic() + SOON_S), 10)
