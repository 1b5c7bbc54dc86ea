"""What becomes of everything when peers come and go: the parts that follow a roster, in order."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.metadata.roster import Roster
from dataplane.peer.claim_queues import ClaimQueues
from dataplane.peer.claims import Claims
from dataplane.peer.door import Door
from dataplane.peer.grants import Grants
from dataplane.peer.host import Entry, Host
from dataplane.peer.keepers import Keeper
from dataplane.peer.leaving import Leaving
from dataplane.peer.membership import Membership
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.replicas import Replicas
from dataplane.peer.shipping import Shipping


class Succession:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        keeper: Keeper,
        shipping: Shipping,
        partitions: Partitions,
        grants: Grants,
        queues: ClaimQueues,
        claims: Claims,
        door: Door,
        settle: Callable[[Entry], None],
    ) -> None:
        self.shipping = shipping
        self.partitions = partitions
        self.queues = queues
        self.claims = claims
        self.membership = Membership(host, mesh, keeper)
        self.membership.in_sync = lambda: shipping.synced
        self.membership.spare = partitions.spare
        self.membership.on_roster.append(self._turned)
        self.membership.on_gone += [keeper.gone, queues.gone, grants.gone]
        self.replicas = Replicas(host, mesh, partitions, shipping, grants)
        self.membership.lost_before = self.replicas.lost_before
        self.leaving = Leaving(
            host, mesh, self.membership, shipping.copying, door, grants.lent, settle
        )

    def _turned(self, old: Roster, new: Roster) -> None:
        self.replicas.turned(old, new)  # first: what was taken over is this peer's own from here on
        self.partitions.turned()
        self.leaving.turned(old, new)
        self.shipping.turned(new)
        if new.places_like(old):
            return
        self.queues.turned()
        self.claims.turned()
