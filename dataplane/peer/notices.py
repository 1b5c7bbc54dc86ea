"""What a waiting call says in the log of its own process, and when: see `metadata.shard.reasons`.

A call that waits is inside of a `Telling`. One of those that wait for the same speaks for all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from dataplane.errors import DataplaneError, counted
from dataplane.metadata.shard import reasons
from dataplane.peer.host import Host, call_notice

ASK_S = 2.0
"""How long the reason is looked for."""
LAST_S = 0.3
"""... by a call itself whose time is up: within what it may then still take."""
REST_S = 0.2

Why = tuple[str, dict[str, Any]]
"""For people, and the same in figures."""


@dataclass(eq=False, repr=False)
class Telling:
    """Says what one call waits for, when that is due.

    soon: its own process may be all that it waits for, which is to be said at once.
    """

    host: Host
    what: object
    subject: reasons.Subject
    look: Callable[[float], Awaitable[Why]]
    soon: bool = False

    def __post_init__(self) -> None:
        self._notice = call_notice.get()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Telling:
        self._began = self.host.now()
        self.host.notices.begin(self.subject, self._began)
        self._arm(reasons.SOON_S if self.soon else reasons.FIRST_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.host.notices.end(self.subject)
        for one in (self._timer, self._task):
            if one is not None:
                one.cancel()

    def _arm(self, most_s: float = math.inf) -> None:
        left_s = min(self.host.notices.wait_s(self.subject, self.host.now()), most_s)
        left_s = max(REST_S, left_s)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._ring)

    def _ring(self) -> None:
        many = self.host.notices.take(self.subject, self.host.now())
        if many or self.soon:
            self._task = asyncio.ensure_future(self._tell(many))
        else:
            self._arm()

    async def _tell(self, many: int) -> None:
        self.soon = False
        try:
            why, details = await self.look(ASK_S)
        except DataplaneError as exc:
            why, details = exc.message, {}
        self.host.notices.said(self.subject, why)
        if many or details.get("only_own"):
            waited_s = self.host.now() - self._began
            others = f" (and {counted(many - 1, 'other')} of this host)" if many > 1 else ""
            self._notice(f"{self.what}{others} has waited {waited_s:.0f} s: {why}")
        self._arm()
