"""The numbered membership of a plane and the table shard -> primary, backup, in_sync.

Sans-I/O, and a pure function of the ordered seeds, so that all peers compute the same table. No row
is copied to a backup yet: `in_sync` is false everywhere. The epoch tells two rosters apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from dataplane.errors import RosterMismatch
from dataplane.wire.limits import SHARDS

NO_BACKUP = 0xFFFF
MINT_SHARDS = 16
"""A client mints keys for at most so many shards."""

U2Column = npt.NDArray[np.uint16]
U8Column = npt.NDArray[np.uint64]


def canonical(seed: str) -> str:
    """One spelling per address, so that equal seeds give equal rosters."""
    return seed.strip().rstrip("/").lower().replace("://localhost:", "://127.0.0.1:")


def _mix(values: U8Column) -> U8Column:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): a hash of a column of u64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


@dataclass(frozen=True, eq=False)
class Roster:
    """members: addresses in order. primary, backup: index of a member per shard."""

    members: tuple[str, ...]
    epoch: tuple[int, int]
    primaries: U2Column
    backups: U2Column
    in_sync: npt.NDArray[np.bool_]

    @staticmethod
    def from_seeds(seeds: Sequence[str], shards: int = SHARDS) -> Roster:
        """The static roster. Without seeds: one member, "", which is this peer alone.

        With three or more members the first, which keeps the roster, hosts no shards.
        """
        members = tuple(canonical(seed) for seed in seeds) or ("",)
        if len(set(members)) != len(members):
            raise RosterMismatch(f"a seed is named twice: {', '.join(members)}", seeds=members)
        hosts = list(range(1 if len(members) >= 3 else 0, len(members)))
        primaries = _primaries(members, hosts, shards)
        backups = _backups(members, hosts, primaries)
        authority = _hash("\n".join(members)) & (2**53 - 1)
        return Roster(members, (authority, 1), primaries, backups, np.zeros(shards, np.bool_))

    def __repr__(self) -> str:
        return f"<Roster of {len(self.members)} peers, {self.shards} shards, epoch {self.epoch}>"

    @property
    def shards(self) -> int:
        return len(self.primaries)

    @property
    def hosts(self) -> list[str]:
        """The members that host shards, in order."""
        return [self.members[index] for index in np.unique(self.primaries)]

    def primary(self, shards: npt.ArrayLike) -> U2Column:
        """Index into `members` per shard."""
        owners: U2Column = self.primaries[np.asarray(shards)]
        return owners

    def address(self, shard: int) -> str:
        """Where this shard is served."""
        return self.members[int(self.primaries[shard])]

    def home(self, partition: str) -> str:
        """The address of a partition's home."""
        return self.address(_hash(partition) % self.shards)

    def stage_home(self, partition: str, stage: str) -> str:
        """The address of the home of a stage's waiting claims."""
        return self.address(_hash(f"{partition}\0{stage}") % self.shards)

    def directory_shards(self, partition: str, keys: npt.NDArray[np.void]) -> U2Column:
        """The shards at which given names (KEY records, hashes of them) are entered."""
        if not len(keys):
            return np.empty(0, np.uint16)
        halves = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)
        hashes = _mix(halves[:, 0] ^ np.uint64(_hash(partition)))
        return (hashes % np.uint64(self.shards)).astype(np.uint16)

    def shards_of(self, address: str) -> U2Column:
        """The shards that a member serves, ascending."""
        return np.flatnonzero(self.primaries == self._index(address)).astype(np.uint16)

    def mint_shards(self, address: str) -> U2Column:
        """Shards for which a member's clients mint keys: its own, or those of the next member in
        order that has any. At most 16."""
        start = self._index(address)
        for step in range(len(self.members)):
            near = self.members[(start + step) % len(self.members)]
            shards = self.shards_of(near)
            if len(shards):
                return shards[:MINT_SHARDS]
        raise AssertionError("no member has shards")

    def _index(self, address: str) -> int:
        try:
            return self.members.index(canonical(address))
        except ValueError:
            raise RosterMismatch(
                f"{address} is not one of this plane's seeds: {', '.join(self.members)}",
                address=address,
                seeds=self.members,
            ) from None


def _primaries(members: Sequence[str], hosts: Sequence[int], shards: int) -> U2Column:
    """Rendezvous hashing: each shard goes to the host with the largest hash of (host, shard)."""
    numbers = _mix(np.arange(1, shards + 1, dtype=np.uint64))
    best = np.zeros(shards, np.uint64)
    primaries = np.full(shards, hosts[0], np.uint16)
    for host in hosts:
        weights = _mix(numbers ^ np.uint64(_hash(members[host])))
        wins = weights > best
        best[wins] = weights[wins]
        primaries[wins] = host
    return primaries


def _backups(members: Sequence[str], hosts: Sequence[int], primaries: U2Column) -> U2Column:
    """A host's shards back up on its two successors on the ring of hashed addresses, by turns.

    A ring and not a second rendezvous draw: every host then backs up exactly two others, so that
    none needs memory for more."""
    backups = np.full(len(primaries), NO_BACKUP, np.uint16)
    ring = sorted(hosts, key=lambda host: _hash(members[host]))
    for position, host in enumerate(ring):
        buddies = [ring[(position + step) % len(ring)] for step in (1, 2)]
        buddies = [buddy for buddy in dict.fromkeys(buddies) if buddy != host]
        if buddies:
            shards = np.flatnonzero(primaries == host)
            backups[shards] = np.resize(np.array(buddies, np.uint16), len(shards))
    return backups
