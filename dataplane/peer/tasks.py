"""What a peer does beside a call: tasks that end with the peer, work that blocks, and answers that
are waited for until a time."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

from dataplane.errors import DataplaneError
from dataplane.peer.failures import fail

log = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """They end with the peer, and no failure is lost."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()
        self.closed = False

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A background task whose failure is logged, never lost. No call's deadline is its own.
        Nothing begins any more once the peer has ended: nobody would see to its end."""
        if self.closed:
            work.close()
            work = asyncio.sleep(0)
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def hold(self, work: asyncio.Future[Any]) -> asyncio.Future[Any]:
        """It ends with this peer; whoever began it looks at its failure."""
        if not work.done():
            self._tasks.add(work)
            work.add_done_callback(self._tasks.discard)
        return work

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, DataplaneError):
            log.warning("peer: a background task failed: %s", failure)
        elif failure is not None:
            log.error("peer: internal error in a background task", exc_info=failure)

    async def close(self) -> None:
        self.closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Threads:
    """Work that blocks, which is waited for before what it works on goes."""

    def __init__(self) -> None:
        self._jobs: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[..., None], *args: Any) -> None:
        """Also a cancelled call waits for the thread: the bytes it moves must stay until then."""
        job = asyncio.get_running_loop().run_in_executor(None, work, *args)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        cancelled: asyncio.CancelledError | None = None
        while not job.done():
            try:
                await asyncio.wait([job])
            except asyncio.CancelledError as exc:
                cancelled = exc
        failed = job.exception()
        if cancelled is not None:
            raise cancelled
        if failed is not None:
            raise failed

    async def ended(self) -> None:
        """Until none of them runs."""
        if self._jobs:
            await asyncio.wait(self._jobs)


# work that may wait for nothing


def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `work` to where it first waits. The task that goes on with it; None where it has ended.

    Until then it runs in its caller's context and in no task: `asyncio.timeout` does not work in
    it, `within` does.
    """
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    rest = _rest(work, awaited)
    rest.send(None)  # a task that is cancelled before its first step would never reach `work`
    return asyncio.get_running_loop().create_task(rest)


async def _rest(work: Coroutine[Any, Any, None], awaited: object) -> None:
    await _resumed(work, awaited)


@types.coroutine
def _resumed(work: Coroutine[Any, Any, None], awaited: object) -> Generator[Any, Any, None]:
    """Go on with `work`, which waits for `awaited`. Pauses once before that."""
    is_begun = False
    while True:
        try:
            if not is_begun:
                is_begun = True
                yield
            value = yield awaited
        except BaseException as exc:
            go_on: Callable[[Any], object] = work.throw
            given: object = exc
        else:
            go_on, given = work.send, value
        try:
            awaited = go_on(given)
        except StopIteration:
            return


async def result_of(outcome: Awaitable[T]) -> T:
    """What comes of it. Also where this is cancelled when that has come: its maker has ended then,
    and gives nothing back itself."""
    try:
        return await outcome
    except asyncio.CancelledError:
        if isinstance(outcome, asyncio.Future) and outcome.done() and not outcome.cancelled():
            result: T = outcome.result()
            return result
        raise


async def within(limit_s: float, work: Awaitable[T]) -> T:
    """The result of `work`. TimeoutError, and it is cancelled, when that takes longer."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=None if limit_s == math.inf else max(0.0, limit_s))
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


async def first_of(*works: Awaitable[Any]) -> set[asyncio.Future[Any]]:
    """Those that ended first. The others are cancelled, and have ended by then too."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work) for work in works]
    try:
        return (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def in_time(answer: asyncio.Future[Any], until: float, late: Callable[[], Exception]) -> None:
    """Unless it is done by then (monotonic), it fails with what `late` makes."""
    if until == math.inf:
        return
    left_s = max(0.0, until - time.monotonic())
    timer = asyncio.get_running_loop().call_later(left_s, lambda: fail(answer, late()))
    answer.add_done_callback(lambda _: timer.cancel())
