"""Rows of this peer's shards that it leases to claims, of its own clients and of other peers'."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dataplane.errors import DataplaneError
from dataplane.metadata.credit import PullCredit
from dataplane.metadata.instructions import Order
from dataplane.metadata.takes import Taken
from dataplane.peer import rows as rowset
from dataplane.peer.host import Entry, Host, Known
from dataplane.peer.leases import Handed, Part
from dataplane.peer.losses import LossReports
from dataplane.peer.mesh import Mesh
from dataplane.peer.shipping import Shipping
from dataplane.wire.messages import Finish, Want
from dataplane.wire.peering import Demand, Grant, Granted
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Supplied:
    """What came of an order. blocked: the next unit would exceed the budget. nbytes: of the credit.
    needed_bytes: cut by the credit, which had to be this much; else 0. ended: the claim had ended
    already."""

    units: int = 0
    amount: float = 0.0
    blocked: bool = False
    nbytes: int = 0
    needed_bytes: int = 0
    ended: bool = False


class Supplying:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        settle: Callable[[Entry], None],
        shipping: Shipping,
        losses: LossReports,
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.settle = settle
        self.shipping = shipping
        self.losses = losses
        self.in_doubt: Callable[[str, dict[int, Entry]], None] = lambda address, leases: None
        """asks the peer there whether a claim of its has these leases; what it has not goes back"""
        self._lent: dict[str, set[int]] = {}
        """which sessions of other peers have had rows from here"""

    def take(
        self,
        entry: Entry,
        stage: str,
        want: Want,
        holder: int,
        fields: list[str],
        credit: PullCredit | None,
    ) -> Handed | None:
        """Rows for a client of this host, all that it wants or none. A hard limit is its peer's to
        keep: it begins when the values are here."""
        now = self.host.now()
        self.lent_to(holder, self.host.address)
        taken = entry.store.take(stage, want, holder, now, credit=credit)
        return None if taken.lease is None else self._granted(entry, taken, fields)

    def _granted(self, entry: Entry, taken: Taken, fields: list[str] | None) -> Handed:
        """Leased rows with what they have here of the fields that are asked for."""
        assert taken.lease is not None and taken.slots is not None
        known = None if fields is None else entry.store.known(fields)
        table = entry.store.table(taken.slots, known)
        self.settle(entry)
        return Handed(Part(self.host.owner, taken.lease, len(taken.slots)), table)

    async def supply(self, entry: Entry, demand: Demand, order: Order) -> Supplied:
        """Lease what is ordered, and hand it to the claim's peer; unwanted, it goes back."""
        self.host.speak()
        claimant = order.claim.peer
        self.host.label(demand.holder, demand.label)
        self.lent_to(demand.holder, claimant)
        taken = entry.store.take(
            demand.stage,
            order.want_remaining,
            demand.holder,
            now=self.host.now(),
            lease_ms=demand.lease_ms,
            partial=not order.exact,
            credit=PullCredit(claimant, lambda: order.credit_bytes, demand.fields),
        )
        if taken.lease is None:
            return Supplied(blocked=taken.blocked, needed_bytes=taken.needed_bytes)
        handed = self._granted(entry, taken, demand.fields)
        grant = Grant(demand.number, taken.lease, handed.table, order.exact)
        try:
            reply: Granted = await self.mesh.call(claimant, grant)
        except DataplaneError as exc:
            log.warning("%s could not be handed its rows: %s", claimant, exc)
            self.in_doubt(claimant, {taken.lease: entry})
            return Supplied()
        if not reply.wanted:
            await self.release(handed.part, entry)
            return Supplied(ended=True)
        return Supplied(taken.units, taken.amount, taken.blocked, taken.nbytes, taken.needed_bytes)

    def lent_to(self, holder: int, address: str) -> None:
        """A session of that peer may hold rows from here."""
        self.shipping.lease_to(holder, address)
        if address != self.host.address:
            self._lent.setdefault(address, set()).add(holder)

    async def release(self, part: Part, entry: Known) -> None:
        """Leased rows go back, wherever they were leased."""
        body = Finish(part.lease, "release", partition=entry.name, generation=entry.generation)
        try:
            await self.mesh.insist(lambda: self.host.serving(part.owner), body)
        except DataplaneError as exc:
            log.info("a granted lease had ended already: %s", exc)

    def gone(self, gone: Owner) -> None:
        """Rows come back from that peer's clients; those whose bytes were there go."""
        holders = self._lent.pop(gone.peer, set())
        for entry in list(self.host.entries.values()):
            back = sum(entry.store.release_holder(holder) for holder in holders)
            self.shipping.copying.owner_gone(entry, gone)
            lost = entry.store.lost(gone)
            if back or lost.rows.keys:
                log.warning(
                    "with peer %s partition %r lost %d rows, and %d were given back to it",
                    gone.peer,
                    entry.name,
                    rowset.count(lost.rows),
                    back,
                )
                self.host.lost_rows += rowset.count(lost.rows)
                self.losses.look(entry)
            self.settle(entry)
