"""What must hold after every step, looked at from outside all peers at once."""

from __future__ import annotations

import numpy as np

from dataplane.peer.peer import Peer
from dataplane.wire.tables import Owner
from tests.simulation.cluster import Cluster


class Watch:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.tables: dict[tuple[int, int], tuple[bytes, ...]] = {}

    def look(self) -> list[str]:
        return [w for peer in self.cluster.peers for w in (*self._roster(peer), *_space(peer))]

    def _roster(self, peer: Peer) -> list[str]:
        """An epoch has one table, so a shard has one primary in it."""
        roster = peer.host.roster
        if roster.epoch in self.tables and self.tables[roster.epoch][0] is roster:
            return []
        table = roster.table
        shown = (table.primaries, table.backups, table.in_sync, repr(table.members).encode())
        known = self.tables.setdefault(roster.epoch, shown)  # type: ignore[arg-type]
        if known != shown:
            return [f"two rosters are numbered {roster.epoch}"]
        return []


def _space(peer: Peer) -> list[str]:
    """Every byte is in one state, and what a store names of its own arena lives there."""
    wrong = []
    space = peer.host.space
    stats = space.stats()
    if stats["size_bytes"] != stats["used_bytes"] + stats["granted_bytes"] + stats["free_bytes"]:
        wrong.append(f"the arena of {peer.host.name} does not add up: {stats}")
    for entry in peer.host.entries.values():
        for owner, ranges, counts in entry.store.holdings():
            if owner == peer.host.owner:
                alive = space.alive(ranges)
                if not alive.all() or (space.ranges.refs(ranges) < counts).any():
                    wrong.append(f"{peer.host.name} freed values that rows of its own still name")
    return wrong


def held(peers: list[Peer], owner: Owner) -> dict[int, int]:
    """References to an arena's ranges that stores anywhere hold, by range."""
    refs: dict[int, int] = {}
    for peer in peers:
        for entry in peer.host.entries.values():
            for named, ranges, counts in entry.store.holdings():
                if named == owner:
                    packed = np.ascontiguousarray(ranges).view(np.uint64).tolist()
                    for one, count in zip(packed, counts.tolist(), strict=True):
                        refs[one] = refs.get(one, 0) + count
    return refs


def left_behind(peer: Peer) -> list[str]:
    """After everybody left and the partition was dropped: nothing but cached copies."""
    space = peer.host.space
    stats = space.stats()
    wrong = []
    if stats["used_bytes"] != stats["cached_bytes"] or stats["granted_bytes"] or stats["pins"]:
        wrong.append(
            f"{peer.host.name} keeps {stats['used_bytes'] - stats['cached_bytes']} B of nobody's, "
            f"{stats['granted_bytes']} B granted, {stats['pins']} pins"
        )
    if len(peer.grants.lent):
        wrong.append(f"{peer.host.name} has {len(peer.grants.lent)} ranges lent for nothing")
    if peer.claims.waiting:
        wrong.append(f"{peer.claims.waiting} claims wait at {peer.host.name} for nobody")
    over = [name for name, home in peer.partitions.homes._homes.items() if not home.defined]
    if over:
        wrong.append(f"{peer.host.name} is the home of {over}, which are over")
    return wrong
