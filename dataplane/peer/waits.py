"""Waiting without claiming, and what people are told of what a stage waits for.

`wait` asks the stage's home in turns; `why` asks the peers what is missing, for the message of a
ClaimTimeout.
"""

from __future__ import annotations

import asyncio
import functools
import math
from typing import Any

import msgspec

from dataplane.errors import ClaimTimeout, Unavailable, counted
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.mesh import Mesh
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
MAX_PEERS_ASKED = 8
"""How many peers are asked why rows are missing, for one message."""

Why = tuple[str, dict[str, Any]]
"""For people, and the same in figures."""


class Waits:
    def __init__(self, host: Host, mesh: Mesh, partitions: Partitions) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        mesh.handlers[Missing] = self._missing

    async def wait(self, session: Session, request: Request, body: Wait) -> Body:
        """Until the home says that it is so. ClaimTimeout, StreamEnd, PartitionGone."""
        end = self.host.now() + body.timeout_ms / 1000 if body.timeout_ms >= 0 else math.inf
        entry = await self.partitions.entry(body.partition, body.generation)
        why = self.explain(end, entry, body.stage, body.unit)
        try:
            done = await self._wait_in_turns(body, end)
        except (ClaimTimeout, Unavailable) as exc:
            if isinstance(exc, Unavailable) and self.host.now() < end:
                raise
            told, details = await why
            raise ClaimTimeout(
                f"waiting for stage {body.stage!r} of {entry.name!r}: {told} after "
                f"{body.timeout_ms / 1000:g} s",
                **details,
            ) from exc
        finally:
            why.cancel()
        return done

    async def _wait_in_turns(self, body: Wait, end: float) -> Body:
        home = functools.partial(self._home, body)
        while True:
            left = max(0.0, end - self.host.now())
            asked = msgspec.structs.replace(body, timeout_ms=int(min(left, WAIT_TURN_S) * 1000))
            try:
                return await self.mesh.reach(home, asked)  # type: ignore[no-any-return]
            except ClaimTimeout:
                if left <= WAIT_TURN_S:
                    raise

    def _home(self, body: Wait) -> str:
        return self.host.roster.stage_home(body.partition, body.stage)

    # what is missing

    def _missing(self, caller: Caller, body: Missing) -> Body:
        entry = self.host.entry(body.partition, body.generation)
        if entry is None:
            return StatsDone({})
        found = entry.store.missing(body.stage, body.unit, now=self.host.now())
        found["leases"] = [
            [self.host.labels.get(holder, f"client {holder:x}"), rows, age]
            for holder, rows, age in found["leases"]
        ]
        return StatsDone(found)

    def explain(
        self, end: float, entry: Entry, stage: str, unit: str, want: Want | None = None
    ) -> asyncio.Task[Why]:
        """`why` as it is shortly before the end of a call, which is not late for the answer. To be
        cancelled where it is not needed."""

        async def later() -> Why:
            left = end - self.host.now()
            if left == math.inf:
                await asyncio.Event().wait()
            ask_s = max(LEAST_WHY_S, min(MOST_WHY_S, left / 4))
            await asyncio.sleep(max(0.0, left - ask_s))
            return await self.why(entry, stage, unit, want, ask_s)

        return asyncio.ensure_future(later())

    async def why(
        self, entry: Entry, stage: str, unit: str, want: Want | None, limit_s: float = WHY_S
    ) -> Why:
        """ "509 of 512 groups ready; 3 lack `reward`, leased by pid 7 on host b for 90 s"."""
        asked = Missing(entry.name, entry.generation, stage, unit)  # type: ignore[arg-type]
        hosts = self.host.roster.hosts[:MAX_PEERS_ASKED]
        answers = await asyncio.gather(
            *(self.mesh.call(m, asked, timeout_s=limit_s) for m in hosts), return_exceptions=True
        )
        found = [a.stats for a in answers if isinstance(a, StatsDone) and a.stats]
        silent = sum(isinstance(a, BaseException) for a in answers)
        ready = sum(f["ready"] for f in found)
        total = sum(f["units"] for f in found)
        missing: dict[str, int] = {}
        for f in found:
            for name, count in f["missing"].items():
                missing[name] = missing.get(name, 0) + count
        leases = [lease for f in found for lease in f["leases"]]
        opened = sum(f["open_groups"] for f in found)
        parts = [f"{ready} of {total} {unit} ready"]
        if want is not None and want.budget_tag is None:
            parts[0] += f", {want.count} wanted"
        parts += [
            f"{counted(count, 'row lacks', 'rows lack')} `{name}`"
            for name, count in missing.items()
        ]
        if opened and unit == "groups":
            parts.append(f"{counted(opened, 'group is', 'groups are')} still open")
        parts += [
            f"{counted(rows, 'row')} leased by {who} for {age:.0f} s"
            for who, rows, age in leases[:3]
        ]
        if silent:
            parts.append(f"{counted(silent, 'peer')} did not answer")
        details = {"ready": ready, "units": total, "missing": missing, "leases": leases}
        return "; ".join(parts), details
