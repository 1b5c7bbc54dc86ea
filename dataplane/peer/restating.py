"""After a new roster: homes that moved are filled anew.

Who was given shards asks every peer what it knows of the partitions there; for one that is lost
before it told, whoever took its rows over. Until all have told, whoever asks there waits.
"""

from __future__ import annotations

import logging

import numpy as np

from dataplane.errors import DataplaneError, ProtocolError, StaleEpoch, Unavailable
from dataplane.metadata.restating import gained
from dataplane.metadata.roster import Flags, Roster
from dataplane.peer.host import Caller, Host
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.wire.messages import Body, Done
from dataplane.wire.rosters import Restate, Restated

log = logging.getLogger(__name__)

RETRY_S = 0.2
TELL_S = 60.0
"""Until a peer with very many names has told them; one that is dead or stopped is lost before."""


class Restating:
    def __init__(self, host: Host, mesh: Mesh, partitions: Partitions) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self._asking: set[str] = set()
        mesh.handlers |= {Restate: self._restate, Restated: self._restated}

    # who was given shards

    def turned(self, old: Roster, new: Roster) -> None:
        self.partitions.homes.turned(new)
        untold = self.host.untold
        lost = [o for o in old.owners if o.peer in untold and not new.has(o)]
        late = [(self.host.serving(owner), untold.pop(owner.peer)) for owner in lost]
        given = self._given(old, new)
        if given.any():  # also those that this peer did not know: they joined before it did
            late += [(owner.peer, given) for owner in new.owners]
        for address, shards in late:
            if address is not None:
                untold[address] = untold.get(address, False) | shards
        for address in untold.keys() - self._asking:
            self._asking.add(address)
            self.mesh.spawn(self._ask(address))
        self._finish()

    def _given(self, old: Roster, new: Roster) -> Flags:
        """Shards of which others may know more. Where rosters were missed by which some moved these
        are all that this peer has: they may have been another's meanwhile."""
        here, none = self.host.address, np.zeros(new.shards, np.bool_)
        if here not in new.members or new.places_like(old) and not _moved_since(old, new):
            return none
        if new.epoch == (old.epoch[0], old.epoch[1] + 1):
            return gained(old, new).get(here, none)
        mine: Flags = new.primaries == new.members.index(here)
        return mine

    async def _ask(self, address: str) -> None:
        """Until it has told everything, or is no member any more. What was told under a roster
        counts under that one only."""
        try:
            while address in self.host.untold:
                roster = self.host.roster
                mine = roster.primaries == roster.members.index(self.host.address)
                shards = np.packbits(self.host.untold[address] & mine).tobytes()
                try:
                    body = Restate(shards)
                    await self.mesh.call(address, body, timeout_s=TELL_S, epoch=roster.epoch)
                except DataplaneError as exc:
                    if not isinstance(exc, StaleEpoch | Unavailable):
                        log.warning("%s does not tell what it knows: %s", address, exc)
                    await self.host.another_roster(roster, self.host.now() + RETRY_S)
                else:
                    if self.host.roster is roster:
                        del self.host.untold[address]
        finally:
            self._asking.discard(address)
        self._finish()

    def _finish(self) -> None:
        if not self.host.untold:
            self.partitions.homes.resume()
            self.host.told()

    def _restated(self, caller: Caller, body: Restated) -> Body:
        """Partitions of another peer, which it looks up here from now on."""
        for known in body.partitions:
            self.partitions.homes.restate(caller.address, known)
        return Done()

    # who knows

    async def _restate(self, caller: Caller, body: Restate) -> Body:
        """Tell another peer what is known here of the shards that it was given."""
        roster = self.host.roster
        shards = np.unpackbits(np.frombuffer(body.shards, np.uint8)).astype(np.bool_)
        if len(shards) != roster.shards:
            raise ProtocolError(f"{len(shards)} bits for {roster.shards} shards")
        told = Restated(self.partitions.known(caller.address))
        await self.mesh.call(caller.address, told, epoch=roster.epoch)
        if self.host.roster is not roster:
            raise StaleEpoch(f"the roster changed while {self.host.address} told what it knows")
        return Done()


def _moved_since(old: Roster, new: Roster) -> bool:
    """Whether shards may have come and gone under rosters in between."""
    followed = new.epoch[0] == old.epoch[0]
    return not followed or any(one.number > old.epoch[1] for one in new.takeovers)
