"""Work that is stepped once, and goes on as a task where it waits."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from dataplane.peer.tasks import begin, within

VARIABLE: ContextVar[str] = ContextVar("VARIABLE", default="")


async def test_work_that_waits_for_nothing_needs_no_task() -> None:
    done = list[str]()

    async def work() -> None:
        done.append("work")

    assert begin(work()) is None and done == ["work"]


async def test_work_that_waits_goes_on_in_its_beginners_context() -> None:
    came, done = asyncio.get_running_loop().create_future(), list[str]()

    async def work() -> None:
        for _ in range(2):
            await asyncio.sleep(0)
        done.append(await came + VARIABLE.get())
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        except TimeoutError:
            done.append("late")

    VARIABLE.set(" of the first")
    task = begin(work())
    assert task is not None
    VARIABLE.set(" of the next")
    came.set_result("came")
    await task
    assert done == ["came of the first", "late"]


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancelled_task_cleans_up_however_early_it_is_cancelled(turns: int) -> None:
    done = list[str]()

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            done.append("gave back")
            raise

    task = begin(work())
    assert task is not None
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and done == ["gave back"]


async def test_a_failure_after_a_wait_is_the_tasks() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise KeyError("it")

    task = begin(work())
    assert task is not None
    with pytest.raises(KeyError):
        await task
    with pytest.raises(KeyError):
        begin(_fails())


async def _fails() -> None:
    raise KeyError("it")


async def test_within_its_limit_work_has_its_result_and_is_cancelled_beyond_it() -> None:
    assert await within(10.0, asyncio.sleep(0, "done")) == "done"
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await within(0.0, never)
    assert never.cancelled()
