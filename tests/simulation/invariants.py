"""What must hold after every step, looked at from outside all peers at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import TYPE_CHECKING

from dataplane.memory.admission import Admission
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard.claim_queue import ClaimQueue
from dataplane.metadata.shard.replicas import Replicas
from dataplane.metadata.tables import answers
from dataplane.peer.host import Entry
from dataplane.peer.peer import Peer
from dataplane.wire.messages import Claim, Wait
from dataplane.wire.tables import Owner
from tests.metadata.observed import accounts
from tests.simulation.cluster import Cluster
from tests.simulation.network import DELAY_S

if TYPE_CHECKING:
    from tests.simulation.line import Client

MET_S = 3.0
"""So soon a call that waits is told of what is there, as soon as nothing is amiss: as long as it
takes until a dead peer's shards are another one's."""
LATE_S = 1.0
"""What brings what is on its way so much later is behind."""


class Watch:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.tables: dict[tuple[int, int], tuple[bytes, ...]] = {}
        self._calm_since = 0.0
        self._due: dict[Client, tuple[Claim | Wait, float]] = {}
        """calls that wait for what is there, and since when"""

    def look(self) -> list[str]:
        peers = self.cluster.peers
        one_by_one = [
            w for peer in peers for w in (*self._roster(peer), *_space(peer), *_changes(peer))
        ]
        return one_by_one + dangling(peers) + self._overdue(peers)

    def _roster(self, peer: Peer) -> list[str]:
        """An epoch has one table, so a shard has one primary in it."""
        roster = peer.host.roster
        table = roster.table
        shown = (table.primaries, table.backups, table.in_sync, repr(table.members).encode())
        known = self.tables.setdefault(roster.epoch, shown)
        if known != shown:
            return [f"two rosters are numbered {roster.epoch}"]
        return []

    def _overdue(self, peers: list[Peer]) -> list[str]:
        """Calls that wait on, though their shard has what they wait for, or elsewhere."""
        alive, now = members(peers), self.cluster.loop.now
        if not self._is_calm(alive):
            self._calm_since = now
        before, self._due = self._due, {}
        waiting = {c: body for c, body in self.cluster.waiting.items() if c.owner in alive}
        claimants = defaultdict[tuple[str, str], set[int]](set)
        for client, body in waiting.items():
            if isinstance(body, Claim):
                claimants[body.partition, body.stage].add(client.session)
        for client, body in waiting.items():
            if _is_due(alive, client, body, claimants[body.partition, body.stage]):
                known, since = before.get(client, (None, now))
                self._due[client] = body, since if known is body else now
        return [
            f"{client!r} waits for {body}, which is there, or that is not known, for {MET_S:g} s"
            for client, (body, since) in self._due.items()
            if now - max(since, self._calm_since) > MET_S
        ]

    def _is_calm(self, alive: dict[Owner, Peer]) -> bool:
        """Nothing is amiss among those that the newest roster has, whoever else is cut off."""
        network, late = self.cluster.network, self.cluster.loop.now + LATE_S
        machines = {place.machine for place in self.cluster.places if place.peer in alive.values()}
        self._calm_since = max(self._calm_since, *(m.disturbed_at for m in machines), 0.0)
        if network.byte_s or network.delay_s > DELAY_S or network.bulk_until > late:
            return False
        if not alive or len(alive) < len(_newest(alive.values()).owners):
            return False
        names = {machine.name for machine in machines}
        wires = [wire for wire in network.wires if machines.issuperset(wire.machines())]
        behind = any(max(wire.last.values()) > late for wire in wires)
        broken = [*network.cuts, *map(frozenset, network.forbidden)]
        return not behind and not any(pair <= names for pair in broken)


def _is_due(
    alive: dict[Owner, Peer], client: Client, body: Claim | Wait, claimants: set[int]
) -> bool:
    """Whether a call's shard has what it waits for, knows that there never will be, is no more, or
    does not know of it. claimants: who waits with a claim of the stage."""
    home = _newest(alive.values()).home(body.partition)
    peer = next((peer for owner, peer in alive.items() if owner.peer == home), None)
    if peer is None:
        return False
    entry = peer.host.entries.get(body.partition)
    if entry is None or entry.generation != body.generation:
        return True
    want = body if isinstance(body, Wait) else body.want
    ready, remaining, to_come, outstanding = entry.store.counts(body.stage, want.unit, want.where)
    if isinstance(body, Wait):
        enough = ready >= body.count or (entry.store.sealed and to_come < body.count)
        return enough if body.count else outstanding < body.below
    stage = peer.calls._stages.get((body.partition, body.generation, body.stage))
    queue = stage.queue if stage is not None else ClaimQueue(entry.store, body.stage)
    assert isinstance(queue, ClaimQueue)
    is_known = any(claim.holder == client.session for claim in queue)
    if body.plan is None and not is_known and client.session not in entry.store.lessees:
        return True  # others get what comes before it
    if body.plan is not None or _is_behind(queue, client.session, claimants):
        return entry.store.sealed and not to_come
    if body.want.budget_tag is not None:
        return entry.store.sealed and (not to_come or 0 < ready == remaining)
    least = body.want.minimum or body.want.count
    if entry.store.sealed:
        return not to_come or 0 < min(least, remaining) <= ready
    return ready >= least


def _is_behind(queue: ClaimQueue, session: int, claimants: set[int]) -> bool:
    """Whether an older claim than this session's waits, and somebody still waits for it. Their
    order is the shard's: calls that are made at once may come there in any."""
    latest = {claim.holder: claim for claim in queue if claim.holder in claimants}
    mine = latest.get(session)
    if mine is None:  # it has been granted rows
        return bool(latest)
    before = takewhile(lambda claim: claim is not mine, queue)
    return any(latest.get(claim.holder) is claim for claim in before)


