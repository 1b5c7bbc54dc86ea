"""One connection to another peer: from the first greeting to the moment in which it breaks.

zmq would connect again and say nothing, and whoever waits for an answer would wait in vain. A link
ends with its connection instead: its calls fail, and the next one makes a new link, which learns
who is there now.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from socket import AF_INET, SOCK_STREAM, getaddrinfo

import zmq

from dataplane.errors import (
    DataplaneError,
    InvalidConfig,
    ProtocolError,
    StaleEpoch,
    Unavailable,
    from_wire,
)
from dataplane.launch.values import is_loopback, parse_address
from dataplane.peer.failures import again, fail
from dataplane.peer.net.authentication import Gate
from dataplane.peer.net.sockets import Context, Socket
from dataplane.peer.net.streams import Dial, Stream
from dataplane.peer.tasks import in_time
from dataplane.transport.limiter import ResourceLimiter
from dataplane.wire import limits, peering
from dataplane.wire.messages import Body, Failed
from dataplane.wire.peering import Append, PeerHello, PeerReply

log = logging.getLogger(__name__)

HEARTBEAT_MS = 300
SILENT_MS = 1_000
"""A heartbeat that is not answered for so long ends the connection: the peer stopped, or is cut
off. With `mesh.AWAY_S`, in which a new one may be made, at most 2.7 s: fail-over is promised in
3 s. TCP repeats a lost packet after 0.2 s, and again after 0.4 s more."""
HANDSHAKE_MS = 3_000
RECONNECT_MS, RECONNECT_MAX_MS = (25, 50), (700, 1_000)
"""A link tries again after so long, then after twice that, and so on up to the second. libzmq has
no jitter once there is a maximum: each link draws its own, or all who lost a peer would knock in
the same moments."""
KNOCK_S = 1.0
MAX_QUEUED_MESSAGES = 256
"""Greetings, and answers to them, at either end of a link."""


class LinkBroken(Unavailable):
    """The connection ended before the answer came.

    For the mesh, which asks again or says so as Unavailable.
    """


class Unreadable(LinkBroken):
    """What came on it is no answer. The way may have damaged it: asked once more it shows."""


def bindable(address: str) -> str:
    """The address with its host as a number, which is all that libzmq binds to.

    InvalidConfig for a name that does not lead to this host, or not from other machines.
    """
    host, port = parse_address(address)
    try:
        found = getaddrinfo(host, port, type=SOCK_STREAM)
    except OSError as exc:
        raise InvalidConfig(f"{address} cannot be listened at: {exc}", address=address) from exc
    number = str(min(found, key=lambda info: info[0] != AF_INET)[4][0])
    if is_loopback(number) and not is_loopback(host):
        raise InvalidConfig(
            f"{host} is {number} on this host, where no other machine reaches it: correct "
            "/etc/hosts, or use the host's address in --listen and --seeds",
            address=address,
        )
    return f"tcp://[{number}]:{port}" if ":" in number else f"tcp://{number}:{port}"


def tune(socket: Socket, address: str) -> None:
    """libzmq's defaults: no size limit, infinite linger, no heartbeats, no IPv6."""
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_HELLO_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, random.randint(*RECONNECT_MS))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, random.randint(*RECONNECT_MAX_MS))


