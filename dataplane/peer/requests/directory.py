"""The names of the run's clients and partitions, for messages only.

Nothing is kept up to date. When a call waits, this peer asks the peer that knows the names, and
caches the answer for a second.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dataplane.errors import (
    DataplaneError,
    PartitionUndefined,
    duration,
    few,
    mixed_releases,
    nearest,
)
from dataplane.latest import Latest
from dataplane.launch import rundir
from dataplane.metadata.shard.reasons import FIRST_S, Facts, Producer, Subject
from dataplane.peer.host import Caller, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.notices import Telling, Why
from dataplane.peer.sessions import Session, Sessions
from dataplane.peer.shards.partitions import Partitions
from dataplane.wire.checkpoint import Census, CensusDone
from dataplane.wire.messages import Body, Define, Request
from dataplane.wire.peering import Identified, Identify
from dataplane.wire.tables import Owner

ASK_S = 0.5
"""Timeout for another peer's answer, so that the message is not late."""
FRESH_S = 1.0
"""Seconds that another peer's statement about a client stays valid."""
MAX_KNOWN = 1_024
"""Clients of other hosts whose names are cached. The least recently requested are forgotten."""
MAX_IDENTIFIED = 64
"""The most clients in one `Identify`."""
SHOWN = 8


class _Client(NamedTuple):
    who: str
    gone_at: float | None
    """when it disconnected (monotonic), or None"""
    until: float


