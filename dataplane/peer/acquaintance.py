"""Who the other peers are: names and incarnations, strangers refused, lost ones mourned.

A peer is lost when another incarnation answers at its address, or when its connection broke and
nobody answered there for a while. What others knew of it is then void; `on_lost` tells them.
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


class Acquaintances:
    def __init__(self, host: Host, bulk_addresses: Callable[[], list[str]]) -> None:
        self.host = host
        self.on_lost: list[Callable[[Owner], None]] = []
        """called with a peer that was there and is no more"""
        self._bulk_addresses = bulk_addresses
        self._names: dict[str, str] = {}
        self._known: dict[str, int] = {}
        self._lost: set[str] = set()

    def name(self, address: str) -> str:
        """What the peer there is called, as far as that is known."""
        return self._names.get(address, "?")

    def introduction(self) -> PeerHello:
        """Who this peer is."""
        return PeerHello(
            versions=(limits.PROTOCOL_VERSION_MIN, limits.PROTOCOL_VERSION),
            plane=self.host.plane,
            name=self.host.name,
            incarnation=self.host.incarnation,
            address=self.host.address,
            epoch=self.host.roster.epoch,
            shards=limits.SHARDS,
            bulk=self._bulk_addresses(),
        )

    def meet(self, hello: PeerHello) -> None:
        """A peer said who it is. VersionMismatch, RosterMismatch, PeerNameTaken for a stranger;
        where it is another incarnation than before, that one is lost."""
        self._check(hello)
        if self._known.get(hello.address, hello.incarnation) != hello.incarnation:
            self.lose(hello.address)
        self._known[hello.address] = hello.incarnation
        self._names[hello.address] = hello.name
        self._lost.discard(hello.address)

    def incarnation(self, address: str) -> int | None:
        """Of the peer that was met there last, unless it is lost."""
        return self._known.get(address)

    def lose(self, address: str) -> None:
        log.warning("peer %s at %s is lost", self._names.pop(address, "?"), address)
        gone = Owner(address, self._known.pop(address))
        self._lost.add(address)
        for tell in self.on_lost:
            tell(gone)

    def is_lost(self, address: str) -> bool:
        """It was there, went away, and has not come back."""
        return address in self._lost

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
                    "with the same --plane and --seeds",
                    what=what,
                )
        if hello.address not in self.host.roster.members:
            raise RosterMismatch(f"{hello.address} is not one of this plane's seeds")
        taken = {n: a for a, n in self._names.items()} | {mine.name: mine.address}
        same = self._known.get(hello.address) == hello.incarnation
        renamed = same and self._names[hello.address] != hello.name
        if taken.get(hello.name, hello.address) != hello.address or renamed:
            raise PeerNameTaken(
                f"two peers of plane {mine.plane!r} are called {hello.name!r}: "
                f"{taken.get(hello.name)} and {hello.address}; give each its own --name",
                name=hello.name,
            )