async def refuses(address: str) -> bool:
    """Whether the host there says that nobody listens: that process has ended, for sure."""
    host, port = parse_address(address)
    try:
        async with asyncio.timeout(KNOCK_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


@dataclass(slots=True, eq=False)
class Link:
    """The way to one remote peer. `hello` is there once it has been greeted, on the zmq socket, and
    calls go over a stream of their own."""

    address: str
    socket: Socket
    broke: Callable[[Link], None]
    bring: Callable[[Link, PeerReply, Append], None]
    stale: Callable[[], None]
    hello: PeerHello | None = None
    calls: Stream | None = None
    answers: dict[int, asyncio.Future[Body]] = field(default_factory=dict)
    greeting: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: Unavailable | None = None
    """why nothing is answered here any more"""
    room: ResourceLimiter = field(default_factory=lambda: ResourceLimiter(limits.MAX_COMING_BYTES))
    """for the values that answers bring: what this peer does not take lies at the other"""
    coming: dict[int, int] = field(default_factory=dict)
    """bytes of values by request, until its answer is here, whether or not somebody waits for it"""

    @staticmethod
    def open(
        context: Context,
        address: str,
        gate: Gate,
        broke: Callable[[Link], None],
        bring: Callable[[Link, PeerReply, Append], None],
        stale: Callable[[], None],
    ) -> Link:
        """broke: told when the connection breaks. One that was never made does not break. bring:
        takes answers that bring operations of the peer there, whose backup this one is, and has
        them `answered` afterwards. stale: told when the peer there works under another roster.

        LinkBroken where there is no descriptor left for it: one may be free a moment later.
        """
        try:
            socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as exc:
            raise _not_made(address, exc) from exc
        link = Link(address, socket, broke, bring, stale)
        try:
            tune(socket, address)
            gate.secure_dealer(socket)
            socket.on_disconnect(lambda: broke(link))
            socket.connect(address)
        except zmq.ZMQError as exc:
            socket.close()
            raise _not_made(address, exc) from exc
        socket.receive(lambda parts: link.received(parts[0]))
        return link

    def takes_now(self, brings: int = 0) -> bool:
        """Whether a request can be sent, and the values that its answer brings have room: that is
        the request's from now on."""
        if self.ended is not None or self.calls is None or self.calls.is_full:
            return False
        return not brings or self.room.acquire_now(brings)

    async def takes(self, brings: int = 0) -> None:
        """As `takes_now`, as soon as there is room."""
        if brings:
            await self.room.acquire(brings)
        try:
            if self.calls is not None:
                await self.calls.drained()
        except BaseException:
            self.room.release(brings)
            raise

    def ask(
        self, rid: int, frame: bytes, until: float, late: Callable[[], Exception], brings: int = 0
    ) -> asyncio.Future[Body]:
        """Send a request that the link takes, or a greeting: the answer, that brings so many bytes
        of values. It fails with its typed error, what the link ended with, or as `late` says where
        it does not come in time (monotonic)."""
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        if brings:
            self.coming[rid] = brings
        if self.ended is not None:
            self._came(rid)
            fail(answer, again(self.ended))
            return answer
        self.answers[rid] = answer
        in_time(answer, until, late)
        answer.add_done_callback(lambda _: self.answers.pop(rid, None))
        if self.calls is not None:
            self.calls.post(frame)
        elif not self.socket.send([frame]):  # libzmq's queue is long enough for greetings
            fail(answer, LinkBroken("a greeting was not sent", address=self.address))
        return answer

    def _came(self, rid: int) -> None:
        if nbytes := self.coming.pop(rid, 0):
            self.room.release(nbytes)

    async def greeted(self, hello: PeerHello, dial: Dial) -> None:
        """That peer answered: calls go over the stream that it promises. LinkBroken."""

        def ended(stream: Stream, why: str) -> None:
            log.debug("the stream to %s ended: %s", self.address, why)
            self.broke(self)

        try:
            stream = await dial(hello.stream, hello.stream_secret, self._on_stream, ended)
        except Unavailable as exc:
            raise LinkBroken(exc.message, **exc.details) from exc
        if self.ended is not None:
            stream.close()
            raise again(self.ended)
        self.calls, self.hello = stream, hello

    def _on_stream(self, stream: Stream, frame: bytes | memoryview) -> None:
        self.received(frame)

    def received(self, frame: bytes | memoryview) -> None:
        """Hand an answer to who waits for it."""
        try:
            reply = peering.decode_reply(frame)
            if not reply.rid:
                raise ProtocolError(f"it could not read what it was asked: {reply.body}")
        except ProtocolError as exc:
            # Whose answer that was, or would have been, nobody can tell.
            log.warning("the link to %s ends, over a bad reply: %s", self.address, exc)
            self.ended = Unreadable(
                f"the peer at {self.address} and this one do not understand each other, and what "
                f"was asked may or may not have taken effect: {exc}",
                address=self.address,
            )
            self.broke(self)
            return
        if self.hello is not None and reply.incarnation != self.hello.incarnation:
            return  # libzmq connected again before this link was told: its ranges are others
        self._came(reply.rid)
        if reply.append is None:
            self.answered(reply)
        else:
            self.bring(self, reply, reply.append)

    def answered(self, reply: PeerReply, failure: DataplaneError | None = None) -> None:
        """Whoever waits for it has an answer, or cannot get it."""
        answer = self.answers.get(reply.rid)
        if answer is None or answer.done():
            return
        body = reply.body
        if failure is None and type(body) is Failed:
            failure = from_wire(body.code, body.message, body.details)
            if isinstance(failure, StaleEpoch):
                self.stale()
        if failure is None:
            answer.set_result(body)
        else:
            fail(answer, failure)

    def close(self, why: Unavailable) -> None:
        """End it; calls under way fail with `why`."""
        self.ended = why
        self.socket.close()
        if self.calls is not None:
            self.calls.close()
        for rid in list(self.coming):
            self._came(rid)
        for answer in self.answers.values():
            fail(answer, again(why))


def _not_made(address: str, exc: zmq.ZMQError) -> LinkBroken:
    return LinkBroken(
        f"no connection to {address} can be made: {exc}; where descriptors are short, raise the "
        "limit of this peer (ulimit -n)",
        address=address,
    )
