"""A bulk worker's end of the socketpair to its peer, and the pins that it asks for there."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from typing import BinaryIO

from dataplane.errors import DeadlineExceeded
from dataplane.transport.bulk_frames import (
    Frame,
    PinAnswer,
    PinAsked,
    ToWorker,
    Unpin,
    decode_to_worker,
    encode,
)
from dataplane.transport.seam import Records
from dataplane.wire.frames import HEADER_BYTES, body_length
from dataplane.wire.packed import EXTENT, Array, column


class ControlChannel:
    """The socketpair to the peer. One thread reads, any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader: BinaryIO = sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, frame: Frame) -> None:
        data = encode(frame)
        with self._lock:
            self._sock.sendall(data)

    def receive(self) -> ToWorker | None:
        """Return the next operation, or None if the peer closed the socketpair or died."""
        try:
            header = self._reader.read(HEADER_BYTES)
            if len(header) < HEADER_BYTES:
                return None
            length = body_length(header)
            body = self._reader.read(length)
        except ConnectionResetError:  # the peer died before it had read everything
            return None
        return decode_to_worker(body) if len(body) == length else None


class PinDesk:
    """Asks the peer to pin chunks while their bytes are transferred. Any thread may use it."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._asks = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[PinAnswer]] = {}

    def pin(self, chunks: Array, deadline: float) -> tuple[int, Records]:
        """Wait until the peer has answered. Return the number for `unpin`, and an EXTENT per chunk,
        whose `offset` is GONE for a freed chunk. Raises DeadlineExceeded, or the peer's error."""
        ask = next(self._asks)
        answers = self._waiting[ask] = queue.SimpleQueue()
        self._control.send(PinAsked(ask, chunks.tobytes()))
        try:
            answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            # The answer may still be in flight. The peer handles frames in order, so this undoes
            # the pin.
            self.unpin(ask, 0)
            raise DeadlineExceeded(
                "the peer that owns the values did not pin them before the deadline: "
                "repeat the call"
            ) from None
        finally:
            del self._waiting[ask]
        if answer.refused is not None:
            raise answer.refused.error()
        return ask, column(answer.places, EXTENT, len(chunks))

    def unpin(self, ask: int, nbytes: int) -> None:
        """Release the pin; `nbytes` were sent under it."""
        self._control.send(Unpin(ask, nbytes))

    def answered(self, answer: PinAnswer) -> None:
        waiting = self._waiting.get(answer.ask)
        if waiting is not None:
            waiting.put(answer)
