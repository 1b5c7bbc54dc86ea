"""What awaiting differs in from blocking: `sync.driver` has the same names.

Each call in flight has a connection of its own; cancelling the task closes it, which cancels the
call at the peer. Big copies run in the loop's executor. Works from several loops and threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from dataplane.client.core import Offload, Operation
from dataplane.client.deadline import Deadline
from dataplane.client.operations.lease import Lease
from dataplane.client.operations.leased import LeasedRows
from dataplane.client.operations.loader import Loading
from dataplane.client.operations.plan import Feed
from dataplane.client.read.selection import Selection as Fetching
from dataplane.client.read.tensors import place_named, settled
from dataplane.client.session import handshake
from dataplane.client.session.connection import GRACE_S, Connection, answer, unwrap
from dataplane.client.session.housekeeping import Housekeeper
from dataplane.client.session.session import Session
from dataplane.client.tracebacks import shorten
from dataplane.errors import DataplaneError, DeadlineExceeded, InvalidCall, StreamEnd
from dataplane.wire.messages import Body, Reply

__all__ = [
    "Connecting",
    "Fetching",
    "Prefetch",
    "Run",
    "conversion",
    "exchange",
    "further",
    "leave",
    "offload",
]

OFFLOAD_BYTES = 1 << 20
"""Copies of at least this much leave the event loop."""

T = TypeVar("T")
P = TypeVar("P", bound="Closing")
B = TypeVar("B", bound=LeasedRows)


class Run(Protocol):
    """How operations are carried out: `Plane.run`."""

    def __call__(self, operation: Operation[T], /) -> Awaitable[T]: ...


# connecting


class Closing(Protocol):
    async def close(self) -> None: ...


class _NotConnected(InvalidCall, AttributeError):
    """Both: who asks whether it has an attribute hears that it has not."""


class Connecting(Generic[P]):
    """A plane that is being connected to: await it, or use it with `async with`."""

    def __init__(self, kind: Callable[[Housekeeper], P], attach: Callable[[], Housekeeper]) -> None:
        self._kind, self._attach = kind, attach
        self._opened: P | None = None

    if not TYPE_CHECKING:  # to a type checker it has none of a plane's attributes

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # asked whether it can do what it cannot
                raise AttributeError(name)
            raise _NotConnected(
                f"{name!r} was used before the plane was connected: write plane = await "
                "dataplane.aio.connect(), or async with dataplane.aio.connect() as plane"
            )

    async def _open(self) -> P:
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(None, self._attach)
        try:
            return self._kind(await asyncio.shield(opening))
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise
        except DataplaneError as exc:
            shorten(exc)
            raise

    def __await__(self) -> Generator[Any, None, P]:
        return self._open().__await__()

    async def __aenter__(self) -> P:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(self, kind: object, exc: object, trace: object) -> None:
        if self._opened is not None:
            await self._opened.close()


def _close_unwanted(opening: asyncio.Future[Housekeeper]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close("connecting was cancelled")


async def leave(keeper: Housekeeper, why: str) -> None:
    await asyncio.get_running_loop().run_in_executor(None, keeper.close, why)


# steps of operations


def conversion(work: Callable[[str], Any], device: str, nbytes: int) -> Operation[Any]:
    """What a caller asked for, made in whatever thread: with the GPU that `device` is in this one,
    and finished there."""
    where = place_named(device)
    return (yield Offload(lambda: settled(where, lambda: work(where)), nbytes))


# a loader's prefetching


class Prefetch(Generic[B]):
    """A task that claims up to so many batches which nobody has asked for yet."""

    def __init__(self, loader: Loading[B, Any] | Feed[Any]) -> None:
        self._run: Run = loader._run
        self._claim: Callable[[], Operation[Any]] = loader._claim
        self._make: Callable[[Any], B] = loader._make
        self._fresh, self._collate = loader._fresh, loader._collate
        self._ahead, self._wanted = loader._ahead, loader._wanted
        self._session = loader._handle.session
        self._changed = asyncio.Condition()
        self._ready: deque[tuple[B, Any]] = deque()
        self._making: B | None = None
        """what collate has, or failed with"""
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._work(), name="dataplane-loader")

    async def next(self) -> tuple[B, Any]:
        """Return the next batch and its collated value. Raises the error that ended the task."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ready or self._failure)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        failure, self._failure = self._failure, StreamEnd("this loop has already ended")
        assert failure is not None
        raise failure

    def stop(self) -> None:
        """Cancel the task. A claim that waits is withdrawn."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def end(self) -> None:
        """Cancel the task and wait until it has stopped."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._loop.run_in_executor(None, self._session.settle)

    def left(self) -> list[Lease]:
        """Take the leases of batches that were prefetched and not used."""
        left, self._ready = [batch for batch, _ in self._ready], deque()
        return [batch.lease for batch in [*left, self._making] if batch is not None]

    async def _work(self) -> None:
        failure: BaseException = StreamEnd("this loop has already ended")
        try:
            while self._wanted != 0:
                async with self._changed:
                    await self._changed.wait_for(lambda: len(self._ready) < self._ahead)
                made = await self._made()
                self._wanted = None if self._wanted is None else self._wanted - 1
                async with self._changed:
                    self._ready.append(made)
                    self._making = None
                    self._changed.notify_all()
                del made
        except asyncio.CancelledError:
            pass
        except BaseException as exc:  # whatever it is, the loop is where it is told
            failure = exc
        self._failure = failure
        async with self._changed:
            self._changed.notify_all()

    async def _made(self) -> tuple[B, Any]:
        batch: B | None = None
        while batch is None:
            batch = await self._run(self._fresh(self._make(await self._run(self._claim()))))
        self._making = batch
        made = batch if self._collate is None else self._collate(batch)
        return batch, await made if inspect.isawaitable(made) else made


