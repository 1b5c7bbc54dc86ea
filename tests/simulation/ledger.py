"""What the clients of a run know, and what may therefore not happen.

Every acknowledged row is, for each stage, delivered, still held, or reported lost. A row may go
missing only with the peers that the authority called lost while they alone had it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables.keys import KEY_BYTES, hash_name, keys_in
from dataplane.metadata.tables.remembered import of_group
from dataplane.peer.peer import Peer
from dataplane.wire.tables import Definition, Name, Owner

if TYPE_CHECKING:
    from tests.simulation.line import Client

SMALL, LARGE, RARE = "step-1", "step-2", "step-3"
"""Partitions."""
TOGETHER_S = 10.0
"""A peer that died so soon after another one was called lost counts as lost together with it: what
one had the other could not take over yet."""


@dataclass(eq=False)
class Row:
    key: bytes
    group: Group
    acks: dict[str, int] = field(default_factory=dict)
    """by stage, how often a client was told that its ack is in"""
    doubtful: set[str] = field(default_factory=set)
    """stages of which an ack may or may not have taken effect"""
    turns: dict[str, tuple[str | None, bool]] = field(default_factory=dict)
    """values that a tag was set to: over which one, and whether a client was told that it is in"""
    dropping: bool = False
    """somebody asked for its end"""
    dropped_at: float | None = None
    dropped_in: int = 0
    """the generation: another one has not heard of it"""
    """when somebody was told that it is gone, which a drop had to know of"""


@dataclass(eq=False)
class Group:
    name: str
    rows: list[Row] = field(default_factory=list)
    names: list[Name] | None = None
    """of the rows, where their keys were given"""
    acked: bool = False
    """the put was answered"""
    repeated: bool = False
    """put again because nobody said whether it was in: it may have come and gone before"""
    owners: set[Owner] = field(default_factory=set)
    """peers in whose arenas some of its values may lie alone"""
    cancelled: bool = False
    """its put was told that it had been dropped"""
    excused: str = ""
    """why it may be lost"""
    generation: int | None = None
    """of the partition that acknowledged it, which has it or names it as lost; None where nobody is
    left that could know"""
    reported: bool = False

    @property
    def dropping(self) -> bool:
        return any(row.dropping for row in self.rows)


class Ledger:
    """Of one partition."""

    def __init__(self, partition: str, definition: Definition, violations: list[str]) -> None:
        self.partition = partition
        self.definition = definition
        self.stages = list(definition.stages)
        self.replicas = definition.replicas
        self.group_rows = definition.group_size or 1
        self.violations = violations
        self.groups: list[Group] = []
        self.rows: dict[bytes, Row] = {}
        self.named: dict[bytes, Group] = {}
        """by the hash of its name"""
        self.condemned: dict[bytes, tuple[float, int] | None] = {}
        """keys of rows and groups that somebody asked to drop, and when it was told so of
        which generation; they may not have been put yet"""
        self.live: dict[tuple[str, bytes], tuple[Client, int]] = {}
        """who holds a row for a stage, and under which lease, as far as that client knows"""
        self.gone: dict[Owner, float] = {}
        """when processes were called lost"""
        self.version = 0
        """the latest that a trainer said"""
        self.over = False
        """it is dropped as a whole, or about to be"""
        self.handed_over = -math.inf
        """when the shard went last from one that leaves to another"""
        self.successor = ""
        """to whom; what both had is at its backup since before"""
        self.spares: set[Owner] = set()
        """who could be its backup then, and has been there since, without being about to leave"""
        self.undone = 0
        """up to this generation it is lost as a whole, also what is put into it afterwards at peers
        that were called lost and have not heard so"""
        self.beginnings = 0
        """how often nobody was left who knew the partition, or how far it was: it began anew"""

    def wrong(self, what: str) -> None:
        self.violations.append(what)

    def opened(self, group: Group) -> None:
        self.groups.append(group)
        self.named[hash_name(group.name)] = group
        self.rows |= {row.key: row for row in group.rows}
        for key in [hash_name(group.name), *(row.key for row in group.rows)]:
            if key in self.condemned:
                self.condemn([key])
                at = self.condemned[key]
                if at is not None:
                    self.dropped(self._meant(key), *at)

    def _meant(self, key: bytes) -> list[Row]:
        """The row with this key, or all of the group, as far as they were put."""
        if key in self.rows:
            return [self.rows[key]]
        return self.named[key].rows if key in self.named else []

    def condemn(self, keys: list[bytes]) -> None:
        """Somebody asks for the end of rows and groups, put or not."""
        for key in keys:
            self.condemned.setdefault(key, None)
            for row in self._meant(key):
                row.dropping = True

    def ended(self, keys: list[bytes], now: float, generation: int) -> None:
        """It was told that they are dropped."""
        for key in keys:
            self.condemned[key] = now, generation
            self.dropped(self._meant(key), now, generation)

    def refused(self, group: Group, began: float, generation: int) -> bool:
        """Whether a put of it that began then could only be refused."""
        dropped = [row for row in group.rows if row.dropped_in == generation]
        before = any(row.dropped_at is not None and row.dropped_at < began for row in dropped)
        return before and not group.excused and not group.repeated

    # what clients see

    def claimed(
        self, client: Client, lease: int, stage: str, keys: list[bytes], whole: bool, began: float
    ) -> None:
        sizes: dict[Group, int] = {}
        for key in keys:
            row = self.rows.get(key)
            if row is None:
                self.wrong(f"{client!r} claimed a row {key.hex()} that nobody put")
                continue
            sizes[row.group] = sizes.get(row.group, 0) + 1
            if client.owner in self.gone:
                continue  # its peer woke up, and handed out what had come: no ack of it counts
            holder = self.live.get((stage, key))
            if holder is not None and self._holds(*holder) and not row.group.excused:
                self.wrong(f"{client!r} claimed {row.group.name} of {stage}, {holder[0]!r} has it")
            dropped = row.dropped_at is not None and row.dropped_at < began
            of_now = row.group.generation in (None, row.dropped_in)
            if dropped and of_now and not row.group.excused:
                self.wrong(f"{client!r} claimed a row of {row.group.name}, which was dropped")
            if row.acks.get(stage) and not row.group.excused and not row.group.repeated:
                self.wrong(f"{client!r} claimed {row.group.name} of {stage}, which was acked")
            self.live[stage, key] = client, lease
        for group, size in sizes.items() if whole else ():
            if not sum(not row.dropping for row in group.rows) <= size <= len(group.rows):
                self.wrong(f"{client!r} got {size} of {len(group.rows)} rows of {group.name}")

    def _holds(self, client: Client, lease: int) -> bool:
        """Whether its ack would count: stores that serve still know the lease."""
        if not client.alive or client.owner in self.gone:
            return False
        return client.cluster.is_leased(client, lease)

    def let_go(self, client: Client, stage: str, keys: list[bytes]) -> None:
        for key in keys:
            if self.live.get((stage, key), (None,))[0] is client:
                del self.live[stage, key]

    def acked(self, stage: str, keys: list[bytes], certain: bool) -> None:
        for key in keys:
            row = self.rows[key]
            if not certain:
                row.doubtful.add(stage)
                continue
            row.acks[stage] = row.acks.get(stage, 0) + 1

    def dropped(self, rows: list[Row], now: float, generation: int) -> None:
        """A client was told that they are gone."""
        for row in rows:
            if row.dropped_at is None:
                row.dropped_at, row.dropped_in = now, generation

    # what the authority decides

    def removed(
        self,
        known: Mapping[Owner, Peer],
        owner: Owner,
        in_sync: bool,
        alone: bool,
        hosts: Set[Owner],
        now: float,
        died: float,
    ) -> None:
        """A process is no member any more. known: all that ever ran, with what they had in memory
        when they died. alone: it was the partition's primary, without a backup in sync. hosts:
        those with shards that are left. died: when it did, where nobody noticed until now."""
        self.gone[owner] = now
        if self.replicas == 1:
            for group in self.groups:
                if owner in group.owners and not group.excused:
                    group.excused = f"its bytes were at {owner.peer}"
        together = {
            o: known[o] for o, at in self.gone.items() if died - at < TOGETHER_S and o in known
        }
        if not in_sync:
            for peer in together.values():
                self._excuse_shards(peer, f"the shards of {owner.peer} had no backup in sync")
            left = self._standing(known[one] for one in hosts & known.keys())
            if alone or left < self._standing(known.values()):
                self.beginnings += 1
            if alone:  # also where it died before it heard that it was
                if died - self.handed_over < TOGETHER_S and len(together) == 1 and self.spares:
                    self.wrong(f"{owner.peer} was given the shard, and was lost with it alone")
                self.undone, _ = self._standing(known.values())
                self._excuse_all(f"{owner.peer} had the shard alone")
        if self.replicas == 2:
            for peer in together.values():
                self._excuse_copies(peer, together)
            for group in self.groups if died - self.handed_over < TOGETHER_S else ():
                if owner in group.owners and owner.peer != self.successor:  # see docs/guarantees.md
                    group.excused = group.excused or "its second copies were made anew"

    def moved(self, store: Store, old: Owner, new: Owner) -> None:
        """Values of rows there move from one arena to another."""
        for block, at in store.at(old):
            row = self.rows.get(block.keys[at])
            if row is not None:
                row.group.owners.add(new)

    def extinct(self) -> None:
        """The last member ended: nothing outlives all peers, and nobody is left to say so."""
        self.beginnings += 1
        self._excuse_all("all members of the plane were dead at once")
        for group in self.groups:
            group.generation = None
        self.gone.clear()  # one that was frozen may bring the plane back as it knew it
        self.handed_over = -math.inf

    def _excuse_all(self, why: str) -> None:
        for group in self.groups:
            group.excused = group.excused or why
        self.condemned = dict.fromkeys(self.condemned)

    def _excuse_shards(self, peer: Peer, why: str) -> None:
        entry = peer.host.entries.get(self.partition)
        if entry is not None:
            state = entry.store
            self._excuse(state.rows.keys, why)
            gone = [key for part in state.tombstones.parts() for key in part]
            self._excuse(b"".join(gone), why)
            self._excuse(b"".join(map(of_group, gone)), why)

    def _excuse_copies(self, peer: Peer, together: Mapping[Owner, Peer]) -> None:
        """Rows whose values were at one peer and whose second copies at another, both dead; also
        where these had become the values, and perhaps had no second copies of their own yet."""
        entry = peer.host.entries.get(self.partition)
        stores = [entry.store] if entry is not None else []
        for origin in peer.log_receiver._origins.values():  # it was the backup of a third peer
            stores += [
                copy.store for (name, _), copy in origin.copies.items() if name == self.partition
            ]
        keys = dict.fromkeys(key for store in stores for key in keys_in(store.rows.keys))
        for other in together:
            if other != peer.host.owner:
                theirs = b"".join(key for key in keys if self._came_from(other, key))
                self._excuse(theirs, f"{other.peer} died together with {peer.host.name}")

    def _came_from(self, owner: Owner, key: bytes) -> bool:
        return key in self.rows and owner in self.rows[key].group.owners

    def _excuse(self, keys: bytes, why: str) -> None:
        for at in range(0, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            for row in self._meant(key):
                row.group.excused = row.group.excused or why
            if key in self.condemned:  # not put yet: its tombstone went
                self.condemned[key] = None

    def reported(self, keys: bytes) -> None:
        """A store says that these rows went with a peer."""
        for at in range(0, len(keys), KEY_BYTES):
            row = self.rows.get(keys[at : at + KEY_BYTES])
            if row is not None:
                row.group.reported = True
                if row.group.acked and not row.group.excused:
                    self.wrong(f"{row.group.name} was lost, and need not have been")

    # the end

    def check_delivered(self) -> None:
        """After the streams ended: all that was acknowledged was delivered, or may be lost."""
        for group in self.groups:
            if not group.acked or group.excused:
                continue
            for stage in self.stages:
                for row in group.rows:
                    if not row.dropping and not row.acks.get(stage) and stage not in row.doubtful:
                        self.wrong(f"a row of {group.name} never got through {stage}")
                        break

    def _standing(self, peers: Iterable[Peer]) -> tuple[int, bool]:
        """The newest generation that they know, and whether it takes no more rows."""
        entries = (peer.host.entries.get(self.partition) for peer in peers)
        known = [(one.generation, one.store.sealed) for one in entries if one is not None]
        return max(known, default=(0, False))
