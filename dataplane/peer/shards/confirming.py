"""Asking the backup, again and again, whether this peer is still the primary of its shards.

A primary answers only within `host.LEASE_S` of sending the last request that its backup in sync
confirmed, so a backup that is promoted knows when the old primary has fallen silent. A backup that
confirms nothing for OVERDUE_S leaves the in-sync set, and calls go on without it: the roster keeper
knows then that the copy is out of date. A primary that keeps the roster itself waits instead until
its backup confirms or is lost. If its host died, nobody else would know.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dataplane.errors import DataplaneError
from dataplane.peer.host import Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.shards.appends import Shipping
from dataplane.wire.peering import Confirm
from dataplane.wire.tables import Owner

CONFIRM_S = 0.3
OVERDUE_S = 2.0
STALL_S = 1.0
"""A primary that did not run for longer than this cannot say that its backup was late."""


@dataclass(eq=False, repr=False)
class Confirming:
    host: Host
    mesh: Mesh
    shipping: Shipping
    keeps_the_roster: bool
    """this peer does, and no consensus store"""

    def __post_init__(self) -> None:
        self._backup: Owner | None = None
        self._heard_at = self._ran_at = 0.0

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._tick()
            await asyncio.sleep(CONFIRM_S)

    def _tick(self) -> None:
        now, backup = self.host.now(), self.shipping.backup
        if now - self._ran_at > CONFIRM_S + STALL_S:
            self._heard_at += now - self._ran_at
        self._ran_at = now
        if backup != self._backup:
            self._backup, self._heard_at = backup, now
        if backup is None:
            return
        self.mesh.spawn(self._ask(backup))
        if now - self._heard_at > OVERDUE_S and not self.keeps_the_roster:
            self.shipping.unconfirmed()

    async def _ask(self, backup: Owner) -> None:
        asked = self.host.now()
        try:
            await self.mesh.call(backup.peer, Confirm(), to=backup.incarnation, timeout_s=OVERDUE_S)
        except DataplaneError:
            return
        self.host.serving.confirmed(backup, asked)
        if backup == self._backup:
            self._heard_at = self.host.now()
            self.shipping.confirmed()
