"""How a peer leaves a running plane: it first moves everything that it has.

The leaving peer ends its clients, lets its backup catch up, and reports to the roster keeper
that it leaves. From then on its backup forwards operations to its own backup, so no row is lost
even if shards move twice. With replicas=2, that second backup also gets replicas of values on
these two peers. When it has everything, and the leaving peer is no longer a backup of any peer,
the leaving peer stops applying changes, and its shards move to its backup. Every other member
then copies the values that its rows reference there, and tells the keeper when none are left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dataplane import progress
from dataplane.errors import DataplaneError, PeerLeaves, Unavailable, sized
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.door.client_door import Door
from dataplane.peer.host import Entry, Host
from dataplane.peer.membership.membership import Membership
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.router import Router
from dataplane.peer.shards.value_replicas import ValueReplicas
from dataplane.peer.tasks import first_of
from dataplane.progress import Bar
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

LEAVE_S = 60.0
"""A peer that was told to leave ends after so long, whatever it still has."""
QUIET_S = 5.0
"""Requests that were begun before are waited for so long."""
FATE_S = 30.0
"""It waits so long to hear whether members that it cannot reach are lost. By then the keeper of the
roster has called them so, even one that is new or doubts itself."""
COPY_S = 20.0
"""So long are copies at a backup awaited of what will lie at its primary and nowhere else."""
POLL_S = 0.1


@dataclass(eq=False, repr=False)
class Leaving:
    host: Host
    mesh: Mesh
    membership: Membership
    value_replicas: ValueReplicas
    door: Door
    router: Router
    run_effects: Callable[[Entry], None]

    def __post_init__(self) -> None:
        self._moving: set[Owner] = set()

    # at the peer that leaves

    async def leave(self, told: asyncio.Event) -> None:
        """Leave once `told` is set, and return when nothing is left here. Return earlier if no
        peer can take the rows, or if the drain takes too long."""
        await told.wait()
        if self.membership.keeps_the_roster and len(self.host.roster.members) > 1:
            await self._end_as_keeper()
            return
        if not self.membership.stays():
            log.info("peer %r: no other peer is left to take over this peer's rows", self.host.name)
            return
        await self._end_clients("is leaving, and its rows are moving to other hosts")
        works = self.membership.deposed.wait(), self._move_out(), self._nobody_is_left()
        try:
            with progress.bar("drain") as bar:
                async with asyncio.timeout(LEAVE_S):
                    for ended in await first_of(*works, self._show(bar)):
                        ended.result()
        except (TimeoutError, Unavailable) as exc:
            log.error(
                "peer %r: drain incomplete (%s): %d shards and %d bytes were not moved",
                self.host.name,
                str(exc) or f"not done within {LEAVE_S:g} s",
                len(self.host.roster.shards_of(self.host.address)),
                self.host.space.stats()["used_bytes"],
            )

    async def _show(self, bar: Bar) -> None:
        """Show how many bytes have moved out. Never ends."""
        first = None
        while True:
            left = self.host.space.stats()["used_bytes"]
            if first is None:
                bar.expect(first := left)
            shards = len(self.host.roster.shards_of(self.host.address))
            bar.at(first - left, f"{shards} shards and {sized(left)} left")
            await asyncio.sleep(POLL_S)

    async def _end_as_keeper(self) -> None:
        """Nobody calls the keeper of the roster lost. What its clients had leased would be leased
        until it is back: their shards hear of it before it ends."""
        log.warning(
            "peer %r: shutting down. This peer is the roster keeper, so no peer can take over "
            "lost shards until this peer is restarted",
            self.host.name,
        )
        await self._end_clients(
            "is shutting down, and must be restarted at the same address because it is the roster "
            "keeper"
        )
        await self._calls_end()
        until = self.host.now() + QUIET_S
        while not (self.router.is_heard and not self.door.connections) and self.host.now() < until:
            await asyncio.sleep(POLL_S / 10)

    async def _end_clients(self, what: str) -> None:
        await self.door.close(
            PeerLeaves(
                f"peer {self.host.name!r} {what}: connect to another peer, and repeat the call "
                "there (for a put, use the same keys)",
                peer=self.host.name,
            )
        )

    async def _move_out(self) -> None:
        await self._calls_end()
        self.membership.peer.log_sender.forgive()
        until = self.host.now() + FATE_S
        greeting = self.mesh.spawn(self._greet_all())
        await _until(lambda: self._is_backed_up() and self._knows_who_lives(until))
        greeting.cancel()
        self.membership.leave()
        await _until(self._may_move)
        copied: tuple[str | None, ...] = ()
        while len(self.host.roster.shards_of(self.host.address)):
            if (heirs := self._heirs()) != copied:
                copied = heirs
                await self._copy_on()
            else:
                await self._fall_silent()
                self.membership.beat_now()
                await _until(lambda: not self.host.silent)
            await _until(self._may_move)
        await self.membership.deposed.wait()

    async def _nobody_is_left(self) -> None:
        """Whatever else is waited for, and where that died as well. Unavailable when nobody is left
        who could take anything over. A keeper of the roster that died may be started again."""
        until = None
        while self.membership.stays():
            if not self.membership.keeper_is_away():
                until = None
            elif until is None:
                until = self.host.now() + FATE_S
                log.warning(
                    "roster keeper: unreachable, waiting up to %g s for it to return", FATE_S
                )
                self.mesh.spawn(self.membership.say_ending())
            elif self.host.now() >= until:
                raise Unavailable(f"the roster keeper has been unreachable for {FATE_S:g} s")
            await asyncio.sleep(POLL_S)
        raise Unavailable(
            "every peer that could take over this peer's shards is also leaving or unreachable"
        )

    def _is_backed_up(self) -> bool:
        _, in_sync = self.host.roster.backup_of(self.host.address)
        return in_sync or not len(self.host.roster.shards_of(self.host.address))

    def _may_move(self) -> bool:
        """Whether it is known that this peer leaves, it is nobody's backup any more, and its own
        has one itself, as it gets with its first shards. Until then these are served here."""
        roster, here = self.host.roster, self.host.address
        if here not in roster.leaving or not self._is_backed_up():
            return False
        if any(roster.backup_of(host)[0] == here for host in roster.hosts):
            return False
        heir, _ = roster.backup_of(here)
        if heir is None or roster.backup_of(heir)[1]:
            return True
        if not len(roster.shards_of(heir)):
            return {one.peer for one in roster.owners} - roster.leaving == {heir}
        return not roster.may_be_backed_up(heir)

    def _heirs(self) -> tuple[str | None, ...]:
        """Its heir, and the backup of that."""
        roster = self.host.roster
        heir, _ = roster.backup_of(self.host.address)
        return heir, None if heir is None else roster.backup_of(heir)[0]

    def _knows_who_lives(self, until: float) -> bool:
        """Whether no member may have died unnoticed. What is stored here of one may be all that is
        left: replicas of its values, which this peer's heir cannot make again, and the copy of its
        shards. When that member is declared lost, they become values and shards, which move out."""
        others = [one for one in self.host.roster.owners if one != self.host.owner]
        return self.host.now() >= until or all(map(self.mesh.is_linked, others))

    async def _greet_all(self) -> None:
        """Again and again: a member that lives answers."""
        while True:
            others = [one for one in self.host.roster.owners if not self.mesh.is_linked(one)]
            greetings = (self.mesh.hello(one.peer) for one in others if one != self.host.owner)
            await asyncio.gather(*greetings, return_exceptions=True)
            await asyncio.sleep(POLL_S)

    async def _calls_end(self) -> None:
        """What its clients asked for is carried out: later their values would go to rows of peers
        which have said already that nothing of theirs lies here."""
        until = self.host.now() + QUIET_S
        while self.door.under_way and self.host.now() < until:
            await asyncio.sleep(POLL_S / 10)

    async def _copy_on(self) -> None:
        """With replicas=2: what lies here and at the heir gets copies at the heir's backup, which
        may be all that is left of it soon. Where there is no room they are made when there is."""
        try:
            async with asyncio.timeout(COPY_S):
                for entry in list(self.host.entries.values()):
                    if entry.replicas is not None:
                        await self._copied_on(entry)
        except TimeoutError:
            log.warning(
                "peer %r: some replicas are still missing after %g s; the new primary "
                "will create them",
                self.host.name,
                COPY_S,
            )

    async def _copied_on(self, entry: Entry) -> None:
        try:
            await self.value_replicas.have_copied(entry)
        except DataplaneError as exc:
            log.warning(
                "partition %r: could not create all replicas before leaving (%r); the new "
                "primary will create the missing ones",
                entry.name,
                exc,
            )

    async def _fall_silent(self) -> None:
        """From here on nobody changes a shard, and the backup has all there is: what is asked waits
        for the next roster. Where the shards are here by that one too, since their heir died or its
        backup did, they are served again, and all of this begins anew."""
        self.host.silent = True
        await self.host.progress.reached(self.host.now() + LEAVE_S)

    # at every peer

    def turned(self, old: Roster, new: Roster) -> None:
        """Apply a new roster while shards that move to another peer are still here."""
        here = self.host.address
        self.host.silent = False
        if here in new.leaving and len(old.shards_of(here)) and not len(new.shards_of(here)):
            self._hand_over()
        for owner in new.owners:
            if self._takes_in(owner) and owner not in self._moving:
                self._moving.add(owner)
                self.mesh.spawn(self._take_in(owner))

    def _hand_over(self) -> None:
        """What the shards hold here is their heir's. Not before: with a peer that was lost while
        this one was silent, rows went, and what they held here."""
        for entry in self.host.entries.values():
            for owner, ranges, counts in entry.store.holdings():
                if owner == self.host.owner:
                    self.host.lent.lend(owner, np.repeat(ranges, counts))

    def clear(self) -> list[str]:
        """Return leaving members that hold no value of this peer's rows."""
        leaving = self.host.roster.leaving
        if not leaving or not self.host.progress.is_settled:
            return []
        found = {o for e in self.host.entries.values() for o, _, _ in e.store.holdings()}
        return sorted(leaving - {owner.peer for owner in found})

    def _takes_in(self, owner: Owner) -> bool:
        """Not where this peer leaves as well: nobody changes shards that are about to move."""
        roster = self.host.roster
        leaves = roster.has(owner) and owner.peer in roster.leaving
        return leaves and self.host.address not in roster.leaving

    async def _take_in(self, owner: Owner) -> None:
        """Until the peer has left, or stays after all."""
        try:
            while self._takes_in(owner):
                # What waits for copies, or for room for them, keeps nobody else waiting.
                for entry in sorted(
                    self.host.entries.values(), key=lambda e: e.replicas is not None
                ):
                    try:
                        await self._move(entry, owner)
                    except DataplaneError as exc:
                        log.warning(
                            "partition %r: could not move values from peer %s, retrying: %s",
                            entry.name,
                            owner.peer,
                            exc,
                        )
                self.membership.beat_now()
                await self.host.another_roster(self.host.roster, self.host.now() + POLL_S)
        finally:
            self._moving.discard(owner)

    async def _move(self, entry: Entry, owner: Owner) -> None:
        """What rows of this partition name there comes here. Leased rows' values too: whoever has
        them leased finds the new place at the shard."""
        if entry.replicas is not None:
            await self.value_replicas.copy_here(entry.replicas, owner)
            try:
                async with asyncio.timeout(COPY_S):
                    await self.value_replicas.copy_held_to_backup(entry, entry.replicas, owner)
            except (TimeoutError, DataplaneError) as exc:
                log.warning(
                    "partition %r: could not create all replicas, retrying later: %r",
                    entry.name,
                    exc,
                )
            if not self._takes_in(owner):
                return
            self.value_replicas.succeed(entry, entry.replicas, owner)
        while self.host.entries.get(entry.name) is entry:
            ranges, nbytes = entry.store.named(owner)
            if not len(ranges):
                break
            count, here, local = await self.value_replicas.fetch(owner, ranges, nbytes)
            if not self._takes_in(owner):
                self.value_replicas.room.release(local)
                return
            self.value_replicas.replace(entry, owner, ranges[:count][here], local)
            self.run_effects(entry)
            if not here.all():
                break  # of what was freed there meanwhile this one is about to hear


async def _until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(POLL_S)
