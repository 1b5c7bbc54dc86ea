"""After a new roster: homes and parts of the directory that moved are filled anew.

Every peer tells those that were given shards what it knows of the partitions and names that are
looked up there now. Until all have, whoever asks there waits.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataplane.errors import StaleEpoch, Unavailable
from dataplane.metadata.columns import Array
from dataplane.metadata.restating import gained, names_for
from dataplane.metadata.roster import Roster
from dataplane.peer.host import Caller, Host
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.wire.messages import Body, Done
from dataplane.wire.records import KEY, column
from dataplane.wire.rosters import KnownNames, Restated

RETRY_S = 0.2


class Restating:
    def __init__(self, host: Host, mesh: Mesh, partitions: Partitions) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self._due: dict[str, Array] = {}
        """which shards a peer was given, until it was told what is known of them here"""
        self._telling: set[str] = set()
        mesh.handlers[Restated] = self._restated

    def turned(self, old: Roster, new: Roster) -> None:
        given = gained(old, new)
        self.partitions.homes.turned(new)
        # A process that is new as well has nothing to tell.
        known = {owner.peer for owner in new.owners if old.has(owner)}
        if self.host.address in given and not new.places_like(old):
            self.host.untold |= known
        self.host.untold &= known
        for address, shards in given.items():
            self._due[address] = self._due.get(address, False) | shards
        for address in list(self._due):
            if address not in new.members:
                del self._due[address]
            elif address not in self._telling:
                self._telling.add(address)
                self.mesh.spawn(self._tell(address))
        self._finish()

    async def _tell(self, address: str) -> None:
        """Until it knows everything, or is no member any more. What was told under a roster counts
        under that one only."""
        try:
            while address in self._due:
                roster = self.host.roster
                try:
                    for body in list(self._messages(roster, address, self._due[address])):
                        await self.mesh.call(address, body, epoch=roster.epoch)
                except (StaleEpoch, Unavailable):
                    await self.host.another_roster(roster, self.host.now() + RETRY_S)
                else:
                    if self.host.roster is roster:
                        self._due.pop(address, None)
        finally:
            self._telling.discard(address)

    def _messages(self, roster: Roster, address: str, shards: Array) -> Iterator[Restated]:
        for entry in self.host.entries.values():
            for names in names_for(entry.store, roster, shards, self.host.address):
                yield Restated(names=[names], last=False)
        yield Restated(self.partitions.known(address))

    def _restated(self, caller: Caller, body: Restated) -> Body:
        """Names and partitions of another peer, which it looks up here from now on."""
        for names in body.names:
            self._enter(names)
        for known in body.partitions:
            self.partitions.homes.restate(caller.address, known)
        if body.last:
            self.host.untold.discard(caller.address)
            self._finish()
        return Done()

    def _enter(self, names: KnownNames) -> None:
        scope = 2 * names.generation + names.groups
        self.host.directory.enter(scope, column(names.keys, KEY), names.shard)

    def _finish(self) -> None:
        if not self.host.untold:
            self.partitions.homes.resume()
            self.host.told()
