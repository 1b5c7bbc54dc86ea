"""What becomes of everything when peers come and go: the parts that follow a roster, in order."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.metadata.roster.roster import Roster
from dataplane.peer.door.client_door import Door
from dataplane.peer.host import Entry, Host
from dataplane.peer.membership.keepers import Keeper
from dataplane.peer.membership.leaving import Leaving
from dataplane.peer.membership.lingering import Lingering
from dataplane.peer.membership.membership import Membership
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.net.serving import Serving
from dataplane.peer.requests.claims import Claims
from dataplane.peer.shards.admissions import Admissions
from dataplane.peer.shards.appends import Shipping
from dataplane.peer.shards.backup import Replicas
from dataplane.peer.shards.claim_queues import ClaimQueues
from dataplane.peer.shards.losses import LossReports
from dataplane.peer.shards.partitions import Partitions
from dataplane.peer.shards.references import References
from dataplane.wire.tables import Owner


class Succession:
    """A `Member`: what it says of itself is of these parts, and they follow rosters."""

    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        keeper: Keeper,
        serving: Serving,
        lingering: Lingering,
        shipping: Shipping,
        partitions: Partitions,
        references: References,
        queues: ClaimQueues,
        admissions: Admissions,
        losses: LossReports,
        claims: Claims,
        door: Door,
        settle: Callable[[Entry], None],
        begins_anew: bool,
    ) -> None:
        self.shipping = shipping
        self.partitions = partitions
        self.references = references
        self.queues = queues
        self.admissions = admissions
        self.losses = losses
        self.claims = claims
        self.membership = Membership(host, mesh, keeper, serving, self, begins_anew)
        self.replicas = Replicas(host, mesh, partitions, shipping, references)
        self.leaving = Leaving(
            host, mesh, self.membership, shipping.copying, door, references.lent, settle
        )
        self.in_sync = lambda: shipping.synced
        self.clear = self.leaving.clear
        self.wanted = lingering.is_wanted
        self.spare = partitions.spare
        self.lost_before = self.replicas.lost_before

    def turned(self, old: Roster, new: Roster) -> None:
        self.replicas.turned(old, new)  # first: what was taken over is this peer's own from here on
        self.partitions.turned()
        self.leaving.turned(old, new)
        self.shipping.turned(new)
        if not new.places_like(old):
            self.queues.turned()
            self.admissions.turned()
            self.claims.turned()
        self.losses.turned()

    def gone(self, owner: Owner) -> None:
        self.admissions.gone(owner)  # first: what comes back is not for who waited there
        self.queues.gone(owner)
        self.references.gone(owner)
