"""Asks the backup repeatedly whether this peer is still the primary of its shards.

A primary replies only within `host.LEASE_S` of the last request that its in-sync backup confirmed.
A promoted backup therefore knows when the old primary has stopped replying. A backup that confirms
nothing for OVERDUE_S leaves the in-sync set, and calls continue without it. The roster keeper then
knows that the copy is out of date.

`Confirm` uses the heartbeat stream. A log record of many megabytes may take seconds on a slow link,
and neither delays the reply nor makes the backup look late. A backup that confirms no log record
for OVERDUE_S and the time that the record may take leaves the in-sync set, too.

If the primary is the roster keeper and dies, no other peer would know that. It therefore waits
until its backup confirms or is lost. While the backup's heartbeats keep arriving, the backup
cannot be lost. The reply to a heartbeat then tells the backup that it left the in-sync set.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dataplane.errors import DataplaneError
from dataplane.peer.host import Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.shards.log_sender import LogSender
from dataplane.wire.peering import Confirm
from dataplane.wire.tables import Owner

CONFIRM_S = 0.3
OVERDUE_S = 2.0
PAUSE_S = 1.0
"""Heartbeats that arrive at least this often, each of which is answered, reach their sender."""
STALL_S = 1.0
"""A primary that did not run for longer than this cannot say that its backup was late."""


@dataclass(eq=False, repr=False)
class Confirming:
    host: Host
    mesh: Mesh
    log_sender: LogSender
    keeps_the_roster: bool
    """whether this peer keeps the roster, without a consensus store"""

    def __post_init__(self) -> None:
        self._backup: Owner | None = None
        self._heard_at = self._ran_at = 0.0
        self._beat_at = self._beats_since = 0.0
        """when the backup's last heartbeat arrived, and since when they arrive without a pause"""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self._tick()
            await asyncio.sleep(CONFIRM_S)

    def _tick(self) -> None:
        now, backup = self.host.now(), self.log_sender.backup
        has_stalled = now - self._ran_at > CONFIRM_S + STALL_S
        if has_stalled:
            self._heard_at += now - self._ran_at
        self._ran_at = now
        if backup != self._backup:
            self._backup, self._heard_at = backup, now
        if backup is None:
            return
        self.mesh.spawn(self._ask(backup))
        if now - self._heard_at > OVERDUE_S:
            if not self.keeps_the_roster:
                self.log_sender.unconfirmed()
            elif now - self._beat_at < PAUSE_S and now - self._beats_since > OVERDUE_S:
                self.log_sender.demote()
        elif not has_stalled and self.log_sender.is_late(OVERDUE_S):
            self.log_sender.demote(late=True)

    def note_heartbeat(self, peer: Owner, epoch: tuple[int, int]) -> None:
        """Note that a heartbeat of a peer that uses this roster reached the keeper, which is
        this peer."""
        self.log_sender.follows(peer, epoch)
        now = self.host.now()
        if peer == self._backup:
            if now - self._beat_at > PAUSE_S:
                self._beats_since = now
            self._beat_at = now

    async def _ask(self, backup: Owner) -> None:
        asked = self.host.now()
        try:
            await self.mesh.call(backup.peer, Confirm(), to=backup.incarnation, timeout_s=OVERDUE_S)
        except DataplaneError:
            return
        self.host.serving.confirmed(backup, asked)
        if backup == self._backup:
            self._heard_at = self.host.now()
            self.log_sender.confirmed()
