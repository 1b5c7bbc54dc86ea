"""Membership of a run: heartbeats to the roster keeper, and the effects of a new roster.

Every peer sends heartbeats to the roster keeper, which is one of the peers, and receives rosters in
reply. While the keeper is unreachable no backup is promoted. A peer without a backup in sync then
stops serving (`host.Serving`), because it cannot know whether it was replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dataplane.errors import (
    DataplaneError,
    LimitExceeded,
    PeerNameTaken,
    RosterMismatch,
    StaleEpoch,
    Unavailable,
    VersionMismatch,
    counted,
    duration,
)
from dataplane.launch.settings import LOST_AFTER_S
from dataplane.metadata.roster.authority import newcomers, rebalanced
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.host import Caller, Host
from dataplane.peer.membership.authority import KeeperRole, SeedKeeper
from dataplane.peer.membership.watching import Watching
from dataplane.peer.net.mesh import Mesh
from dataplane.wire.messages import Body, Done
from dataplane.wire.peering import Beat, Rostered
from dataplane.wire.tables import Owner

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer

log = logging.getLogger(__name__)

BEAT_S = 0.4
LOG_EVERY_S = 5.0
ASK_S = 2.0
AWAY_S = 3.0
"""The keeper counts as away after this long without a reply to a heartbeat."""
WANTED_S = 10.0
"""Seconds that the keeper's statement about the run's clients stays valid."""


@dataclass(eq=False, repr=False)
class Membership:
    host: Host
    mesh: Mesh
    keeper: SeedKeeper
    peer: Peer
    """fills in heartbeats, and applies rosters"""
    lost_after_s: float = LOST_AFTER_S

    def __post_init__(self) -> None:
        self.deposed = asyncio.Event()
        """set when this process is no longer a member; the peer may return as a new process"""
        self.watching = Watching(self.host, self.mesh, self._evidence)
        self.role = KeeperRole(self)
        self._admitted = False
        self._leaving = False
        self._ending: set[Owner] = set()
        """members that reported, while the keeper was away, that they leave"""
        self._unreached: set[str] = set()
        """members that did not answer such a report of this peer"""
        self._plane_wanted = False
        self._refused: DataplaneError | None = None
        self._beat_now = asyncio.Event()
        self.mesh.on_stale = self.beat_now

    # heartbeats

    async def run(self) -> None:
        """Run until cancelled."""
        if self.keeper.apart:
            await self.keeper.run(self.role)
        else:
            self.mesh.spawn(self.keeper.run(self.role))
        while True:
            await self._say()
            self._beat_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._beat_now.wait()

    async def admitted(self, timeout_s: float) -> None:
        """Wait until this process is a member.

        Raise Unavailable if the keeper does not confirm that, or the reason of its refusal:
        RosterMismatch, PeerNameTaken, VersionMismatch or LimitExceeded. A restarted seed waits
        too: the first roster, which it derives itself, may be outdated, and would assign shards
        of other peers to it.
        """
        waited_s, told_s = 0.0, 0.0  # counted in turns, without the time while this peer is stopped
        while self.host.owner not in self.host.roster.owners:
            if self._refused is not None:
                raise self._refused
            if await self.host.another_roster(self.host.roster, self.host.now() + BEAT_S):
                continue
            waited_s += BEAT_S
            asks = (
                f"the roster keeper{self._whereabouts()}. Check that the keeper is running with "
                "the same --run, --seeds, --roster and --token-file"
            )
            if waited_s >= timeout_s:
                raise Unavailable(
                    f"could not join within {duration(timeout_s)}: no answer from {asks}"
                )
            if waited_s >= told_s + LOG_EVERY_S:
                told_s = waited_s
                log.info("peer %r: waiting to join; no answer yet from %s", self.host.name, asks)

    async def _say(self) -> None:
        leaving = self._leaving and self._is_ready() and self.host.progress.is_settled
        body = self.peer.heartbeat(leaving, self._spare())
        body.unreached = self.watching.contacts.unreached()
        epoch = self.host.roster.epoch  # the heartbeat refers to this roster
        asked = self.host.now()  # a reply counts from here, even if this peer reads it late
        if self.role.is_open and self.keeper.sure():
            self.host.serving.heard = asked
            self.role.note(self.host.owner, body, epoch)
            self._plane_wanted = self.role.wanted
            return
        try:
            reply: Rostered = await self.mesh.call(
                self.keeper.address(), body, timeout_s=ASK_S, epoch=epoch
            )
        except (RosterMismatch, PeerNameTaken, VersionMismatch, LimitExceeded) as exc:
            self._refused = exc
            return
        except DataplaneError as exc:
            log.debug("peer %r: no answer from the roster keeper: %s", self.host.name, exc)
            self.host.serving.authority = self._whereabouts()
            return
        self._plane_wanted = reply.wanted
        if reply.table is not None:
            self.adopt(Roster.from_table(reply.table))
        if not self.deposed.is_set():
            self.host.serving.heard = asked

    def _spare(self) -> bytes:
        """Return which empty shards of this peer are due to members without shards. Partitions
        cannot begin in these until the next roster. All other shards stay open to new partitions,
        even if the keeper fails before that, or if no shard is due."""
        host = self.host
        serves = host.address in host.roster.hosts and not host.silent
        if not serves or not newcomers(host.roster, self.keeper.apart):
            return b""
        if host.spare is None:
            after = rebalanced(host.roster, self.keeper.apart, self.peer.partitions.spare())
            host.spare = after != host.roster.primaries
        return np.packbits(host.spare).tobytes()

    def plane_is_wanted(self) -> bool:
        """Whether any peer of the run has a client or waits for one, according to the keeper.
        False if the keeper has not replied for long."""
        heard = self.host.serving.heard
        return heard is not None and self.host.now() - heard < WANTED_S and self._plane_wanted

    # leaving

    def stays(self) -> set[str]:
        """Return members that could take this peer's shards, now or when the keeper is back.
        Members that have exited with the keeper or are about to leave are not among them."""
        roster = self.host.roster
        if self.keeps_the_roster:
            return set()
        staying = set(roster.members) - roster.leaving - {self.host.address}
        if self.keeper_is_away():
            proven = filter(self.watching.contacts.has_ended, roster.owners)
            ended = {*self._ending, *proven}  # owners: a restarted process has not ended
            staying -= {owner.peer for owner in ended if roster.has(owner)}
            staying -= self._unreached | {self.keeper.apart}
        return staying

    @property
    def keeps_the_roster(self) -> bool:
        """Whether this peer is the roster keeper because it is the first seed."""
        return self.keeper.apart == self.host.address

    def keeper_is_away(self) -> bool:
        """Whether the first seed, if it is the keeper, has not replied for a while."""
        heard = self.host.serving.heard
        if not self.keeper.apart or self.keeps_the_roster or heard is None:
            return False
        return self.host.now() - heard > AWAY_S

    async def announce_leaving(self) -> None:
        """Tell all members that this peer wants to leave, until the keeper is back and tells them.
        Members that want to leave too are included, because they may wait only for this peer."""
        others = {*self.host.roster.members} - {self.host.address, self.keeper.apart}
        await asyncio.gather(*map(self._announce_leaving_to, others))
        self._unreached.clear()

    async def _announce_leaving_to(self, other: str) -> None:
        """Greet the member before each report, so that its exit is noticed. A member that has
        exited answers no greeting, and does not delay reports to the others."""
        while self.keeper_is_away():
            try:
                async with asyncio.timeout(ASK_S):
                    await self.mesh.hello(other)
                self._unreached.discard(other)
                with contextlib.suppress(DataplaneError):  # the member is not the keeper
                    await self.mesh.call(other, Beat(leaving=True), timeout_s=ASK_S)
            except (TimeoutError, DataplaneError):
                self._unreached.add(other)
            await asyncio.sleep(BEAT_S)

    def leave(self) -> None:
        """Report in heartbeats that this peer wants to leave, until it is `deposed`."""
        self._leaving = True
        self.beat_now()

    def _is_ready(self) -> bool:
        """Whether a heartbeat may report that this peer leaves. Once the roster says so, the report
        asks to move its shards, which requires that it is silent."""
        return self.host.silent or self.host.address not in self.host.roster.leaving

    def beat_now(self) -> None:
        self._beat_now.set()

    def _whereabouts(self) -> str:
        """Return where the keeper is, for messages."""
        try:
            return f" at {self.keeper.address()}"
        except Unavailable:
            return " (no peer is known to be the keeper)"

    # evidence and heartbeats of other peers

    def _evidence(self) -> None:
        """Act on evidence that a member may be lost."""
        if self.role.is_open:
            self.role.judge()
        else:
            self.beat_now()

    def has_ended(self, address: str) -> bool:
        """Whether the process of the member at this address is proven to have exited."""
        owner = self.host.roster.owner_at(address)
        return owner is not None and self.watching.contacts.has_ended(owner)

    def beat_here(self, caller: Caller, body: Beat) -> Body:
        if self.role.is_open and self.keeper.sure():
            self.role.note(caller.owner, body, caller.epoch)
            self.peer.confirming.note_heartbeat(caller.owner, caller.epoch)
            if not self.role.is_open:
                raise Unavailable(
                    f"the roster keeper at {self.host.address} is restarting: repeat the call"
                )
        elif caller.address != self.keeper.apart:  # which asks for rosters when it starts
            if body.leaving:
                ending = (*self._ending, caller.owner)
                self._ending = set(filter(self.host.roster.has, ending))
            raise Unavailable(
                f"the peer at {self.host.address} is not the roster keeper, or is still starting: "
                "repeat the call"
            )
        ours = self.host.roster
        known = ours.epoch == caller.epoch
        return Rostered(None if known else ours.table, self.role.wanted)

    # rosters

    def rostered_here(self, caller: Caller, body: Rostered) -> Body:
        """Handle a roster from another peer. Raise StaleEpoch for one of another run: its keeper
        must first learn how many peers this run has."""
        ours = self.host.roster
        new = Roster.from_table(body.table) if body.table is not None else ours
        if new.follows(ours.epoch):
            self.adopt(new)
        elif not ours.follows(new.epoch):
            self.beat_now()
            raise StaleEpoch(
                f"the peer at {self.host.address} has roster version {ours.epoch} and rejected "
                f"version {new.epoch}, which does not follow it: send the latest roster"
            )
        return Done()

    def adopt(self, new: Roster) -> None:
        """Apply a newer roster."""
        old = self.host.roster
        if new.epoch[1] <= old.epoch[1]:
            return
        if not new.has(self.host.owner) or not new.follows(old.epoch):
            if self._admitted:
                if not self._leaving or len(old.shards_of(self.host.address)):
                    log.error("peer %s: declared lost by the roster keeper", self.host.address)
                self.deposed.set()
            return
        self._admitted |= self.host.owner in new.owners
        gone = [owner for owner in old.owners if not new.has(owner)]
        self.host.successors.follow(old, new)
        log.info("roster: now version %s, with %s", new.epoch, counted(len(new.members), "peer"))
        self.host.turn(new)
        self.peer.turned(old, new)
        self.watching.follow(everybody=self.role.is_open)
        for owner in gone:
            self.mesh.part(owner.peer)
        for owner in dict.fromkeys([*gone, *self.peer.log_receiver.lost_before()]):
            self.keeper.gone(owner)
            self.peer.gone(owner)
        if new.leaving or newcomers(new, self.keeper.apart):
            self.beat_now()  # leaving peers end and new ones get shards once all follow
