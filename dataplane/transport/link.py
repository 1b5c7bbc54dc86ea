"""The peer's end of one bulk worker: its process, its socketpair, its jobs and its pins.

Runs in the peer's event loop. Only when the process has exited do its jobs fail and its pins
end, because only then is it certain that it neither reads nor writes the arena.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from dataplane.errors import DataplaneError, InternalError, TransferFailed
from dataplane.transport.bulk_frames import (
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
    Unpin,
    decode_from_worker,
    encode,
)
from dataplane.transport.seam import ReadOutcome, Records, Remote
from dataplane.wire.frames import FrameReader
from dataplane.wire.packed import EXTENT, U8, Array, column
from dataplane.wire.tables import Owner

Pinning = tuple[int, Records]
Pin = Callable[[Array], Pinning | Awaitable[Pinning]]
"""Pins chunks by number. Returns a pin id, and an EXTENT per chunk with `offset` GONE for a freed
one. It returns an awaitable if chunks outside the arena must be read back. A cancelled awaitable
pins nothing."""
Unpinned = Callable[[int], None]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """Counters over the life of an engine, across restarts of its worker."""

    bytes_in: int = 0
    bytes_out: int = 0
    jobs_done: int = 0
    jobs_failed: int = 0
    pins_served: int = 0
    restarts: int = 0
    bytes_in_over: dict[str, int] = field(default_factory=dict)
    """by transport"""


class WorkerLink(asyncio.Protocol):
    """One worker process."""

    def __init__(self, peer: str, pin: Pin, unpin: Unpinned, traffic: Traffic) -> None:
        self._peer = peer
        self._pin = pin
        self._unpin = unpin
        self._traffic = traffic
        self._frames = FrameReader()
        self._numbers = itertools.count(1)
        self._jobs: dict[int, tuple[asyncio.Future[ReadOutcome], int, str]] = {}
        self._pins: dict[int, int] = {}
        self._pinning: dict[int, asyncio.Task[None]] = {}
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.missing: dict[str, str] = {}
        """why the worker does not run a requested engine"""

    def __repr__(self) -> str:
        state = "ended" if self.ended.done() else "ready" if self.usable else "starting"
        return (
            f"<WorkerLink pid={self.pid} {state}, {len(self._jobs)} jobs, {len(self._pins)} pins>"
        )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def usable(self) -> bool:
        return self.ready.done() and not self.ended.done() and self._transport is not None

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    @property
    def pins(self) -> int:
        return len(self._pins)

    async def start(
        self, arena_fd: int, arena_bytes: int, listener: socket.socket, configure: Configure
    ) -> None:
        """Start the process. `ready` or `ended` reports the outcome. Raises OSError if it cannot
        start."""
        given = {"--arena-fd": arena_fd, "--listen-fd": listener.fileno()}
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _spawn(given | {"--control-fd": theirs.fileno()}, arena_bytes)
            self._pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            ours.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self.ended.set_result(None)
            raise
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._exited)
        await loop.create_unix_connection(lambda: self, sock=ours)
        self._send(configure)

    def read(
        self, remote: Remote, copies: Records, timeout_s: float, transport: str
    ) -> tuple[int, asyncio.Future[ReadOutcome]]:
        """Start a job. Return its number and a future of its outcome."""
        job = next(self._numbers)
        future: asyncio.Future[ReadOutcome] = asyncio.get_running_loop().create_future()
        self._jobs[job] = (future, len(copies), transport)
        self._send(
            Read(
                job,
                remote.owner,
                remote.address,
                copies.tobytes(),
                max(1, int(timeout_s * 1000)),
                transport,
                remote.fingerprint,
            )
        )
        return job, future

    def cancel(self, job: int) -> None:
        self._send(Cancel(job))

    def forget(self, owner: Owner) -> None:
        self._send(Forget(owner))

    def kill(self) -> None:
        """Kill the process. `ended` reports when it has exited."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the process and wait until it has exited. It has no state worth saving."""
        self.kill()
        await asyncio.wait({self.ended})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._take(body)
        except DataplaneError as exc:
            logger.error(
                "bulk: killing the worker with pid %s, because it sent an invalid message: %s",
                self.pid,
                exc,
            )
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        # A worker that closed its end sends nothing more, and must not stay half alive.
        self._transport = None
        self.kill()

    def _send(self, frame: Frame) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(bytes(encode(frame)))

    def _take(self, body: bytes | memoryview) -> None:
        match decode_from_worker(body):
            case Finished() as finished:
                self._finished(finished)
            case PinAsked() as asked:
                self._pin_for(asked)
            case Unpin(ask=ask, nbytes=nbytes):
                self._traffic.bytes_out += nbytes
                if (pinning := self._pinning.get(ask)) is not None:
                    pinning.cancel()
                if (pin := self._pins.pop(ask, None)) is not None:
                    self._unpin(pin)
            case Ready(missing=missing):
                self.missing = missing
                if not self.ready.done():
                    self.ready.set_result(None)

    def _pin_for(self, asked: PinAsked) -> None:
        task = asyncio.get_running_loop().create_task(self._pinned(asked))
        self._pinning[asked.ask] = task
        task.add_done_callback(lambda _: self._pinning.pop(asked.ask))

    async def _pinned(self, asked: PinAsked) -> None:
        ask = asked.ask
        try:
            pinned = self._pin(column(asked.chunks, U8))
            pin, places = pinned if isinstance(pinned, tuple) else await pinned
        except Exception as exc:
            self._send(_not_pinned(ask, exc, self._peer))
            return
        self._pins[ask] = pin
        self._traffic.pins_served += 1
        self._send(PinAnswer(ask, np.ascontiguousarray(places, EXTENT).tobytes()))

    def _finished(self, finished: Finished) -> None:
        future, count, transport = self._jobs.pop(finished.job)
        self._traffic.bytes_in += finished.nbytes
        over = self._traffic.bytes_in_over
        over[transport] = over.get(transport, 0) + finished.nbytes
        if finished.refused is not None:
            self._traffic.jobs_failed += 1
            _settle(future, finished.refused.error())
            return
        self._traffic.jobs_done += 1
        gone = np.frombuffer(finished.gone or bytes(count), bool)
        if not future.done():
            future.set_result(ReadOutcome(gone, finished.nbytes))

    def _exited(self) -> None:
        """Handle the end of the process. It no longer reads or writes the arena."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        assert self._process is not None
        code = self._process.wait()
        if self._transport is not None:
            self._transport.abort()
        error = TransferFailed(
            f"the bulk worker (pid {self.pid}) exited with code {code} during the transfer: repeat "
            "the call",
            pid=self.pid,
            exit_code=code,
        )
        for future, *_ in self._jobs.values():
            self._traffic.jobs_failed += 1
            _settle(future, error)
        self._jobs.clear()
        for pinning in self._pinning.values():
            pinning.cancel()
        for pin in self._pins.values():
            self._unpin(pin)
        self._pins.clear()
        self.ended.set_result(None)


def _spawn(given: dict[str, int], arena_bytes: int) -> subprocess.Popen[bytes]:
    """given: the options that pass descriptors."""
    options = {**given, "--arena-bytes": arena_bytes}
    return subprocess.Popen(
        [sys.executable, "-m", "dataplane.transport.worker"]
        + [part for name, value in options.items() for part in (name, str(value))],
        stdin=subprocess.DEVNULL,
        pass_fds=tuple(given.values()),
        close_fds=True,
    )


def _not_pinned(ask: int, exc: Exception, peer: str) -> PinAnswer:
    if isinstance(exc, DataplaneError):
        return PinAnswer(ask, b"", Refused.of(exc))
    logger.error("bulk: could not pin values for a reader", exc_info=exc)
    bug = InternalError(
        f"peer {peer!r} could not pin values that it owns: see the traceback in that peer's log"
    )
    return PinAnswer(ask, b"", Refused.of(bug))


def _settle(future: asyncio.Future[ReadOutcome], error: DataplaneError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # a cancelled caller does not read the error
