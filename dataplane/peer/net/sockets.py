"""zmq sockets on the event loop: what comes is given to a callback, what goes out goes at once.

Over them peers greet each other, and nothing else; libzmq's heartbeats tell of one that stopped or
is cut off, answered by a thread of its own while the loop works.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import Context as Variables

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger(__name__)

Take = Callable[[list[bytes]], None]


class SocketClosed(Exception):
    """It was closed before the message could be sent."""


class Socket:
    """Belongs to the loop that runs when it is made. Nothing is received before `receive`."""

    def __init__(self, raw: zmq.asyncio.Socket, closed: Callable[[Socket], None]) -> None:
        self._raw = raw
        self._told_closed = closed
        self._receiving: asyncio.Task[None] | None = None
        self._monitor: Socket | None = None

    def __repr__(self) -> str:
        return f"<Socket {'closed' if self.closed else 'open'}>"

    @property
    def closed(self) -> bool:
        return self._raw.closed

    def setsockopt(self, option: int, value: int | bytes) -> None:
        self._raw.setsockopt(option, value)

    def bind(self, address: str) -> None:
        """zmq.ZMQError where the address is another's."""
        self._raw.bind(address)

    def connect(self, address: str) -> None:
        self._raw.connect(address)

    def close(self) -> None:
        """What libzmq has not sent yet is lost."""
        if self._monitor is not None and not self.closed:
            self._raw.disable_monitor()
            self._monitor.close()
        self._raw.close(linger=0)
        self._told_closed(self)

    def receive(self, take: Take) -> None:
        """From now on each message that comes is given to `take`, with all its parts."""
        # What comes belongs to no call that happened to be under way when the socket was made.
        receiving = self._receive(take)
        self._receiving = asyncio.get_running_loop().create_task(receiving, context=Variables())

    async def _receive(self, take: Take) -> None:
        while not self.closed:
            parts = await self._raw.recv_multipart()
            try:
                take(parts)
            except Exception:  # the messages after it are still to be taken
                log.exception("a message was not taken")
            await asyncio.sleep(0)  # others have their turn, however many come

    def on_disconnect(self, tell: Callable[[], None]) -> None:
        """Call `tell` when a connection of this socket ends."""

        def take(parts: list[bytes]) -> None:
            if parse_monitor_message(parts)["event"] == zmq.EVENT_DISCONNECTED:
                tell()

        raw = self._raw.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
        self._monitor = Socket(raw, lambda monitor: None)
        self._monitor.receive(take)

    def send(self, parts: Sequence[bytes]) -> bool:
        """Whether it was sent: False where libzmq's queue is full. SocketClosed."""
        if self.closed:
            raise SocketClosed
        sent = asyncio.ensure_future(self._raw.send_multipart(parts, zmq.NOBLOCK))
        return sent.exception() is None  # it never waits


class Context:
    """Of one peer's sockets."""

    def __init__(self) -> None:
        self._raw = zmq.asyncio.Context()
        self._sockets: set[Socket] = set()

    def socket(self, kind: zmq.SocketType) -> Socket:
        made = Socket(self._raw.socket(kind), self._sockets.discard)
        self._sockets.add(made)
        return made

    def destroy(self) -> None:
        """Every socket closes; what they have not sent is lost."""
        for one in list(self._sockets):
            one.close()
        self._raw.destroy(linger=0)
