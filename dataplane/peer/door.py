"""The local door: clients of this host, over a unix socket that only this user may open.

The peer speaks first (Welcome, with the arena's descriptors). A connection carries one request at a
time; when it closes, the request it carried is cancelled if it only waits. A bad frame ends that
connection and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, cast

from dataplane.errors import DataplaneError, InternalError, ProtocolError, VersionMismatch
from dataplane.peer.host import Host, call_deadline
from dataplane.peer.sessions import Session, Sessions
from dataplane.wire import frames, limits
from dataplane.wire.messages import (
    Body,
    Claim,
    Define,
    Done,
    Failed,
    Goodbye,
    Hello,
    HelloDone,
    Reply,
    Request,
    Reserve,
    Wait,
    Welcome,
)

log = logging.getLogger(__name__)

Handler = Callable[[Session, Request, Any], Body | Awaitable[Body]]
GRACE_S = 2.0
"""How long after a call's deadline other peers' answers are awaited: less than the client waits for
this peer's, so that it is told who did not answer."""
WAITING = (Claim, Reserve, Wait, Define)
"""Calls that only wait: cancelled when their connection closes. Others run to their end."""


class Door:
    """Listens on the socket, and calls one handler per type of body."""

    def __init__(
        self,
        host: Host,
        sessions: Sessions,
        handlers: dict[type[Body], Handler],
        unsent: Callable[[Session, Request, Body], None],
    ) -> None:
        self.host = host
        self.sessions = sessions
        self.handlers = handlers
        self.unsent = unsent
        """takes back what an answer hands out that nobody is there to receive"""
        self.connections: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, path: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(1024)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        task = asyncio.get_running_loop().create_task(self._greet(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _greet(self, sock: socket.socket) -> None:
        """Welcome and descriptors go out on the bare socket, then a transport takes over."""
        pid, uid, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        if uid not in (os.getuid(), 0) or len(self.connections) >= limits.MAX_CONNECTIONS:
            sock.close()
            return
        host = self.host
        welcome = Welcome(
            versions=(limits.PROTOCOL_VERSION_MIN, limits.PROTOCOL_VERSION),
            plane=host.plane,
            peer=host.name,
            incarnation=host.incarnation,
            arena_bytes=host.space.size_bytes,
            shards=limits.SHARDS,
            epoch=host.roster.epoch,
            max_frame_bytes=limits.MAX_FRAME_BYTES,
            max_rows=limits.MAX_ROWS_PER_MESSAGE,
        )
        sock.setblocking(False)
        try:
            socket.send_fds(
                sock, [frames.encode(Reply(0, welcome))], [host.arena.ro_fd, host.arena.rw_fd]
            )
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: Connection(self, pid), sock)
        except OSError:
            sock.close()

    async def close(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
        for connection in list(self.connections):
            connection.abort()


class Connection(asyncio.Protocol):
    """One connection: cuts frames, runs the handler, writes the reply."""

    def __init__(self, door: Door, pid: int) -> None:
        self._door = door
        self._pid = pid
        self._frames = frames.FrameReader()
        self._session: Session | None = None
        self._transport: asyncio.Transport | None = None
        self._running: dict[asyncio.Task[None], bool] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class
        self._door.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.connections.discard(self)
        self._transport = None
        for task, only_waits in list(self._running.items()):
            if only_waits:
                # Not before it has begun, or what its handler took would never be given back.
                asyncio.get_running_loop().call_soon(task.cancel)
        if self._session is not None:
            self._door.sessions.connection_lost(self._session)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._request(frames.decode_request(body))
        except ProtocolError as exc:
            log.warning("pid %d sent a bad frame: %s", self._pid, exc)
            self._send(0, failed(exc))
            if self._transport is not None:
                self._transport.close()

    def _request(self, request: Request) -> None:
        if self._session is None:
            self._answer(request.rid, self._hello(request.body))
            return
        if isinstance(request.body, Goodbye):
            self._door.sessions.goodbye(self._session)
            self._answer(request.rid, Done())
            return
        handler = self._door.handlers.get(type(request.body))
        if handler is None:
            raise ProtocolError(f"{type(request.body).__name__} is not for the local door")
        wait_s = request.deadline_ms / 1000 + GRACE_S if request.deadline_ms else math.inf
        call_deadline.set(self._door.host.now() + wait_s)
        try:
            outcome = handler(self._session, request, request.body)
        except Exception as exc:
            outcome = failed(exc)
        if isinstance(outcome, Body):
            self._answer(request.rid, outcome)
            return
        task = asyncio.ensure_future(self._finish(request, outcome))
        self._running[task] = isinstance(request.body, WAITING)
        task.add_done_callback(self._running.pop)

    async def _finish(self, request: Request, outcome: Awaitable[Body]) -> None:
        assert self._session is not None
        try:
            body = await outcome
        except Exception as exc:
            body = failed(exc)
        if self._transport is None or self._transport.is_closing():
            self._door.unsent(self._session, request, body)
        else:
            self._answer(request.rid, body)
        self._door.sessions.sweep(self._session)

    def _hello(self, body: Body) -> Body:
        if not isinstance(body, Hello):
            raise ProtocolError("the first message of a client is Hello")
        if not limits.PROTOCOL_VERSION_MIN <= body.version <= limits.PROTOCOL_VERSION:
            return failed(
                VersionMismatch(
                    f"this peer speaks versions {limits.PROTOCOL_VERSION_MIN} to "
                    f"{limits.PROTOCOL_VERSION}, the client {body.version}: install the same "
                    "release of dataplane on both sides"
                )
            )
        sessions = self._door.sessions
        try:
            if body.session:
                session = sessions.join(body.session, self._pid)
            else:
                session = sessions.open(self._pid, body.label)
        except DataplaneError as exc:
            return failed(exc)
        session.connections += 1
        self._session = session
        host = self._door.host
        return HelloDone(
            session=session.id,
            mint=[int(shard) for shard in host.roster.mint_shards(host.address)],
            share_bytes=host.space.share_bytes,
        )

    def _answer(self, rid: int, body: Body) -> None:
        if rid:
            self._send(rid, body)
        elif isinstance(body, Failed):
            log.info("a one-way message of pid %d failed: %s", self._pid, body.message)

    def _send(self, rid: int, body: Body) -> None:
        if self._transport is None:
            return
        try:
            frame = frames.encode(Reply(rid, body))  # type: ignore[arg-type]
        except ProtocolError as exc:
            frame = frames.encode(Reply(rid, failed(exc)))
        self._transport.write(frame)


def failed(exc: Exception) -> Failed:
    """The one place where an exception becomes a message."""
    if isinstance(exc, DataplaneError):
        return Failed(type(exc).__name__, exc.message, plain(exc.details))
    log.exception("a request failed by a bug of ours", exc_info=exc)
    return Failed(InternalError.__name__, f"{type(exc).__name__}: {exc}; see the peer's log")


def plain(value: Any) -> Any:
    """Details as MessagePack can carry them."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    if isinstance(value, bool | int | float | str | bytes | None):
        return value
    return str(value)
