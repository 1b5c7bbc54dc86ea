"""One connection to another peer: from the first greeting to the moment in which it breaks.

zmq would connect again and say nothing, and whoever waits for an answer would wait in vain. A link
ends with its connection instead: its calls fail, and the next one makes a new link, which learns
who is there now.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from dataplane.errors import Unavailable
from dataplane.wire import limits
from dataplane.wire.messages import Body
from dataplane.wire.peering import PeerHello

HEARTBEAT_MS = 1_000
"""A peer that is silent for three of them has gone away: stopped, or cut off."""
MAX_QUEUED_MESSAGES = 10_000


class LinkBroken(Unavailable):
    """The connection ended before the answer came.

    For the mesh, which asks again or says so as Unavailable.
    """


def tune(socket: zmq.asyncio.Socket) -> None:
    """libzmq's defaults: no size limit, infinite linger, no heartbeats."""
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 3 * HEARTBEAT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)


@dataclass(slots=True, eq=False)
class Link:
    """The way to one remote peer. `hello` is there once it has been greeted."""

    address: str
    socket: zmq.asyncio.Socket
    monitor: zmq.asyncio.Socket
    hello: PeerHello | None = None
    answers: dict[int, asyncio.Future[Body]] = field(default_factory=dict)
    greeting: asyncio.Lock = field(default_factory=asyncio.Lock)
    reader: asyncio.Task[None] | None = None
    ended: Unavailable | None = None
    """why nothing is answered here any more"""

    @staticmethod
    def open(context: zmq.asyncio.Context, address: str) -> Link:
        socket = context.socket(zmq.DEALER)
        tune(socket)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(address)
        return Link(address, socket, monitor)

    async def broken(self) -> None:
        """Until the connection breaks. One that was never made does not."""
        event = 0
        while event != zmq.EVENT_DISCONNECTED:
            event = parse_monitor_message(await self.monitor.recv_multipart())["event"]

    async def ask(self, rid: int, frame: bytes) -> Body:
        """Send a request and wait for its answer; raises what the link ended with."""
        if self.ended is not None:
            raise self._failure(self.ended)
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self.answers[rid] = answer
        try:
            await self.socket.send(frame)
            return await answer
        except asyncio.CancelledError:
            if self.ended is not None:  # closing a socket cancels what is being sent
                raise self._failure(self.ended) from None
            raise
        finally:
            self.answers.pop(rid, None)

    def close(self, why: Unavailable) -> None:
        """End it; calls under way fail with `why`."""
        self.ended = why
        if self.reader is not None:
            self.reader.cancel()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(self._failure(why))

    @staticmethod
    def _failure(why: Unavailable) -> Unavailable:
        """Each call gets an error of its own: it keeps the frames that it went through."""
        return type(why)(why.message, **why.details)
