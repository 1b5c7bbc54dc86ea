"""Rows that this peer leases to claims, of its own clients and of other peers'."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dataplane.errors import DataplaneError
from dataplane.metadata.credit import PullCredit
from dataplane.metadata.takes import Taken
from dataplane.peer import rows as rowset
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.leases import Handed, Part
from dataplane.peer.losses import LossReports
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.shipping import Shipping
from dataplane.wire.messages import Body, Finish, Want
from dataplane.wire.peering import Grant, Granted, Order, Supplied
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)


class Supplying:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        partitions: Partitions,
        settle: Callable[[Entry], None],
        shipping: Shipping,
        losses: LossReports,
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.settle = settle
        self.shipping = shipping
        self.losses = losses
        self.in_doubt: Callable[[str, dict[int, Entry]], None] = lambda address, leases: None
        """asks the peer there whether a claim of its has these leases; what it has not goes back"""
        self._lent: dict[str, set[int]] = {}
        """which sessions of other peers have had rows from here"""
        mesh.handlers[Order] = self._order

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
        self.shipping.lease_to(holder, self.host.address)
        taken = entry.store.take(stage, want, holder, now, credit=credit)
        return None if taken.lease is None else self._granted(entry, taken, fields)

    def _granted(self, entry: Entry, taken: Taken, fields: list[str] | None) -> Handed:
        """Leased rows with what they have here of the fields that are asked for."""
        assert taken.lease is not None and taken.slots is not None
        known = None if fields is None else entry.store.known(fields)
        table = entry.store.table(taken.slots, known)
        self.settle(entry)
        return Handed(Part(self.host.owner, taken.lease, len(taken.slots)), table)

    async def _order(self, caller: Caller, body: Order) -> Body:
        """Lease what is ordered, and hand it to the claim's peer; unwanted, it goes back."""
        entry = await self.partitions.entry(body.partition, body.generation, body.stage)
        self.host.label(body.holder, body.label)
        self.lent_to(body.holder, body.claimant)
        self.shipping.lease_to(body.holder, body.claimant)
        taken = entry.store.take(
            body.stage,
            body.want,
            body.holder,
            now=self.host.now(),
            lease_ms=body.lease_ms,
            partial=not body.exact,
            credit=PullCredit(body.claimant, lambda: body.credit_bytes, body.fields),
        )
        if taken.lease is None:
            return Supplied(0, 0.0, taken.blocked, 0, taken.needed_bytes)
        handed = self._granted(entry, taken, body.fields)
        grant = Grant(body.number, taken.lease, handed.table, body.exact)
        try:
            reply: Granted = await self.mesh.call(body.claimant, grant)
        except DataplaneError as exc:
            log.warning("%s could not be handed its rows: %s", body.claimant, exc)
            self.in_doubt(body.claimant, {taken.lease: entry})
            return Supplied(0, 0.0, False)
        if not reply.wanted:
            await self.release(handed.part, entry)
            return Supplied(0, 0.0, False, ended=True)
        return Supplied(taken.units, taken.amount, taken.blocked, taken.nbytes, taken.needed_bytes)

    def lent_to(self, holder: int, address: str) -> None:
        """A session of that peer may hold rows from here."""
        if address != self.host.address:
            self._lent.setdefault(address, set()).add(holder)

    async def release(self, part: Part, entry: Entry) -> None:
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
                self.losses.tell(entry, rowset.names(lost.rows))
            self.settle(entry)
