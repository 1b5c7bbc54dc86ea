"""Work that blocks, in a thread, for the one event loop of the peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Threads:
    """Jobs of one part of the peer, which can wait for all of them before it goes."""

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
