"""Who waits for the backup, which may not come back for as long as nobody makes another roster."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from dataplane.errors import Unavailable
from dataplane.peer.host import Progress
from dataplane.wire.messages import OVERDUE

TRIES = 100


async def test_who_is_out_of_time_or_gave_up_is_kept_no_longer() -> None:
    """What is asked again and again until the backup is there was kept each time, with the error
    that it ended with: a megabyte a second."""
    progress = Progress()
    progress.done, progress.required = 1, True
    late = [progress.reached(0.0) for _ in range(TRIES)]
    given_up = [progress.reached(math.inf) for _ in range(TRIES)]
    progress.done = 2
    stays = progress.reached(math.inf)
    for one in given_up:
        one.cancel()
    for one in late:
        with pytest.raises(Unavailable):
            await one
    await asyncio.sleep(0)
    assert len(progress._waiting) == 1
    progress.move(1)
    assert progress.is_awaited and not stays.done()
    progress.move(2)
    assert stays.done() and not progress.is_awaited


@pytest.mark.parametrize("is_slow", [True, False])
async def test_only_a_backup_that_confirmed_just_now_is_called_slow(is_slow: bool) -> None:
    """A call at a slow peer ends with DeadlineExceeded. If the backup is away, it is
    Unavailable."""
    progress = Progress()
    progress.required, progress.done = True, 1
    progress.is_slow = lambda: is_slow
    with pytest.raises(Unavailable, match="did not confirm") as caught:
        await progress.reached(time.monotonic() + 0.01)
    assert (OVERDUE in caught.value.details) == is_slow


async def test_replies_wait_for_work_that_comes_before_them() -> None:
    progress = Progress()
    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
    progress.hold(first, "the first work is not done")
    reached = progress.reached(math.inf)
    progress.hold(second, "the second work is not done")
    first.cancel()
    await asyncio.sleep(0)
    assert not reached.done() and not progress.is_settled
    second.set_result(None)
    await asyncio.sleep(0)
    assert reached.done() and progress.is_settled
