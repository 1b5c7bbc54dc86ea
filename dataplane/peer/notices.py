"""When and what a waiting call writes to the log of its own process; see `metadata.shard.reasons`.

A waiting call is inside a `Telling`. If several calls wait for the same reason, one logs for all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from dataplane.errors import counted, duration
from dataplane.metadata.shard import reasons
from dataplane.peer.host import Host, call_context

REST_S = 0.2

Why = tuple[str, dict[str, Any]]
"""The reason in words, and the same in figures."""


@dataclass(eq=False, repr=False)
class Telling:
    """Logs what one call waits for, at intervals.

    look: returns what the call waits for, as far as that is known. soon: log early, because the
    call's own process may be the reason. learn: asks other peers first for what `look` reports.
    """

    host: Host
    what: object
    subject: reasons.Subject
    look: Callable[[], Why]
    soon: bool = False
    learn: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._notice = call_context.get().notice
        self._timer: asyncio.TimerHandle | None = None
        self._learning: asyncio.Future[None] | None = None

    def __enter__(self) -> Telling:
        self._began = self.host.now() - call_context.get().delayed_s
        self.host.notices.begin(self.subject, self._began)
        self._arm(reasons.SOON_S if self.soon else reasons.FIRST_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.host.notices.end(self.subject)
        if self._timer is not None:
            self._timer.cancel()
        if self._learning is not None:
            self._learning.cancel()

    def _arm(self, most_s: float = math.inf) -> None:
        left_s = min(self.host.notices.wait_s(self.subject, self.host.now()), most_s)
        left_s = max(REST_S, left_s)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._ring)

    def _ring(self) -> None:
        many = self.host.notices.take(self.subject, self.host.now())
        if many and self.learn is not None:
            self._learning = asyncio.ensure_future(self._learn_and_notify(self.learn, many))
        elif many or self.soon:
            self._notify(many)
        self.soon = False
        self._arm()

    async def _learn_and_notify(self, learn: Callable[[], Awaitable[None]], many: int) -> None:
        await learn()
        self._notify(many)

    def _notify(self, many: int) -> None:
        why, details = self.look()
        self.host.notices.set_reason(self.subject, why, details.get("reason", ""))
        if many or details.get("only_own"):
            waited_s = self.host.now() - self._began
            others = f" (and {counted(many - 1, 'other')} on this host)" if many > 1 else ""
            self._notice(f"{self.what}{others} has waited {duration(waited_s)}: {why}")
