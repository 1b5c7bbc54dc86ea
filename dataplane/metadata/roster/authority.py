"""The roster keeper's decisions: makes the next roster when peers join, leave, get in sync, or are
lost.

Sans-I/O: reports of peers in, rosters out. Runs at one peer at a time: the first seed, or the
peer that a consensus store chooses. A backup first learns, then is in sync, and only then can be
promoted. If a shard has no backup in sync, it starts empty and its rows are lost.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from dataplane.errors import LimitExceeded, counted
from dataplane.latest import Latest
from dataplane.metadata.roster.roster import (
    FIRST,
    MAX_ANCESTORS,
    MAX_TAKEOVERS,
    NO_BACKUP,
    Flags,
    Roster,
    U2Column,
    buddy,
    proposed,
)
from dataplane.wire.limits import MAX_MEMBERS
from dataplane.wire.peering import Beat
from dataplane.wire.tables import Owner, Takeover

log = logging.getLogger(__name__)

MAX_GONE = 10_000
"""Lost processes that are remembered, so that one which was only stopped is not let in again."""


class Authority:
    """The roster keeper. `incarnation`: of the process that runs this. `roster`: the one in
    force. keeper: the peer that hosts no shards if there are others, because no other peer could
    take them over."""

    def __init__(self, roster: Roster, incarnation: int, keeper: str = "") -> None:
        self.roster = roster
        self._keeper = keeper
        self._incarnation = incarnation
        self._number = roster.epoch[1]
        self._gone = Latest[Owner, None](MAX_GONE)
        self._told: dict[tuple[int, int], Roster] = {}
        """what members knew of authorities before this one when it began"""
        self._followers: set[Owner] = set()
        self._strays: set[Owner] = set()
        """peers that work under rosters of which it was not told"""
        self._said: dict[str, Beat] = {}
        """the last that members said under the roster in force, of which nothing holds under the
        next: what follows from that one is to be done there first, and at their backups"""

    def __repr__(self) -> str:
        return f"<Authority {self._incarnation} of {self.roster!r}>"

    @property
    def is_behind(self) -> bool:
        """Whether the run continued from a roster that no member could report when this keeper
        asked. Its next roster would undo that one, so it must ask again."""
        return bool(self._keeper) and 0 < len(self._strays) >= len(self._followers)

    # events

    def go_on(self, told: Sequence[Roster]) -> None:
        """Continue from the rosters that members know: from the line with the most members, and
        then from its newest roster."""
        self._told = {one.epoch: one for one in told if one.epoch[1] > FIRST}
        if not self._told:
            return
        votes = Counter(one.epoch for one in told)

        def standing(one: Roster) -> tuple[int, int]:
            return sum(votes[e] for e in self._told if one.follows(e)), one.epoch[1]

        before = max(self._told.values(), key=standing)
        self._number = max(number for _, number in self._told)
        if before.epoch[0] != self._incarnation:
            ancestors = (*before.ancestors, before.epoch)[-MAX_ANCESTORS:]
            self._publish(dataclasses.replace(before, ancestors=ancestors))

    def beat(self, peer: Owner, epoch: tuple[int, int], said: Beat) -> None:
        """Note a heartbeat of a peer, under the roster of `epoch`. Raises LimitExceeded for one
        peer too many."""
        if self._is_astray(peer, epoch):
            return
        if not self.roster.has(peer):
            if peer in self._gone or epoch[1] > FIRST:
                return  # the plane went on without it: the answer says so, it returns as a new one
            if peer.peer in self.roster.members:
                self._remove(peer.peer, ended=True)  # its successor has its port
            self._join(peer)
        elif peer not in self.roster.owners:
            self._see(peer)
        if epoch == self.roster.epoch:
            self._relieve(peer.peer)
        backup, _ = self.roster.backup_of(peer.peer)
        if epoch == self.roster.epoch and backup is not None and said.synced is not None:
            self._sync(peer.peer, said.synced)
        if said.leaving and peer.peer not in self.roster.leaving:
            log.info("peer %s: asked to leave the run", peer.peer)
            going = self.roster.leaving | {peer.peer}
            self._publish(self._with_backups(dataclasses.replace(self.roster, leaving=going)))
        if epoch == self.roster.epoch:
            self._said[peer.peer] = said
            self._give()
        self._retire()

    def _is_astray(self, peer: Owner, epoch: tuple[int, int]) -> bool:
        """Few that went astray are outvoted: the plane goes on without what they did, and the next
        roster is newer than theirs."""
        if epoch[0] == self._incarnation and peer.peer != self._keeper:
            self._followers.add(peer)
        if self.roster.follows(epoch):
            self._strays.discard(peer)
            return False
        if not any(one.follows(epoch) for one in self._told.values()):
            self._strays.add(peer)
        if not self.is_behind:
            self._strays.discard(peer)
            if epoch[1] >= self._number:
                self._number = epoch[1]
                self._publish(self.roster)
            if peer in self.roster.owners:
                self.lost(peer)
        return True

    def lost(self, peer: Owner, ended: bool = False) -> None:
        """Remove a process that is dead or cut off. ended: that is proven."""
        if self.roster.has(peer):
            self._gone[peer] = None
            self._followers.discard(peer)
            self._strays.discard(peer)
            self._remove(peer.peer, ended)
            self._retire()

    # what follows from them

    def _see(self, peer: Owner) -> None:
        """A seed's process shows itself for the first time."""
        at = self.roster.members.index(peer.peer)
        incarnations = list(self.roster.incarnations)
        incarnations[at] = peer.incarnation
        seen = dataclasses.replace(self.roster, incarnations=tuple(incarnations))
        self._publish(self._with_backups(seen))

    def _join(self, peer: Owner) -> None:
        """A new member gets shards as soon as those that have them say in which nothing lives."""
        if len(self.roster.members) >= MAX_MEMBERS:
            raise LimitExceeded(
                f"this run already has {MAX_MEMBERS} peers, the maximum: stop a peer "
                "first, or join another run",
                limit=MAX_MEMBERS,
            )
        members = (*self.roster.members, peer.peer)
        incarnations = (*self.roster.incarnations, peer.incarnation)
        joined = dataclasses.replace(self.roster, members=members, incarnations=incarnations)
        log.info("peer %s: joined", peer.peer)
        self._publish(self._with_backups(joined))

    def _give(self) -> None:
        """Once all have said which of their shards are empty, peers without any get of these."""
        roster = self.roster
        told = {host: self._said[host].spare for host in roster.hosts if host in self._said}
        asked = [raw for raw in told.values() if len(raw) * 8 == roster.shards]
        if len(asked) < len(roster.hosts) or not newcomers(roster, self._keeper):
            return
        spare = np.zeros(roster.shards, np.bool_)
        for host, raw in told.items():
            bits = np.unpackbits(np.frombuffer(raw, np.uint8)) > 0
            spare |= bits & (roster.primaries == roster.members.index(host))
        primaries = moved(roster, self._keeper, spare)
        given = int((primaries != roster.primaries).sum())
        if given:
            log.info("roster: moved %s to peers that had none", counted(given, "empty shard"))
            unsynced = roster.in_sync & (primaries == roster.primaries)
            after = dataclasses.replace(roster, primaries=primaries, in_sync=unsynced)
            self._publish(self._with_backups(after))

    def _sync(self, address: str, synced: bool) -> None:
        """The learner has everything, and can be promoted from now on; or it lost the thread."""
        mine = self.roster.shards_of(address)
        if (self.roster.in_sync[mine] == synced).all():
            return
        in_sync = self.roster.in_sync.copy()
        in_sync[mine] = synced
        log.info(
            "peer %s: its backup is %s", address, "now in sync" if synced else "no longer in sync"
        )
        self._publish(dataclasses.replace(self.roster, in_sync=in_sync))

    def _relieve(self, address: str) -> None:
        """Where the backup of a member that lives leaves, or need not host, the next one gets its
        copy. One that died and was not called lost yet could give none."""
        if self.roster.backup_of(address)[0] in self.roster.leaving | {self._keeper}:
            relieved = self._with_backups(self.roster, address)
            if (relieved.backups != self.roster.backups).any():
                self._publish(relieved)

    def _remove(self, address: str, ended: bool = False) -> None:
        """Its shards go to its backup if that is in sync, else they start empty elsewhere. ended:
        its process is proven to have."""
        roster = self.roster
        at = roster.members.index(address)
        rest = [i for i in range(len(roster.members)) if i != at]
        if not rest:
            return
        primaries, backups = roster.primaries.copy(), roster.backups.copy()
        mine, lost = roster.primaries == at, roster.lost.copy()
        if roster.in_sync[mine].any():
            # Shards that are not in sync yet came from another peer just now: what has arrived of
            # them is no whole copy, so they begin empty there.
            heir = int(backups[mine][0])
            partly = int((mine & ~roster.in_sync).sum())
            log.warning(
                "peer %s: declared lost; %s is taking over its shards%s",
                address,
                roster.members[heir],
                (
                    f", but {partly} of these {int(mine.sum())} shards start empty, because the "
                    "backup had no complete copy of them"
                )
                if partly
                else "",
            )
            primaries[mine] = heir
            lost[mine & ~roster.in_sync] += 1
        elif mine.any():
            log.warning(
                "peer %s: declared lost, but no backup was in sync, so its shards start empty",
                address,
            )
            hosts = [h for h in hosts_of(roster, self._keeper) if h != at] or rest[:1]
            primaries[mine] = proposed(roster.members, hosts)[mine]
            lost[mine] += 1
        backups[mine | (backups == at)] = NO_BACKUP
        renumber = np.full(NO_BACKUP + 1, NO_BACKUP, np.uint16)
        renumber[rest] = np.arange(len(rest), dtype=np.uint16)
        without = dataclasses.replace(
            roster,
            members=tuple(roster.members[i] for i in rest),
            incarnations=tuple(roster.incarnations[i] for i in rest),
            primaries=renumber[primaries],
            backups=renumber[backups],
            leaving=roster.leaving - {address},
            lost=lost,
        )
        self._publish(self._with_backups(self._taken_over(address, without, ended)))

    def _retire(self) -> None:
        """Whoever leaves hands its shards over when its backup is in sync, it has done itself what
        the last roster asked of it, and the backup of its heir has all as well, which may die as
        soon as the shards are there; it is let go when no member holds a value that lies there."""
        for address in sorted(self.roster.leaving):
            backup, in_sync = self.roster.backup_of(address)
            if backup is not None and in_sync:
                ready = address in self._said and self._said[address].leaving
                if not ready or not self._may_inherit(backup):
                    continue
                log.info("peer %s: leaving; %s is taking over its shards", address, backup)
                moved = self._taken_over(address, self._moved(address, backup))
                self._publish(self._with_backups(moved))
            elif not len(self.roster.shards_of(address)) and self._is_clear(address):
                log.info("peer %s: left", address)
                self._remove(address)

    def _may_inherit(self, heir: str) -> bool:
        _, in_sync = self.roster.backup_of(heir)
        if not in_sync:
            return not self.roster.may_be_backed_up(heir)
        return heir in self._said and self._said[heir].synced is True

    def _moved(self, address: str, heir: str) -> Roster:
        """The heir has passed on to its own backup what it has of the shards."""
        primaries, backups = self.roster.primaries.copy(), self.roster.backups.copy()
        in_sync = self.roster.in_sync.copy()
        mine, theirs = self.roster.shards_of(address), self.roster.shards_of(heir)
        primaries[mine] = self.roster.members.index(heir)
        backups[mine] = backups[theirs[0]] if len(theirs) else NO_BACKUP
        in_sync[mine] = self.roster.backup_of(heir)[1]
        return dataclasses.replace(
            self.roster, primaries=primaries, backups=backups, in_sync=in_sync
        )

    def _taken_over(self, address: str, then: Roster, ended: bool = True) -> Roster:
        """It tells as well whose a member's shards are, and whether with what they hold. ended: the
        member answers for them no more."""
        owner = self.roster.owner_at(address)
        heir = then.heir_of(self.roster, owner) if owner is not None else None
        if owner is None or heir is None or heir == owner:
            return then
        in_sync = bool(self.roster.in_sync[self.roster.shards_of(address)].any())
        one = Takeover(owner, heir, self._number + 1, in_sync, ended)
        takeovers = (*then.takeovers, one)[-MAX_TAKEOVERS:]
        return dataclasses.replace(then, takeovers=takeovers)

    def _is_clear(self, address: str) -> bool:
        others = {owner.peer for owner in self.roster.owners} - {address}
        said = self._said
        return all(other in said and address in said[other].clear for other in others)

    # who hosts, who backs up

    def _with_backups(self, roster: Roster, heard: str = "") -> Roster:
        """A backup for every host that has none in sync, and for the one that was `heard` under
        this roster, where its backup leaves. Among the peers that were seen; not one that has just
        come, where others are there: without shards it has no backup itself, and would inherit from
        a peer that leaves what nobody else has then."""
        hosts = hosts_of(roster, self._keeper)
        seen = [h for h in hosts if roster.incarnations[h]]
        serving = dict.fromkeys(np.unique(roster.primaries).tolist())
        settled = [h for h in seen if h in serving]
        backups, in_sync = roster.backups.copy(), roster.in_sync.copy()
        in_sync &= backups != NO_BACKUP
        for host in serving:
            mine = roster.primaries == host
            kept = np.unique(backups[mine & in_sync]).tolist()
            going = roster.leaving | {self._keeper} if roster.members[host] != heard else set()
            if len(kept) == 1 and (kept[0] in hosts or roster.members[kept[0]] in going):
                backups[mine] = kept[0]
                continue
            among = next((some for some in (settled, seen) if set(some) - {host}), hosts)
            backups[mine] = buddy(roster.members, among, host)
            in_sync[mine] = False
        return dataclasses.replace(roster, backups=backups, in_sync=in_sync)

    def _publish(self, roster: Roster) -> None:
        self._number += 1
        self._said.clear()
        self.roster = dataclasses.replace(roster, epoch=(self._incarnation, self._number))


def hosts_of(roster: Roster, keeper: str) -> list[int]:
    """Members that may serve shards: not leaving ones. With three or more members, not the
    keeper either, unless it has shards from the time when there were fewer."""
    stay = [i for i, m in enumerate(roster.members) if m not in roster.leaving]
    apart = roster.members.index(keeper) if keeper in roster.members else -1
    if len(stay) < 3 or (roster.primaries == apart).any():
        return stay or list(range(len(roster.members)))
    return [i for i in stay if i != apart]


def newcomers(roster: Roster, keeper: str) -> list[int]:
    """Members that may serve shards, have been seen, and have none yet."""
    serving = set(np.unique(roster.primaries).tolist())
    return [h for h in hosts_of(roster, keeper) if h not in serving and roster.incarnations[h]]


def moved(roster: Roster, keeper: str, spare: Flags) -> U2Column:
    """Return the primaries after these shards move to the newcomers that should have them."""
    hosts = hosts_of(roster, keeper)
    by_right = proposed(roster.members, hosts, roster.shards)
    theirs = spare & np.isin(by_right, newcomers(roster, keeper))
    return np.where(theirs, by_right, roster.primaries)
