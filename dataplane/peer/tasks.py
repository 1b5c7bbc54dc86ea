"""What a peer does in the background: it ends with the peer, and no failure is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from contextvars import Context
from typing import Any

from dataplane.errors import DataplaneError

log = logging.getLogger(__name__)


class Tasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def __repr__(self) -> str:
        return f"<Tasks {len(self._tasks)} under way>"

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """A background task whose failure is logged, never lost. No call's deadline is its own."""
        coroutine = work if isinstance(work, Coroutine) else _awaited(work)
        task = asyncio.get_running_loop().create_task(coroutine, context=Context())
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
            log.warning("not done: %s", failure)
        elif failure is not None:
            log.error("a background task failed", exc_info=failure)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work
