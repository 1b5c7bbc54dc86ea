"""A bulk worker: the child process of a peer that moves bytes, and may crash without it.

It maps the peer's arena, receives operations as frames over a socketpair and answers there. It
shares nothing else with its parent. It exits at once when the socketpair closes or the parent
dies, whatever its threads are doing: the exit tells the peer that nothing of it writes any more.
Its witness, a child that maps nothing, outlives both (`witness`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import mmap
import os
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from dataplane.errors import (
    DataplaneError,
    InternalError,
    LimitExceeded,
    ProtocolError,
    TransportMissing,
    joined,
)
from dataplane.transport.bulk_frames import (
    COPY,
    Cancel,
    Configure,
    Finished,
    Forget,
    PinAnswer,
    Read,
    Ready,
    Refused,
    ToWorker,
)
from dataplane.transport.control import ControlChannel, PinDesk
from dataplane.transport.owner import ChunkServer, Service
from dataplane.transport.reader import Reads
from dataplane.transport.reading import Reading
from dataplane.transport.registry import TCP, load
from dataplane.transport.seam import PlacedPool, Records, Region, Remote, Transport
from dataplane.transport.secure_stream import door
from dataplane.transport.stream import BulkStream
from dataplane.transport.witness import leave_witness
from dataplane.wire.packed import column

JOBS = 32
"""The most jobs in progress."""
_PR_SET_PDEATHSIG = 1
_MIXED = "This can happen if dataplane was reinstalled while the peer was running: restart the peer"

logger = logging.getLogger(__name__)


class Worker:
    """Runs operations until the peer is gone."""

    def __init__(
        self, control: ControlChannel, region: Region, desk: PinDesk, reads: dict[str, Reads]
    ) -> None:
        self._control = control
        self._region = region
        self._desk = desk
        self._reads = reads
        self._jobs = ThreadPoolExecutor(JOBS, "bulk-job")
        self._live: dict[int, tuple[Reading, Future[None]]] = {}

    def serve(self) -> None:
        while (frame := self._control.receive()) is not None:
            self._take(frame)

    def _take(self, frame: ToWorker) -> None:
        match frame:
            case Read():
                self._start(frame)
            case Cancel(job=job):
                self._cancel(job)
            case PinAnswer():
                self._desk.answered(frame)
            case Forget(owner=owner):
                for reads in self._reads.values():
                    reads.forget(owner)
            case Configure():
                raise ProtocolError(
                    "unexpected Configure message: this bulk worker is already configured. "
                    f"{_MIXED}"
                )

    def _start(self, frame: Read) -> None:
        copies = column(frame.copies, COPY)
        deadline = time.monotonic() + frame.timeout_ms / 1000
        reading = Reading(Remote(frame.owner, frame.address, frame.fingerprint), copies, deadline)
        job = self._jobs.submit(self._read, frame.job, frame.transport, reading)
        self._live[frame.job] = reading, job
        job.add_done_callback(lambda _: self._live.pop(frame.job))

    def _cancel(self, number: int) -> None:
        if (live := self._live.get(number)) is not None:
            reading, job = live
            error = reading.cancel()
            if job.cancel():  # no thread had started it
                self._control.send(Finished(number, b"", 0, Refused.of(error)))

    def _read(self, job: int, transport: str, reading: Reading) -> None:
        try:
            check_destinations(self._region, reading.copies)
            if transport not in self._reads:
                raise TransportMissing(
                    "the reading peer's bulk worker does not support transport "
                    f"{transport}: start all peers with the same --transport"
                )
            gone = self._reads[transport].read(reading)
            nbytes = int(reading.copies["nbytes"][~gone].sum())
            finished = Finished(job, gone.tobytes() if gone.any() else b"", nbytes)
        except DataplaneError as exc:
            finished = Finished(job, b"", 0, Refused.of(exc))
        except BaseException as exc:
            logger.exception("bulk: transfer job %d failed", job)
            bug = InternalError(f"the bulk worker failed: {exc!r}; see the peer's log")
            finished = Finished(job, b"", 0, Refused.of(bug))
        self._control.send(finished)


def check_destinations(region: Region, copies: Records) -> None:
    """Raise LimitExceeded for a copy that would go outside the region, because addresses are
    raw."""
    dest, nbytes, size = copies["dest"], copies["nbytes"], np.uint64(region.nbytes)
    if ((dest > size) | (nbytes > size - np.minimum(dest, size))).any():
        raise LimitExceeded(
            f"the transfer would write outside the arena, which is {int(size)} bytes long. "
            f"{_MIXED}",
            limit=int(size),
        )


def run(control_fd: int, arena_fd: int, arena_bytes: int, listen_fd: int) -> None:
    """Serve until the peer is gone."""
    control = ControlChannel(socket.socket(fileno=control_fd))
    first = control.receive()
    if first is None:
        return
    if not isinstance(first, Configure):
        raise ProtocolError(
            "the first message to a bulk worker must be Configure, got "
            f"{type(first).__name__}. {_MIXED}"
        )
    listener = socket.socket(fileno=listen_fd)
    if not first.pools:  # one witness per host is enough
        leave_witness(listener, first, keeps_not=(control_fd, arena_fd))
    # `arena` keeps the mapping alive: the region holds only its address
    arena = None if first.pools else mmap.mmap(arena_fd, arena_bytes)
    region, desk = _region(first, arena, arena_fd, arena_bytes), PinDesk(control)
    reads: dict[str, Reads] = {}
    services: dict[str, Service] = {}
    missing: dict[str, str] = {}
    for name in [*first.transports, *([] if first.pools else [TCP])]:
        try:
            transport = _loaded(name, first, region)
            card = transport.register(region)
        except TransportMissing as exc:
            missing[name] = exc.message
            continue
        reads[name] = Reads(transport, card, first.key, tls_only=bool(first.tls))
        services[name] = Service(transport, card, region, desk, first.key)
    stream_of = door(first.tls) if first.tls else BulkStream
    ChunkServer(listener, first.owner, first.key, services, stream_of).start()
    with contextlib.suppress(ConnectionError):  # the peer has ended, and this process ends next
        control.send(Ready(missing))
    Worker(control, region, desk, reads).serve()


def _region(first: Configure, arena: mmap.mmap | None, arena_fd: int, arena_bytes: int) -> Region:
    """Return the region: the arena, or the pools, which follow each other up to `arena_bytes`."""
    if arena is not None:
        return Region(np.frombuffer(arena, np.uint8).ctypes.data, arena_bytes, fd=arena_fd)
    start = arena_bytes - sum(pool.nbytes for pool in first.pools)
    pools: list[PlacedPool] = []
    for pool in first.pools:
        pools.append(PlacedPool(start, pool))
        start += pool.nbytes
    return Region(0, arena_bytes, "cuda", pools=tuple(pools))


def _loaded(name: str, first: Configure, region: Region) -> Transport:
    found = load(name)
    if region.kind not in found.memory:
        raise TransportMissing(
            f"transport {name} moves only "
            f"{joined(sorted(found.memory))} memory, but this arena is "
            f"in {region.kind} memory: choose another --transport",
            transport=name,
        )
    return found(first.owner)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dataplane.transport.worker")
    for name in ("--control-fd", "--arena-fd", "--arena-bytes", "--listen-fd"):
        parser.add_argument(name, type=int, required=True)
    asked = parser.parse_args(argv)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C reaches the whole process group, but the peer decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    code = 0
    try:
        run(asked.control_fd, asked.arena_fd, asked.arena_bytes, asked.listen_fd)
    except BaseException:
        logger.exception("bulk: worker failed, exiting")
        code = 1
    # Not sys.exit: that waits for threads, which may be blocked in a transfer.
    os._exit(code)


if __name__ == "__main__":
    main()
