"""Requests to shards: sent to the primary of a partition's shard, wherever it is then.

The caller gets the shard's reply. If the shard has moved, or the primary was unreachable, the
request is repeated until the call's deadline. Such a request is idempotent or has a number.
"""

from __future__ import annotations

import asyncio
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
from dataplane.peer.failures import fail
from dataplane.peer.host import Caller, Host, call_context, call_end
from dataplane.peer.net.mesh import Mesh
from dataplane.wire.messages import Admit, Body, Claim, Losses, Wait, Withdraw

log = logging.getLogger(__name__)

TURN_S, LONG_S = 5.0, 20.0
"""The first and the longest turn. A waiting call asks its shard again after each turn, which brings
the reason for the wait. Only the turns of claims grow."""
OWN_TURN_S = 0.5
"""The first turn of a call that may wait for its own process. It ends before the reason must be
reported (`reasons.SOON_S`)."""
LATE_S = 1.0
"""A shard that has not replied this long after a turn's end is silent."""
AT_ONCE_S = 0.3
"""Time for the round trip of a call that does not wait."""
RETRY_S = 0.2
"""The pause after an attempt that did not reach a shard. A new roster ends it."""
MOST_WITHDRAWN = 4_096
"""The most numbers in one `Withdraw`."""
LEAST_S = 0.01
"""With less time left, a request is not retried: its timeout would hide the earlier error."""

T = TypeVar("T")
WaitingCall = Claim | Wait | Losses | Admit
Hear = Callable[[DataplaneError], None]
"""Called with the reason of each repetition. An error that it raises ends the call."""


