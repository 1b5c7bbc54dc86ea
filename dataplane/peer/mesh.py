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
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from dataplane.errors import (
    AddressInUse,
    PeerNameTaken,
    ProtocolError,
    RosterMismatch,
    StaleEpoch,
    Unavailable,
    VersionMismatch,
    from_wire,
)
from dataplane.metadata.operations import Operations
from dataplane.peer.door import failed
from dataplane.peer.host import Host, call_deadline
from dataplane.peer.once import Once
from dataplane.peer.sessions import Session
from dataplane.wire import limits, peering
from dataplane.wire.messages import (
    Body,
    Close,
    Drop,
    Failed,
    Finish,
    Put,
    Request,
    Reset,
    Tag,
)
from dataplane.wire.peering import PeerHello, PeerReply, PeerRequest

log = logging.getLogger(__name__)

CALL_S = 30.0
HEARTBEAT_MS = 1_000
MAX_QUEUED_MESSAGES = 10_000
REPEATABLE = (Put, Finish, Tag, Drop, Close, Reset)
"""Operations of clients, answered once however often they are forwarded."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the peer, and the client operation on whose behalf."""

    address: str
    incarnation: int
    session: int = 0
    op: int = 0
    floor: int = 0


Handler = Callable[[Caller, Any], Body | Awaitable[Body]]


@dataclass(slots=True)
class Link:
    """The way to one remote peer."""

    socket: zmq.asyncio.Socket
    hello: PeerHello | None = None
    answers: dict[int, asyncio.Future[Body]] = field(default_factory=dict)
    greeting: asyncio.Lock = field(default_factory=asyncio.Lock)
    reader: asyncio.Task[None] | None = None


class Mesh:
    def __init__(self, host: Host, bulk_addresses: Callable[[], list[str]]) -> None:
        self.host = host
        self.handlers: dict[type[Body], Handler] = {PeerHello: self._hello}
        self._bulk_addresses = bulk_addresses
        self._context = zmq.asyncio.Context()
        self._links: dict[str, Link] = {}
        self._rids = itertools.count(1)
        self._names: dict[str, str] = {}
        self._router: zmq.asyncio.Socket | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._once = Once(Operations())

    def listen(self) -> None:
        """AddressInUse when the address belongs to somebody else."""
        router = self._context.socket(zmq.ROUTER)
        self._tune(router)
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
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task failed", exc_info=task.exception())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            link.socket.close(linger=0)
        if self._router is not None:
            self._router.close(linger=0)
        self._context.term()

    @staticmethod
    def _tune(socket: zmq.asyncio.Socket) -> None:
        # libzmq's defaults: no size limit, infinite linger, no heartbeats.
        socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)

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
        if address == self.host.address:
            outcome = self.handlers[type(body)](who, body)
            if isinstance(outcome, Body):
                return outcome
            reply = await outcome
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    link = await self._link(address)
                    reply = await self._ask(link, body, who, timeout_s)
            except TimeoutError as exc:
                raise Unavailable(
                    f"peer {self._names.get(address, '?')} at {address} did not answer "
                    f"{type(body).__name__} within {timeout_s:g} s: is it running?",
                    address=address,
                ) from exc
        if isinstance(reply, Failed):
            raise from_wire(reply.code, reply.message, reply.details)
        return reply

    async def call_all(self, body: Body, **kwargs: Any) -> list[Any]:
        """Ask every peer of the roster, this one included."""
        members = self.host.roster.members
        return await asyncio.gather(*(self.call(m, body, **kwargs) for m in members))

    def hello_of(self, address: str) -> PeerHello | None:
        link = self._links.get(address)
        return link.hello if link else None

    async def hello(self, address: str, timeout_s: float = CALL_S) -> PeerHello:
        """Who answers at an address."""
        async with asyncio.timeout(timeout_s):
            link = await self._link(address)
        assert link.hello is not None
        return link.hello

    async def _link(self, address: str) -> Link:
        link = self._links.get(address)
        if link is None:
            socket = self._context.socket(zmq.DEALER)
            self._tune(socket)
            socket.connect(address)
            link = self._links[address] = Link(socket)
            link.reader = self.spawn(self._read(link))
        if link.hello is None:
            async with link.greeting:
                if link.hello is None:
                    who = Caller(self.host.address, self.host.incarnation)
                    reply = await self._ask(link, self._introduction(), who, CALL_S)
                    if isinstance(reply, Failed):
                        raise from_wire(reply.code, reply.message, reply.details)
                    self._check(reply)
                    link.hello = reply
                    self._names[address] = reply.name
        return link

    async def _ask(self, link: Link, body: Body, who: Caller, timeout_s: float) -> Any:
        rid = next(self._rids)
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        link.answers[rid] = answer
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
        try:
            await link.socket.send(peering.encode(request))
            return await answer
        finally:
            link.answers.pop(rid, None)

    async def _read(self, link: Link) -> None:
        while True:
            frame = await link.socket.recv()
            try:
                reply = peering.decode_reply(frame)
            except ProtocolError as exc:
                log.warning("a peer sent a bad reply: %s", exc)
                continue
            if link.hello is not None and link.hello.incarnation != reply.incarnation:
                log.warning("the peer %r was started anew", link.hello.name)
                link.hello = None  # the next call greets it again
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

    # handshake

    def _introduction(self) -> PeerHello:
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

    def _hello(self, caller: Caller, body: PeerHello) -> Body:
        self._check(body)
        self._names[body.address] = body.name
        return self._introduction()

    def _check(self, hello: PeerHello) -> None:
        """Compare what must be equal; the first difference names both sides."""
        mine = self._introduction()
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
        other = self._names.get(hello.address, hello.name)
        taken = {n: a for a, n in self._names.items()} | {mine.name: mine.address}
        if taken.get(hello.name, hello.address) != hello.address or other != hello.name:
            raise PeerNameTaken(
                f"two peers of plane {mine.plane!r} are called {hello.name!r}: "
                f"{taken.get(hello.name)} and {hello.address}; give each its own --name",
                name=hello.name,
            )


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


def caller_of(host: Host, request: Request, session: Session) -> Caller:
    """A client of this host, whose operation is carried on to other peers."""
    return Caller(host.address, host.incarnation, session.id, request.op, request.floor)