# calls


async def further(session: Session, deadline: Deadline) -> Connection:
    """Open one more connection. If the caller is cancelled, later calls use it."""
    opening = asyncio.get_running_loop().run_in_executor(None, handshake.further, session, deadline)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:

        def keep(opened: asyncio.Future[Connection]) -> None:
            if not opened.cancelled() and opened.exception() is None:
                session.connections.give_back(opened.result())

        opening.add_done_callback(keep)
        raise


async def offload(step: Offload) -> Any:
    """Run the work; large work runs in a thread. A cancelled task still waits until the thread has
    ended, because the thread writes into memory that must not be reused meanwhile."""
    if step.nbytes < OFFLOAD_BYTES:
        return step.work()
    working = asyncio.get_running_loop().run_in_executor(None, step.work)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            try:
                await asyncio.wait([working])
            except asyncio.CancelledError:
                continue
        raise


async def exchange(connection: Connection, frame: bytes, rid: int, deadline: Deadline) -> Body:
    """Send a request and return its reply, as `Connection.exchange` does."""
    try:
        body = answer(await _converse(connection, frame, deadline), rid)
    except BaseException as exc:
        connection.fail(exc)
        raise
    return unwrap(body)


async def _converse(connection: Connection, frame: bytes, deadline: Deadline) -> Reply:
    loop, sock = asyncio.get_running_loop(), connection.sock
    turns = connection.turns(deadline, GRACE_S)
    rest = memoryview(frame)
    while rest and (rest := rest[connection.send_some(rest) :]):
        await _ready(sock, loop.add_writer, loop.remove_writer, next(turns))
    while (reply := connection.arrived_reply()) is None:
        try:
            wait_s = next(turns)
        except DeadlineExceeded:
            if (reply := connection.take_reply()) is None:
                raise
            return reply
        await _ready(sock, loop.add_reader, loop.remove_reader, wait_s)
        # Not loop.sock_recv_into: a task that is cancelled as that has just received loses how
        # much, and with it the answer that the housekeeper must undo.
        with contextlib.suppress(BlockingIOError):
            connection.take()
    return reply


async def _ready(
    sock: socket.socket,
    add: Callable[..., object],
    remove: Callable[..., object],
    limit_s: float,
) -> None:
    """Until the loop finds it readable, or writable, or so long."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(limit_s, _set, ready)
    add(sock, _set, ready)
    try:
        await ready
    finally:
        timer.cancel()
        remove(sock)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
