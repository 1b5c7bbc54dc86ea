"""Background work of a peer: tasks that end with the peer, blocking work in threads, and waits
with a deadline."""

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
    """Tasks that end with the peer. Every failure is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()
        self.closed = False

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a background task, independent of the current call's deadline. Its failure is
        logged. Start nothing after the peer has closed."""
        if self.closed:
            work.close()
            work = asyncio.sleep(0)
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def hold(self, work: asyncio.Future[Any]) -> asyncio.Future[Any]:
        """Cancel this work when the peer ends. Its starter handles its failure."""
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
    """Threads for blocking work. The peer waits for them before it frees what they use."""

    def __init__(self) -> None:
        self._jobs: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[..., None], *args: Any) -> None:
        """Run a function in a thread. A cancelled call still waits for the thread, because its
        bytes must stay until then."""
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
        """Wait until no thread runs."""
        if self._jobs:
            await asyncio.wait(self._jobs)


# work that may end without a wait


def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `work` up to its first wait. Return the task that continues it, or None if it has ended.

    Until the first wait, it runs in its caller's context and in no task. There `asyncio.timeout`
    does not work, but `within` does.
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
    """Continue `work`, which waits for `awaited`. Pauses once before that."""
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


def result_of(outcome: Awaitable[T]) -> Awaitable[T]:
    """Return an awaitable of the result of `outcome`. A caller that is cancelled after the task has
    ended still gets its result, because the task can no longer undo its work."""
    return _result_of(outcome) if isinstance(outcome, asyncio.Future) else outcome


async def _result_of(task: asyncio.Future[T]) -> T:
    try:
        return await task
    except asyncio.CancelledError:
        if task.done() and not task.cancelled():
            return task.result()
        raise


async def within(limit_s: float, work: Awaitable[T]) -> T:
    """Return the result of `work`, or cancel it and raise TimeoutError after `limit_s`."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=None if limit_s == math.inf else max(0.0, limit_s))
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


async def first_of(*works: Awaitable[Any]) -> set[asyncio.Future[Any]]:
    """Return the works that ended first. The others are cancelled and have ended too."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work) for work in works]
    try:
        return (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def in_time(answer: asyncio.Future[Any], until: float, late: Callable[[], Exception]) -> None:
    """Fail a future at a time (monotonic) with the error that `late` makes, unless it is done by
    then."""
    if until == math.inf:
        return
    left_s = max(0.0, until - time.monotonic())
    timer = asyncio.get_running_loop().call_later(left_s, lambda: fail(answer, late()))
    answer.add_done_callback(lambda _: timer.cancel())
