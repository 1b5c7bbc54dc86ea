"""Waiting without claiming, and what people are told of what a stage waits for.

`wait` asks the stage's home in turns; `why` asks the peers what is missing, for the message of a
ClaimTimeout.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from dataplane.errors import ClaimTimeout, Unavailable
from dataplane.metadata import reasons
from dataplane.peer.host import Caller, Host, Known
from dataplane.peer.mesh import Mesh
from dataplane.peer.notices import Telling, Why
from dataplane.peer.partitions import Partitions
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Request, StatsDone, Wait, Want
from dataplane.wire.peering import Missing

WAIT_TURN_S = 10.0
"""A home is asked again after so long: what it holds for a waiter ends with the waiter."""
WHY_S = 2.0
MOST_WHY_S = 0.5
LEAST_WHY_S = 0.2
"""How long the peers that are asked have for an answer; at the end of a call, a quarter of it."""


def _wanted(body: Wait) -> Want | None:
    return Want(body.unit, body.count, body.count) if body.count else None


class Waits:
    def __init__(self, host: Host, mesh: Mesh, partitions: Partitions) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.sessions: Callable[[], Iterable[Session]] = lambda: ()
        self.producers: Callable[[], int] = lambda: 0
        """puts that wait for room here"""
        mesh.handlers[Missing] = self._missing

    async def wait(self, session: Session, request: Request, body: Wait) -> Body:
        """Until the home says that it is so. ClaimTimeout, StreamEnd, PartitionGone."""
        end = self.host.now() + body.timeout_ms / 1000 if body.timeout_ms >= 0 else math.inf
        entry = await self.partitions.known(body.partition, body.generation)
        look = self.looks(session, entry, body.stage, body.unit, _wanted(body))
        why = self.explain(end, look)
        subject = reasons.Subject("wait", entry.name, body.stage, (entry.generation, body.unit))
        what = f"wait for stage {body.stage!r} of partition {entry.name!r}"
        try:
            with Telling(self.host, what, subject, look):
                done = await self._wait_in_turns(body, end)
        except (ClaimTimeout, Unavailable) as exc:
            if isinstance(exc, Unavailable) and self.host.now() < end:
                raise
            told, details = await why
            raise ClaimTimeout(
                f"waiting for stage {body.stage!r} of {entry.name!r}, which did not come within "
                f"{body.timeout_ms / 1000:g} s: {told}",
                **details,
            ) from exc
        finally:
            why.cancel()
        return done

    async def _wait_in_turns(self, body: Wait, end: float) -> Body:
        while True:
            left = max(0.0, end - self.host.now())
            asked = msgspec.structs.replace(body, timeout_ms=int(min(left, WAIT_TURN_S) * 1000))
            try:
                done: Body = await self.partitions.ask_home(body.partition, asked)
                return done
            except ClaimTimeout:
                if left <= WAIT_TURN_S:
                    raise

    # what is missing

    def _missing(self, caller: Caller, body: Missing) -> Body:
        entry = self.host.entry(body.partition, body.generation)
        if entry is None:
            return StatsDone({})
        found = entry.store.missing(body.stage, body.unit, self.host.now(), body.where)
        found["leases"] = [
            [self.host.labels.get(holder, f"client {holder:x}"), stage, rows, age]
            for holder, stage, rows, age in found["leases"]
        ]
        found["sealed"], found["producers"] = entry.sealed, self.producers()
        return StatsDone(found)

    def explain(self, end: float, look: Callable[[float], Awaitable[Why]]) -> asyncio.Task[Why]:
        """What `look` finds shortly before the end of a call, which is not late for the answer. To
        be cancelled where it is not needed."""

        async def later() -> Why:
            left = end - self.host.now()
            if left == math.inf:
                await asyncio.Event().wait()
            ask_s = max(LEAST_WHY_S, min(MOST_WHY_S, left / 4))
            await asyncio.sleep(max(0.0, left - ask_s))
            return await look(ask_s)

        return asyncio.ensure_future(later())

    def looks(
        self, session: Session, entry: Known, stage: str, unit: str, want: Want | None = None
    ) -> Callable[[float], Awaitable[Why]]:
        """`why` of one call."""
        return functools.partial(self.why, session, entry, stage, unit, want)

    async def why(
        self,
        session: Session,
        entry: Known,
        stage: str,
        unit: str,
        want: Want | None,
        limit_s: float = WHY_S,
    ) -> Why:
        """ "509 of 512 groups ready; 3 lack `reward`, leased by pid 7 on host b for 90 s"."""
        where = None if want is None else want.where
        asked = Missing(entry.name, entry.generation, stage, unit, where)  # type: ignore[arg-type]
        hosts = [self.host.roster.home(entry.name)]
        answers = await asyncio.gather(
            *(self.mesh.call(m, asked, timeout_s=limit_s) for m in hosts), return_exceptions=True
        )
        silent = sum(isinstance(a, BaseException) for a in answers)
        told = [a.stats for a in answers if isinstance(a, StatsDone) and a.stats]
        facts = reasons.added_up(unit, told, silent)
        wanted = None if want is None or want.budget_tag is not None else want.count
        said = reasons.reason(facts, stage, wanted, session.label)
        others = (s for s in self.sessions() if entry.name in s.partitions)
        alone = self.host.solo and all(other.pid == session.pid for other in others)
        own = reasons.only_own(facts, stage, session.label, alone)
        details = facts.details | {"only_own": own}
        return f"{said}; {reasons.OWN}" if own else said, details
