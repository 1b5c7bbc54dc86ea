"""The roster keeper at work: it receives heartbeats of every member, and publishes new rosters.

One peer at a time is the keeper: always the first peer in the seed list, or with etcd the peer
that owns the keeper's key there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from dataplane.errors import DataplaneError, RosterMismatch, StaleEpoch, Unavailable
from dataplane.metadata.roster.authority import Authority
from dataplane.metadata.roster.failure_detector import FailureDetector
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.host import Host
from dataplane.transport.etcd import Etcd, EtcdValue
from dataplane.wire.peering import Beat, Rostered
from dataplane.wire.tables import Owner, RosterTable

if TYPE_CHECKING:
    from dataplane.peer.membership.membership import Membership

log = logging.getLogger(__name__)

ASK_S = 2.0
"""How long a new keeper waits for the members' rosters."""
TTL_S = 2
"""etcd's minimum. The keeper's key expires this long after its last renewal."""
SURE_S = 1.6
"""How long a keeper trusts its key, counted from the request that renewed it."""
LOOK_S = 0.4
HURRY_S = 0.1
"""The pause instead of LOOK_S once the keeper's process is proven to have exited."""

Commit = Callable[[Roster], Awaitable[bool]]


class KeeperRole:
    """The role of the roster keeper, which a member has or may get."""

    def __init__(self, member: Membership) -> None:
        self.host, self.mesh, self._member = member.host, member.mesh, member
        self._authority: Authority | None = None
        self._published = (0, 0)
        self._detector = self._new_detector()
        self._wanted: dict[str, bool] = {}
        self._committing: asyncio.Task[None] | None = None
        self.mesh.on_heard = self._heard

    def _new_detector(self) -> FailureDetector:
        member = self._member
        return FailureDetector(self.host.address, member.watching.contacts, member.lost_after_s)

    @property
    def is_open(self) -> bool:
        return self._authority is not None

    async def open(self, roster: Roster, ask: bool) -> None:
        """Become the keeper, starting from this roster. ask: first ask the members for their
        rosters."""
        made = Authority(roster, self.host.incarnation, self._member.keeper.apart)
        told = [roster]
        if ask:
            others = [m for m in self.host.roster.members if m != self.host.address]
            answers = await asyncio.gather(
                *(self.mesh.call(m, Beat(), timeout_s=ASK_S) for m in others),
                return_exceptions=True,
            )
            tables = [reply.table for reply in answers if isinstance(reply, Rostered)]
            told += [Roster.from_table(table) for table in tables if table is not None]
        made.go_on(told)
        self._authority = made
        log.info(
            "peer %r is now the roster keeper, with roster version %s",
            self.host.name,
            made.roster.epoch,
        )
        self._detector = self._new_detector()
        self._member.watching.follow(everybody=True)
        self.judge()

    def close(self) -> None:
        self._authority = None
        self._member.watching.follow(everybody=False)

    def note(self, peer: Owner, body: Beat, epoch: tuple[int, int]) -> None:
        """Note a heartbeat. The role must be open."""
        assert self._authority is not None
        if peer.peer != self.host.address:
            self._detector.heard(peer, self.host.now())
            self._detector.reported(peer, body.unreached)
        self._wanted[peer.peer] = body.wanted
        self._authority.beat(peer, epoch, body)
        if self._authority.is_behind:
            log.error(
                "peer %s has roster version %s, which this roster keeper does not "
                "know; the roster keeper restarts, to ask all peers for their roster versions",
                peer.peer,
                epoch,
            )
            self.close()
            self._member.deposed.set()  # this peer restarts as a new process
        else:
            self.judge()

    @property
    def wanted(self) -> bool:
        """Whether any member has reported that it is in use."""
        return any(self._wanted.get(member) for member in self.host.roster.members)

    def _heard(self, peer: Owner) -> None:
        if self._authority is not None:
            self._detector.heard(peer, self.host.now())

    def judge(self) -> None:
        """Decide which members are lost, and publish the next roster. A no-op if this peer is
        not the keeper."""
        if self._authority is None:
            return
        lost = self._detector.lost(self._authority.roster.owners, self.host.now())
        for owner in lost:
            self._wanted.pop(owner.peer, None)
            self._authority.lost(owner, self._member.watching.contacts.has_ended(owner))
        self._publish()

    def _publish(self) -> None:
        """Send the next roster to all members and to former ones. A peer that was only stopped
        learns from it that it was removed."""
        assert self._authority is not None
        new = self._authority.roster
        if new.epoch in (self._published, self.host.roster.epoch):
            return
        if self._member.keeper.commit is None:
            self._announce(new)
        elif self._committing is None or self._committing.done():
            kept = self._publish_roster(self._authority, self._member.keeper.commit)
            self._committing = self.mesh.spawn(kept)

    async def _publish_roster(self, authority: Authority, commit: Commit) -> None:
        while self._authority is authority and authority.roster.epoch != self._published:
            new = authority.roster
            if await commit(new):
                self._announce(new)
            elif self._authority is authority:
                self.close()

    def _announce(self, new: Roster) -> None:
        self._published = new.epoch
        told = {*self.host.roster.members, *new.members} - {self.host.address}
        self._member.adopt(new)
        for address in sorted(a for a in told if a in self._detector):
            self.mesh.spawn(self._push(address, new))

    async def _push(self, address: str, roster: Roster) -> None:
        with contextlib.suppress(StaleEpoch, Unavailable):  # the peer asks by itself
            await self.mesh.call(address, Rostered(roster.table), timeout_s=ASK_S)