def _changes(peer: Peer) -> list[str]:
    """A shard remembers changes of members only, each so many as the caller may repeat."""
    wrong = []
    most = answers.MAX_CHANGES_ABOVE_FLOOR  # type: ignore[attr-defined]  # as the run patched it
    for entry in peer.host.entries.values():
        for told in entry.store.answers.records():
            if len(told.given) > most or not peer.host.roster.has(told.caller):
                many, caller = len(told.given), told.caller.peer
                wrong.append(f"the shard at {peer.host.name} remembers {many} changes of {caller}")
    return wrong


def _space(peer: Peer) -> list[str]:
    """Every byte is in one state, what a store names of its own arena lives there, and it counts
    what it has."""
    wrong = []
    space = peer.host.space
    stats = space.stats()
    if stats["size_bytes"] != stats["used_bytes"] + stats["granted_bytes"] + stats["free_bytes"]:
        wrong.append(f"the arena of {peer.host.name} does not add up: {stats}")
    for entry in peer.host.entries.values():
        wrong += [f"the shard at {peer.host.name}: {one}" for one in accounts(entry.store)]
        for owner, chunks, counts in entry.store.holdings():
            if owner == peer.host.owner:
                alive = space.alive(chunks)
                if not alive.all() or (space.chunks.refs(chunks) < counts).any():
                    wrong.append(f"{peer.host.name} freed values that rows of its own still name")
    return wrong


def _newest(peers: Iterable[Peer]) -> Roster:
    return max((peer.host.roster for peer in peers), key=lambda r: r.epoch[1])


def members(peers: list[Peer]) -> dict[Owner, Peer]:
    """Those that the newest roster has, and that are of its plane: what others serve is undone."""
    if not peers:
        return {}
    newest = _newest(peers)
    there = [peer for peer in peers if newest.follows(peer.host.roster.epoch)]
    return {peer.host.owner: peer for peer in there if peer.host.owner in newest.owners}


def dangling(peers: list[Peer]) -> list[str]:
    """Every chunk that a shard references is alive at its host."""
    alive = members(peers)
    wrong = []
    for peer, entry in _served(alive):
        for owner, chunks, _ in entry.store.holdings():
            there = alive.get(owner)
            if there is not None and not there.host.space.alive(chunks).all():
                name = there.host.name
                wrong.append(f"{name} freed values that rows at {peer.host.name} still name")
    return wrong


def _served(alive: dict[Owner, Peer]) -> Iterator[tuple[Peer, Entry]]:
    """Shards, each at the peer that the newest roster names. Who leaves and has not heard yet that
    its own are another's changes them no more, and that one may have freed what they name."""
    for peer in alive.values():
        for entry in peer.host.entries.values():
            if _newest(alive.values()).home(entry.name) == peer.host.address:
                yield peer, entry


def unnamed(peers: list[Peer]) -> list[str]:
    """At rest, a shard references every living chunk, or the chunk that it is a second copy of."""
    alive = members(peers)
    named: dict[Owner, set[int]] = {owner: set() for owner in alive}
    for owner, peer in alive.items():
        for entry in peer.host.entries.values():
            for of, chunks, _ in entry.store.holdings():
                named.setdefault(of, set()).update(chunks.tolist())
        for copies in _second_copies(peer):
            for known in copies._known.values():
                named[owner].update([c.local for c in known.values() if c.local])
    wrong = []
    for owner, peer in alive.items():
        living = peer.host.space.chunks.by_age(Admission.PULL).tolist()
        nobodys = [one for one in living if one not in named[owner]]
        if nobodys:
            wrong.append(f"{peer.host.name} keeps {len(nobodys)} chunks that no shard names")
    return wrong


def permitted(peers: list[Peer]) -> list[str]:
    """Permits are nobody's any more, and account was kept of every group."""
    wrong = []
    for peer in members(peers).values():
        for entry in peer.host.entries.values():
            permits = entry.store.permits
            if permits.given:
                wrong.append(f"{peer.host.name} has {permits.left} permits of nobody's")
            if not 0 <= permits.done <= len(entry.store.groups):
                wrong.append(f"{peer.host.name} counts {permits.done} finished groups")
    return wrong


def _second_copies(peer: Peer) -> Iterator[Replicas]:
    for entry in peer.host.entries.values():
        if entry.replicas is not None:
            yield entry.replicas
    for origin in peer.log_receiver._origins.values():
        for copy in origin.copies.values():
            if copy.values is not None:
                yield copy.values


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
    if len(peer.outgoing):
        wrong.append(f"{peer.host.name} waits for what became of changes: {peer.outgoing.numbers}")
    if len(peer.references.remote_references):
        wrong.append(
            f"{peer.host.name} has {len(peer.references.remote_references)} chunks lent for nothing"
        )
    if peer.claims.waiting or len(peer.calls):
        waiting = peer.claims.waiting + len(peer.calls)
        wrong.append(f"{waiting} claims wait at {peer.host.name} for nobody")
    if peer.host.entries:
        wrong.append(f"{peer.host.name} serves {list(peer.host.entries)}, which were dropped")
    return wrong
