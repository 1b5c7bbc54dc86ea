"""What a waiting call says in the log of its own process, and when: see `metadata.shard.reasons`.

A call that waits is inside of a `Telling`. One of those that wait for the same speaks for all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from dataplane.errors import DataplaneError, counted
from dataplane.metadata.shard import reasons
from dataplane.peer.host import Host, call_notice
from dataplane.peer.tasks import EARLY_S

ASK_S = 2.0
"""How long the reason is looked for."""
MOST_LAST_S, LEAST_LAST_S = 0.5, 0.2
"""... shortly before the end of a call: for a quarter of what it waits at most."""
REST_S = 0.2

Why = tuple[str, dict[str, Any]]
"""For people, and the same in figures."""


class Telling:
    """Says what one call waits for, when that is due, and looks for it once more before its end,
    which is not late for the answer.

    soon: its own process may be all that it waits for, which is to be said at once. end: of the
    call (monotonic).
    """

    def __init__(
        self,
        host: Host,
        what: object,
        subject: reasons.Subject,
        look: Callable[[float], Awaitable[Why]],
        soon: bool = False,
        end: float = math.inf,
    ) -> None:
        self._host = host
        self._what = what
        self._subject = subject
        self._look = look
        self._soon = soon
        self._notice = call_notice.get()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._end = end
        self._last: asyncio.Future[Why] | None = None
        """what is found before the end"""

    def __enter__(self) -> Telling:
        self._began = self._host.now()
        self._last_s = max(LEAST_LAST_S, min(MOST_LAST_S, (self._end - self._began) / 4))
        self._host.notices.begin(self._subject, self._began)
        self._arm(reasons.SOON_S if self._soon else reasons.FIRST_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._host.notices.end(self._subject)
        for one in (self._timer, self._task, self._last):
            if one is not None:
                one.cancel()

    async def why(self) -> Why:
        """What the call waited for, now that its time is up."""
        return await self._last_look()

    def _last_look(self) -> asyncio.Future[Why]:
        if self._last is None:
            self._last = asyncio.ensure_future(self._look(self._last_s))
        return self._last

    def _arm(self, most_s: float) -> None:
        now = self._host.now()
        left_s = max(REST_S, min(self._host.notices.wait_s(self._subject, now), most_s))
        if self._last is None:
            left_s = max(0.0, min(left_s, self._end - self._last_s - now))
        self._timer = asyncio.get_running_loop().call_later(left_s, self._ring)

    def _ring(self) -> None:
        if self._last is None and self._host.now() + EARLY_S >= self._end - self._last_s:
            self._last_look()
            self._arm(math.inf)
            return
        many = self._host.notices.take(self._subject, self._host.now())
        if many or self._soon:
            self._task = asyncio.ensure_future(self._tell(many))
        else:
            self._arm(math.inf)

    async def _tell(self, many: int) -> None:
        self._soon = False
        try:
            why, details = await self._look(ASK_S)
        except DataplaneError as exc:
            why, details = exc.message, {}
        self._host.notices.said(self._subject, why)
        if many or details.get("only_own"):
            waited_s = self._host.now() - self._began
            others = f" (and {counted(many - 1, 'other')} of this host)" if many > 1 else ""
            self._notice(f"{self._what}{others} has waited {waited_s:.0f} s: {why}")
        self._arm(math.inf)