class Router:
    def __init__(self, host: Host, mesh: Mesh) -> None:
        self.host = host
        self.mesh = mesh
        self._withdrawn: dict[tuple[str, int], list[tuple[int, asyncio.Future[None]]]] = {}
        """by partition and generation: numbers that its shard has not confirmed, and who waits for
        that"""
        self._telling: set[asyncio.Task[None]] = set()

    async def ask(
        self, body: Any, caller: Caller | None = None, timeout_s: float | None = None
    ) -> Any:
        """Return the reply of the shard, repeating the request until the call's deadline, and for
        timeout_s at most."""
        end = call_end(self.host.now(), timeout_s)
        return await self.reach(lambda roster, left_s: self.at(roster, body, caller, left_s), end)

    async def wait(
        self,
        body: WaitingCall,
        caller: Caller | None = None,
        hear: Hear = lambda why: None,
        first: Awaitable[Any] | None = None,
    ) -> Any:
        """Return the reply of the shard to a waiting call, in turns, for as long as the call
        says. At the deadline, raise the outcome of the last turn. first: the first turn, if it
        has started."""
        began = self.host.now()

        def turn(roster: Roster, turn_s: float) -> Awaitable[Any]:
            nonlocal first
            begun, first = first, None
            if begun is not None:
                return begun
            waited_ms = int((self.host.now() - began) * 1000)
            return self.at(roster, _turn_of(body, turn_s, waited_ms), caller, turn_s + LATE_S)

        most_s = LONG_S if isinstance(body, Claim) else TURN_S
        return await self.reach(turn, ends(body.timeout_ms, began), _first_s(body), hear, most_s)

    def begin_here(self, body: WaitingCall, caller: Caller) -> Body | asyncio.Future[Any]:
        """Start the first turn of a waiting call if the shard is here. Return the reply, or a
        future of it for `wait`. The turn takes over `body`."""
        _limit(body, _first_s(body))
        try:
            outcome = self.mesh.here(caller, body)
        except DataplaneError as exc:
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            fail(answer, exc)
            return answer
        return outcome if isinstance(outcome, Body) else asyncio.ensure_future(outcome)

    def tell(self, body: Any) -> asyncio.Task[bool]:
        """Send a request until the shard has replied, whether or not a caller waits for that.
        Return False if the partition or the lease had already ended."""
        telling = self.mesh.spawn(self._tell(body))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        return telling

    @property
    def is_heard(self) -> bool:
        """Whether shards have confirmed every request of `tell` and `withdraw`."""
        return not self._telling and not self._withdrawn

    async def _tell(self, body: Any) -> bool:
        try:
            await self.reach(lambda roster, left_s: self.at(roster, body))
        except (LeaseExpired, PartitionGone):
            return False
        return True

    def withdraw(self, partition: str, generation: int, number: int) -> asyncio.Future[None]:
        """Withdraw a waiting call or a permit. Done when its shard confirms.

        While one message is in flight, other numbers wait to be sent together, because callers
        of an unreachable shard withdraw again and again.
        """
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        key = partition, generation
        if key in self._withdrawn:
            self._withdrawn[key].append((number, told))
        else:
            self._withdrawn[key] = [(number, told)]
            self.mesh.spawn(self._withdraw(*key))
        return told

    async def _withdraw(self, partition: str, generation: int) -> None:
        waiting = self._withdrawn[partition, generation]
        try:
            while some := waiting[:MOST_WITHDRAWN]:
                numbers = [number for number, _ in some]
                await self._tell(Withdraw(partition, generation, numbers))
                del waiting[: len(some)]
                for _, told in some:
                    if not told.done():
                        told.set_result(None)
        finally:
            del self._withdrawn[partition, generation]
            for _, told in waiting:
                told.cancel()

    def at(
        self,
        roster: Roster,
        body: Any,
        caller: Caller | None = None,
        timeout_s: float | None = None,
    ) -> Awaitable[Any]:
        """Return the shard's reply, from its primary in this roster, without a retry."""
        home, epoch = roster.home(body.partition), roster.epoch
        return self.mesh.call(home, body, caller=caller, timeout_s=timeout_s, epoch=epoch)

    async def reach(
        self,
        attempt: Callable[[Roster, float], Awaitable[T]],
        end: float = math.inf,
        turn_s: float = math.inf,
        hear: Hear = lambda why: None,
        most_s: float = TURN_S,
    ) -> T:
        """Return the outcome of the first attempt that reached the shard, each by the current
        roster and with a time limit. Raise StaleEpoch or Unavailable if none did until `end`
        (monotonic). Each turn lasts twice as long as the previous one, between TURN_S and
        most_s."""
        while True:
            roster, left_s = self.host.roster, max(0.0, end - self.host.now())
            try:
                return await attempt(roster, min(left_s, turn_s))
            except (ClaimTimeout, DeadlineExceeded) as exc:
                hear(exc)
                if left_s <= turn_s:
                    raise
                turn_s = min(most_s, max(TURN_S, 2 * turn_s))
            except (StaleEpoch, Unavailable) as exc:
                hear(exc)
                log.debug("shard: a request failed (%s), retrying", exc)
                await self.host.another_roster(roster, min(self.host.now() + RETRY_S, end))
                if end - self.host.now() < LEAST_S:
                    raise


def _first_s(body: WaitingCall) -> float:
    """Return the length of a call's first turn."""
    return OWN_TURN_S if isinstance(body, Claim | Admit) and body.own else TURN_S


def _turn_of(body: WaitingCall, turn_s: float, waited_ms: int = 0) -> WaitingCall:
    """Return the request of a turn. `waited_ms` is the time since `body` was made. The turn ends
    with the call at the latest."""
    asked = msgspec.structs.replace(body)
    _limit(asked, turn_s)
    if isinstance(asked, Claim | Admit):
        asked.waited_ms += waited_ms
    return asked


def _limit(body: WaitingCall, turn_s: float) -> None:
    turn_ms = int(turn_s * 1000)
    body.timeout_ms = turn_ms if body.timeout_ms < 0 else min(turn_ms, body.timeout_ms)


def ends(timeout_ms: int, now: float) -> float:
    """Return the end (monotonic) of a waiting call."""
    if timeout_ms < 0:
        return math.inf
    return min(now + (timeout_ms / 1000 or AT_ONCE_S), call_context.get().until)
