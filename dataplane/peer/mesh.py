"""The peer door: requests and replies between peers over zmq ROUTER/DEALER.

Connections are made when first needed. Before its first request a peer shows who it is
(`PeerHello`); planes, rosters, versions and names are compared and a stranger is refused. A call to
this peer's own address is a plain function call, so that homes need not know where they live.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from dataplane.errors import (
    AddressInUse,
    DataplaneError,
    ProtocolError,
    RosterMismatch,
    StaleEpoch,
    Unavailable,
    from_wire,
)
from dataplane.metadata.operations import Operations
from dataplane.peer.acquaintance import Acquaintances
from dataplane.peer.door import failed
from dataplane.peer.host import Host, call_deadline
from dataplane.peer.links import Link, LinkBroken, tune
from dataplane.peer.once import REPEATABLE, Once, may_repeat
from dataplane.peer.sessions import Session
from dataplane.wire import peering
from dataplane.wire.messages import (
    Body,
    Failed,
    Request,
)
from dataplane.wire.peering import (
    PeerHello,
    PeerReply,
    PeerRequest,
)

log = logging.getLogger(__name__)

CALL_S = 30.0
LOST_S = 5.0
"""A peer whose connection broke and that does not answer for so long is lost."""
REJOIN_S = 2.0
"""How long a call to a lost peer waits for its return."""
RETRY_S = 0.5
RECONNECT_S = 0.05


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the peer, and the client operation on whose behalf."""

    address: str
    incarnation: int
    session: int = 0
    op: int = 0
    floor: int = 0


Handler = Callable[[Caller, Any], Body | Awaitable[Body]]


