"""Bulk transfer as the peer uses it: reads from other peers into its arena, and serves their reads.

It runs in the peer's event loop; the bytes move in a worker process. The engine starts the
worker, restarts it after a crash, and bounds the bytes in flight. It never touches the arena
itself. Once `read` returns or raises, nothing writes to its destinations any more.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from dataplane.errors import (
    DeadlineExceeded,
    TransferFailed,
    Unavailable,
    sized,
)
from dataplane.transport.bulk_frames import (
    COPY,
    MAX_GET_BYTES,
    MAX_GET_ITEMS,
    MAX_HELD_BYTES,
    Configure,
)
from dataplane.transport.limiter import ResourceLimiter
from dataplane.transport.link import Pin, Traffic, Unpinned, WorkerLink
from dataplane.transport.registry import TCP
from dataplane.transport.seam import ReadOutcome, Records, Remote
from dataplane.transport.slices import Slice, cut
from dataplane.transport.tickets import Identity
from dataplane.wire.tables import Owner, PoolHandle

PART_BYTES = 64 << 20
"""A larger read is split into parts of one request each, so that other reads take turns."""
POOL_PART_BYTES = MAX_HELD_BYTES
"""The size of parts between pools: a pool copies this in a millisecond, and the exchange for a part
takes three."""
LEAST_PART_BYTES = 8 << 20
"""A read over TCP has at least two parts if each is larger than this. Each part has a connection of
its own, so that with more cores the copy of one core is not the limit. On loopback with 2 cores, 1
and 2 connections are equally fast (about 0.9 of a bare socket)."""
UNDER_WAY_PARTS = 4
JOB_BYTES = 256 << 10
"""A read counts as at least this, which bounds the number of jobs (1,024) as well."""
START_S = 30.0
GRACE_S = 2.0
"""How long a worker may take to stop a job before it is killed."""
RESTART_S = (0.05, 5.0)
STABLE_S = 60.0

logger = logging.getLogger(__name__)


class BulkEngine:
    """The bulk worker of one peer, restarted whenever it exits.

    arena_rw_fd: the arena's memfd, read-write; the engine borrows it. host: where to listen.
    pin, unpin: called in the event loop, see `link.Pin`. key: the run's key, see `tickets`.
    transports: what the worker should run besides TCP; `reasons` says why it does not. identity:
    the worker accepts only TLS, with this certificate, and runs only TCP. pools: the worker
    copies between these pools instead of the host arena; `arena_bytes` is then the end
    of the last of them, as a host address.
    """

    def __init__(
        self,
        arena_rw_fd: int,
        arena_bytes: int,
        host: str,
        *,
        owner: Owner,
        key: bytes,
        pin: Pin,
        unpin: Unpinned,
        transports: Sequence[str] = (),
        identity: Identity | None = None,
        pools: Sequence[PoolHandle] = (),
    ) -> None:
        self._arena_fd = arena_rw_fd
        self._arena_bytes = arena_bytes
        self._host = host
        pem = identity.pem if identity else b""
        self._configure = Configure(owner, key, list(transports), pem, list(pools))
        self._identity = identity
        self.left_out = ""
        """why no other engine was tried, for `missing`"""
        self._pin = pin
        self._unpin = unpin
        self._traffic = Traffic()
        self._part_bytes = POOL_PART_BYTES if pools else PART_BYTES
        self._limit = ResourceLimiter(UNDER_WAY_PARTS * self._part_bytes)
        self._listener: socket.socket | None = None
        self._link: WorkerLink | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._stopping = False

    def __repr__(self) -> str:
        return f"<BulkEngine {self.address} {self._link}>"

    @property
    def address(self) -> str:
        """`host:port` of the worker, the same as long as the engine lives."""
        return _address_of(self._listener) if self._listener is not None else ""

    @property
    def pid(self) -> int | None:
        """The pid of the current worker process."""
        return self._link.pid if self._link is not None else None

    @property
    def reasons(self) -> dict[str, str]:
        """Why the worker does not run some of the requested engines. It runs all others."""
        return self._link.missing if self._link is not None else {}

    @property
    def transport(self) -> str:
        """The transport of the worker: the first requested engine, or `tcp`."""
        asked = self._configure.transports
        return next((name for name in asked if name not in self.reasons), TCP)

    @property
    def missing(self) -> str:
        """Why the worker does not run the first requested engine; "" if it does."""
        return next(iter(self.reasons.values()), self.left_out)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the worker's certificate, see `Remote`; "" without TLS."""
        return self._identity.fingerprint if self._identity is not None else ""

    async def start(self) -> None:
        """Start the worker. Raises Unavailable if it does not get ready."""
        try:
            self._listener = _listen(self._host)
            await self._open()
        except BaseException:
            await self.stop()
            raise
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self, witnessed: bool = False) -> None:
        """Stop the worker. Pending reads raise TransferFailed. No process or descriptor is left,
        except a witness that reports the end of this peer for some seconds, if that is wanted."""
        self._stopping = True
        self._changed.set()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._link is not None:
            await self._link.stop()
            self._link = None
        if self._listener is not None:
            if not witnessed and self._listener.fileno() >= 0:
                self._listener.shutdown(socket.SHUT_RDWR)  # this also ends the witness
            self._listener.close()

    async def read(
        self, remote: Remote, copies: Records, timeout_s: float = 30.0, transport: str = TCP
    ) -> ReadOutcome:
        """Copy the pieces named by COPY records from a peer into this arena.

        Pieces whose chunk is gone are marked in the outcome; the others arrive. Raises
        TransferFailed (can be retried once), Unavailable, DeadlineExceeded, TicketRefused,
        LimitExceeded or TransportMissing. Cancelling the task cancels the transfer, and waits
        until it has stopped.
        """
        copies = np.ascontiguousarray(copies, COPY)
        deadline = asyncio.get_running_loop().time() + timeout_s
        part_bytes = self._part_bytes
        if transport == TCP:
            half = -(-int(copies["nbytes"].sum()) // 2)
            part_bytes = min(max(half, LEAST_PART_BYTES), MAX_GET_BYTES)
        parts = list(cut(copies, part_bytes, MAX_GET_ITEMS))
        if len(parts) == 1 and len(parts[0].copies) == len(copies):
            return await self._read_part(remote, parts[0], deadline, transport)
        tasks: list[asyncio.Task[ReadOutcome]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    read = self._read_part(remote, part, deadline, transport)
                    tasks.append(group.create_task(read))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        gone = np.zeros(len(copies), bool)
        for part, task in zip(parts, tasks, strict=True):
            gone[part.index[task.result().gone]] = True
        nbytes = sum(task.result().nbytes for task in tasks)
        return ReadOutcome(gone, nbytes)

    def forget(self, owner: Owner) -> None:
        """Close the connections to a peer that is no longer a member."""
        if self._link is not None and self._link.usable:
            self._link.forget(owner)

    def stats(self) -> dict[str, Any]:
        """Figures since the start: bytes, jobs, pins."""
        link = self._link
        return {
            "transport": self.transport,
            "tls": self._identity is not None,
            "address": self.address,
            "bytes_in": self._traffic.bytes_in,
            "bytes_in_over": dict(self._traffic.bytes_in_over),
            "bytes_out": self._traffic.bytes_out,
            "jobs_done": self._traffic.jobs_done,
            "jobs_failed": self._traffic.jobs_failed,
            "jobs_under_way": link.jobs if link is not None else 0,
            "bytes_under_way": self._limit.used_bytes,
            "pins": link.pins if link is not None else 0,
            "pins_served": self._traffic.pins_served,
            "works": link is not None and link.usable,
            "restarts": self._traffic.restarts,
        }

    async def _read_part(
        self, remote: Remote, part: Slice, deadline: float, transport: str
    ) -> ReadOutcome:
        loop = asyncio.get_running_loop()
        async with _room(self._limit, max(part.nbytes, JOB_BYTES), deadline):
            link = await self._usable_link(deadline)
            job, future = link.read(remote, part.copies, deadline - loop.time(), transport)
            try:
                await asyncio.wait({future}, timeout=deadline - loop.time() + GRACE_S)
            except asyncio.CancelledError:
                await _uninterrupted(_stop_job(link, job, future))
                raise
            if not future.done():  # the worker should have ended the job itself
                logger.error(
                    "bulk: killing worker %r, because a transfer missed its deadline", link
                )
                link.kill()
                await _uninterrupted(asyncio.wait({future}))
                raise DeadlineExceeded(
                    "the bulk worker did not finish the transfer before the deadline: "
                    "repeat the call, perhaps with a longer timeout="
                )
            return future.result()

    async def _usable_link(self, deadline: float) -> WorkerLink:
        """Return the link to the worker. Wait while the worker is being restarted."""
        while not self._stopping:
            if self._link is not None and self._link.usable:
                return self._link
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise Unavailable(
                    f"the bulk worker of peer {self._configure.owner.peer!r} is not running, so "
                    "the peer cannot transfer values: see that peer's log, then repeat the call"
                ) from None
        raise TransferFailed(
            f"the bulk worker of peer {self._configure.owner.peer!r} is shutting down: connect to "
            "another peer and repeat the call"
        )

    async def _open(self) -> None:
        assert self._listener is not None
        self._link = link = WorkerLink(
            self._configure.owner.peer, self._pin, self._unpin, self._traffic
        )
        await link.start(self._arena_fd, self._arena_bytes, self._listener, self._configure)
        await asyncio.wait(
            {link.ready, link.ended}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not link.usable:
            link.kill()
            raise Unavailable(
                f"the bulk worker exited, or was not ready within {START_S:g} s: see the peer's "
                "log for the reason"
            )
        self._changed.set()

    async def _keep(self) -> None:
        """Restart the worker whenever it has exited, with longer pauses if it keeps crashing."""
        loop = asyncio.get_running_loop()
        pause, since = RESTART_S[0], loop.time()
        while True:
            link = self._link
            assert link is not None
            await asyncio.wait({link.ended})
            pause = RESTART_S[0] if loop.time() - since > STABLE_S else pause
            logger.warning("bulk: worker %r exited, restarting it in %.2f s", link, pause)
            await asyncio.sleep(pause)
            pause, since = min(pause * 2, RESTART_S[1]), loop.time()
            self._traffic.restarts += 1
            try:
                await self._open()
            except (OSError, Unavailable) as exc:
                logger.error("bulk: could not start a worker: %s", exc)


@asynccontextmanager
async def _room(limit: ResourceLimiter, nbytes: int, deadline: float) -> AsyncIterator[None]:
    """Wait for space in the limiter. Raise DeadlineExceeded at the deadline."""
    try:
        async with asyncio.timeout_at(deadline):
            await limit.acquire(nbytes)
    except TimeoutError:
        raise DeadlineExceeded(
            f"timed out waiting for other transfers ({sized(limit.used_bytes)} of "
            f"{sized(limit.limit_bytes)} in flight, {limit.waiting} waiting): repeat the call, "
            "perhaps with a longer timeout="
        ) from None
    try:
        yield
    finally:
        limit.release(nbytes)


async def _stop_job(link: WorkerLink, job: int, future: asyncio.Future[ReadOutcome]) -> None:
    """Stop a job. Return once none of its writes is in progress."""
    link.cancel(job)
    done, _ = await asyncio.wait({future}, timeout=GRACE_S)
    if not done:
        link.kill()
        await asyncio.wait({future})


async def _uninterrupted(work: Any) -> None:
    """Await `work` to its end, even if the waiting task is cancelled again: the job may still
    write."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=256)


def _address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
