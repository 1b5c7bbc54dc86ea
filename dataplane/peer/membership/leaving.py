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
"""A leaving peer ends after this time, even if it still has shards or values."""
QUIET_S = 5.0
"""How long a leaving peer waits for requests that it is still carrying out."""
FATE_S = 30.0
"""How long a leaving peer waits for members that it cannot reach. Within this time the roster
keeper declares them lost, even a keeper that is new or hears few members."""
COPY_S = 20.0
"""How long to wait until values that only the primary holds are also at the backup."""
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

    # at the leaving peer

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
        works = self.membership.deposed.wait(), self._move_out(), self._fail_when_alone()
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
        """Report the leases of the keeper's clients as ended before it stops. No peer declares a
        keeper lost, so these rows would stay leased until it is restarted."""
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
            if (successors := self._successors()) != copied:
                copied = successors
                await self._copy_on()
            else:
                await self._fall_silent()
                self.membership.beat_now()
                await _until(lambda: not self.host.silent)
            await _until(self._may_move)
        await self.membership.deposed.wait()

    async def _fail_when_alone(self) -> None:
        """Raise Unavailable when no peer is left that could take over shards. Runs during every
        other wait of a leaving peer. A keeper that died gets `FATE_S` to be restarted."""
        until = None
        while self.membership.stays():
            if not self.membership.keeper_is_away():
                until = None
            elif until is None:
                until = self.host.now() + FATE_S
                log.warning(
                    "roster keeper: unreachable, waiting up to %g s for it to return", FATE_S
                )
                self.mesh.spawn(self.membership.announce_leaving())
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
        """Return whether the shards may move: the roster says that this peer leaves, this peer
        backs up no other, and its backup has a backup of its own. A peer gets a backup with its
        first shards, so a backup that has no shards needs none yet."""
        roster, here = self.host.roster, self.host.address
        if here not in roster.leaving or not self._is_backed_up():
            return False
        if any(roster.backup_of(host)[0] == here for host in roster.hosts):
            return False
        successor, _ = roster.backup_of(here)
        if successor is None or roster.backup_of(successor)[1]:
            return True
        if not len(roster.shards_of(successor)):
            return {one.peer for one in roster.owners} - roster.leaving == {successor}
        return not roster.may_be_backed_up(successor)

    def _successors(self) -> tuple[str | None, ...]:
        """Return the peer that takes over this peer's shards, and that peer's backup."""
        roster = self.host.roster
        successor, _ = roster.backup_of(self.host.address)
        return successor, None if successor is None else roster.backup_of(successor)[0]

    def _knows_who_lives(self, until: float) -> bool:
        """Return whether every member is linked, or `until` has passed.

        A member that died unnoticed may have left its only copies here: replicas of its values,
        and the backup of its shards. When the keeper declares it lost, these become values and
        shards of this peer, which can move out.
        """
        others = [one for one in self.host.roster.owners if one != self.host.owner]
        return self.host.now() >= until or all(map(self.mesh.is_linked, others))

    async def _greet_all(self) -> None:
        """Greet members without a link until cancelled. A live member answers."""
        while True:
            others = [one for one in self.host.roster.owners if not self.mesh.is_linked(one)]
            greetings = (self.mesh.hello(one.peer) for one in others if one != self.host.owner)
            await asyncio.gather(*greetings, return_exceptions=True)
            await asyncio.sleep(POLL_S)

    async def _calls_end(self) -> None:
        """Wait until the clients' requests are carried out. A later one could write values here
        for rows of peers that have already reported this peer clear."""
        until = self.host.now() + QUIET_S
        while self.door.under_way and self.host.now() < until:
            await asyncio.sleep(POLL_S / 10)

    async def _copy_on(self) -> None:
        """With replicas=2: replicate the values that are here or at the new primary to the new
        primary's backup, which may soon hold the only copy. If the backup has no space, the new
        primary replicates them later."""
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
        """Stop applying changes, and wait until the backup has all of them. Requests wait for the
        next roster. If that roster leaves the shards here, because their new primary or its backup
        died, this peer serves them again and starts over."""
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
        """Give the new primary references to the values here that the moved shards reference. This
        comes last: if a peer was lost while this peer was silent, its rows and their values are
        freed first."""
        for entry in self.host.entries.values():
            for owner, chunks, counts in entry.store.holdings():
                if owner == self.host.owner:
                    self.host.remote_references.add(owner, np.repeat(chunks, counts))

    def clear(self) -> list[str]:
        """Return leaving members that hold no value of this peer's rows."""
        leaving = self.host.roster.leaving
        if not leaving or not self.host.progress.is_settled:
            return []
        found = {o for e in self.host.entries.values() for o, _, _ in e.store.holdings()}
        return sorted(leaving - {owner.peer for owner in found})

    def _takes_in(self, owner: Owner) -> bool:
        """Return whether this peer copies the values of `owner`, which is leaving. If this peer is
        leaving too, it does not: its shards must not change while they move."""
        roster = self.host.roster
        leaves = roster.has(owner) and owner.peer in roster.leaving
        return leaves and self.host.address not in roster.leaving

    async def _take_in(self, owner: Owner) -> None:
        """Copy values from `owner` until it has left, or no longer leaves."""
        try:
            while self._takes_in(owner):
                # Partitions that wait for replicas come last, so the others do not wait for them.
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
        """Copy the values at `owner` that this partition's rows reference to this peer. This
        includes leased rows: their holder asks the shard where the values are now."""
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
            chunks, nbytes = entry.store.named(owner)
            if not len(chunks):
                break
            count, here, local = await self.value_replicas.fetch(owner, chunks, nbytes)
            if not self._takes_in(owner):
                self.value_replicas.room.release(local)
                return
            self.value_replicas.replace(entry, owner, chunks[:count][here], local)
            self.run_effects(entry)
            if not here.all():
                break  # other values were freed, and the shard will learn of it


async def _until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(POLL_S)
