"""The reader's side of TCP bulk transfer: pulls slices straight into the local arena.

Runs in a bulk worker. A job is cut into slices; a few threads take one after another, each on a
connection of its own. The first error stops the whole job, and `read` returns only when none of its
threads can write any more: that is what lets the peer reuse the destination.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import numpy as np

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    ProtocolError,
    TransferFailed,
    Unavailable,
)
from dataplane.transport.bulk_frames import (
    LEAST_PULL_BYTES,
    MAX_PULL_BYTES,
    MAX_PULL_FRAME_BYTES,
    MAX_PULL_ITEMS,
    SMALL_LANE_BYTES,
    FromOwner,
    Pull,
    Refused,
    Sending,
    Sent,
    decode_from_owner,
    encode,
)
from dataplane.transport.connections import Connection, Connections, Lane
from dataplane.transport.renewals import Renewals
from dataplane.transport.seam import Endpoint, Mask, ReadRequest, Region
from dataplane.transport.slices import Slice, cut, pieces_of
from dataplane.transport.stream import BulkStream, iovecs
from dataplane.transport.tickets import issue

RUNNERS = 32
RUNS_PER_JOB = 2
"""Connections that one large job uses at once. On loopback with 2 cores 1 and 2 are equally fast
(about 0.9 of a bare socket); with more cores the second
keeps one core's copy from being the ceiling."""
EARLY_ITEMS = 512
"""A request this short fits into socket buffers even while the owner is busy sending; a longer one
could leave both sides sending and nobody receiving."""

logger = logging.getLogger(__name__)


