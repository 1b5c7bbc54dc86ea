"""What becomes of everything when peers come and go: the parts that follow a roster, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane.metadata.roster.roster import Roster
from dataplane.peer.membership.keepers import Keeper
from dataplane.peer.membership.leaving import Leaving
from dataplane.peer.membership.lingering import Lingering
from dataplane.peer.membership.membership import Membership
from dataplane.peer.net.serving import Serving
from dataplane.peer.shards.backup import Replicas
from dataplane.wire.tables import Owner

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer


class Succession:
    """What a peer says of itself in each life sign is what its parts know; they follow rosters, of
    which the newest is in force already when they hear of it."""

    def __init__(self, peer: Peer, keeper: Keeper, serving: Serving, lingering: Lingering) -> None:
        """Last of all, but for what only watches."""
        self.peer = peer
        host, mesh, begins_anew = peer.host, peer.mesh, bool(peer.config.launch)
        self.membership = Membership(host, mesh, keeper, serving, self, begins_anew)
        self.replicas = Replicas(host, mesh, peer.partitions, peer.shipping, peer.references)
        self.leaving = Leaving(
            host, mesh, self.membership, peer.copying, peer.door, host.lent, peer.settle
        )
        self.clear = self.leaving.clear
        self.wanted = lingering.is_wanted
        self.spare = peer.partitions.spare
        self.lost_before = self.replicas.lost_before

    def in_sync(self) -> bool:
        """Whether the peer that backs this one up has all it has."""
        return self.peer.shipping.synced

    def turned(self, old: Roster, new: Roster) -> None:
        self.replicas.turned(old, new)  # first: what was taken over is this peer's own from here on
        self.peer.partitions.turned()
        self.leaving.turned(old, new)
        self.peer.shipping.turned(new)
        if not new.places_like(old):
            self.peer.queues.turned()
            self.peer.admissions.turned()
            self.peer.claims.turned()

    def gone(self, owner: Owner) -> None:
        """That process is no member any more; called after `turned`."""
        self.peer.admissions.gone(owner)  # first: what comes back is not for who waited there
        self.peer.queues.gone(owner)
        self.peer.references.gone(owner)
