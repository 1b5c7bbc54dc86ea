"""The authority at work: hears of every member, and brings the rosters that follow into force.

Open at one peer at a time; which one that is, `peer.membership.keepers` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from dataplane.errors import Unavailable
from dataplane.metadata.roster.authority import Authority
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.roster.silence import Silence
from dataplane.peer.host import Host
from dataplane.peer.net.links import refuses
from dataplane.peer.net.mesh import Mesh
from dataplane.wire.peering import Beat, Rostered
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

SUCCESSION_S = 3.0
"""A new authority hears of a member so soon, or calls it lost."""
ASK_S = 2.0
"""How long a new authority waits for what the members know."""


class Office:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        adopt: Callable[[Roster], None],
        commit: Callable[[Roster], bool | Awaitable[bool]],
        apart: str,
        depose: Callable[[], None],
    ) -> None:
        """depose: ends this process's part in the plane, so that it returns as a new one"""
        self.host = host
        self.mesh = mesh
        self._adopt = adopt
        self._commit = commit
        self._apart = apart
        self._depose = depose
        self._authority: Authority | None = None
        self._published = (0, 0)
        self._silence = Silence(host.address)
        self._asked: set[Owner] = set()
        self._wanted: dict[str, bool] = {}
        self._committing: asyncio.Task[None] | None = None
        mesh.others.on_away.append(self._away)

    @property
    def is_open(self) -> bool:
        return self._authority is not None

    async def open(self, roster: Roster, ask: bool) -> None:
        """Go on from this roster. ask: or from a newer one that a member has."""
        made = Authority(roster, self.host.incarnation, self._apart)
        if roster.epoch[1] > 1:
            made.outrank(roster)
        if ask:
            others = [m for m in self.host.roster.members if m != self.host.address]
            answers = await asyncio.gather(
                *(self.mesh.call(m, Beat(), timeout_s=ASK_S) for m in others),
                return_exceptions=True,
            )
            for reply in answers:
                if isinstance(reply, Rostered) and reply.table is not None:
                    made.outrank(Roster.from_table(reply.table))
        self._authority = made
        log.info("keeps the roster: %r", made)
        self._silence = Silence(self.host.address)
        gone = self.mesh.others.gone()
        now = self.host.now()
        for owner in made.roster.owners:  # of an authority before: who is there says so soon
            if owner in gone:
                self._silence.away(owner, now)
            else:
                self._silence.expect(owner, now, SUCCESSION_S)
        self._judge()

    def close(self) -> None:
        self._authority = None

    def note(self, peer: Owner, body: Beat, epoch: tuple[int, int]) -> None:
        """A life sign; the office is open."""
        assert self._authority is not None
        if peer.peer not in self._silence and peer.peer != self.host.address:
            self.mesh.spawn(self.mesh.hello(peer.peer))  # a connection that breaks when it dies
        self._silence.heard(peer, self.host.now())
        self._wanted[peer.peer] = body.wanted
        self._authority.beat(peer, epoch, body.synced, body.leaving, body.clear, body.spare)
        if self._authority.is_behind:
            log.error(
                "%s works under roster %s, of which this keeper of the roster was not told when it "
                "started: it begins anew, and asks again",
                peer.peer,
                epoch,
            )
            self.close()
            self._depose()
        else:
            self._judge()

    @property
    def wanted(self) -> bool:
        """Whether any member has said that it is."""
        return any(self._wanted.get(member) for member in self.host.roster.members)

    def _away(self, peer: Owner) -> None:
        if self._authority is not None:
            self._silence.away(peer, self.host.now())
            self._judge()

    def _judge(self) -> None:
        """Who is lost now, and which roster follows."""
        assert self._authority is not None
        for owner in self._silence.lost(self._authority.roster.owners, self.host.now()):
            self._wanted.pop(owner.peer, None)
            self._authority.lost(owner)
        for owner in self._silence.doubted:
            if owner not in self._asked:
                self._asked.add(owner)
                self.mesh.spawn(self._look_at(owner))
        self._publish()

    async def _look_at(self, owner: Owner) -> None:
        """A host that can be reached and has nobody listening there leaves no doubt."""
        try:
            if await refuses(owner.peer):
                self._silence.dead(owner)
        finally:
            self._asked.discard(owner)

    def _publish(self) -> None:
        """Tell all, and those that are members no more: one that was only stopped learns so."""
        assert self._authority is not None
        new = self._authority.roster
        if new.epoch in (self._published, self.host.roster.epoch):
            return
        if self._committing is not None and not self._committing.done():
            return
        kept = self._commit(new)
        if isinstance(kept, bool):
            self._announce(new)
        else:
            self._committing = self.mesh.spawn(self._publish_when_kept(self._authority, new, kept))

    async def _publish_when_kept(
        self, authority: Authority, new: Roster, kept: Awaitable[bool]
    ) -> None:
        while await kept:
            self._announce(new)
            if self._authority is not authority or authority.roster is new:
                return
            new = authority.roster
            following = self._commit(new)
            assert not isinstance(following, bool)
            kept = following
        if self._authority is authority:
            self.close()

    def _announce(self, new: Roster) -> None:
        self._published = new.epoch
        told = {*self.host.roster.members, *new.members} - {self.host.address}
        self._adopt(new)
        for address in sorted(a for a in told if a in self._silence):
            self.mesh.spawn(self._push(address, new))

    async def _push(self, address: str, roster: Roster) -> None:
        with contextlib.suppress(Unavailable):  # it asks by itself
            await self.mesh.call(address, Rostered(roster.table), timeout_s=ASK_S)