class Job:
    """One read under way: its slices, its streams, and the first error."""

    def __init__(self, request: ReadRequest) -> None:
        self.request = request
        self.gone = np.zeros(len(request.copies), bool)
        self.nbytes = 0
        self.renewals = Renewals(request.deadline)
        total = int(request.copies["nbytes"].sum())
        each = min(max(-(-total // RUNS_PER_JOB), LEAST_PULL_BYTES), MAX_PULL_BYTES)
        self._left = deque(cut(request.copies, each, MAX_PULL_ITEMS))
        self.slices = len(self._left)
        self.lane: Lane = "small" if total <= SMALL_LANE_BYTES else "large"
        self._streams: set[BulkStream] = set()
        self._lock = threading.Lock()
        self._error: DataplaneError | None = None

    @property
    def stopped(self) -> bool:
        return self._error is not None

    def next(self, max_bytes: int = MAX_PULL_BYTES) -> Slice | None:
        """The next slice, as much of it as an owner takes at once that told this limit."""
        with self._lock:
            if not self._left or self._error:
                return None
            part = self._left.popleft()
        return self.within(part, max_bytes)

    def within(self, part: Slice, max_bytes: int) -> Slice:
        """As much of the slice as an owner takes at once that told this limit; the rest is next."""
        most = max(max_bytes, LEAST_PULL_BYTES)
        if part.nbytes <= most:
            return part
        first, *rest = (
            Slice(part.index[some.index], some.copies, some.nbytes)
            for some in cut(part.copies, most, MAX_PULL_ITEMS)
        )
        with self._lock:
            self._left.extendleft(reversed(rest))
        return first

    def watch(self, stream: BulkStream) -> None:
        with self._lock:
            self._streams.add(stream)
            if self._error:
                stream.abort()

    def unwatch(self, stream: BulkStream) -> bool:
        """Whether the stream is still good for others."""
        with self._lock:
            self._streams.discard(stream)
            return not self._error

    def arrived(self, part: Slice, gone: np.ndarray, nbytes: int) -> None:
        with self._lock:
            self.gone[part.index[gone]] = True
            self.nbytes += nbytes

    def stop(self, error: DataplaneError) -> None:
        """The first error counts: those that follow come from the aborted streams."""
        with self._lock:
            if self._error is None:
                self._error = error
            for stream in self._streams:
                stream.abort()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class RangeReader:
    """Reads for all jobs of one worker over one pool of connections."""

    def __init__(self, region: Region, key: bytes, *, tls_only: bool = False) -> None:
        self._region = region
        self._key = key
        self._connections = Connections(key, tls_only=tls_only)
        self._runners = ThreadPoolExecutor(RUNNERS, "bulk-runner")
        self._jobs: dict[int, Job] = {}
        self._lock = threading.Lock()

    def read(self, request: ReadRequest) -> Mask:
        job = Job(request)
        with self._lock:
            self._jobs[request.job] = job
        if request.cancelled.is_set():
            job.stop(TransferFailed("the read was cancelled"))
        runs: list[Future[None]] = []
        with suppress(RuntimeError):  # no more threads: this one does it alone
            for nth in range(1, min(RUNS_PER_JOB, job.slices)):
                runs.append(self._runners.submit(self._run, job, nth))
        self._run(job, 0)
        # Runs that have not started are not needed any more; no thread waits for a queue.
        wait([run for run in runs if not run.cancel()])
        with self._lock:
            del self._jobs[request.job]
        job.raise_error()
        return job.gone

    def cancel(self, number: int) -> None:
        with self._lock:
            job = self._jobs.get(number)
        if job is not None:
            job.stop(TransferFailed("the read was cancelled"))
            self._connections.wake()

    def forget(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._connections.forget(endpoints)

    def close(self) -> None:
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.stop(TransferFailed("the bulk worker stops"))
        self._connections.wake()
        self._connections.close()
        self._runners.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: Job, nth: int) -> None:
        """Takes slices until none is left or the job stopped. Never raises."""
        endpoints = job.request.remote.endpoints
        address = endpoints[(job.request.job + nth) % len(endpoints)]
        try:
            part = job.next()
            while part is not None:
                part = self._pull(job, part, address)
        except BaseException as exc:
            job.stop(typed_error(exc, job.request, job.nbytes, address))
            self._connections.wake()

    def _pull(self, job: Job, part: Slice, address: Endpoint) -> Slice | None:
        """Slices one after another on one connection; the one to repeat if it was closed idle, or
        if the ticket ran out."""
        connection = self._connections.borrow(address, job.lane, job.request.deadline, job)
        answered, clean = connection.sequence > 0, False
        most = connection.greeting.max_bytes
        try:
            part = job.within(part, most)
            self._ask(connection, part, job)
            while (answer := self._answer(connection, job)) is not None:
                answered = True
                if _is_over(answer) and job.renewals.take():
                    return part
                following = job.next(most)
                # Asked before the bytes are taken, so that the owner never waits for the reader.
                early = following is not None and len(following.copies) <= EARLY_ITEMS
                if following is not None and early:
                    self._ask(connection, following, job)
                self._take(connection, part, job, answer)
                if following is None:
                    clean = True
                    return None
                if not early:
                    self._ask(connection, following, job)
                part = following
            if not answered or job.stopped:
                raise ConnectionResetError("the connection ended before the answer")
            return part
        finally:
            if job.unwatch(connection.stream) and clean:
                self._connections.give_back(connection)
            else:
                self._connections.discard(connection)

    def _ask(self, connection: Connection, part: Slice, job: Job) -> None:
        deadline = job.request.deadline
        expiry_ms = max(1, int((deadline - time.monotonic()) * 1000))
        pieces = pieces_of(part.copies).tobytes()
        owner = job.request.remote.owner
        ticket = issue(self._key, owner, expiry_ms, connection.nonce(), pieces)
        pull = Pull(connection.version, ticket, pieces, part.nbytes)
        with suppress(ConnectionError):  # then there is no answer
            connection.stream.send(encode(pull), deadline)

    def _answer(self, connection: Connection, job: Job) -> FromOwner | None:
        """None: closed without an answer, as an owner does with idle connections."""
        with suppress(ConnectionError):
            frame = connection.stream.receive(MAX_PULL_FRAME_BYTES, job.request.deadline)
            return None if frame is None else decode_from_owner(frame)
        return None

    def _take(self, connection: Connection, part: Slice, job: Job, answer: FromOwner) -> None:
        if isinstance(answer, Refused):
            raise answer.error()
        if not isinstance(answer, Sending):
            raise ProtocolError(f"a pull was answered by {type(answer).__name__}")
        copies, count = part.copies, len(part.copies)
        if answer.gone and len(answer.gone) != count:
            raise ProtocolError(f"an answer for {len(answer.gone)} pieces, {count} were asked for")
        gone = np.frombuffer(answer.gone or bytes(count), bool)
        copies = copies[~gone] if gone.any() else copies
        if answer.nbytes != int(copies["nbytes"].sum()):
            raise ProtocolError(f"the owner announces {answer.nbytes} bytes, not what was asked")
        base, deadline = np.uint64(self._region.address), job.request.deadline
        connection.stream.receive_into(iovecs(base + copies["dest"], copies["nbytes"]), deadline)
        frame = connection.stream.receive(MAX_PULL_FRAME_BYTES, deadline)
        sent = None if frame is None else decode_from_owner(frame)
        if not isinstance(sent, Sent) or sent.nbytes != answer.nbytes:
            raise TransferFailed("the owner did not confirm the bytes that it sent")
        job.arrived(part, gone, answer.nbytes)


def _is_over(answer: FromOwner) -> bool:
    """Whether the owner says that the ticket's time is over."""
    return isinstance(answer, Refused) and answer.code == DeadlineExceeded.__name__


def typed_error(
    exc: BaseException, request: ReadRequest, nbytes: int, address: Endpoint
) -> DataplaneError:
    """The one place where what sockets raise becomes an error of ours. nbytes: that arrived."""
    peer = request.remote.owner.peer
    if isinstance(exc, DataplaneError):
        return exc
    if isinstance(exc, TimeoutError) and time.monotonic() >= request.deadline:
        return DeadlineExceeded(
            f"peer {peer!r} at {address} did not send all bytes in time; it may be stopped or cut "
            f"off ({nbytes} bytes arrived)",
            peer=peer,
            nbytes=nbytes,
        )
    if isinstance(exc, (ConnectionRefusedError, TimeoutError)):
        return Unavailable(f"peer {peer!r} does not answer at {address}: {exc}", peer=peer)
    if isinstance(exc, (OSError, EOFError)):
        return TransferFailed(
            f"the transfer from peer {peer!r} at {address} broke off: {exc}; it may be retried",
            peer=peer,
        )
    logger.error("bulk: a transfer from peer %r failed", peer, exc_info=exc)
    return InternalError(f"the reading bulk worker failed: {exc!r}; the peer's log has more")
