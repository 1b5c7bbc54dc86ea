"""zmq sockets on the event loop: messages come to a callback, and go out at once where they can.

libzmq's descriptor says only that something changed since the events were last looked at, and each
send or receive may swallow that word. So the events are read again after every one of them, until
nothing more can be done. `zmq.asyncio` makes a future and a poll of each message; here one costs no
more than libzmq's own calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context as Variables
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger(__name__)

Take = Callable[[list[bytes]], None]
_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_LAST, _NOT_LAST = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

AT_ONCE = 16
"""Messages that one socket hands over before others have their turn."""
MOST_FRAMES, MOST_BYTES = 256, 256 << 10
"""A message has no more parts, nor more bytes but in its last one."""


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
        self._paused = False
        self._look_is_due = self._looks = False
        self._queue: deque[tuple[Sequence[bytes], asyncio.Future[None] | None]] = deque()
        self._posted: dict[bytes, list[bytes]] = {}
        self.on_untaken: Callable[[int], None] = lambda frames: None
        """told how many posted frames were dropped, as their receiver takes none"""
        self._monitor: Socket | None = None
        # What comes belongs to no call that happened to be under way when the socket was made.
        self._variables = Variables()
        self._variables.run(self._loop.add_reader, self._descriptor, self._look)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "paused" if self._paused else "open"
        return f"<Socket {state}, {len(self._queue)} waiting to send>"

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
        """What libzmq has not sent yet is lost; who waits to send gets SocketClosed."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._descriptor)
        if self._monitor is not None:
            self._raw.disable_monitor()
            self._monitor.close()
        self._raw.close(linger=0)
        while self._queue:
            turn = self._queue.popleft()[1]
            if turn is not None and not turn.done():
                turn.set_exception(SocketClosed())
        self._told_closed(self)

    # in

    def receive(self, take: Take) -> None:
        """From now on each message that comes is given to `take`, with all its parts."""
        self._take = take
        self._look_soon()

    def pause(self) -> None:
        """Take nothing more: libzmq's queue fills, and then the senders wait."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
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
            self._loop.call_soon(self._look_again, context=self._variables)

    def _look_again(self) -> None:
        self._look_is_due = False
        self._look()

    def _look(self) -> None:
        """Do all that can be done now, or much of it and the rest soon."""
        self._looks = True
        try:
            if not self._work_off():
                self._look_soon()
        finally:
            self._looks = False

    def _work_off(self) -> bool:
        for _ in range(AT_ONCE):
            if self.closed:
                return True
            events = self._number(zmq.EVENTS)
            sent = bool(self._queue) and events & _OUT and self._send_next()
            receives = not self._paused and self._take is not None and events & _IN
            if receives:
                self._receive_next()
            if not sent and not receives:
                return True
        return False

    def _receive_next(self) -> None:
        assert self._take is not None
        # A frame says by itself whether more follow: it costs less than asking the socket.
        frame = self._raw.recv(zmq.NOBLOCK, copy=False)
        parts = [frame.bytes]
        while frame.more:
            frame = self._raw.recv(zmq.NOBLOCK, copy=False)
            parts.append(frame.bytes)
        try:
            self._take(parts)
        except Exception:  # the messages after it are still to be taken
            log.exception("a message was not taken")

    # out

    def post(self, frame: bytes, to: bytes = b"") -> None:
        """Send it when this turn of the loop is over, in one message with all else that goes to the
        same receiver then, each a part of it. to: at a ROUTER, whose connection; where nobody is
        there any more, or the socket closes before, it is lost."""
        if not self._posted:
            self._loop.call_soon(self._send_posted, context=self._variables)
        self._posted.setdefault(to, []).append(frame)

    def _send_posted(self) -> None:
        posted, self._posted = self._posted, {}
        if self.closed:
            return
        for to, frames in posted.items():
            first = nbytes = 0
            for nth, frame in enumerate(frames, 1):
                nbytes += len(frame)
                if nth == len(frames) or nth - first == MOST_FRAMES or nbytes >= MOST_BYTES:
                    self._send_soon(to, frames[first:nth])
                    first, nbytes = nth, 0

    def _send_soon(self, to: bytes, frames: list[bytes]) -> None:
        if not to:
            if not self.send_now(frames):
                self._queue.append((frames, None))
                self._look_soon()
            return
        with contextlib.suppress(zmq.ZMQError):  # nobody is there any more
            if not self.send_now([to, *frames]):
                self.on_untaken(len(frames))

    def send_now(self, parts: Sequence[bytes]) -> bool:
        """Whether it was sent: False where libzmq's queue is full, or others wait. SocketClosed."""
        if self._queue:
            return False
        if self.closed:
            raise SocketClosed
        sent = self._try(parts)
        # Sending may have swallowed the word that something came: who looks asks again anyhow.
        if not self._looks and self._number(zmq.EVENTS) & _IN:
            self._look_soon()
        return sent

    async def send(self, parts: Sequence[bytes]) -> None:
        """In the order of the calls; waits while libzmq's queue is full. SocketClosed."""
        if self.send_now(parts):
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        self._queue.append((parts, turn))
        self._look_soon()
        await turn

    def _try(self, parts: Sequence[bytes]) -> bool:
        """Whole or not at all: only the first part of a message can find the queue full."""
        try:
            last = len(parts) - 1
            for nth, part in enumerate(parts):
                self._raw.send(part, _LAST if nth == last else _NOT_LAST)
        except zmq.Again:
            return False
        return True

    def _send_next(self) -> bool:
        """Whether somebody waits no longer."""
        parts, turn = self._queue[0]
        if turn is None or not turn.done():  # otherwise whoever sent it gave up
            try:
                if not self._try(parts):
                    return False
            except zmq.ZMQError as exc:
                if turn is not None:
                    turn.set_exception(exc)
            else:
                if turn is not None:
                    turn.set_result(None)
        self._queue.popleft()
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