class Mesh:
    def __init__(self, host: Host, bulk_addresses: Callable[[], list[str]]) -> None:
        self.host = host
        self.handlers: dict[type[Body], Handler] = {PeerHello: self._hello}
        self.others = Acquaintances(host, bulk_addresses)
        self._context = zmq.asyncio.Context()
        self._links: dict[str, Link] = {}
        self._rids = itertools.count(1)
        self._router: zmq.asyncio.Socket | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._once = Once(Operations())
        self._closing = False
        self._looked_for: set[str] = set()
        self._told = itertools.count(1)
        self._telling: set[int] = set()
        self.on_parted: list[Callable[[str], None]] = []
        """called with a peer's address when the connection broke: this one may be lost to it"""

    def listen(self) -> None:
        """AddressInUse when the address belongs to somebody else."""
        router = self._context.socket(zmq.ROUTER)
        tune(router)
        try:
            router.bind(self.host.address)
        except zmq.ZMQError as exc:
            router.close()
            raise AddressInUse(
                f"cannot listen on {self.host.address}: {exc}; choose another --listen address or "
                "stop the process that has it",
                address=self.host.address,
            ) from exc
        self._router = router
        self.spawn(self._serve(router))

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """A background task whose failure is logged, never lost. No call's deadline is its own."""
        task = asyncio.get_running_loop().create_task(_awaited(work), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, DataplaneError):
            log.warning("not done: %s", failure)
        elif failure is not None:
            log.error("a background task failed", exc_info=failure)

    async def close(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            link.close(Unavailable(f"peer {self.host.name!r} ends"))
        if self._router is not None:
            self._router.close(linger=0)
        self._context.term()

    # calling

    async def call(
        self,
        address: str,
        body: Body,
        *,
        caller: Caller | None = None,
        timeout_s: float = CALL_S,
    ) -> Any:
        """Ask a peer. Its typed error is raised here; Unavailable when it does not answer in time,
        and no later than the client's call has to end."""
        timeout_s = max(0.0, min(timeout_s, call_deadline.get() - self.host.now()))
        who = caller or Caller(self.host.address, self.host.incarnation)
        if self.others.is_lost(address):
            timeout_s = min(timeout_s, REJOIN_S)
        if address == self.host.address:
            outcome = self.handlers[type(body)](who, body)
            if isinstance(outcome, Body):
                return outcome
            reply = await outcome
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await self._exchange(address, body, who, timeout_s)
            except TimeoutError as exc:
                raise Unavailable(
                    f"peer {self.others.name(address)} at {address} did not answer "
                    f"{type(body).__name__} within {timeout_s:g} s: is it running?",
                    address=address,
                ) from exc
        if isinstance(reply, Failed):
            raise from_wire(reply.code, reply.message, reply.details)
        return reply

    async def _exchange(self, address: str, body: Body, who: Caller, timeout_s: float) -> Any:
        """Again on a new connection where the one before broke and that does no harm; until the
        peer is lost."""
        while True:
            try:
                return await self._ask(await self._link(address), body, who, timeout_s)
            except LinkBroken as exc:
                if self.others.is_lost(address) or not may_repeat(body, who.op):
                    raise Unavailable(exc.message, **exc.details) from exc
                await asyncio.sleep(RECONNECT_S)

    async def insist(self, address: str, body: Body) -> None:
        """Tell a peer, again and again, unless it is lost. It carries it out once."""
        number = next(self._told)
        self._telling.add(number)
        me = self.host.incarnation
        try:
            while True:
                who = Caller(self.host.address, me, me, number, min(self._telling))
                try:
                    await self.call(address, body, caller=who)
                    return
                except Unavailable as exc:
                    if self.others.is_lost(address):
                        log.info("%s is not told any more: %s", type(body).__name__, exc)
                        return
                    await asyncio.sleep(RETRY_S)
        finally:
            self._telling.discard(number)

    async def call_all(self, body: Body, **kwargs: Any) -> list[Any]:
        """Ask every peer of the roster, this one included."""
        members = self.host.roster.members
        return await asyncio.gather(*(self.call(m, body, **kwargs) for m in members))

    async def hello(self, address: str, timeout_s: float = CALL_S) -> PeerHello:
        """Who answers at an address."""
        async with asyncio.timeout(timeout_s):
            link = await self._link(address)
        assert link.hello is not None
        return link.hello

    async def _link(self, address: str) -> Link:
        if self._closing:
            raise Unavailable(f"peer {self.host.name!r} ends")
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link.open(self._context, address)
            link.reader = self.spawn(self._read(link))
            self.spawn(self._watch(link))
        if link.hello is None:
            async with link.greeting:
                if link.hello is None:
                    who = Caller(self.host.address, self.host.incarnation)
                    reply = await self._ask(link, self.others.introduction(), who, CALL_S)
                    if isinstance(reply, Failed):
                        raise from_wire(reply.code, reply.message, reply.details)
                    self.others.meet(reply)
                    link.hello = reply
        return link

    # who is there

    async def _watch(self, link: Link) -> None:
        await link.broken()
        self._break(link)

    def _break(self, link: Link) -> None:
        """The connection ended: calls under way fail; is the peer still there?"""
        if self._links.get(link.address) is not link or self._closing:
            return
        del self._links[link.address]
        name = self.others.name(link.address)
        link.close(
            LinkBroken(
                f"peer {name} at {link.address} went away in the middle of a call, which may or "
                "may not have taken effect: repeat it when the peer runs again",
                address=link.address,
            )
        )
        if link.hello is not None:
            log.warning("the connection to peer %s at %s broke", name, link.address)
            for tell in self.on_parted:
                tell(link.address)
        incarnation = self.others.incarnation(link.address)
        if incarnation is not None and link.address not in self._looked_for:
            self._looked_for.add(link.address)
            self.spawn(self._look_for(link.address, incarnation))

    async def _look_for(self, address: str, incarnation: int) -> None:
        """Is it still there, after its connection broke?"""
        try:
            async with asyncio.timeout(LOST_S):
                while not await self._greets(address):
                    await asyncio.sleep(RECONNECT_S)
        except (TimeoutError, DataplaneError):
            if self.others.incarnation(address) == incarnation:
                self.others.lose(address)
                link = self._links.get(address)
                if link is not None and link.hello is None:
                    self._break(link)  # who waits for it to be there waits no longer
        finally:
            self._looked_for.discard(address)

    async def _greets(self, address: str) -> bool:
        try:
            await self._link(address)
        except LinkBroken:
            return False
        return True

    async def _ask(self, link: Link, body: Body, who: Caller, timeout_s: float) -> Any:
        rid = next(self._rids)
        request = PeerRequest(
            rid,
            self.host.address,
            self.host.incarnation,
            who.session,
            who.op,
            who.floor,
            self.host.roster.epoch,
            int(timeout_s * 1000),
            body,  # type: ignore[arg-type]
        )
        return await link.ask(rid, peering.encode(request))

    async def _read(self, link: Link) -> None:
        while True:
            frame = await link.socket.recv()
            try:
                reply = peering.decode_reply(frame)
            except ProtocolError as exc:
                log.warning("a peer sent a bad reply: %s", exc)
                continue
            answer = link.answers.get(reply.rid)
            if answer is not None and not answer.done():
                answer.set_result(reply.body)

    # answering

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            parts = await router.recv_multipart()
            if len(parts) != 2:
                continue
            identity, frame = parts
            try:
                request = peering.decode_request(frame)
            except ProtocolError as exc:
                log.warning("a bad frame at the peer door: %s", exc)
                reply = PeerReply(0, self.host.incarnation, failed(exc))
                await router.send_multipart([identity, peering.encode(reply)])
                continue
            self.spawn(self._answer(router, identity, request))

    async def _answer(
        self, router: zmq.asyncio.Socket, identity: bytes, request: PeerRequest
    ) -> None:
        try:
            reply = await self._handle(request)
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            reply = failed(exc)
        with contextlib.suppress(zmq.ZMQError):
            await router.send_multipart(
                [
                    identity,
                    peering.encode(PeerReply(request.rid, self.host.incarnation, reply)),  # type: ignore[arg-type]
                ]
            )

    async def _handle(self, request: PeerRequest) -> Body:
        if not isinstance(request.body, PeerHello):
            self._check_epoch(request)
        caller = Caller(
            request.sender, request.incarnation, request.session, request.op, request.floor
        )
        handler = self.handlers.get(type(request.body))
        if handler is None:
            raise ProtocolError(f"{type(request.body).__name__} is not for the peer door")
        who = (request.session, type(request.body), getattr(request.body, "lease", 0))
        if request.op and isinstance(request.body, REPEATABLE):
            start = functools.partial(handler, caller, request.body)
            outcome = self._once.run(who, request.op, request.floor, start)
        else:
            outcome = handler(caller, request.body)
        return outcome if isinstance(outcome, Body) else await outcome

    def _check_epoch(self, request: PeerRequest) -> None:
        if tuple(request.epoch) != tuple(self.host.roster.epoch):
            raise StaleEpoch(
                f"{request.sender} works under roster {request.epoch}, this peer under "
                f"{self.host.roster.epoch}: start all peers of a plane with the same --seeds",
                sender=request.sender,
            )
        if request.sender not in self.host.roster.members:
            raise RosterMismatch(
                f"{request.sender} is not one of this plane's seeds", sender=request.sender
            )

    def _hello(self, caller: Caller, body: PeerHello) -> Body:
        link = self._links.get(body.address)
        if link and link.hello and link.hello.incarnation != body.incarnation:
            self._break(link)
        self.others.meet(body)
        return self.others.introduction()


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


def caller_of(host: Host, request: Request, session: Session) -> Caller:
    """A client of this host, whose operation is carried on to other peers."""
    return Caller(host.address, host.incarnation, session.id, request.op, request.floor)
