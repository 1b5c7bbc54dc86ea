"""Where the roster is kept, and so which peer may run the authority.

Embedded: at the first seed, always. With etcd: wherever etcd lets one, see `peer.membership.etcd`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from dataplane.metadata.roster.roster import Roster
from dataplane.peer.host import Host
from dataplane.peer.membership.authority import Office
from dataplane.peer.membership.etcd import EtcdKeeper
from dataplane.wire.tables import Owner


class Keeper(Protocol):
    apart: str
    """the peer that hosts no shards where there are three or more, or "" """

    def address(self) -> str:
        """Of the peer that runs the authority. Unavailable where nobody is known to."""

    async def run(self, office: Office) -> None:
        """Open the office here when it is this peer's turn; until it is cancelled."""

    def sure(self) -> bool:
        """Whether an office that is open here is the only one."""

    def commit(self, new: Roster) -> bool | Awaitable[bool]:
        """Before a roster is in force: False where another authority made one."""

    def gone(self, owner: Owner) -> None:
        """That process is no member any more."""

    async def close(self) -> None: ...


class SeedKeeper:
    """The first seed keeps it. A new life of it asks the members what they know."""

    def __init__(self, host: Host, first: str) -> None:
        self.host = host
        self.apart = first

    def address(self) -> str:
        return self.apart

    async def run(self, office: Office) -> None:
        if self.host.address == self.apart:
            await office.open(self.host.roster, ask=True)

    def sure(self) -> bool:
        return True

    def commit(self, new: Roster) -> bool:
        return True

    def gone(self, owner: Owner) -> None:
        return

    async def close(self) -> None:
        return


def keeper_of(
    host: Host, first: str, servers: Sequence[str], is_away: Callable[[str], bool]
) -> Keeper:
    """servers: `host:port` of etcd's; without any the first seed keeps the roster. is_away: whether
    a peer that was there cannot be reached."""
    return EtcdKeeper(host, servers, is_away) if servers else SeedKeeper(host, first)
