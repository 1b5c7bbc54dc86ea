"""Where the roster is kept, and so which peer may run the authority.

Embedded: at the first seed, always. With etcd: at whoever has the authority's key there, under a
lease. Every roster is put by compare-and-swap, on the one before and on that key, so one that was
deposed publishes nothing. While etcd is away nobody is replaced, and all others go on.

The key goes with its lease, 2 s to 2.5 s after the authority's last word. Where the authority's
process has ended for sure, whoever notices ends that lease at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from dataplane.errors import DataplaneError, RosterMismatch, Unavailable
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.host import Host
from dataplane.peer.membership.authority import Office
from dataplane.peer.net.links import refuses
from dataplane.transport.etcd import Etcd, Kept
from dataplane.wire.tables import Owner, RosterTable

log = logging.getLogger(__name__)

TTL_S = 2
"""etcd's own least: so long after its last word an authority's key goes."""
SURE_S = 1.6
"""An authority believes in its key for less, counted from when it asked for it."""
LOOK_S = 0.4
HURRY_S = 0.1
"""The same while the authority cannot be reached."""


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


class EtcdKeeper:
    apart = ""

    def __init__(
        self, host: Host, endpoints: Sequence[str], is_away: Callable[[str], bool]
    ) -> None:
        self.host = host
        self._is_away = is_away
        self.etcd = Etcd(endpoints)
        prefix = f"/dataplane/{host.plane}/{host.founding[0]:x}"
        self._roster_key, self._authority_key = f"{prefix}/roster", f"{prefix}/authority"
        self._address = ""
        self._lease = 0
        self._created = 0
        """revision of the authority's key, where it is this peer's"""
        self._changed = 0
        """revision of the roster that is in etcd"""
        self._sure_until = 0.0
        self._look_now = asyncio.Event()

    def address(self) -> str:
        if not self._address:
            raise Unavailable("no peer is known to run the authority: is etcd there?")
        return self._address

    def sure(self) -> bool:
        return self.host.now() < self._sure_until

    async def run(self, office: Office) -> None:
        while True:
            began = self.host.now()
            try:
                if office.is_open:
                    await self._stay(office, began)
                else:
                    await self._look(office, began)
            except DataplaneError as exc:
                log.warning("%s", exc)
            if office.is_open and not self.sure():
                log.warning("this peer is the authority no more")
                office.close()
                self._address = ""
            self._look_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HURRY_S if self._is_away(self._address) else LOOK_S):
                    await self._look_now.wait()

    async def _stay(self, office: Office, began: float) -> None:
        if await self.etcd.keep_alive(self._lease):
            self._sure_until = began + SURE_S
        else:
            self._sure_until = 0.0

    async def _look(self, office: Office, began: float) -> None:
        """Who has the office? If nobody, this peer tries to get it."""
        kept = await self.etcd.get(self._authority_key)
        if kept is not None and not await self._is_over(kept):
            return
        lease = await self.etcd.grant(TTL_S)
        address = self.host.address.encode()
        free = {self._authority_key: 0}
        self._created = await self.etcd.put_if(self._authority_key, address, free, {}, lease)
        if not self._created:
            await self.etcd.revoke(lease)
            faster = await self.etcd.get(self._authority_key)
            self._address = faster.value.decode() if faster is not None else ""
            return
        self._lease, self._sure_until = lease, began + SURE_S
        stored = await self.etcd.get(self._roster_key)
        self._changed = stored.changed if stored is not None else 0
        roster = self.host.roster if stored is None else _roster(stored.value)
        self._address = self.host.address
        await office.open(roster, ask=False)

    async def _is_over(self, kept: Kept) -> bool:
        """Whether the process that has the key is none any more; then the key is gone as well."""
        address = kept.value.decode()
        if address == self.host.address:
            return False  # of a life before, or of a lease that was given up: it goes by itself
        self._address = address
        if not self._is_away(address) or not await refuses(address):
            return False
        log.info("the authority's process at %s has ended", address)
        self._address = ""  # who asks it now would wait for one that is no member any more
        await self.etcd.revoke(kept.lease)
        return True

    async def commit(self, new: Roster) -> bool:
        raw = msgspec.msgpack.encode(new.table)
        mine = {self._authority_key: self._created}
        before = {self._roster_key: self._changed}
        try:
            revision = await self.etcd.put_if(self._roster_key, raw, mine, before, 0)
        except Unavailable as exc:  # it may be there or not: whoever comes next reads it
            log.warning("a roster was not kept: %s", exc)
            revision = 0
        if not revision:
            self._sure_until = 0.0
            return False
        self._changed = revision
        return self.sure()

    def gone(self, owner: Owner) -> None:
        """Who made the roster that says so has the office now. To ask the one before would only
        mean to wait."""
        if owner.peer == self._address:
            self._address = ""
            self._look_now.set()

    async def close(self) -> None:
        try:
            if self._lease and self.sure():
                await self.etcd.revoke(self._lease)
        except Unavailable as exc:
            log.info("the authority's key ends by itself: %s", exc)
        await self.etcd.close()


def _roster(raw: bytes) -> Roster:
    try:
        return Roster.from_table(msgspec.msgpack.decode(raw, type=RosterTable))
    except msgspec.MsgspecError as exc:
        raise RosterMismatch(f"what etcd keeps is no roster of this version: {exc}") from exc


def keeper_of(
    host: Host, first: str, servers: Sequence[str], is_away: Callable[[str], bool]
) -> Keeper:
    """servers: `host:port` of etcd's; without any the first seed keeps the roster. is_away: whether
    a peer that was there cannot be reached."""
    return EtcdKeeper(host, servers, is_away) if servers else SeedKeeper(host, first)