@dataclass(eq=False, repr=False)
class Directory:
    host: Host
    mesh: Mesh
    sessions: Sessions
    partitions: Partitions
    runs: Path | None = None
    """the run directory of this host, or None"""

    def __post_init__(self) -> None:
        self._clients = Latest[int, _Client](MAX_KNOWN)
        self._elsewhere: set[str] = set()
        """partitions of other peers, as of the last request"""

    # asked for by clients of this host

    async def define(self, session: Session, request: Request, body: Define) -> Body:
        """Declare a partition, or attach to it. PartitionUndefined names the partitions that
        exist."""
        name, parts, wait_s = body.partition, self.partitions, request.deadline_ms / 1000
        session.partitions.add(name)
        if body.generation:
            looked: Body = await parts.router.ask(body)
            return looked
        if body.definition is not None:
            restorer = self.host.caller(session.id) if body.restores else None
            return await parts.define(name, body.definition, wait_s, restorer)

        def why() -> Why:
            return self.undeclared(name), {}

        what = f"attaching to partition {name!r}"
        learning = self.mesh.spawn(self.learn_names(FIRST_S / 2))
        try:
            with Telling(self.host, what, Subject("attach", name), why):
                return await parts.define(name, None, wait_s)
        except PartitionUndefined as exc:
            await self.learn_names()
            said = f"partition {name!r} was not found: {self.undeclared(name)}"
            raise PartitionUndefined(said, **exc.details) from exc
        finally:
            learning.cancel()

    # clients

    def facts(
        self, unit: str, told: Mapping[str, Any], partition: str, since_s: float = 0.0
    ) -> Facts:
        """Return a shard's report about a wait, received `since_s` ago, with names in place of
        numbers as far as they are known here."""
        facts = Facts(unit, **told)
        facts.leases = [(who, of, rows, age + since_s) for who, of, rows, age in facts.leases]
        facts.producers = [
            self._producer(session, rows, None if idle_s is None else idle_s + since_s)
            for session, rows, idle_s in told.get("producers", ())
        ]
        if not facts.put_rows and not facts.sealed:
            facts.near_partitions = self.similar(partition)
            facts.elsewhere = self.other_runs(partition)
        return facts

    def _producer(self, session: int, rows: int, idle_s: float | None) -> Producer:
        here = self.sessions.identify(session)
        if here is not None:
            return Producer(here[0], rows, idle_s, here[1])
        owner = self._owner(session)
        if (known := self._clients.get(session)) is not None:
            if known.gone_at is not None:
                return Producer(known.who, rows, idle_s, self.host.now() - known.gone_at)
            return Producer(known.who, rows, idle_s, math.inf if owner is None else 0.0)
        if owner is None:
            return Producer("a client of a lost peer", rows, idle_s, math.inf)
        return Producer(f"a client of peer {self.mesh.others.name(owner.peer)!r}", rows, idle_s)

    def _owner(self, session: int) -> Owner | None:
        """Return the peer that has this client, or None if it is no longer a member."""
        owners = (self.host.owner, *self.host.roster.owners)
        return next((one for one in owners if one.has_session(session)), None)

    async def learn(self, sessions: Iterable[int]) -> None:
        """Ask the peers of these clients for names that are not known here. Without a reply they
        stay unnamed."""
        now = self.host.now()
        asked: dict[Owner, list[int]] = {}
        for session in sessions:
            known, owner = self._clients.get(session), self._owner(session)
            if owner not in (None, self.host.owner) and (known is None or now > known.until):
                assert owner is not None
                asked.setdefault(owner, []).append(session)
        await asyncio.gather(*(self._learn(*one) for one in asked.items()))

    async def _learn(self, owner: Owner, sessions: list[int]) -> None:
        body = Identify(sessions[:MAX_IDENTIFIED])
        try:
            told: Identified = await self.mesh.call(
                owner.peer, body, timeout_s=ASK_S, to=owner.incarnation
            )
        except DataplaneError:
            return
        now = self.host.now()
        for session, (who, gone_ms) in zip(body.sessions, told.clients, strict=False):
            gone_at = None if gone_ms < 0 else now - gone_ms / 1000
            self._clients[session] = _Client(who, gone_at, now + FRESH_S)

    def identify(self, caller: Caller, body: Identify) -> Body:
        if len(body.sessions) > MAX_IDENTIFIED:
            raise mixed_releases(
                f"the request lists {len(body.sessions)} sessions, over the limit of "
                f"{MAX_IDENTIFIED}"
            )
        told: list[tuple[str, int]] = []
        for session in body.sessions:
            who, gone_s = self.sessions.identify(session) or (
                "a client that disconnected long ago",
                math.inf,
            )
            told.append((who, -1 if not gone_s else int(1000 * min(gone_s, 1e9))))
        return Identified(told)

    # partitions

    def names(self) -> list[str]:
        """Partitions of this run that this peer knows."""
        return sorted({*self.host.entries, *self.partitions.declared, *self._elsewhere})

    def declared(self) -> list[str]:
        """Partitions that clients of this host declared or attached to, the latest last."""
        return list(self.partitions.declared)

    async def learn_names(self, after_s: float = 0.0) -> None:
        """Ask the other peers of the run which partitions they have."""
        await asyncio.sleep(after_s)
        others = [one for one in self.host.roster.hosts if one != self.host.address]
        asked = (self.mesh.call(one, Census(), timeout_s=ASK_S) for one in others)
        told = await asyncio.gather(*asked, return_exceptions=True)
        self._elsewhere = {n for one in told if isinstance(one, CensusDone) for n in one.partitions}

    def undeclared(self, partition: str) -> str:
        """Why a client that attaches to the partition waits, and what to do."""
        run = f"run {self.host.plane!r}"
        if partition in self._elsewhere or partition in self.host.entries:
            return (
                f"a peer of {run} has it, but the peer that serves it now has not "
                "received it yet: repeat the call"
            )
        again = f"with plane.partition({partition!r}, stages={{…}})"
        if partition in self.partitions.declared:
            return f"it existed in {run} before, but was dropped or lost: declare it again {again}"
        said = f"no process has declared it in {run}"
        if similar := self.similar(partition):
            said += f", which has a partition {similar[0]!r}: is one of the names misspelt?"
        elif elsewhere := self.other_runs(partition):
            said += f", but {few(elsewhere, SHOWN)} has a partition with this name: connect both "
            said += "sides to the same run with connect(run=…)"
        else:
            known = few([repr(name) for name in self.names()], SHOWN) or "none"
            said += f" (partitions of this run: {known}): declare it in one process {again}"
        return said

    def similar(self, partition: str) -> list[str]:
        """Return partitions of which this name may be a misspelling."""
        near = nearest(partition, self.names())
        return [near] if near else []

    def other_runs(self, partition: str) -> list[str]:
        """Return other runs of this user on this host with a partition of this name. Reads a few
        files."""
        found = []
        there = self.runs is not None and self.runs.is_dir()
        for run in rundir.living_runs(self.runs) if there else ():
            cards = [peer.card for peer in run.peers if peer.card is not None]
            if run.name == self.host.plane or not any(partition in c.partitions for c in cards):
                continue
            by = f"`{run.starter.command}`, " if run.starter is not None else ""
            found.append(f"run {run.name!r} ({by}{duration(run.age_s)} old)")
        return found
