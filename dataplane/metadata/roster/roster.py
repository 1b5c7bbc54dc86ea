"""The members of a run, and the table shard -> primary, backup, in_sync.

Sans-I/O. The first roster is a pure function of the ordered seeds, so all peers compute the same
table. After that, the roster keeper (`metadata.roster.authority`) makes the next ones. A roster
never changes, and its epoch identifies it. Of earlier rosters, a peer keeps only which peer took
over from which (`Successors`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from dataplane.errors import RosterMismatch, counted
from dataplane.wire.limits import MAX_MEMBERS, SHARDS
from dataplane.wire.packed import U2, column
from dataplane.wire.tables import Owner, RosterTable, Takeover

FIRST = 1
"""Number of the roster of a peer that has not joined yet."""
NO_BACKUP = 0xFFFF
MAX_TAKEOVERS = 64
"""A roster lists this many: more than happen while a peer is cut off but not declared lost."""
MAX_ANCESTORS = 64
"""The same limit for earlier keepers."""

U1Column = npt.NDArray[np.uint8]
U2Column = npt.NDArray[np.uint16]
Flags = npt.NDArray[np.bool_]
U8Column = npt.NDArray[np.uint64]


def canonical(seed: str) -> str:
    """Normalise an address, so that equal seeds give equal rosters."""
    return seed.strip().rstrip("/").lower().replace("://localhost:", "://127.0.0.1:")


def _mix(values: U8Column) -> U8Column:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): a hash of a column of u64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=4096)
def _hash(text: str) -> int:
    """Cached, because the same few partitions and stages recur."""
    return xxhash.xxh3_64_intdigest(text.encode())


@dataclass(frozen=True, eq=False)
class Roster:
    """The members and the shard table.

    members: addresses in order; the first keeps the roster. incarnations: the process of each
    member, 0 if none was seen yet. primaries, backups: index of a member per shard. in_sync: the
    backup has every operation that the primary has confirmed. leaving: members that move their
    shards to others. takeovers: the last MAX_TAKEOVERS. lost: how often each shard started empty
    because both copies were lost, modulo 256. ancestors: for each of the last MAX_ANCESTORS
    keepers, the epoch of the roster from which the next one continued.
    """

    members: tuple[str, ...]
    incarnations: tuple[int, ...]
    epoch: tuple[int, int]
    primaries: U2Column
    backups: U2Column
    in_sync: Flags
    lost: U1Column
    leaving: frozenset[str] = frozenset()
    takeovers: tuple[Takeover, ...] = ()
    ancestors: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def from_seeds(
        seeds: Sequence[str], shards: int = SHARDS, keeps: bool = True, launch: str = ""
    ) -> Roster:
        """The first roster. Without seeds it has one member, "", which is this peer alone.

        keeps: with three or more members, the first one keeps the roster and hosts no shards.
        launch: the launch that started this run name again. Its roster belongs to another run
        than those of earlier launches.
        """
        members = tuple(canonical(seed) for seed in seeds) or ("",)
        if len(set(members)) != len(members):
            raise RosterMismatch(
                f"the seed list ({', '.join(members)}) contains a duplicate: list each seed once",
                seeds=members,
            )
        hosts = list(range(1 if keeps and len(members) >= 3 else 0, len(members)))
        primaries = proposed(members, hosts, shards)
        backups = np.full(shards, NO_BACKUP, np.uint16)
        for host in hosts:
            mine = np.flatnonzero(primaries == host)
            backups[mine] = buddy(members, hosts, host)
        founders = (*members, *(() if keeps else ("",)), *((f"launch {launch}",) if launch else ()))
        authority = _hash("\n".join(founders)) & (2**53 - 1)
        unsynced, lost = np.zeros(shards, np.bool_), np.zeros(shards, np.uint8)
        nobody = (0,) * len(members)
        return Roster(members, nobody, (authority, FIRST), primaries, backups, unsynced, lost)

    @staticmethod
    def from_table(table: RosterTable, shards: int = SHARDS) -> Roster:
        """Return the roster that a peer sent. Raises RosterMismatch if it is inconsistent."""
        members, lost = tuple(table.members), table.lost or bytes(shards)
        sizes = (len(table.primaries), len(table.backups), len(table.in_sync), len(lost))
        if (
            not 0 < len(members) <= MAX_MEMBERS
            or len(set(members)) != len(members)
            or not set(table.leaving) <= set(members)
            or len(table.incarnations) != len(members)
            or sizes != (2 * shards, 2 * shards, (shards + 7) // 8, shards)
        ):
            raise RosterMismatch(
                f"received an inconsistent roster of {counted(len(members), 'member')}: "
                "install the same dataplane release everywhere"
            )
        primaries = column(table.primaries, U2).astype(np.uint16)
        backups = column(table.backups, U2).astype(np.uint16)
        in_sync = np.unpackbits(np.frombuffer(table.in_sync, np.uint8), count=shards)
        known = (primaries < len(members)) & ((backups < len(members)) | (backups == NO_BACKUP))
        if not known.all():
            raise RosterMismatch(
                f"received a roster of {counted(len(members), 'member')} that assigns shards to "
                "peers outside the roster: install the same dataplane release everywhere"
            )
        columns = (primaries, backups, in_sync.astype(np.bool_), np.frombuffer(lost, np.uint8))
        incarnations, leaving = tuple(table.incarnations), frozenset(table.leaving)
        takeovers = tuple(table.takeovers[-MAX_TAKEOVERS:])
        ancestors = tuple(table.ancestors[-MAX_ANCESTORS:])
        return Roster(members, incarnations, table.epoch, *columns, leaving, takeovers, ancestors)

    @property
    def table(self) -> RosterTable:
        """The roster in wire form."""
        return RosterTable(
            list(self.members),
            list(self.incarnations),
            self.epoch,
            self.primaries.astype(U2).tobytes(),
            self.backups.astype(U2).tobytes(),
            np.packbits(self.in_sync).tobytes(),
            sorted(self.leaving),
            list(self.takeovers),
            self.lost.tobytes() if self.lost.any() else b"",
            list(self.ancestors),
        )

    def __repr__(self) -> str:
        return f"<Roster of {len(self.members)} peers, {self.shards} shards, epoch {self.epoch}>"

    @property
    def shards(self) -> int:
        return len(self.primaries)

    @cached_property
    def hosts(self) -> list[str]:
        """The members that host shards, in order. Only these may have rows."""
        return [self.members[index] for index in np.unique(self.primaries)]

    def address(self, shard: int) -> str:
        """The address of the peer that serves this shard."""
        return self.members[self.primaries.item(shard)]

    def bucket(self, partition: str) -> int:
        """The shard of a partition."""
        return _hash(partition) % self.shards

    def home(self, partition: str) -> str:
        """The address of the peer that serves a partition: its rows, claims, definition and
        phase."""
        return self.address(self.bucket(partition))

    def shards_of(self, address: str) -> U2Column:
        """The shards that a member serves, ascending."""
        return np.flatnonzero(self.primaries == self._index(address)).astype(np.uint16)

    def backup_of(self, address: str) -> tuple[str | None, bool]:
        """Return the backup of this member's shards, and whether it is in sync. All shards of a
        member have one backup, so their operations are shipped as one sequence."""
        known = self._backups.get(address)
        if known is None:
            known = self._backups[address] = self._backup_of(self.shards_of(address))
        return known

    @cached_property
    def _backups(self) -> dict[str, tuple[str | None, bool]]:
        """By member: asked with every request, and a roster never changes."""
        return {}

    def _backup_of(self, shards: U2Column) -> tuple[str | None, bool]:
        if not len(shards) or self.backups[shards[0]] == NO_BACKUP:
            return None, False
        return self.members[int(self.backups[shards[0]])], bool(self.in_sync[shards].all())

    def may_be_backed_up(self, address: str) -> bool:
        """Whether this member has a backup that was seen, in sync or still learning."""
        backup, _ = self.backup_of(address)
        return backup is not None and self.incarnations[self.members.index(backup)] > 0

    def has(self, owner: Owner) -> bool:
        """Whether this process is a member, or its address belongs to a member that was never
        seen."""
        if owner.peer not in self.members:
            return False
        return self.incarnations[self.members.index(owner.peer)] in (0, owner.incarnation)

    def follows(self, epoch: tuple[int, int]) -> bool:
        """Whether this roster descends from the one with this epoch. If two keepers continued
        from one roster, decisions under one line are void under the other."""
        by, number = epoch
        known = (self.epoch, *self.ancestors)
        return number <= FIRST or any(by == one and number <= last for one, last in known)

    def successor_of(self, old: Roster, owner: Owner) -> Owner:
        """The peer that now serves what a member served under an older roster. All shards of a
        peer move together. The member itself if it had none, then or since."""
        if self.has(owner) and len(self.shards_of(owner.peer)):
            return owner
        # Takeovers come first: after missed rosters, most of its shards may be empty at a peer that
        # joined later, or the member may have got its first shards in between.
        successor = owner
        for one in self.takeovers:
            if one.number > old.epoch[1] and one.owner == successor:
                successor = one.successor
        if successor != owner and successor.incarnation:
            return successor
        held = old.shards_of(owner.peer)
        if not len(held):
            return owner
        at = int(np.bincount(self.primaries[held]).argmax())
        successor = Owner(self.members[at], self.incarnations[at])
        return owner if successor == Owner(owner.peer, 0) else successor

    def lost_since(self, old: Roster) -> set[int]:
        """The shards that started empty after an older roster."""
        return set(np.flatnonzero(self.lost != old.lost).tolist())

    def places_like(self, old: Roster) -> bool:
        """Whether every shard is served as in another roster: only incarnations or in_sync may
        differ."""
        lives = zip(old.incarnations, self.incarnations, strict=False)
        return (
            self.members == old.members
            and all(before in (0, now) for before, now in lives)
            and bool((self.primaries == old.primaries).all())
        )

    @property
    def owners(self) -> list[Owner]:
        """The members that were seen, each in its current incarnation."""
        pairs = zip(self.members, self.incarnations, strict=True)
        return [Owner(member, incarnation) for member, incarnation in pairs if incarnation]

    def owner_at(self, address: str | None) -> Owner | None:
        """The member at an address, if it was seen."""
        return next((owner for owner in self.owners if owner.peer == address), None)

    def _index(self, address: str) -> int:
        try:
            return self.members.index(canonical(address))
        except ValueError:
            raise RosterMismatch(
                f"{address} is not one of the seeds of this run "
                f"({', '.join(self.members)}): start all peers with the same --seeds",
                address=address,
                seeds=self.members,
            ) from None


class Successors:
    """Which peer now serves the shards of a peer that is gone or has moved them.

    Every peer derives this from the rosters that it adopts. A peer that misses a roster learns
    the takeovers in between from the next one. A successor speaks for everything that it took
    over, step by step.
    """

    def __init__(self) -> None:
        self._successors: dict[Owner, Owner] = {}
        self._since: dict[Owner, int] = {}
        """number of the roster under which it was taken over"""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._successors)} processes>"

    def follow(self, old: Roster, new: Roster) -> None:
        """Apply a newer roster."""
        for one in new.takeovers:
            if one.number > old.epoch[1]:
                self._enter(one.owner, one.successor, one.number)
        for owner in old.owners:  # a roster lists only the last takeovers
            successor = new.successor_of(old, owner)
            if successor not in (owner, self.current(owner)):
                self._enter(owner, successor, new.epoch[1])

    def _enter(self, owner: Owner, successor: Owner, number: int) -> None:
        self._successors[owner] = successor
        self._since[owner] = number
        self._successors.pop(successor, None)  # it serves again

    def current(self, owner: Owner) -> Owner:
        """The peer that now serves its shards: the peer itself, or the last successor."""
        while owner in self._successors:
            owner = self._successors[owner]
        return owner

    def after(self, owner: Owner) -> Iterator[tuple[int, Owner]]:
        """The successors in order, each with the number of the roster that appointed it."""
        while owner in self._successors:
            successor = self._successors[owner]
            yield self._since[owner], successor
            owner = successor


def proposed(members: Sequence[str], hosts: Sequence[int], shards: int = SHARDS) -> U2Column:
    """Rendezvous hashing: assign each shard to the host with the largest hash of (host, shard)."""
    numbers = _mix(np.arange(1, shards + 1, dtype=np.uint64))
    best = np.zeros(shards, np.uint64)
    primaries = np.full(shards, hosts[0], np.uint16)
    for host in hosts:
        weights = _mix(numbers ^ np.uint64(_hash(members[host])))
        wins = weights > best
        best[wins] = weights[wins]
        primaries[wins] = host
    return primaries


def neighbours(roster: Roster, address: str, count: int) -> list[Owner]:
    """The next seen members after `address` on the ring of hashed addresses."""
    ring = sorted(roster.owners, key=lambda owner: (_hash(owner.peer), owner.peer))
    after = [one for one in ring if _hash(one.peer) > _hash(address)]
    others = [one for one in (*after, *ring) if one.peer != address]
    return list(dict.fromkeys(others))[:count]


def buddy(members: Sequence[str], hosts: Sequence[int], host: int) -> int:
    """The backup of a host: the next one on the ring of hashed addresses; NO_BACKUP if it is
    alone.

    With a ring, unlike a second rendezvous hash, every host backs up exactly one other, so no
    host needs memory for more.
    """
    ring = sorted({*hosts, host}, key=lambda one: _hash(members[one]))
    after = ring[(ring.index(host) + 1) % len(ring)]
    return NO_BACKUP if after == host else after
