"""A bulk worker: the child process of a peer that moves bytes, and may crash alone.

It maps the peer's arena, takes operations as frames over a socketpair and answers there, and shares
nothing else with its parent. It ends when the socketpair closes or the parent dies, at once and
whatever its threads are doing: the peer learns from the exit that nothing of it writes any more.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import logging
import mmap
import os
import queue
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import numpy as np

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    ProtocolError,
)
from dataplane.transport.bulk_frames import (
    COPY,
    HEADER_BYTES,
    SMALL_LANE_BYTES,
    Cancel,
    Configure,
    Finished,
    Forget,
    Frame,
    PinAnswer,
    PinAsked,
    Read,
    Ready,
    Refused,
    ToWorker,
    Unpin,
    decode_to_worker,
    encode,
)
from dataplane.transport.seam import Pinned, ReadRequest, Records, Region, Remote, Transport
from dataplane.transport.tcp import TcpTransport
from dataplane.wire.frames import body_length
from dataplane.wire.records import EXTENT, column

SMALL_JOBS = 64
LARGE_JOBS = 16
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


class ControlChannel:
    """The socketpair to the peer: one thread reads, any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader: BinaryIO = sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, frame: Frame) -> None:
        data = encode(frame)
        with self._lock:
            self._sock.sendall(data)

    def receive(self) -> ToWorker | None:
        """The next operation; None when the peer closed or died."""
        header = self._reader.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return None
        length = body_length(header)
        body = self._reader.read(length)
        return decode_to_worker(body) if len(body) == length else None


class PeerDesk:
    """Asks the peer to pin ranges; see `seam.PinDesk`."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._asks = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[PinAnswer]] = {}

    def pin(self, ranges: Records, deadline: float) -> Pinned:
        ask = next(self._asks)
        answers = self._waiting[ask] = queue.SimpleQueue()
        self._control.send(PinAsked(ask, ranges.tobytes()))
        try:
            answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            # The answer may still be on its way: the peer takes frames in order, so this undoes it.
            self.unpin(ask, 0)
            raise DeadlineExceeded("the owner's peer did not answer in time for a pin") from None
        finally:
            del self._waiting[ask]
        if answer.refused is not None:
            raise answer.refused.error()
        return Pinned(ask, column(answer.places, EXTENT, len(ranges)))

    def unpin(self, ask: int, nbytes: int) -> None:
        self._control.send(Unpin(ask, nbytes))

    def answered(self, answer: PinAnswer) -> None:
        waiting = self._waiting.get(answer.ask)
        if waiting is not None:
            waiting.put(answer)


class Worker:
    """Takes operations until the peer is gone."""

    def __init__(self, control: ControlChannel, region: Region, transport: Transport) -> None:
        self._control = control
        self._transport = transport
        self._desk = PeerDesk(control)
        # Two lanes: a small read never queues for a thread behind large ones.
        self._small = ThreadPoolExecutor(SMALL_JOBS, "bulk-small")
        self._large = ThreadPoolExecutor(LARGE_JOBS, "bulk-large")
        self._live: dict[int, ReadRequest] = {}
        transport.open(region, self._desk)

    def serve(self) -> None:
        self._control.send(Ready(os.getpid()))
        while (frame := self._control.receive()) is not None:
            self._take(frame)

    def _take(self, frame: ToWorker) -> None:
        match frame:
            case Read():
                self._start(frame)
            case Cancel(job=job):
                if (request := self._live.get(job)) is not None:
                    request.cancelled.set()
                    self._transport.cancel(job)
            case PinAnswer():
                self._desk.answered(frame)
            case Forget():
                self._transport.forget(Remote(frame.owner, tuple(frame.addresses)))
            case Configure():
                raise ProtocolError("a bulk worker is configured once")

    def _start(self, frame: Read) -> None:
        copies = column(frame.copies, COPY)
        remote = Remote(frame.owner, tuple(frame.addresses))
        deadline = time.monotonic() + frame.timeout_ms / 1000
        request = ReadRequest(frame.job, remote, copies, deadline)
        self._live[frame.job] = request
        small = int(copies["nbytes"].sum()) <= SMALL_LANE_BYTES
        (self._small if small else self._large).submit(self._read, request)

    def _read(self, request: ReadRequest) -> None:
        try:
            done = self._transport.read(request)
            gone = done.gone.astype(np.uint8).tobytes() if done.gone.any() else b""
            finished = Finished(request.job, gone, done.nbytes, done.seconds)
        except DataplaneError as exc:
            finished = Finished(request.job, b"", 0, 0.0, Refused.of(exc))
        except BaseException as exc:
            logger.exception("bulk: job %d failed", request.job)
            bug = InternalError(f"the bulk worker failed: {exc!r}; the peer's log has more")
            finished = Finished(request.job, b"", 0, 0.0, Refused.of(bug))
        del self._live[request.job]
        self._control.send(finished)


def run(control_fd: int, arena_fd: int, arena_bytes: int, listen_fd: int) -> None:
    """Serves until the peer is gone."""
    control = ControlChannel(socket.socket(fileno=control_fd))
    first = control.receive()
    if first is None:
        return
    if not isinstance(first, Configure):
        raise ProtocolError("the first operation must configure the worker")
    if first.transport != TcpTransport.capabilities.name:
        raise ProtocolError(f"this worker has no transport {first.transport!r}")
    arena = mmap.mmap(arena_fd, arena_bytes)
    base = np.frombuffer(arena, np.uint8).ctypes.data
    os.close(arena_fd)
    transport = TcpTransport(socket.socket(fileno=listen_fd), first.owner, first.key)
    Worker(control, Region(base, arena_bytes), transport).serve()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dataplane.transport.worker")
    for name in ("--control-fd", "--arena-fd", "--arena-bytes", "--listen-fd"):
        parser.add_argument(name, type=int, required=True)
    asked = parser.parse_args(argv)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C reaches the whole process group; when to stop is the peer's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    code = 0
    try:
        run(asked.control_fd, asked.arena_fd, asked.arena_bytes, asked.listen_fd)
    except BaseException:
        logger.exception("bulk worker failed")
        code = 1
    # Not sys.exit: that waits for threads, which may be blocked in a transfer.
    os._exit(code)


if __name__ == "__main__":
    main()
