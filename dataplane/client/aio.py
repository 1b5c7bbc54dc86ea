"""connect() and Plane on an event loop: the same operations, carried out with `await`.

Each call in flight has a connection of its own; cancelling the task closes it, which cancels the
call at the peer. Big copies run in the loop's executor. Works from several loops and threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from dataplane.client import arguments, checkpoint, core, reads, restore
from dataplane.client.aio_batch import Rows
from dataplane.client.aio_partition import Partition
from dataplane.client.connection import (
    LOOK_S,
    Connection,
    answer,
    no_answer,
    unwrap,
)
from dataplane.client.core import DEFAULT_TIMEOUT_S, Call, Handle, Offload, Operation, Step
from dataplane.client.devices import wish_of
from dataplane.client.handshake import further
from dataplane.client.housekeeping import Housekeeper
from dataplane.client.opening import open_session, reconnect
from dataplane.client.outgoing import Outgoing
from dataplane.client.ref import Ref
from dataplane.client.session import Session
from dataplane.client.stopped import is_stopped
from dataplane.errors import PeerLost
from dataplane.wire.messages import Body

OFFLOAD_BYTES = 1 << 20
"""Copies of at least this much leave the event loop."""

T = TypeVar("T")


def connect(
    name: str | None = None,
    *,
    run: str | None = None,
    fresh: bool = False,
    devices: str | None = None,
) -> Connecting:
    """As `dataplane.connect`: `await connect()`, or `async with connect() as plane`."""
    return Connecting(name, run, fresh, devices)


class Connecting:
    """A plane that is being connected to."""

    def __init__(self, name: str | None, run: str | None, fresh: bool, devices: str | None) -> None:
        self._open_session = partial(open_session, name, run, fresh, wish_of(devices))
        self._opened: Plane | None = None

    async def _open(self) -> Plane:
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(None, self._open_session)
        try:
            return Plane(await asyncio.shield(opening))
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise

    def __await__(self) -> Generator[Any, None, Plane]:
        return self._open().__await__()

    async def __aenter__(self) -> Plane:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._opened is not None:
            await self._opened.close()


def _close_unwanted(opening: asyncio.Future[Housekeeper]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close("connecting was cancelled")


class Runs:
    """Carries operations of a session out on whatever loop runs; a cancelled task's call ends at
    the peer too."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def run(self, operation: Operation[T]) -> T:
        """Carry out the steps of an operation on the running loop, and return its result."""
        outcome: Any = None
        failure: BaseException | None = None
        while True:
            try:
                step = operation.throw(failure) if failure else operation.send(outcome)
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                # An error that this frame kept would keep the frames of its traceback, this one
                # and the caller's, and so the batches in them, until the collector runs.
                outcome, failure = None, None
            try:
                outcome = await self._perform(step)
            except BaseException as exc:
                failure = exc

    async def _perform(self, step: Step) -> Any:
        return await (self._call(step) if isinstance(step, Call) else offload(step))

    async def _call(self, step: Call) -> Body:
        """On another connection to the same incarnation of the peer where one breaks."""
        session, began = self._session, time.monotonic()
        connection = session.connections.idle() or await _further(session, step.deadline_s)
        outgoing: Outgoing | None = None
        try:
            outgoing = Outgoing(session, step, began)
            while True:
                try:
                    return await exchange(
                        connection,
                        outgoing.frame,
                        outgoing.rid,
                        outgoing.limit_s(),
                        outgoing.grace_s,
                    )
                except PeerLost as exc:
                    outgoing.broke(exc)
                connection = await _further(session, outgoing.limit_s())
        finally:
            session.connections.give_back(connection)
            if outgoing is not None:
                outgoing.done()


