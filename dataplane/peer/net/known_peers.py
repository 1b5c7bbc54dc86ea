"""Who the other peers are: names and incarnations, and which of them cannot be reached.

Strangers are refused. A peer that cannot be reached is away; whether it is lost, and what becomes
of its rows, only the roster says (`peer.membership.membership`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dataplane.errors import PeerNameTaken, RosterMismatch, VersionMismatch
from dataplane.peer.host import Host
from dataplane.wire import limits
from dataplane.wire.peering import PeerHello
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)


Bulk = Callable[[], tuple[str, str, str]]
"""Where this peer's bulk workers listen, the fingerprint of their certificate, and where its device
workers do; see `PeerHello`."""


class Acquaintances:
    def __init__(self, host: Host, bulk: Bulk) -> None:
        self.host = host
        self.on_away: list[Callable[[Owner], None]] = []
        """called with a peer whose connection broke, and that did not answer for a while"""
        self.looked_for: set[str] = set()
        """whose connection broke, and who may answer yet"""
        self._bulk = bulk
        self._met: dict[str, PeerHello] = {}
        self._away: set[str] = set()

    def name(self, address: str) -> str:
        """What the peer there is called, as far as that is known."""
        return self._met[address].name if address in self._met else "?"

    def introduction(self) -> PeerHello:
        """Who this peer is."""
        bulk, fingerprint, device_bulk = self._bulk()
        return PeerHello(
            versions=(limits.PROTOCOL_VERSION_MIN, limits.PROTOCOL_VERSION),
            plane=self.host.plane,
            name=self.host.name,
            incarnation=self.host.incarnation,
            address=self.host.address,
            epoch=self.host.founding,
            shards=limits.SHARDS,
            bulk=bulk,
            bulk_fingerprint=fingerprint,
            device_bulk=device_bulk,
        )

    def meet(self, hello: PeerHello) -> None:
        """A peer said who it is. VersionMismatch, RosterMismatch, PeerNameTaken for a stranger."""
        self._check(hello)
        self._met[hello.address] = hello
        self._away.discard(hello.address)

    def incarnation(self, address: str) -> int | None:
        """Of the peer that was met there last."""
        return self._met[address].incarnation if address in self._met else None

    def away(self, address: str) -> None:
        """Nobody answers there."""
        log.warning("peer %s at %s cannot be reached", self.name(address), address)
        self._away.add(address)
        for tell in self.on_away:
            tell(Owner(address, self._met[address].incarnation))

    def is_away(self, address: str) -> bool:
        """It was there, and cannot be reached."""
        return address in self._away

    def may_be_dead(self, owner: Owner) -> bool:
        """This process does not answer there any more, or has to be looked for."""
        there = self.incarnation(owner.peer) in (None, owner.incarnation)
        return not there or owner.peer in self._away or owner.peer in self.looked_for

    def gone(self) -> list[Owner]:
        """All that were there and cannot be reached."""
        return [Owner(address, self._met[address].incarnation) for address in sorted(self._away)]

    def forget(self, address: str) -> None:
        """It is no member any more: its name is free."""
        self._met.pop(address, None)
        self._away.discard(address)
        self.looked_for.discard(address)

    def _check(self, hello: PeerHello) -> None:
        """Compare what must be equal; the first difference names both sides."""
        mine = self.introduction()
        if max(hello.versions[0], mine.versions[0]) > min(hello.versions[1], mine.versions[1]):
            raise VersionMismatch(
                f"peer {hello.name!r} speaks versions {hello.versions}, this one {mine.versions}"
            )
        for what in ("plane", "shards", "epoch"):
            theirs, ours = getattr(hello, what), getattr(mine, what)
            if theirs != ours:
                raise RosterMismatch(
                    f"peer {hello.name!r} at {hello.address} has {what} {theirs!r}, this peer "
                    f"({mine.name!r} at {mine.address}) has {ours!r}: start all peers of a plane "
                    "with the same --run and --seeds, or all by connect(fresh=True) of one launch",
                    what=what,
                )
        taken = {met.name: address for address, met in self._met.items()} | {
            mine.name: mine.address
        }
        same = self.incarnation(hello.address) == hello.incarnation
        renamed = same and self.name(hello.address) != hello.name
        if taken.get(hello.name, hello.address) != hello.address or renamed:
            raise PeerNameTaken(
                f"two peers of plane {mine.plane!r} are called {hello.name!r}: "
                f"{taken.get(hello.name)} and {hello.address}; give each its own --name",
                name=hello.name,
            )
