"""Asking shards: the primary of a partition's bucket, wherever that is then.

Who asks gets what the shard answers. Where the bucket has another primary meanwhile, or nobody
could be reached, it is asked again, until the call's end: what is asked does no harm when it is
carried out twice, or is numbered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from dataplane.errors import (
    ClaimTimeout,
    DataplaneError,
    DeadlineExceeded,
    LeaseExpired,
    PartitionGone,
    StaleEpoch,
    Unavailable,
)
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.host import Caller, Host, call_deadline
from dataplane.peer.net.mesh import CALL_S, Mesh
from dataplane.wire.messages import Admit, Losses, Wait

log = logging.getLogger(__name__)

TURN_S = 5.0
"""Who waits at a shard asks it again after so long: what it holds for a waiter ends with that."""
RETRY_S = 0.2
"""... and so long after it could not be reached, or at once under another roster."""

T = TypeVar("T")
Hear = Callable[[DataplaneError], None]
"""Told why a shard is asked again; what it raises is the end."""


def _unheard(why: DataplaneError) -> None:
    pass


class Router:
    def __init__(self, host: Host, mesh: Mesh) -> None:
        self.host = host
        self.mesh = mesh

    async def ask(self, body: Any, caller: Caller | None = None, timeout_s: float = CALL_S) -> Any:
        """What the shard answers, until the call's deadline."""
        end = min(self.host.now() + timeout_s, call_deadline.get())
        return await self.reach(lambda roster, left_s: self.at(roster, body, caller, left_s), end)

    async def wait(
        self,
        body: Wait | Losses | Admit,
        caller: Caller | None = None,
        first_s: float = TURN_S,
        hear: Hear = _unheard,
    ) -> Any:
        """What the shard answers to who waits there, for as long as the call says, in turns, of
        which the first is so long. What the last one ended with when time is up."""
        began, limit_ms = self.host.now(), body.timeout_ms
        end = began + limit_ms / 1000 if limit_ms >= 0 else math.inf

        def turn(roster: Roster, turn_s: float) -> Awaitable[Any]:
            asked = msgspec.structs.replace(body, timeout_ms=int(turn_s * 1000))
            if isinstance(asked, Admit):
                asked.waited_ms = int((self.host.now() - began) * 1000)
            return self.at(roster, asked, caller)

        return await self.reach(turn, end, first_s, hear)

    def tell(self, body: Any) -> asyncio.Task[None]:
        """Until the shard has answered, whoever waits for that. What is gone needs no telling."""

        async def told() -> None:
            with contextlib.suppress(LeaseExpired, PartitionGone):
                await self.reach(lambda roster, left_s: self.at(roster, body))

        return self.mesh.spawn(told())

    def at(
        self, roster: Roster, body: Any, caller: Caller | None = None, timeout_s: float = CALL_S
    ) -> Awaitable[Any]:
        """What the shard answers at its primary by this roster, asked once."""
        home, epoch = roster.home(body.partition), roster.epoch
        return self.mesh.call(home, body, caller=caller, timeout_s=timeout_s, epoch=epoch)

    async def reach(
        self,
        attempt: Callable[[Roster, float], Awaitable[T]],
        end: float = math.inf,
        turn_s: float = math.inf,
        hear: Hear = _unheard,
    ) -> T:
        """What comes of an attempt, by the roster as it is and within so many seconds, that reached
        the shard; StaleEpoch, Unavailable where none did until the end (monotonic)."""
        while True:
            roster, left_s = self.host.roster, max(0.0, end - self.host.now())
            try:
                return await attempt(roster, min(left_s, turn_s))
            except (ClaimTimeout, DeadlineExceeded) as exc:
                hear(exc)
                if left_s <= turn_s:
                    raise
                turn_s = TURN_S
            except (StaleEpoch, Unavailable) as exc:
                log.debug("a shard is asked again: %s", exc)
                hear(exc)
                await self.host.another_roster(roster, min(self.host.now() + RETRY_S, end))
                if self.host.now() >= end:
                    raise
