"""zmq sockets on the event loop: what comes is given to a callback, what goes out goes at once.

Over them peers greet each other, and nothing else; libzmq's heartbeats tell of one that stopped or
is cut off, answered by a thread of its own while the loop works. Its descriptor says only that
something changed since the events were last looked at, and each send or receive may swallow that
word: so the events are read again after every one of them, until nothing more can be done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import Context as Variables
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger(__name__)

Take = Callable[[list[bytes]], None]
_IN = int(zmq.POLLIN)

AT_ONCE = 16
"""Messages that one socket hands over before others have their turn."""


class SocketClosed(Exception):
    """It was closed before the message could be sent."""


class Socket:
    """Belongs to the loop that runs when it is made. Nothing is received before `receive`."""

    def __init__(self, raw: zmq.Socket[bytes], closed: Callable[[Socket], None]) -> None:
        self._raw = raw
        self._loop = asyncio.get_running_loop()
        self._number = cast(Callable[[int], int], raw.getsockopt)
        self._descriptor = self._number(zmq.FD)
        self._told_closed = closed
        self.closed = False
        self._take: Take | None = None
        self._look_is_due = False
        self._monitor: Socket | None = None
        # What comes belongs to no call that happened to be under way when the socket was made.
        self._variables = Variables()

    def __repr__(self) -> str:
        return f"<Socket {'closed' if self.closed else 'open'}>"

    def fileno(self) -> int:
        """libzmq's descriptor: readable when something may have changed."""
        return self._descriptor

    def setsockopt(self, option: int, value: int | bytes) -> None:
        self._raw.setsockopt(option, value)

    def bind(self, address: str) -> None:
        """zmq.ZMQError where the address is another's."""
        self._raw.bind(address)

    def connect(self, address: str) -> None:
        self._raw.connect(address)

    def close(self) -> None:
        """What libzmq has not sent yet is lost."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._descriptor)
        if self._monitor is not None:
            self._raw.disable_monitor()
            self._monitor.close()
        self._raw.close(linger=0)
        self._told_closed(self)

    def receive(self, take: Take) -> None:
        """From now on each message that comes is given to `take`, with all its parts."""
        self._take = take
        self._variables.run(self._loop.add_reader, self._descriptor, self._look)
        self._look_soon()

    def on_disconnect(self, tell: Callable[[], None]) -> None:
        """Call `tell` when a connection of this socket ends."""
        raw = self._raw.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
        monitor = self._monitor = Socket(raw, lambda monitor: None)

        def take(parts: list[bytes]) -> None:
            if parse_monitor_message(parts)["event"] == zmq.EVENT_DISCONNECTED:
                tell()

        monitor.receive(take)

    def _look_soon(self) -> None:
        if not self._look_is_due:
            self._look_is_due = True
            self._loop.call_soon(self._look, context=self._variables)

    def _look(self) -> None:
        """Take what there is, or much of it and the rest soon."""
        self._look_is_due = False
        for _ in range(AT_ONCE):
            if self.closed or self._take is None or not self._number(zmq.EVENTS) & _IN:
                return
            parts = self._raw.recv_multipart(zmq.NOBLOCK)
            try:
                self._take(parts)
            except Exception:  # the messages after it are still to be taken
                log.exception("a message was not taken")
        self._look_soon()

    def send(self, parts: Sequence[bytes]) -> bool:
        """Whether it was sent: False where libzmq's queue is full. SocketClosed."""
        if self.closed:
            raise SocketClosed
        try:
            self._raw.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending may have swallowed the word that something came.
        self._look_soon()
        return True


class Context:
    """Of one peer's sockets."""

    def __init__(self) -> None:
        self._raw: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
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
