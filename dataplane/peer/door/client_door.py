"""The local door: clients of this host, over a unix socket that only this user may open.

The peer speaks first (Welcome, with the arena's descriptors). When a
connection closes, what it carried is cancelled if it only waits. A bad frame ends that connection
and nothing else.
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
    ConnectError,
    DataplaneError,
    FrameTooLarge,
    LimitExceeded,
    PeerLost,
    ProtocolError,
    VersionMismatch,
)
from dataplane.peer import descriptors
from dataplane.peer.failures import failed
from dataplane.peer.host import Host, call_deadline, call_notice, call_stage
from dataplane.peer.net.router import WaitingCall
from dataplane.peer.sessions import Session, Sessions
from dataplane.peer.tasks import Tasks
from dataplane.transport.limiter import ResourceLimiter
from dataplane.wire import frames, limits
from dataplane.wire.messages import (
    UNHEARD,
    Admit,
    Body,
    Claim,
    Claimed,
    Define,
    Failed,
    Hello,
    HelloDone,
    Losses,
    Notice,
    Reply,
    Request,
    Reserve,
    Stats,
    Wait,
    Welcome,
)
from dataplane.wire.refusals import Refusals

log = logging.getLogger(__name__)

Handler = Callable[[Session, Request, Any], Body | Awaitable[Body]]
FULL_S = 0.1
"""How long nobody is accepted when no descriptor is left for clients."""
MAX_UNKNOWN = 8
"""Connections beyond that which have not said yet whose they are; most are refused and go."""
CONFIRM_S = 30.0
"""How long a call without a deadline of its own waits for the backup."""
WAITING = frozenset({Claim, Wait, Losses, Admit, Define, Reserve})
"""Calls that only wait: cancelled when their connection closes. Others run to their end."""
AFTER_S = 0.4
"""A call that waited for rows until its end may still take so long to bring their values, or to
find out why there are none."""
FRAME_S = 30.0
"""How long a larger frame keeps the room that it was given while it arrives."""


@dataclass(eq=False, repr=False)
class Door:
    """Listens on the socket, and calls one handler per type of body."""

    host: Host
    sessions: Sessions
    handlers: dict[type[Body], Handler]
    unsent: Callable[[Session, Request, Body], None]
    """takes back what an answer hands out that nobody is there to receive"""
    unpin: Callable[[Session, list[int]], None]
    is_over: Callable[[], bool]
    """asked as a new client comes: whether this peer was about to end before it did"""

    def __post_init__(self) -> None:
        self.observe: Callable[[Body, Body, float], None] | None = None
        """told of each call that was answered: request, answer, when it began"""
        self.on_claimed: Callable[[Claim, Claimed], None] = lambda asked, claimed: None
        """called as a client gets rows that it claimed"""
        self.connections: set[Connection] = set()
        self.under_way: set[asyncio.Future[Any]] = set()
        """calls that are not answered yet, also of connections that closed"""
        self.intake = ResourceLimiter(limits.MAX_BYTES_UNDER_WAY)
        self.refusals = Refusals(log, "local door")
        self._listener: socket.socket | None = None
        self._bound: os.stat_result | None = None
        self.spawn = Tasks().spawn

    @property
    def is_open(self) -> bool:
        return self._listener is not None

    def open(self, path: str) -> None:
        """Listen at a path; also anew, where somebody has removed the socket's file."""
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
        """Whether it needs no file at this path, or its socket's is still there."""
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
        """Accept nobody for a while: the listener would stay readable all the time."""
        assert self._listener is not None
        self.refusals.count(f"no new client can be accepted: {why}")
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        loop.call_later(FULL_S, self._admit)

    @property
    def _room(self) -> int:
        """Descriptors that clients may take."""
        return descriptors.for_clients(len(self.host.roster.members))

    def check_room(self, session: Session | None) -> None:
        """LimitExceeded unless there are descriptors for one more client, or for one more
        connection of a session. What those that are here may still take is theirs."""
        each = descriptors.OF_A_CLIENT
        taken = sum([max(one.connections, each - 1) for one in self.sessions])
        taken += self.sessions.watched
        if session is not None and session.connections < each - 1:
            return
        if taken + (each if session is None else 1) > self._room:
            what = "client" if session is None else "connection of this client"
            raise LimitExceeded(
                f"this peer cannot serve another {what}: it has {len(self.sessions)} "
                f"clients and may open only {descriptors.limit()} file descriptors. Raise "
                "its limit (ulimit -n) and restart it, or close unused clients",
                limit=descriptors.limit(),
            )

    async def _greet(self, sock: socket.socket) -> None:
        """Welcome and descriptors go out on the bare socket, then a transport takes over."""
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
            shards=limits.SHARDS,
            epoch=host.roster.epoch,
            max_frame_bytes=limits.MAX_FRAME_BYTES,
            max_rows=limits.MAX_ROWS_PER_MESSAGE,
            max_requests=limits.MAX_REQUESTS_PER_CONNECTION,
            pools=host.pools,
            log=_log_path(),
            alone=host.solo,
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
        """Why a process of this user is not let in."""
        if uid not in (os.getuid(), 0):
            return ConnectError(
                f"this peer belongs to uid {os.getuid()} and serves no client of uid {uid}: start "
                "a peer of your own",
                uid=uid,
            )
        if len(self.connections) >= limits.MAX_CONNECTIONS:
            return LimitExceeded(
                f"this peer has {limits.MAX_CONNECTIONS} connections, which is the limit: "
                "close unused clients",
                limit=limits.MAX_CONNECTIONS,
            )
        return None

    def tell_what_is_there(self, session: Session, done: HelloDone) -> None:
        """What a new client finds: other clients, or rows that clients have left."""
        sessions, last = self.sessions, self.sessions.last
        done.clients = len(sessions) - 1
        if done.clients or last is None or last.is_of(session):
            return
        done.rows, done.left_by = self.host.rows, last.command or last.label
        done.left_ms = int((self.host.now() - sessions.last_seen) * 1e3)

    @property
    def is_deserted(self) -> bool:
        """Whether all clients have closed their connections, also where that was not read yet."""
        open_ones = [one.fileno() for one in self.connections if one.is_joined]
        poll = select.poll()
        for descriptor in open_ones:
            poll.register(descriptor, select.POLLRDHUP)
        return len(poll.poll(0)) == len(open_ones)

    def shut(self) -> None:
        """No client comes any more: who tries finds that this peer leaves, and waits for another
        one. Those that are here stay."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    async def close(self, why: DataplaneError | None = None) -> None:
        """why: what clients are told first."""
        self.shut()
        for connection in list(self.connections):
            connection.end(why)


class Connection(asyncio.Protocol):
    """One connection: cuts frames, runs the handler, writes the reply."""

    def __init__(self, door: Door, pid: int) -> None:
        self._door = door
        self._pid = pid
        self._frames = frames.FrameReader(limits.MAX_HELLO_BYTES)
        self._session: Session | None = None
        self._transport: asyncio.Transport | None = None
        self._running: dict[asyncio.Future[Any], bool] = {}
        self._inflow = Inflow(door.intake)
        self._is_untaken = False
        """the client does not take its answers"""

    @property
    def is_joined(self) -> bool:
        """It is a session's, and not known to be closed."""
        transport = self._transport
        return self._session is not None and transport is not None and not transport.is_closing()

    def fileno(self) -> int:
        """Of an open one."""
        assert self._transport is not None
        return cast(socket.socket, self._transport.get_extra_info("socket")).fileno()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class
        # Answers go at once: uvloop keeps what may be kept, and looks for events once more for it.
        self._transport.set_write_buffer_limits(high=0)
        self._inflow.transport = self._transport
        self._door.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.connections.discard(self)
        self._transport = self._inflow.transport = None
        self._inflow.arrived()
        for task, only_waits in list(self._running.items()):
            if only_waits:
                # Not before it has begun, or what its handler took would never be given back.
                asyncio.get_running_loop().call_soon(task.cancel)
        if self._session is not None:
            self._door.sessions.connection_lost(self._session)

    def end(self, why: DataplaneError | None) -> None:
        if why is not None:
            self._send(0, failed(why))
        if self._transport is not None:
            self._transport.close() if why else self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                if self._inflow.is_arriving:
                    self._inflow.arrived()
                self._request(frames.decode_request(body))
                if self._is_untaken:
                    return  # what else has come stays in the reader
        except ProtocolError as exc:
            self._door.refusals.count(f"a frame of pid {self._pid}: {exc}")
            self._send(0, failed(exc))
            if self._transport is not None:
                self._transport.close()
        awaited_bytes = self._frames.awaited_bytes
        if awaited_bytes > limits.MAX_HELLO_BYTES and not self._inflow.is_arriving:
            self._door.spawn(self._inflow.let_in(awaited_bytes))

    def pause_writing(self) -> None:
        """A client that does not take its answers asks nothing more."""
        self._is_untaken = True
        self._inflow.hold("answers")

    def resume_writing(self) -> None:
        self._is_untaken = False
        self._inflow.go_on("answers")
        self.data_received(b"")  # what had come by then

    def _request(self, request: Request) -> None:
        if self._session is None:
            self._answer(request.rid, self._hello(request.body))
            return
        handler = self._door.handlers.get(type(request.body))
        if handler is None:
            raise ProtocolError(f"{type(request.body).__name__} is not accepted from clients")
        if len(self._running) >= limits.MAX_REQUESTS_PER_CONNECTION:
            raise ProtocolError(
                f"{len(self._running)} requests of one connection are in flight, which is "
                "the limit",
                limit=limits.MAX_REQUESTS_PER_CONNECTION,
            )
        began = self._door.host.now()
        call_deadline.set(began + _limit_s(request))
        call_notice.set(self._notice)
        call_stage.set(request.body.stage if isinstance(request.body, Claim) else "")
        try:
            self._session.check()
            if request.unpin:
                self._door.unpin(self._session, request.unpin)
            serving = self._door.host.serving
            if _is_of_the_peer(request.body) or (serving.is_sure() and not serving.waiting):
                outcome = handler(self._session, request, request.body)
            else:
                outcome = self._later(handler, request, began)
        except Exception as exc:
            outcome = failed(exc)
        if isinstance(outcome, Body) and self._door.host.progress.is_settled:
            self._answer_call(request, outcome, began)
            return
        work = self._to_its_end(request, outcome, began)
        call = asyncio.get_running_loop().create_task(work)
        self._running[call] = type(request.body) in WAITING
        self._door.under_way.add(call)
        call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._door.under_way.discard(call)
        del self._running[call]

    async def _to_its_end(
        self, request: Request, outcome: Body | Awaitable[Body], began: float
    ) -> None:
        """Answered as soon as it is carried out, and the backup has all that was done. Where it is
        cancelled before that, its handler gives back what it took."""
        session, progress = self._session, self._door.host.progress
        assert session is not None
        try:
            body = outcome if isinstance(outcome, Body) else await _answer_of(outcome)
            try:
                until = min(call_deadline.get(), self._door.host.now() + CONFIRM_S)
                if not progress.is_settled:
                    await progress.reached(until)
                if self._is_of_here(request.body):
                    await self._door.host.serving.until_sure(until)
            except BaseException as exc:
                self._door.unsent(session, request, body)
                if not isinstance(exc, Exception):
                    raise
                body = failed(exc)
            if self._transport is None or self._transport.is_closing():
                self._door.unsent(session, request, body)
            else:
                self._answer_call(request, body, began)
        finally:
            self._door.sessions.sweep(session)

    def _is_of_here(self, body: Body) -> bool:
        """Whether this peer may serve the shard that the answer comes from: then another one may
        serve it by now. What another peer's shard said that peer has made sure of."""
        if _is_of_the_peer(body):
            return False
        partition = getattr(body, "partition", "")
        return not partition or self._door.host.serves(partition)

    async def _later(self, handler: Handler, request: Request, began: float) -> Body:
        """As soon as it is sure that nobody else serves what this peer does. What a call waits
        until then is of its own time."""
        assert self._session is not None
        try:
            await self._door.host.serving.until_sure(call_deadline.get())
        except DataplaneError as exc:
            exc.details[UNHEARD] = True
            raise
        body = request.body
        if isinstance(body, WaitingCall) and body.timeout_ms > 0:
            left_ms = body.timeout_ms - int((self._door.host.now() - began) * 1000)
            body = msgspec.structs.replace(body, timeout_ms=max(0, left_ms))
        outcome = handler(self._session, request, body)
        return outcome if isinstance(outcome, Body) else await _end_of(outcome)

    def _hello(self, body: Body) -> Body:
        if not isinstance(body, Hello):
            raise ProtocolError("the first message of a client must be Hello")
        try:
            session = self._session_of(body)
        except DataplaneError as exc:
            return failed(exc)
        session.connections += 1
        self._session = session
        self._frames.limit_bytes = limits.MAX_FRAME_BYTES
        done = HelloDone(session.id, self._door.host.space.share_bytes)
        if not body.session:
            self._door.tell_what_is_there(session, done)
        return done

    def _session_of(self, body: Hello) -> Session:
        """VersionMismatch, PeerLost; ClientClosed for a session that has ended."""
        host, sessions = self._door.host, self._door.sessions
        if not limits.PROTOCOL_VERSION_MIN <= body.version <= limits.PROTOCOL_VERSION:
            raise VersionMismatch(
                f"this peer speaks protocol versions {limits.PROTOCOL_VERSION_MIN} to "
                f"{limits.PROTOCOL_VERSION}, the client speaks version {body.version}: install the "
                "same release of dataplane on both sides"
            )
        if body.session:
            session = sessions.join(body.session, self._pid, body.pid)
            self._door.check_room(session)
            return session
        if self._door.is_over() or not self._door.is_open:
            raise PeerLost(
                f"peer {host.name!r} was shutting down when this client connected: call "
                "dataplane.connect() again, which finds or starts another",
                peer=host.name,
            )
        self._door.check_room(None)
        return sessions.open(self._pid, body)

    def _notice(self, text: str) -> None:
        self._send(0, Notice(text))

    def _answer_call(self, request: Request, body: Body, began: float) -> None:
        if isinstance(body, Claimed) and isinstance(request.body, Claim):
            self._door.on_claimed(request.body, body)
        if not self._answer(request.rid, body):
            assert self._session is not None
            self._door.unsent(self._session, request, body)
        if self._door.observe is not None:
            self._door.observe(request.body, body, began)

    def _answer(self, rid: int, body: Body) -> bool:
        """As `_send`."""
        if rid:
            return self._send(rid, body)
        if isinstance(body, Failed):
            log.info("client pid %d: a one-way message failed: %s", self._pid, body.message)
        return True

    def _send(self, rid: int, body: Body) -> bool:
        """False where it is too large for a frame, and that was told instead."""
        if self._transport is None:
            return True
        self._door.host.sent_local[type(body).__name__] += 1
        try:
            frame = frames.encode(Reply(rid, body))  # type: ignore[arg-type]
        except FrameTooLarge as exc:
            too_large = FrameTooLarge(
                f"the answer would need a message of {exc.details['size']} bytes, and the "
                f"limit is {limits.MAX_FRAME_BYTES}: read fewer rows at a time, or fewer "
                "fields with fields=",
                **exc.details,
            )
            self._transport.write(frames.encode(Reply(rid, failed(too_large))))
            return False
        self._transport.write(frame)
        return True


