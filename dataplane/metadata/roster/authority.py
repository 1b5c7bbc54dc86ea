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
"""How many lost processes the keeper remembers, to refuse one that was only stopped."""


class Authority:
    """The roster keeper. `incarnation`: of the process that runs this. `roster`: the one in
    force. keeper: the address of the peer that runs this. It hosts no shards if other peers can,
    because without a keeper nobody could take them over."""

    def __init__(self, roster: Roster, incarnation: int, keeper: str = "") -> None:
        self.roster = roster
        self._keeper = keeper
        self._incarnation = incarnation
        self._number = roster.epoch[1]
        self._gone = Latest[Owner, None](MAX_GONE)
        self.reported: dict[tuple[int, int], Roster] = {}
        """rosters of earlier keepers that members reported when this keeper started, by epoch"""
        self._followers: set[Owner] = set()
        self._strays: set[Owner] = set()
        """peers that follow a roster which no member had reported to this keeper"""
        self._heartbeats: dict[str, Beat] = {}
        """the last heartbeat of each member under the roster in force. A new roster clears them,
        because members and their backups must apply it before they report again."""

    def __repr__(self) -> str:
        return f"<Authority {self._incarnation} of {self.roster!r}>"

    @property
    def is_behind(self) -> bool:
        """Whether the run continued from a roster that no member could report when this keeper
        asked. The keeper's next roster would undo it, so it must ask again."""
        return bool(self._keeper) and 0 < len(self._strays) >= len(self._followers)

    # events

    def go_on(self, told: Sequence[Roster]) -> None:
        """Continue from the rosters that members know: from the line with the most members, and
        then from its newest roster."""
        self.reported = {one.epoch: one for one in told if one.epoch[1] > FIRST}
        if not self.reported:
            return
        votes = Counter(one.epoch for one in told)

        def standing(one: Roster) -> tuple[int, int]:
            return sum(votes[e] for e in self.reported if one.follows(e)), one.epoch[1]

        before = max(self.reported.values(), key=standing)
        self._number = max(number for _, number in self.reported)
        if before.epoch[0] != self._incarnation:
            ancestors = (*before.ancestors, before.epoch)[-MAX_ANCESTORS:]
            self._publish(dataclasses.replace(before, ancestors=ancestors))

    def beat(self, peer: Owner, epoch: tuple[int, int], said: Beat) -> None:
        """Note a heartbeat of a peer, under the roster of `epoch`. Raises LimitExceeded for one
        peer too many."""
        if self._is_stray(peer, epoch):
            return
        if not self.roster.has(peer):
            if peer in self._gone or epoch[1] > FIRST:
                return  # it was declared lost: the reply says so, and it joins as a new process
            if peer.peer in self.roster.members:
                self._remove(peer.peer, ended=True)  # a new process has its port
            self._join(peer)
        elif peer not in self.roster.owners:
            self._note_incarnation(peer)
        if epoch == self.roster.epoch:
            self._replace_backup(peer.peer)
        backup, _ = self.roster.backup_of(peer.peer)
        if epoch == self.roster.epoch and backup is not None and said.synced is not None:
            self._note_sync(peer.peer, said.synced)
        if said.leaving and peer.peer not in self.roster.leaving:
            log.info("peer %s: asked to leave the run", peer.peer)
            going = self.roster.leaving | {peer.peer}
            self._publish(self._with_backups(dataclasses.replace(self.roster, leaving=going)))
        if epoch == self.roster.epoch:
            self._heartbeats[peer.peer] = said
            self._give_empty_shards()
        self._advance_leaving()

    def _is_stray(self, peer: Owner, epoch: tuple[int, int]) -> bool:
        """Return whether `peer` follows a roster that is not an ancestor of the one in force.

        If most followers agree with this keeper, the strays are declared lost, and the next roster
        is newer than theirs.
        """
        if epoch[0] == self._incarnation and peer.peer != self._keeper:
            self._followers.add(peer)
        if self.roster.follows(epoch):
            self._strays.discard(peer)
            return False
        if not any(one.follows(epoch) for one in self.reported.values()):
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
        """Remove a process that is dead or cut off. ended: its death is proven."""
        if self.roster.has(peer):
            self._gone[peer] = None
            self._followers.discard(peer)
            self._strays.discard(peer)
            self._remove(peer.peer, ended)
            self._advance_leaving()

    # decisions

    def _note_incarnation(self, peer: Owner) -> None:
        """Note the incarnation of a seed that reports for the first time."""
        at = self.roster.members.index(peer.peer)
        incarnations = list(self.roster.incarnations)
        incarnations[at] = peer.incarnation
        seen = dataclasses.replace(self.roster, incarnations=tuple(incarnations))
        self._publish(self._with_backups(seen))

    def _join(self, peer: Owner) -> None:
        """Add a member. It gets shards once their primaries report which of theirs are empty."""
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

    def _give_empty_shards(self) -> None:
        """Move empty shards to members without shards, once every host reported its empty ones."""
        roster = self.roster
        told = {
            host: self._heartbeats[host].spare for host in roster.hosts if host in self._heartbeats
        }
        asked = [raw for raw in told.values() if len(raw) * 8 == roster.shards]
        if len(asked) < len(roster.hosts) or not newcomers(roster, self._keeper):
            return
        spare = np.zeros(roster.shards, np.bool_)
        for host, raw in told.items():
            bits = np.unpackbits(np.frombuffer(raw, np.uint8)) > 0
            spare |= bits & (roster.primaries == roster.members.index(host))
        primaries = rebalanced(roster, self._keeper, spare)
        given = int((primaries != roster.primaries).sum())
        if given:
            log.info("roster: moved %s to peers that had none", counted(given, "empty shard"))
            unsynced = roster.in_sync & (primaries == roster.primaries)
            after = dataclasses.replace(roster, primaries=primaries, in_sync=unsynced)
            self._publish(self._with_backups(after))

    def _note_sync(self, address: str, synced: bool) -> None:
        """Note whether the backup of `address` is in sync, so that it may be promoted."""
        mine = self.roster.shards_of(address)
        if (self.roster.in_sync[mine] == synced).all():
            return
        in_sync = self.roster.in_sync.copy()
        in_sync[mine] = synced
        log.info(
            "peer %s: its backup is %s", address, "now in sync" if synced else "no longer in sync"
        )
        self._publish(dataclasses.replace(self.roster, in_sync=in_sync))

    def _replace_backup(self, address: str) -> None:
        """Choose another backup for `address` if its backup leaves or is the keeper. Only called
        for a member that just reported: a dead one could not copy its shards to a new backup."""
        if self.roster.backup_of(address)[0] in self.roster.leaving | {self._keeper}:
            relieved = self._with_backups(self.roster, address)
            if (relieved.backups != self.roster.backups).any():
                self._publish(relieved)

    def _remove(self, address: str, ended: bool = False) -> None:
        """Remove a member. Its shards move to its backup if that is in sync, else they start empty
        at other peers. ended: its process is proven to have ended."""
        roster = self.roster
        at = roster.members.index(address)
        rest = [i for i in range(len(roster.members)) if i != at]
        if not rest:
            return
        primaries, backups = roster.primaries.copy(), roster.backups.copy()
        mine, lost = roster.primaries == at, roster.lost.copy()
        if roster.in_sync[mine].any():
            # Shards that are not in sync yet just moved to the lost member. Its backup has no
            # complete copy of them, so they start empty.
            successor = int(backups[mine][0])
            partly = int((mine & ~roster.in_sync).sum())
            log.warning(
                "peer %s: declared lost; %s is taking over its shards%s",
                address,
                roster.members[successor],
                (
                    f", but {partly} of these {int(mine.sum())} shards start empty, because the "
                    "backup had no complete copy of them"
                )
                if partly
                else "",
            )
            primaries[mine] = successor
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
        self._publish(self._with_backups(self._with_takeover(address, without, ended)))

    def _advance_leaving(self) -> None:
        """Move the shards of leaving members, and remove members that nobody needs.

        Shards move once the backup is in sync, the leaving member has applied the roster in force,
        and the backup's own backup is in sync, because the backup may die as soon as it has the
        shards. A member is removed once no rows reference values there.
        """
        for address in sorted(self.roster.leaving):
            backup, in_sync = self.roster.backup_of(address)
            if backup is not None and in_sync:
                ready = address in self._heartbeats and self._heartbeats[address].leaving
                if not ready or not self._may_take_over(backup):
                    continue
                log.info("peer %s: leaving; %s is taking over its shards", address, backup)
                moved = self._with_takeover(address, self._with_shards_at(address, backup))
                self._publish(self._with_backups(moved))
            elif not len(self.roster.shards_of(address)) and self._is_clear(address):
                log.info("peer %s: left", address)
                self._remove(address)

    def _may_take_over(self, successor: str) -> bool:
        _, in_sync = self.roster.backup_of(successor)
        if not in_sync:
            return not self.roster.may_be_backed_up(successor)
        return successor in self._heartbeats and self._heartbeats[successor].synced is True

    def _with_shards_at(self, address: str, successor: str) -> Roster:
        """Return the roster with the shards of `address` at `successor`, whose own backup has
        them."""
        primaries, backups = self.roster.primaries.copy(), self.roster.backups.copy()
        in_sync = self.roster.in_sync.copy()
        mine, theirs = self.roster.shards_of(address), self.roster.shards_of(successor)
        primaries[mine] = self.roster.members.index(successor)
        backups[mine] = backups[theirs[0]] if len(theirs) else NO_BACKUP
        in_sync[mine] = self.roster.backup_of(successor)[1]
        return dataclasses.replace(
            self.roster, primaries=primaries, backups=backups, in_sync=in_sync
        )

    def _with_takeover(self, address: str, then: Roster, ended: bool = True) -> Roster:
        """Return `then` with a record of who took over the shards of `address`, and whether with
        their rows. ended: that member answers no more requests for them."""
        owner = self.roster.owner_at(address)
        successor = then.successor_of(self.roster, owner) if owner is not None else None
        if owner is None or successor is None or successor == owner:
            return then
        in_sync = bool(self.roster.in_sync[self.roster.shards_of(address)].any())
        one = Takeover(owner, successor, self._number + 1, in_sync, ended)
        takeovers = (*then.takeovers, one)[-MAX_TAKEOVERS:]
        return dataclasses.replace(then, takeovers=takeovers)

    def _is_clear(self, address: str) -> bool:
        others = {owner.peer for owner in self.roster.owners} - {address}
        said = self._heartbeats
        return all(other in said and address in said[other].clear for other in others)

    # who hosts, who backs up

    def _with_backups(self, roster: Roster, heard: str = "") -> Roster:
        """Return the roster with a backup for every host that has none in sync, and for the member
        `heard` if its backup leaves.

        Backups are peers that have reported. A peer that just joined is chosen last: without
        shards it has no backup itself, so it would hold the only copy of a leaving peer's shards.
        """
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
        self._heartbeats.clear()
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


def rebalanced(roster: Roster, keeper: str, spare: Flags) -> U2Column:
    """Return the primaries after these shards move to the newcomers that should have them."""
    hosts = hosts_of(roster, keeper)
    by_right = proposed(roster.members, hosts, roster.shards)
    theirs = spare & np.isin(by_right, newcomers(roster, keeper))
    return np.where(theirs, by_right, roster.primaries)
