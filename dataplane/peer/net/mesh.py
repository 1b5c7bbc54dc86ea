"""Calls to other peers, over one link to each. Their requests arrive at `peer_door`.

Connections are made when first needed. Before its first request a peer identifies itself
(`PeerHello`). Runs, seeds, versions and names are compared, and unknown peers are refused. A
call to this peer's own address is a plain function call, so callers need not know where shards
are.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from dataplane.errors import (
    DataplaneError,
    RosterMismatch,
    StaleEpoch,
    Unavailable,
    duration,
)
from dataplane.peer.failures import LinkBroken, again, fail
from dataplane.peer.host import CALL_S, Caller, Host, call_end
from dataplane.peer.net import greetings
from dataplane.peer.net.greetings import Gate
from dataplane.peer.net.links import Bulk, KnownPeers, Link, Unreadable
from dataplane.peer.net.peer_door import PeerDoor
from dataplane.peer.operations import OPERATIONS, PeerHandler, Sender
from dataplane.peer.tasks import Tasks, within
from dataplane.wire import peering
from dataplane.wire.messages import OVERDUE, Body
from dataplane.wire.peering import Append, PeerHello, PeerReply, PeerRequest
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

RETRY_S = 0.5
RECONNECT_S = 0.05
SMALL_BYTES = 64 << 10
"""Requests of at most this size are sent while longer ones wait for a full stream: hundreds of
megabytes delay them by half a minute on a slow link."""


T = TypeVar("T")


class _Call(msgspec.Struct, frozen=True):
    """A request, its address and its caller. For `to` and `epoch` see `Mesh.call`."""

    address: str
    body: Body
    who: Caller
    to: int | None = None
    epoch: tuple[int, int] | None = None


class Mesh:
    def __init__(self, host: Host, bulk: Bulk, gate: Gate) -> None:
        self.host = host
        self.gate = gate
        self.handlers: dict[type[Body], PeerHandler] = {}
        self.others = KnownPeers(host, bulk)
        self.greetings = greetings.Greetings(gate)
        self._links: dict[str, Link] = {}
        self._reaching: dict[str, asyncio.Task[Link | DataplaneError]] = {}
        """connection attempts in progress"""
        self._rids = itertools.count(1)
        self._tasks = Tasks()
        self.spawn = self._tasks.spawn
        hold = self._tasks.hold
        self.door = PeerDoor(host, self.handlers, hold, gate, lambda peer: self.on_heard(peer))
        self.on_stale: Callable[[], None] = lambda: None
        """called when another peer has another roster"""
        self.on_heard: Callable[[Owner], None] = lambda peer: None
        """called with each process that sent a message"""
        self.begins_anew = False
        """Retry while a peer refuses this one over its roster. Peers of an earlier launch may still
        run at the addresses of this one."""
        self.has: Callable[[str], tuple[int, int] | None] = lambda address: None
        """this peer's position in the log of a peer that it backs up"""

    @property
    def refused(self) -> int:
        """The number of messages and peers refused so far."""
        doors = self.door, self.door.streams, self.gate
        return sum(one.refusals.total for one in doors)

    async def listen(self) -> None:
        """Start to listen. Raise AddressInUse if another process uses the address."""
        where = self.greetings.bind(self.host.address)
        await self.door.streams.listen(where, self.host.address)  # before a greeting tells the port
        self.spawn(self.greetings.serve(self.door.greeted))

    async def close(self) -> None:
        self.door.streams.close()  # later requests would start tasks that nothing ends
        await self._tasks.close()
        for link in self._links.values():
            link.close(
                Unavailable(
                    f"peer {self.host.name!r} is shutting down: connect to another peer, and "
                    "repeat the call there (for a put, use the same keys)"
                )
            )
        self.greetings.close()

    # calling

    async def call(
        self,
        address: str,
        body: Body,
        *,
        caller: Caller | None = None,
        timeout_s: float | None = None,
        to: int | None = None,
        epoch: tuple[int, int] | None = None,
    ) -> Any:
        """Call a peer and return its reply. Raise its typed error, or Unavailable if it does not
        reply in time: within timeout_s, and at the latest when the client's call must end.

        to: call only this incarnation of the peer. epoch: the version of the roster that chose
        it; StaleEpoch if the peer uses another one.
        """
        who = caller or self.host.caller()
        if address == self.host.address:
            outcome = self.here(who, body, epoch)
            return outcome if isinstance(outcome, Body) else await outcome
        # Send once the backup has every record that the request may depend on. If the connection
        # breaks, send again on a new one, until the peer is no longer a member.
        asked, kind = _Call(address, body, who, to, epoch), type(body)
        until = call_end(self.host.now(), timeout_s)
        if OPERATIONS[kind].held and not self.host.progress.is_settled:
            await self.host.progress.reached(until)
        broken: LinkBroken | None = None
        while True:
            try:
                self._check_epoch(address, epoch)
                ahead_bytes = SMALL_BYTES
                while (answer := self._send(asked, until, ahead_bytes)) is None:
                    ready = self._ready(asked)
                    await self._in_time(address, kind.__name__, until, ready)
                    ahead_bytes = 0  # it has waited, so it overtakes no others
                return await answer
            except LinkBroken as exc:
                unreadable = type(exc) is type(broken) is Unreadable
                # A former member may still run and accept connections, but never answer.
                is_lost = to is not None and not self.host.roster.has(Owner(address, to))
                if unreadable or is_lost:
                    raise Unavailable(exc.message, **exc.details) from exc
                broken = exc
                await asyncio.sleep(RECONNECT_S)
            except StaleEpoch:
                if broken is None:
                    raise
                # This attempt was refused, but an earlier one may have been carried out. So the
                # caller must not take the request for refused.
                raise Unavailable(broken.message, **broken.details) from broken

    def ask(self, address: str, body: Body, *, timeout_s: float, to: int) -> asyncio.Future[Any]:
        """Call another peer, for an operation that is not held. Sent at once if a link is ready.
        If the link breaks, the reply is LinkBroken; if no frame can hold the request, it is
        FrameTooLarge."""
        asked = _Call(address, body, self.host.caller(), to)
        try:
            answer = self._send(asked, call_end(self.host.now(), timeout_s))
        except DataplaneError as exc:
            answer = asyncio.get_running_loop().create_future()
            fail(answer, exc)
        if answer is None:
            answer = asyncio.ensure_future(self.call(address, body, timeout_s=timeout_s, to=to))
        return answer

    def here(
        self, who: Caller, body: Body, epoch: tuple[int, int] | None = None
    ) -> Body | Awaitable[Body]:
        """Run a request on this peer itself, at once if possible."""
        self._check_epoch(self.host.address, epoch)
        if OPERATIONS[type(body)].sender is Sender.IN_STEP:
            self.host.speak()
        return self.handlers[type(body)](who, body)

    def _check_epoch(self, address: str, epoch: tuple[int, int] | None) -> None:
        if epoch not in (None, self.host.roster.epoch):
            raise StaleEpoch(
                f"the roster changed while a request to {address} was in flight: repeat the call",
                address=address,
            )

    def _send(
        self, asked: _Call, until: float, ahead_bytes: int = SMALL_BYTES
    ) -> asyncio.Future[Body] | None:
        """Send a request, or return None if it must wait. ahead_bytes: a request of at most this
        size does not wait for others."""
        link, kind = self._links.get(asked.address), type(asked.body)
        if link is None or link.hello is None or self._tasks.closed:
            return None
        is_full = link.is_full(kind)
        if asked.to not in (None, link.hello.incarnation) or (is_full and not ahead_bytes):
            return None
        limit_s = max(0.0, until - self.host.now())
        rid, frame = self._request(asked, limit_s)
        if is_full and not (len(frame) <= ahead_bytes and link.lets_pass(kind)):
            return None
        self.host.sent_between[kind.__name__] += 1
        late = functools.partial(self._silent, asked.address, kind.__name__, limit_s)
        return link.ask(kind, rid, frame, until, late)

    async def _ready(self, asked: _Call) -> None:
        """Wait until a link to the asked peer can take the request."""
        link = await self._link(asked.address)
        assert link.hello is not None
        if asked.to not in (None, link.hello.incarnation):
            raise Unavailable(
                f"peer {link.hello.name} at {link.address} was restarted: repeat the call",
                address=link.address,
            )
        await link.takes(type(asked.body))

    async def _in_time(self, address: str, what: str, until: float, work: Awaitable[T]) -> T:
        limit_s = max(0.0, until - self.host.now())
        try:
            return await within(limit_s, work)
        except TimeoutError as exc:
            raise self._silent(address, what, limit_s) from exc

    def _silent(self, address: str, what: str, limit_s: float) -> Unavailable:
        is_linked = address in self._links
        if is_linked:
            hint = (
                "the peer is still connected, so the request may still take effect. The peer "
                "may be busy, suspended, or waiting for another peer: check `dataplane status` and "
                "the peer's log, then repeat the call or pass a longer timeout="
            )
        elif self.others.incarnation(address) is not None:
            hint = (
                "the connection was lost, so the peer may be suspended, dead, or cut off. "
                "Check the peer's log. Once the peer is back, repeat the call (for a put, use the "
                "same keys)"
            )
        else:
            hint = "check that the peer is running with the same --run, --seeds and --token-file"
        return Unavailable(
            f"peer {self.others.name(address)} at {address} did not answer {what} within "
            f"{duration(limit_s)}: {hint}",
            address=address,
            **({OVERDUE: True} if is_linked else {}),
        )

    async def tell(self, owner: Owner, body: Body, caller: Caller | None = None) -> Body | None:
        """Send a message to this incarnation of a peer, and resend it until the peer replies.
        Return None if it is no longer a member. The peer's next incarnation numbers chunks the
        same way, so it must not get the message."""
        while (roster := self.host.roster).has(owner):
            try:
                reply: Body = await self.call(
                    owner.peer, body, caller=caller, to=owner.incarnation, epoch=roster.epoch
                )
                return reply
            except (StaleEpoch, Unavailable):
                await self.host.another_roster(roster, self.host.now() + RETRY_S)
        log.info(
            "dropped a pending %s request to peer %s, which is no longer a member of the run",
            type(body).__name__,
            owner.peer,
        )
        return None

    def linked(self, address: str) -> PeerHello | None:
        """Return the identity of the peer at an address if this peer has a link to it now."""
        link = self._links.get(address)
        return None if link is None else link.hello

    async def hello(self, address: str) -> PeerHello:
        """Return the identity of the peer at an address. Raise Unavailable if none replies in
        time."""
        until = call_end(self.host.now(), CALL_S)
        link = await self._in_time(address, "a greeting", until, self._link(address))
        assert link.hello is not None
        return link.hello

    # links

    async def _link(self, address: str) -> Link:
        """Return the link to a peer, making it if needed. Raise Unavailable, or the peer's
        refusal."""
        if self._tasks.closed:
            raise Unavailable(
                f"peer {self.host.name!r} is shutting down: connect to "
                "another peer and repeat the call"
            )
        if address in self._links:
            return self._links[address]
        reaching = self._reaching.get(address)
        if reaching is None or reaching.done():
            reaching = self._reaching[address] = self.spawn(self._reach(address))
        await asyncio.wait([reaching])
        if reaching.cancelled():
            raise Unavailable(
                f"the peer at {address} left the run or was declared lost: repeat the call",
                address=address,
            )
        outcome = reaching.result()
        if isinstance(outcome, DataplaneError):
            raise again(outcome)
        return outcome

    async def _reach(self, address: str) -> Link | DataplaneError:
        """Make a link for all callers that wait for it. Return the error if that fails."""
        broken: LinkBroken | None = None
        try:
            async with asyncio.timeout(CALL_S):
                while True:
                    try:
                        return await self._greet(address)
                    except LinkBroken as exc:
                        is_other = address not in self.host.roster.members
                        if is_other or type(exc) is type(broken) is Unreadable:
                            return Unavailable(exc.message, **exc.details)
                        broken = exc
                    except RosterMismatch as exc:
                        if not self.begins_anew:
                            return exc
                        log.debug(
                            "the peer at %s belongs to an earlier launch of this run (%s); "
                            "trying again",
                            address,
                            exc,
                        )
                    await asyncio.sleep(RECONNECT_S)
        except TimeoutError:
            return self._silent(address, "a greeting", CALL_S)
        except DataplaneError as exc:
            return exc

    async def _greet(self, address: str) -> Link:
        link = Link(address, self)
        asked = _Call(address, self.others.introduction(), self.host.caller())
        rid, greeting = self._request(asked, CALL_S)
        self.host.sent_between[PeerHello.__name__] += 1
        try:
            await link.greet(rid, greeting)
        except BaseException:
            link.close(LinkBroken(f"the connection attempt to {address} was abandoned"))
            raise
        self._links[address] = link
        return link

    def broke(self, link: Link) -> None:
        """Handle the end of a connection: pending calls fail with LinkBroken, and `call` resends
        them."""
        if self._tasks.closed:
            return
        why = self._disconnected(link.address)
        link.close(link.ended or LinkBroken(why, address=link.address))
        if self._links.get(link.address) is not link:
            return  # the link was not in use yet
        del self._links[link.address]
        name = self.others.name(link.address)
        log.info("peer %s at %s: connection lost", name, link.address)

    def is_linked(self, owner: Owner) -> bool:
        """Whether a connection to this incarnation of the peer is open."""
        link = self._links.get(owner.peer)
        return (
            link is not None
            and link.hello is not None
            and link.hello.incarnation == owner.incarnation
        )

    def _disconnected(self, address: str) -> str:
        return (
            f"peer {self.others.name(address)} at {address} disconnected during a call. "
            "The call may have taken effect: repeat it once the peer is back"
        )

    def part(self, address: str) -> None:
        """Close the link to a peer that is no longer a member. Calls that wait for its replies
        fail."""
        link = self._links.pop(address, None)
        if link is not None:
            link.close(link.ended or LinkBroken(self._disconnected(address), address=address))
        elif address in self._reaching:
            self._reaching.pop(address).cancel()
        self.others.forget(address)

    def bring(self, link: Link, reply: PeerReply, append: Append) -> None:
        """Replay the records that came with a reply, then deliver the reply."""
        try:
            outcome = self.handlers[Append](Caller(link.address, reply.incarnation), append)
        except DataplaneError as exc:
            self._not_brought(link, reply, exc)
            return
        if isinstance(outcome, Body):
            link.answered(reply)
        else:
            self.spawn(self._brought(link, reply, outcome))

    async def _brought(self, link: Link, reply: PeerReply, outcome: Awaitable[Body]) -> None:
        try:
            await outcome
        except DataplaneError as exc:
            self._not_brought(link, reply, exc)
        else:
            link.answered(reply)

    def _not_brought(self, link: Link, reply: PeerReply, exc: DataplaneError) -> None:
        """Fail a call as if the connection had broken: the request may have taken effect."""
        name = self.others.name(link.address)
        log.warning(
            "dropped a reply from peer %s, because its log entries could not be replayed: %s",
            name,
            exc,
        )
        why = (
            f"this peer is the backup of peer {name} at {link.address}, and could not "
            f"apply its replication log: {exc}. The call may have taken effect: "
            "repeat it, with the same keys if it is a put"
        )
        link.answered(reply, LinkBroken(why, address=link.address))

    def _request(self, asked: _Call, timeout_s: float) -> tuple[int, bytes]:
        rid, who = next(self._rids), asked.who
        request = PeerRequest(
            rid,
            self.host.address,
            self.host.incarnation,
            who.session,
            asked.epoch or self.host.roster.epoch,
            int(timeout_s * 1000),
            asked.body,  # type: ignore[arg-type]
            self.has(asked.address),
        )
        return rid, peering.encode(request)

    def hello_here(self, caller: Caller, body: PeerHello) -> Body:
        link = self._links.get(body.address)
        if link and link.hello and link.hello.incarnation != body.incarnation:
            self.broke(link)
        self.others.meet(body)
        return self.door.welcome(self.others.introduction())
