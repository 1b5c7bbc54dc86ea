"""Leases that nobody holds, because the claim did not get them, or was not heard to.

Whoever takes a peer's shards over takes its leases over as well, also those whose grant never
arrived; and a grant may go unanswered. The claims' peers are asked, which let none of these in any
more; what nobody there holds goes back to its stage.
"""

from __future__ import annotations

from collections.abc import Callable

from dataplane.errors import StaleEpoch, Unavailable
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.leases import Part
from dataplane.peer.mesh import Mesh
from dataplane.peer.supplying import Supplying
from dataplane.wire.messages import Body
from dataplane.wire.rosters import Held, Unheld

MAX_ASKED = 10_000
RETRY_S = 0.2


class Orphans:
    """`unheld` tells which of some leases, by their shards' numbers, no client of this host
    holds. No claim here is granted them from then on."""

    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        supplying: Supplying,
        unheld: Callable[[list[int]], list[int]],
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.supplying = supplying
        self.unheld = unheld
        supplying.in_doubt = self.ask
        mesh.handlers[Held] = self._held

    def _held(self, caller: Caller, body: Held) -> Body:
        return Unheld(self.unheld(body.leases))

    def ask(self, address: str, leases: dict[int, Entry]) -> None:
        """About leases whose holders are clients at that address, and where they are here now."""
        numbers = list(leases)
        for at in range(0, len(numbers), MAX_ASKED):
            some = {number: leases[number] for number in numbers[at : at + MAX_ASKED]}
            self.mesh.spawn(self._ask(address, some))

    async def _ask(self, address: str, leases: dict[int, Entry]) -> None:
        """Until it has answered, or is no member any more. Then nobody holds them; those it had
        when it went have ended, and these may have come after."""
        back = list(leases)
        while address in self.host.roster.members:
            roster = self.host.roster
            try:
                reply: Unheld = await self.mesh.call(
                    address, Held(list(leases)), epoch=roster.epoch
                )
            except (StaleEpoch, Unavailable):
                await self.host.another_roster(roster, self.host.now() + RETRY_S)
                continue
            back = reply.leases
            break
        for number in back:
            await self.supplying.release(Part(self.host.owner, number, 0), leases[number])