class Plane(Runs):
    """One client of the plane. An async context manager; `await plane.close()` otherwise."""

    def __init__(self, keeper: Housekeeper) -> None:
        self._keeper = keeper
        super().__init__(keeper.session)
        weakref.finalize(self, keeper.desert).atexit = False

    @property
    def name(self) -> str:
        """The plane's name, which is its run's."""
        return self._session.plane

    @property
    def peer(self) -> str:
        """The name of the peer that this client is attached to."""
        return self._session.peer

    async def partition(
        self,
        name: str,
        stages: Mapping[str, Sequence[str]] | None = None,
        group_size: int | None = None,
        groups: int | None = None,
        free: str | None = None,
        replicas: int = 1,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Partition:
        """As `dataplane.Plane.partition`."""
        handle = Handle(self._session, arguments.text(name, "a partition"))
        definition = core.definition_of(stages, group_size, groups, free, replicas)
        if definition is not None:
            await self.run(handle.define(definition, core.Deadline(timeout)))
        return Partition(self.run, handle)

    async def partitions(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> list[str]:
        """As `dataplane.Plane.partitions`."""
        return await self.run(core.partitions(timeout))

    async def get(
        self,
        ref: Ref,
        fields: Sequence[str] | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> Rows:
        """The rows of a ref, from wherever they are. fields None: all of them."""
        handle = reads.handle_of(self._session, ref)
        found = await self.run(reads.read_ref(handle, ref, fields, timeout))
        return Rows(self.run, handle, *found)

    async def stats(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """What this peer holds, as nested dicts."""
        return await self.run(core.stats(None, timeout))

    async def metrics(self, *, timeout: float | None = DEFAULT_TIMEOUT_S) -> dict[str, float]:
        """As `dataplane.Plane.metrics`."""
        stats = await self.run(core.stats(None, timeout))
        return self._session.tally.take(stats)

    async def checkpoint(
        self, directory: str | os.PathLike[str], *, timeout: float | None = None
    ) -> None:
        """As `dataplane.Plane.checkpoint`; work on files is off the event loop."""
        await self.run(checkpoint.checkpoint(self._session, directory, timeout))

    async def restore(
        self, directory: str | os.PathLike[str], *, timeout: float | None = None
    ) -> list[str]:
        """As `dataplane.Plane.restore`; work on files is off the event loop."""
        return await self.run(restore.restore(self._session, directory, timeout))

    async def close(self) -> None:
        """Release leases and grants, and leave. Views in hand stay readable."""
        why = "this client was closed; call dataplane.aio.connect() for another"
        await asyncio.get_running_loop().run_in_executor(None, self._keeper.close, why)

    def __reduce__(self) -> Any:
        """As a `dataplane.Plane` is pickled."""
        return reconnect, (Plane, *self._session.origin)

    async def __aenter__(self) -> Plane:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = " closed" if self._session.closed else ""
        return f"<aio.Plane {self.name!r} at peer {self.peer!r}{state}>"


async def _further(session: Session, limit_s: float | None) -> Connection:
    """One more connection; if nobody waits for it any more, it is kept for later calls."""
    opening = asyncio.get_running_loop().run_in_executor(None, further, session, limit_s)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:

        def keep(opened: asyncio.Future[Connection]) -> None:
            if not opened.cancelled() and opened.exception() is None:
                session.connections.give_back(opened.result())

        opening.add_done_callback(keep)
        raise


async def offload(step: Offload) -> Any:
    """Run the work, off the loop where it is much. A cancelled task still waits for its end: the
    thread writes into memory that must not be given away meanwhile."""
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


async def exchange(
    connection: Connection,
    frame: bytearray,
    rid: int,
    limit_s: float | None,
    grace_s: float,
) -> Body:
    """As `Connection.exchange`."""
    watch = _Watch(connection)
    deadline: asyncio.TimerHandle | None = None
    try:
        async with asyncio.timeout(None if limit_s is None else limit_s + grace_s) as until:
            if limit_s is not None:
                loop = asyncio.get_running_loop()
                deadline = loop.call_later(limit_s, _end_if_stopped, connection, until)
            body = answer(await _converse(connection, frame), rid)
    except TimeoutError as exc:
        # Of the time-out above; DeadlineExceeded, which is one too, comes from nowhere in here.
        connection.leave()
        raise no_answer(connection.peer, limit_s or 0.0) from exc
    except BaseException as exc:
        connection.fail(exc)
        raise
    finally:
        watch.cancel()
        if deadline is not None:
            deadline.cancel()
    return unwrap(body)


def _end_if_stopped(connection: Connection, until: asyncio.Timeout) -> None:
    """At a call's deadline."""
    if is_stopped(connection.sock):
        until.reschedule(asyncio.get_running_loop().time())


async def _converse(connection: Connection, frame: bytearray) -> Any:
    loop, sock = asyncio.get_running_loop(), connection.sock
    await loop.sock_sendall(sock, frame)
    while (reply := connection.arrived_reply()) is None:
        await _readable(loop, sock)
        # Not loop.sock_recv_into: a task that is cancelled as that has just received loses how
        # much, and with it the answer that the housekeeper must undo.
        with contextlib.suppress(BlockingIOError):
            connection.count(sock.recv_into(connection.inbox.room()))
    return reply


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class _Watch:
    """Looks now and then, while a call waits, whether the peer runs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._started, self._look_s = self._loop.time(), LOOK_S
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        waited_s = self._loop.time() - self._started
        self._look_s = self._connection.look(waited_s, self._look_s)
        self._timer = self._loop.call_later(max(LOOK_S, self._look_s - waited_s), self._look)

    def cancel(self) -> None:
        self._timer.cancel()