class Inflow:
    """When one connection is read, and why not at the moment.

    A larger frame is read when all that are on their way have room. One that stops on its way gives
    its room to others: its sender may be frozen, and what it holds must not end for that.
    """

    def __init__(self, intake: ResourceLimiter) -> None:
        self.transport: asyncio.Transport | None = None
        self._intake = intake
        self._arriving: asyncio.Event | None = None
        """set when the larger frame that is coming in is whole"""
        self._held: set[str] = set()

    @property
    def is_arriving(self) -> bool:
        """Whether a larger frame is on its way."""
        return self._arriving is not None

    def let_in(self, nbytes: int) -> Coroutine[Any, Any, None]:
        """A larger frame begins: to be run until it is whole."""
        self._arriving = asyncio.Event()
        return self._let_in(nbytes, self._arriving)

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
        """A frame is whole, or none comes any more."""
        if self._arriving is not None:
            self._arriving.set()
            self._arriving = None

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
    """The file that this process logs to; "" where that is none, or was removed."""
    try:
        path = os.readlink("/proc/self/fd/2")
        return path if stat.S_ISREG(os.fstat(2).st_mode) and os.path.exists(path) else ""
    except OSError:
        return ""


async def _answer_of(outcome: Awaitable[Body]) -> Body:
    try:
        return await _end_of(outcome)
    except Exception as exc:
        return failed(exc)


async def _end_of(outcome: Awaitable[Body]) -> Body:
    """Also where this is cancelled as that has ended already, and gives nothing back itself any
    more: the answer, which is nobody's."""
    try:
        return await outcome
    except asyncio.CancelledError:
        if isinstance(outcome, asyncio.Future) and outcome.done() and not outcome.cancelled():
            ended: Body = outcome.result()
            return ended
        raise


def _is_of_the_peer(body: Body) -> bool:
    """Whether the answer is about the peer itself: true also while another one may serve its
    shards. Whoever ends a run or looks at it must be told who uses it."""
    return isinstance(body, Stats) and not body.partition


def _limit_s(request: Request) -> float:
    """How long a call may take, from its arrival on. Its handler says when that is over; for one
    that does not, the client does."""
    if isinstance(request.body, WaitingCall):
        waits_ms = request.body.timeout_ms
        return waits_ms / 1000 + AFTER_S if waits_ms >= 0 else math.inf
    return request.deadline_ms / 1000 if request.deadline_ms else math.inf