class SeedKeeper:
    """The first peer in the seed list keeps the roster. After a restart it asks the members for
    theirs."""

    commit: Commit | None = None
    """called before a roster takes effect; returns False if another keeper has stored one"""

    def __init__(self, host: Host, first: str) -> None:
        self.host = host
        self.apart = first
        """the peer that hosts no shards if the run has three or more peers, or "" """

    def address(self) -> str:
        """The address of the roster keeper. Raises Unavailable if none is known."""
        return self.apart

    async def run(self, role: KeeperRole) -> None:
        """Open the role here when it is this peer's turn. Runs until cancelled."""
        if self.host.address == self.apart:
            await role.open(self.host.roster, ask=True)

    def sure(self) -> bool:
        """Whether a role that is open here is the only one."""
        return True

    def gone(self, owner: Owner) -> None:
        """Handle a process that is no longer a member."""

    async def close(self) -> None:
        """Close, because this peer ends."""


class EtcdKeeper(SeedKeeper):
    """The peer that owns the keeper's key in etcd keeps the roster, under a lease.

    Every roster is stored by compare-and-swap on the previous roster and on that key, so a
    former keeper cannot publish. While etcd is unreachable no member is replaced, and all others
    continue. The key expires 2 s to 2.5 s after the keeper's last renewal. If the keeper's
    process is proven to have exited, another peer revokes the lease at once.
    """

    def __init__(
        self, host: Host, endpoints: Sequence[str], has_ended: Callable[[str], bool]
    ) -> None:
        """has_ended: returns whether the process of the member at an address is proven to have
        exited."""
        super().__init__(host, "")
        self.commit = self._put
        self._has_ended = has_ended
        self.etcd = Etcd(endpoints)
        prefix = f"/dataplane/{host.plane}/{host.founding[0]:x}"
        self._roster_key, self._authority_key = f"{prefix}/roster", f"{prefix}/authority"
        self._address = ""
        self._lease = 0
        self._created = 0
        """revision of the keeper's key, if this peer owns it"""
        self._changed = 0
        """revision of the roster in etcd"""
        self._sure_until = 0.0
        self._look_now = asyncio.Event()

    def address(self) -> str:
        if not self._address:
            raise Unavailable(
                "no peer is currently the roster keeper: check that etcd is running, "
                "then repeat the call"
            )
        return self._address

    def sure(self) -> bool:
        return self.host.now() < self._sure_until

    async def run(self, role: KeeperRole) -> None:
        while True:
            began = self.host.now()
            try:
                if role.is_open:
                    stays = await self.etcd.keep_alive(self._lease)
                    self._sure_until = began + SURE_S if stays else 0.0
                else:
                    await self._look(role, began)
            except DataplaneError as exc:
                log.warning(
                    "peer %r: could not read or renew the roster keeper's key in etcd: %s",
                    self.host.name,
                    exc,
                )
            if role.is_open and not self.sure():
                log.warning("peer %r is no longer the roster keeper", self.host.name)
                role.close()
                self._address = ""
            self._look_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HURRY_S if self._has_ended(self._address) else LOOK_S):
                    await self._look_now.wait()

    async def _look(self, role: KeeperRole, began: float) -> None:
        """Find out who the keeper is. If there is none, try to become it."""
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
        await role.open(roster, ask=False)

    async def _is_over(self, kept: EtcdValue) -> bool:
        """Whether the process that owns the key is proven to have exited. If so, revoke the key."""
        address = kept.value.decode()
        if address == self.host.address:
            return False  # an abandoned or an earlier incarnation's key, which expires by itself
        self._address = address
        if not self._has_ended(address):
            return False
        log.info("roster keeper at %s: process exited", address)
        self._address = ""  # callers must not wait for a former member
        await self.etcd.revoke(kept.lease)
        return True

    async def _put(self, new: Roster) -> bool:
        raw = msgspec.msgpack.encode(new.table)
        mine = {self._authority_key: self._created}
        before = {self._roster_key: self._changed}
        try:
            revision = await self.etcd.put_if(self._roster_key, raw, mine, before, 0)
        except Unavailable as exc:  # the roster may be stored or not: the next keeper reads it
            log.warning("roster keeper: could not store the roster: %s", exc)
            revision = 0
        if not revision:
            self._sure_until = 0.0
            return False
        self._changed = revision
        return self.sure()

    def gone(self, owner: Owner) -> None:
        """Look for a new keeper if the former one is no longer a member. Calls to it would only
        wait."""
        if owner.peer == self._address:
            self._address = ""
            self._look_now.set()

    async def close(self) -> None:
        try:
            if self._lease and self.sure():
                await self.etcd.revoke(self._lease)
        except Unavailable as exc:
            log.info(
                "roster keeper: could not revoke its etcd lease, which will expire by itself: %s",
                exc,
            )
        await self.etcd.close()


def _roster(raw: bytes) -> Roster:
    try:
        return Roster.from_table(msgspec.msgpack.decode(raw, type=RosterTable))
    except msgspec.MsgspecError as exc:
        raise RosterMismatch(
            f"cannot decode the roster in etcd ({exc}), because another dataplane release wrote "
            "it: install that release, or choose another --run"
        ) from exc
