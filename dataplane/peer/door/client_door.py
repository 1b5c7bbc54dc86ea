"""The local door: a unix socket for clients of this host, which only this user may open.

The peer speaks first: it sends Welcome, with the arena's descriptors. When a connection closes,
the peer cancels the calls of that connection that only wait. An invalid frame closes its
connection and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from dataplane.errors import (
    BackPressure,
    ConnectError,
    DataplaneError,
    DeadlineExceeded,
    FrameTooLarge,
    LimitExceeded,
    PeerLost,
    ProtocolError,
    ShardFull,
    SpillFull,
    VersionMismatch,
    counted,
    mixed_releases,
)
from dataplane.metadata.shard.reasons import Subject
from dataplane.peer import descriptors
from dataplane.peer.failures import failed
from dataplane.peer.host import CallContext, Host, call_context
from dataplane.peer.net.router import WaitingCall
from dataplane.peer.notices import Telling
from dataplane.peer.operations import OPERATIONS, ClientHandler, Once, WaitLimit
from dataplane.peer.pipeline import MARGIN_S, Call
from dataplane.peer.sessions import Session, Sessions
from dataplane.peer.tasks import Tasks, begin
from dataplane.transport.limiter import ResourceLimiter
from dataplane.wire import frames, limits
from dataplane.wire.messages import (
    OVERDUE,
    UNHEARD,
    Body,
    Claim,
    Claimed,
    Failed,
    Hello,
    HelloDone,
    Notice,
    Reply,
    Request,
    Welcome,
)
from dataplane.wire.refusals import Refusals

log = logging.getLogger(__name__)

FULL_S = 0.1
"""Seconds in which the door accepts no client after file descriptors ran out."""
MAX_UNKNOWN = 8
"""Connections above the limit that have not sent Hello yet; most will be refused."""
AFTER_S = 0.4
"""Extra time for a call that waited for rows until its timeout, to copy their values or to find out
why there are none."""
FRAME_S = 30.0
"""How long a larger frame keeps its memory while it arrives."""
_NO_SPACE = {one.__name__ for one in (BackPressure, ShardFull, SpillFull)}


@dataclass(eq=False, repr=False)
class Door:
    """Accept clients on the socket and count the requests that they have in flight."""

    host: Host
    sessions: Sessions
    take_back: Callable[[Session, Request, Body], None]
    """takes back what a reply grants if the client is not there to receive it"""
    unpin: Callable[[Session, list[int]], None]
    is_over: Callable[[], bool]
    """called for a new client: whether this peer was already shutting down"""

    def __post_init__(self) -> None:
        self.handlers: dict[type[Body], ClientHandler] = {}
        self.observe: Callable[[Body, Body, float], None] | None = None
        """called for each answered call: request, reply, start time"""
        self.on_claimed: Callable[[Claim, Claimed], None] = lambda asked, claimed: None
        """called when a client gets rows that it claimed"""
        self.connections: set[Connection] = set()
        self.under_way: set[asyncio.Future[Any]] = set()
        """unanswered calls, also those of closed connections"""
        self.intake = ResourceLimiter(limits.MAX_BYTES_UNDER_WAY)
        self.refusals = Refusals(log, "local door")
        self._listener: socket.socket | None = None
        self._bound: os.stat_result | None = None
        self.spawn = Tasks().spawn

    @property
    def is_open(self) -> bool:
        return self._listener is not None

    def open(self, path: str) -> None:
        """Listen on a path. Listen again if another process has removed the socket's file."""
        self.shut()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(1024)
        self._listener, self._bound = listener, os.stat(path)
        self._admit()

    def is_at(self, path: Path) -> bool:
        """Whether the file at this path is still this door's socket, or the door is not open."""
        if self._listener is None or self._bound is None:
            return True
        try:
            return os.path.samestat(self._bound, path.stat())
        except OSError:
            return False

    def _admit(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        if len(self.connections) + self.sessions.watched >= self._room + MAX_UNKNOWN:
            self._wait_for_room(descriptors.short())
            return
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as exc:
            self._wait_for_room(str(exc))
            return
        self.spawn(self._greet(sock))

    def _wait_for_room(self, why: str) -> None:
        """Stop accepting for FULL_S: the listener would stay readable all the time."""
        assert self._listener is not None
        self.refusals.count(f"cannot accept another client: {why}")
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        loop.call_later(FULL_S, self._admit)

    @property
    def _room(self) -> int:
        """Descriptors that clients may take."""
        return descriptors.for_clients(len(self.host.roster.members))

    def check_room(self, session: Session | None) -> None:
        """Raise LimitExceeded unless file descriptors are left for one more client, or for one
        more connection of a session. Descriptors that present clients may still use are not
        available."""
        each = descriptors.OF_A_CLIENT
        taken = sum([max(one.connections, each - 1) for one in self.sessions])
        taken += self.sessions.watched
        if session is not None and session.connections < each - 1:
            return
        if taken + (each if session is None else 1) > self._room:
            what = "client" if session is None else "connection of this client"
            raise LimitExceeded(
                f"peer {self.host.name!r} cannot accept another {what}: it has "
                f"{counted(len(self.sessions), 'client')} and may open only {descriptors.limit()} "
                "file descriptors. Raise the limit with ulimit -n and restart the peer, "
                "or close unused clients",
                limit=descriptors.limit(),
            )

    async def _greet(self, sock: socket.socket) -> None:
        """Send Welcome and descriptors on the bare socket, then hand the socket to a transport."""
        pid, uid, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        if (refusal := self._refusal(uid)) is not None:
            self.refusals.count(f"pid {pid}: {refusal}")
            with sock, contextlib.suppress(OSError):
                sock.send(frames.encode(Reply(0, failed(refusal))))
            return
        host = self.host
        welcome = Welcome(
            versions=(limits.PROTOCOL_VERSION_MIN, limits.PROTOCOL_VERSION),
            plane=host.plane,
            peer=host.name,
            incarnation=host.incarnation,
            arena_bytes=host.space.size_bytes,
            max_frame_bytes=limits.MAX_FRAME_BYTES,
            max_rows=limits.MAX_ROWS_PER_MESSAGE,
            pools=host.pools,
            log=_log_path(),
            alone=host.solo,
            address=host.address,
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

    def _refusal(self, uid: int) -> DataplaneError | None:
        """Return the reason to refuse a process of this user, if any."""
        if uid not in (os.getuid(), 0):
            return ConnectError(
                f"peer {self.host.name!r} belongs to uid {os.getuid()} and does not "
                f"accept clients of uid {uid}: start a peer as uid {uid}",
                uid=uid,
            )
        if len(self.connections) >= limits.MAX_CONNECTIONS:
            return LimitExceeded(
                f"peer {self.host.name!r} already has {limits.MAX_CONNECTIONS} client "
                "connections, the maximum: close unused clients",
                limit=limits.MAX_CONNECTIONS,
            )
        return None

    def fill_in_hello(self, session: Session, done: HelloDone) -> None:
        """Fill in what a new client finds: how many other clients, or the rows that earlier
        clients left."""
        sessions, last = self.sessions, self.sessions.last
        done.clients = len(sessions) - 1
        if done.clients or last is None or last.is_of(session):
            return
        done.rows, done.left_by = self.host.rows, last.command or last.label
        done.left_ms = int((self.host.now() - sessions.last_seen) * 1e3)

    @property
    def is_deserted(self) -> bool:
        """Whether all clients have closed their connections, even if the peer has not read that
        yet."""
        open_ones = [one.fileno() for one in self.connections if one.is_joined]
        poll = select.poll()
        for descriptor in open_ones:
            poll.register(descriptor, select.POLLRDHUP)
        return len(poll.poll(0)) == len(open_ones)

    def shut(self) -> None:
        """Accept no new clients. A client that tries finds that this peer is leaving, and waits
        for another peer. Present clients stay connected."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    async def close(self, why: DataplaneError | None = None) -> None:
        """Close the door and every connection. Clients first receive the error `why`."""
        self.shut()
        for connection in list(self.connections):
            connection.end(why)


class Connection(asyncio.Protocol):
    """One connection: cuts the stream into requests, starts each, and writes the replies."""

    def __init__(self, door: Door, pid: int) -> None:
        self.door = door
        self._pid = pid
        self._frames = frames.FrameReader(limits.MAX_HELLO_BYTES)
        self._session: Session | None = None
        self._transport: asyncio.Transport | None = None
        self._running: dict[asyncio.Future[Any], bool] = {}
        self._inflow = Inflow(door.intake)
        self._is_untaken = False
        """the client does not read its replies"""

    @property
    def is_open(self) -> bool:
        """Whether the connection is not known to be closed."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_joined(self) -> bool:
        """Whether the connection belongs to a session and is not known to be closed."""
        return self._session is not None and self.is_open

    def fileno(self) -> int:
        """The file descriptor of an open connection."""
        assert self._transport is not None
        return cast(socket.socket, self._transport.get_extra_info("socket")).fileno()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class
        # Write replies at once: uvloop would buffer them for another turn of the loop.
        self._transport.set_write_buffer_limits(high=0)
        self._inflow.transport = self._transport
        self.door.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.door.connections.discard(self)
        self._transport = self._inflow.transport = None
        self._inflow.arrived()
        for task, only_waits in list(self._running.items()):
            if only_waits:
                task.cancel()
        if self._session is not None:
            self.door.sessions.connection_lost(self._session)

    def end(self, why: DataplaneError | None) -> None:
        if why is not None:
            self.send(0, failed(why))
        if self._transport is not None:
            self._transport.close() if why else self._transport.abort()

    def data_received(self, data: bytes) -> None:
        arriving = self._frames
        try:
            arriving.add(data)
            while arriving.held and not self._is_untaken and (body := arriving.next()) is not None:
                if self._inflow.arriving is not None:
                    self._inflow.arrived()
                self._request(frames.decode_request(body))
        except ProtocolError as exc:
            self.door.refusals.count(f"invalid frame from the client with pid {self._pid}: {exc}")
            self.send(0, failed(exc))
            if self._transport is not None:
                self._transport.close()
        if arriving.awaited_bytes > limits.MAX_HELLO_BYTES and self._inflow.arriving is None:
            self.door.spawn(self._inflow.let_in(arriving.awaited_bytes))

    def pause_writing(self) -> None:
        """Stop reading requests from a client that does not read its replies."""
        self._is_untaken = True
        self._inflow.hold("answers")

    def resume_writing(self) -> None:
        self._is_untaken = False
        self._inflow.go_on("answers")
        self.data_received(b"")  # requests that arrived during the pause

    def _request(self, request: Request) -> None:
        body, door, session = request.body, self.door, self._session
        if session is None:
            self.send(request.rid, self._hello(body))
            return
        kind = type(body)
        handler = door.handlers.get(kind)
        if handler is None:
            raise mixed_releases(f"clients may not send {kind.__name__} messages")
        if self._running and len(self._running) >= limits.MAX_REQUESTS_PER_CONNECTION:
            raise ProtocolError(
                f"this connection already has {len(self._running)} requests in flight, the "
                "maximum: wait for a reply before you send another request",
                limit=limits.MAX_REQUESTS_PER_CONNECTION,
            )
        host, operation = door.host, OPERATIONS[kind]
        began = host.now()
        if operation.waits is WaitLimit.TIMEOUT:
            until = began + _waits_s(body)
        else:
            until = began + request.deadline_ms / 1000 if request.deadline_ms else math.inf
        call_context.set(
            CallContext(until, self._notice, body.stage if isinstance(body, Claim) else "")
        )
        held = operation.is_held(body)
        call = _Call(host, operation, until, held, self, session, request, handler, began)
        task = begin(call.serve())
        if task is not None:
            self._running[task] = operation.waits is not WaitLimit.NO
            door.under_way.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.door.under_way.discard(task)
        del self._running[task]
        if self._session is not None:
            self.door.sessions.sweep(self._session)

    def _hello(self, body: Body) -> Body:
        if not isinstance(body, Hello):
            raise mixed_releases(
                f"the first message from a client must be Hello, got {type(body).__name__}"
            )
        try:
            session = self._session_of(body)
        except DataplaneError as exc:
            return failed(exc)
        session.connections += 1
        self._session = session
        self._frames.limit_bytes = limits.MAX_FRAME_BYTES
        done = HelloDone(session.id, self.door.host.space.quota_bytes)
        if not body.session:
            self.door.fill_in_hello(session, done)
        return done

    def _session_of(self, body: Hello) -> Session:
        """Return the session that a client opens or joins. Raise VersionMismatch, PeerLost, or
        ClientClosed for a session that has ended."""
        host, sessions = self.door.host, self.door.sessions
        if not limits.PROTOCOL_VERSION_MIN <= body.version <= limits.PROTOCOL_VERSION:
            raise VersionMismatch(
                f"this peer speaks protocol versions {limits.PROTOCOL_VERSION_MIN} to "
                f"{limits.PROTOCOL_VERSION}, but the client speaks version {body.version}: "
                "install the same dataplane release everywhere"
            )
        if body.session:
            session = sessions.join(body.session, self._pid, body.pid)
            self.door.check_room(session)
            return session
        if self.door.is_over() or not self.door.is_open:
            raise PeerLost(
                f"peer {host.name!r} was shutting down when this client connected: call "
                "dataplane.connect() again to find or start another peer",
                peer=host.name,
            )
        self.door.check_room(None)
        return sessions.open(self._pid, body)

    def _notice(self, text: str) -> None:
        self.send(0, Notice(text))

    def send(self, rid: int, body: Body) -> bool:
        """Send a reply. `rid` 0 answers no request. Return False if the reply was too large for
        a frame; the client then received FrameTooLarge instead."""
        if self._transport is None:
            return True
        self.door.host.sent_local[type(body).__name__] += 1
        try:
            self._transport.write(frames.encode(Reply(rid, body)))  # type: ignore[arg-type]
        except FrameTooLarge as exc:
            too_large = FrameTooLarge(
                f"the reply would be {exc.details['size']} bytes long, over the limit of "
                f"{limits.MAX_FRAME_BYTES}: read fewer rows per call. Reading fewer "
                "fields may not help, because the small values of a row are sent together",
                **exc.details,
            )
            self._transport.write(frames.encode(Reply(rid, failed(too_large))))
            return False
        return True


class _Call(Call):
    """A request of a client."""

    connection: Connection
    session: Session
    request: Request
    handler: ClientHandler
    began: float

    def is_admitted(self) -> bool:
        """Whether this peer is sure that no other peer serves its partitions."""
        session = self.session
        session.check()
        if self.request.unpin:
            self.connection.door.unpin(session, self.request.unpin)
        if not self.held:
            return True
        serving = self.host.serving
        return not serving.waiting and serving.is_sure()

    async def admission(self) -> None:
        """Wait until this peer may serve its partitions. The wait counts towards the call's
        deadline."""
        body, serving = self.request.body, self.host.serving
        partition = getattr(body, "partition", "")
        what = f"a call on partition {partition!r}" if partition else "a call"
        try:
            with Telling(self.host, what, Subject("call"), lambda: (serving.reason, {})):
                await serving.until_sure(self.until)
        except DataplaneError as exc:
            exc.details[UNHEARD] = True
            raise
        delayed_s = self.host.now() - self.began
        call_context.set(msgspec.structs.replace(call_context.get(), delayed_s=delayed_s))
        if isinstance(body, WaitingCall) and body.timeout_ms > 0:
            left_ms = body.timeout_ms - int(delayed_s * 1000)
            left = msgspec.structs.replace(body, timeout_ms=max(0, left_ms))
            self.request = msgspec.structs.replace(self.request, body=left)

    def handle(self) -> Body | Awaitable[Body]:
        if self.operation.once is Once.NO or not self.request.op:
            return self._start()
        return self.session.repeats.run(self.request, self.operation, self._start)

    def _start(self, unpin: int = 0) -> Body | Awaitable[Body]:
        if unpin:
            self.connection.door.unpin(self.session, [unpin])
        return self.handler(self.session, self.request, self.request.body)

    def may_leave(self, reply: Body) -> bool:
        if not self.held or (self.host.progress.is_settled and self.host.serving.is_sure()):
            return True
        # Such a call changed nothing, and its user needs the reason most while the backup is
        # silent.
        return isinstance(reply, Failed) and reply.code in _NO_SPACE

    def is_served_here(self) -> bool:
        """Whether this peer serves the call's partition. Otherwise its owner checks the reply."""
        partition = getattr(self.request.body, "partition", "")
        return self.held and (not partition or self.host.serves(partition))

    def take_back(self, reply: Body) -> None:
        self.connection.door.take_back(self.session, self.request, reply)

    def _of_failure(self, reply: Failed) -> Failed:
        """Return an error as the client gets it. If a slow peer did not answer until the call's own
        deadline, that is DeadlineExceeded. An error of a one-way message is logged."""
        if OVERDUE in reply.details:
            is_over = self.host.now() > self.until - MARGIN_S
            code = DeadlineExceeded.__name__ if is_over else reply.code
            details = {name: value for name, value in reply.details.items() if name != OVERDUE}
            reply = Failed(code, reply.message, details)
        if not self.request.rid:
            log.info(
                "could not handle a one-way message from client %s: %s",
                self.session.label,
                reply.message,
            )
        return reply

    def answer(self, reply: Body) -> None:
        connection, request = self.connection, self.request
        door, kind = connection.door, type(reply)
        if not connection.is_open:
            self.take_back(reply)
            return
        if kind is Claimed:
            door.on_claimed(request.body, reply)  # type: ignore[arg-type]
        elif kind is Failed:
            reply = self._of_failure(reply)  # type: ignore[arg-type]
        if request.rid and not connection.send(request.rid, reply):
            self.take_back(reply)
        if door.observe is not None:
            door.observe(request.body, reply, self.began)


class Inflow:
    """Flow control of one connection: when the peer reads it, and why it is paused.

    A large frame is read once the frames in flight leave enough memory. A frame that stalls halfway
    gives up its memory to others. The connection stays open, because its client may only be
    stopped.
    """

    def __init__(self, intake: ResourceLimiter) -> None:
        self.transport: asyncio.Transport | None = None
        self._intake = intake
        self.arriving: asyncio.Event | None = None
        """set when the larger frame in progress is complete"""
        self._held: set[str] = set()

    def let_in(self, nbytes: int) -> Coroutine[Any, Any, None]:
        """Note that a larger frame starts. Reading runs until the frame is complete."""
        self.arriving = asyncio.Event()
        return self._let_in(nbytes, self.arriving)

    async def _let_in(self, nbytes: int, whole: asyncio.Event) -> None:
        self.hold("no room")
        await self._intake.acquire(nbytes)
        try:
            self.go_on("no room")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(whole.wait(), FRAME_S)
        finally:
            self._intake.release(nbytes)

    def arrived(self) -> None:
        """Note that a frame is complete, or that no more bytes arrive."""
        if self.arriving is not None:
            self.arriving.set()
            self.arriving = None

    def hold(self, why: str) -> None:
        if not self._held and self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
        self._held.add(why)

    def go_on(self, why: str) -> None:
        if why not in self._held:
            return
        self._held.discard(why)
        if not self._held and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()


def _log_path() -> str:
    """Return the file that this process logs to, or "" if there is none or it was removed."""
    try:
        path = os.readlink("/proc/self/fd/2")
        return path if stat.S_ISREG(os.fstat(2).st_mode) and os.path.exists(path) else ""
    except OSError:
        return ""


def _waits_s(body: Any) -> float:
    """Return how long a waiting call may take, from its arrival. Its handler ends the call. If it
    does not, the client does."""
    waits_ms: int = body.timeout_ms
    return waits_ms / 1000 + AFTER_S if waits_ms >= 0 else math.inf
