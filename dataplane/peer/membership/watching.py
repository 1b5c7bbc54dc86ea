"""Watching the processes of other members, so that a death is proven and not guessed.

The roster keeper watches every member. Every member watches the next few on a ring of addresses,
and reports in its heartbeats which hosts it cannot reach. The keeper never declares a host
unreachable on its own observation alone. Observations go into `Contacts`; `failure_detector`
decides who is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable

from dataplane.errors import DataplaneError
from dataplane.metadata.roster.failure_detector import Contacts
from dataplane.metadata.roster.roster import neighbours
from dataplane.peer.host import Host
from dataplane.peer.net.mesh import Mesh
from dataplane.transport.witness import Look, Process, watch
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""From the end of one look at a process to the next."""
WATCHED = 3
"""How many others each member watches."""


class Watching:
    """Watches processes of other members. on_evidence: called when a member may be lost."""

    def __init__(self, host: Host, mesh: Mesh, on_evidence: Callable[[], None]) -> None:
        self.host = host
        self.mesh = mesh
        self.contacts = Contacts()
        self.key = b""
        """key of the run's bulk transfer"""
        self._on_evidence = on_evidence
        self._watches: dict[Owner, asyncio.Task[None]] = {}

    def follow(self, everybody: bool) -> None:
        """Watch the members of the current roster. everybody: watch all of them, as the keeper
        does."""
        roster, here = self.host.roster, self.host.address
        wanted = neighbours(roster, here, len(roster.members) if everybody else WATCHED)
        for owner in [owner for owner in self._watches if owner not in wanted]:
            self._watches.pop(owner).cancel()
            self.contacts.forget(owner)
        for owner in wanted:
            if owner not in self._watches:
                self._watches[owner] = self.mesh.spawn(self._watch(owner))

    async def _watch(self, owner: Owner) -> None:
        silent_since: float | None = None
        while True:
            tell, before = functools.partial(self._tell, owner), silent_since
            silent_since = await watch(self._process(owner), self.key, tell, before)
            if before is not None or silent_since is None:  # at first silence, look again at once
                await asyncio.sleep(LOOK_S)

    def _process(self, owner: Owner) -> Process:
        """Return a member's process. Its ports are known if it has been greeted."""
        address = owner.peer.removeprefix("tcp://")
        hello = self.mesh.others.hello(owner)
        if hello is None:
            self.mesh.spawn(self._greet(owner))
            return Process(owner, "", "", (address,))
        ports = tuple(port for port in (address, hello.stream) if port)
        return Process(owner, hello.bulk, hello.bulk_fingerprint, ports)

    async def _greet(self, owner: Owner) -> None:
        with contextlib.suppress(DataplaneError):
            await self.mesh.hello(owner.peer)

    def _tell(self, owner: Owner, look: Look, since: float) -> None:
        now, contacts = self.host.now(), self.contacts
        before = contacts.is_unreached(owner)
        match look:
            case Look.ENDED:
                if not contacts.has_ended(owner):
                    log.info("peer %s: its host reports that the process has exited", owner.peer)
                contacts.ended(owner)
            case Look.REFUSED:
                contacts.refused(owner, now)
            case Look.UNANSWERED:
                contacts.unanswered(owner, since, now)
            case Look.ANSWERED:
                contacts.answered(owner)
        if look is not Look.ANSWERED or before:
            self._on_evidence()
