"""A client's side of the local door, on a simulated machine of its own: lines, calls, repetitions.

As the real client: one call at a time on a line, an operation id for each, sent again on a new line
where the one before broke.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any, TypeVar, cast

from dataplane.errors import ClientClosed, DeadlineExceeded, PeerLost, from_wire
from dataplane.peer.door.client_door import Connection
from dataplane.peer.peer import Peer
from dataplane.wire import frames, limits
from dataplane.wire import messages as m
from dataplane.wire.tables import Owner
from tests.simulation.cluster import Cluster, Place
from tests.simulation.loop import Machine

NOBODY = 1 << 30
"""No process has this id, so that its connections alone are watched."""
REPEATS = 8
GRACE_S = 1.0
MOVES_S = 3.0
"""A client whose host has no peer for so long goes to another one."""
LATE_S = 0.6
"""A call whose peer runs is answered so soon after its deadline, with whatever."""

B = TypeVar("B", bound=m.Body)
_numbers = itertools.count(1)


class _Served(Connection):
    """Told apart by a number, so that sets of them have one order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.number = next(_numbers)

    def __hash__(self) -> int:
        return self.number


class Line:
    """One connection. To the peer it is the transport."""

    def __init__(self, client: Client, peer: Peer, machine: Machine) -> None:
        self.client = client
        self.machine = machine
        self.answers: dict[int, asyncio.Future[m.Body]] = {}
        self.lost = False
        self._loop = client.cluster.loop
        self._closed = False
        self._door = peer.door
        self._served = _Served(peer.door, NOBODY)
        self._reader = frames.FrameReader()
        self._last = 0.0
        client.cluster.lines.append(self)
        self._to_peer(self._connected)

    def _to_peer(self, what: Any, *args: Any) -> None:
        self._last = max(self._last + 1e-6, self._loop.now + 50e-6)
        self._loop.call_on(self.machine, self._last - self._loop.now, what, *args)

    def _connected(self) -> None:
        if self._door.is_open:
            self._served.connection_made(self)  # type: ignore[arg-type]
        else:
            self._closed = True
            self.break_off()

    # the client's side

    def send(self, frame: bytes) -> None:
        self._to_peer(self._arrived, bytes(frame))

    def hang_up(self) -> None:
        self.lost = True
        self._to_peer(self._gone)

    def break_off(self) -> None:
        """The peer's process died, or this connection did."""
        if self.lost:
            return
        self.lost = True
        self._to_peer(self._gone)
        self._loop.call_on(self.client.machine, 50e-6, self._fail)

    def _fail(self) -> None:
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(PeerLost("the line broke"))

    def _received(self, data: bytes) -> None:
        for body in self._reader.feed(data):
            reply = frames.decode_reply(body)
            answer = self.answers.get(reply.rid)
            if answer is not None and not answer.done():
                answer.set_result(reply.body)

    # the peer's side

    def _arrived(self, data: bytes) -> None:
        if not self._closed:
            self._served.data_received(data)

    def _gone(self) -> None:
        if not self._closed:
            self._closed = True
            self._served.connection_lost(None)

    def write(self, data: bytes | bytearray) -> None:
        if self.client.cluster.loses_answer():
            self.break_off()
        elif not self.lost:
            self._loop.call_on(self.client.machine, 50e-6, self._received, bytes(data))

    def close(self) -> None:
        self.break_off()

    abort = close

    def is_closing(self) -> bool:
        return self._closed

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class Client:
    """One client process on a host. Opened again after its peer died, as a user would."""

    def __init__(self, cluster: Cluster, place: Place, name: str) -> None:
        self.cluster = cluster
        self.place = place
        self.name = name
        self.machine = cluster.loop.machine(name)
        self.peer: Peer | None = None
        self.session = 0
        self._anchor: Line | None = None
        self._line: Line | None = None
        self._ops = itertools.count(1)
        self._untold: list[m.Body] = []

    def __repr__(self) -> str:
        return f"<client {self.name} on {self.place.name}, session {self.session:x}>"

    @property
    def owner(self) -> Owner:
        assert self.peer is not None
        return self.peer.host.owner

    @property
    def alive(self) -> bool:
        """It and its session, as far as can be told from here."""
        anchored = self._anchor is not None and not self._anchor.lost
        return not self.machine.crashed and anchored

    async def connect(self) -> None:
        """A new session, as soon as a peer serves here; at another host where that takes long."""
        self._line = None
        self._untold.clear()
        end = self.cluster.loop.now + MOVES_S
        while not self.place.lets_in or not self.place.machine.runs:
            await asyncio.sleep(0.05)
            others = [place for place in self.cluster.places if place.lets_in]
            if self.cluster.loop.now > end and others:
                self.place = self.cluster.rng.choice(others)
                end = self.cluster.loop.now + MOVES_S
        assert self.place.peer is not None
        self.peer = self.place.peer
        self._anchor = Line(self, self.peer, self.place.machine)
        done = await self._hello(self._anchor, 0)
        self.session = done.session
        self._ops = itertools.count(1)

    async def _hello(self, line: Line, session: int) -> m.HelloDone:
        request = m.Request(1, session, 0, 0, 0, m.Hello(limits.PROTOCOL_VERSION, session))
        return cast(m.HelloDone, await self._exchange(line, request, 30.0))

    async def call(self, body: m.Body, expected: type[B], timeout_s: float = 30.0) -> B:
        """The typed error of the peer is raised; DeadlineExceeded where it says nothing in time."""
        if self._anchor is None or self._anchor.lost:
            raise PeerLost("there is no session")
        op = next(self._ops)
        deadline_ms = 0 if isinstance(body, m.Claim | m.Wait) else int(timeout_s * 1000)
        request = m.Request(op, self.session, op, op, deadline_ms, body)  # type: ignore[arg-type]
        if isinstance(body, m.Claim | m.Wait):
            self.cluster.waiting[self] = body
        try:
            return await self._repeated(request, expected, timeout_s)
        finally:
            self.cluster.waiting.pop(self, None)

    async def _repeated(self, request: m.Request, expected: type[B], timeout_s: float) -> B:
        """What is answered on this line, or on the next where it broke."""
        assert self._anchor is not None
        for _ in range(REPEATS):
            try:
                if self._line is None or self._line.lost:
                    self._line = Line(self, cast(Peer, self.peer), self._anchor.machine)
                    await self._hello(self._line, self.session)
                    untold, self._untold = self._untold, []
                    for one in untold:
                        self.tell(one, request.op)
                reply = await self._exchange(self._line, request, timeout_s + GRACE_S)
            except PeerLost:
                if self._anchor.lost:
                    raise
                continue
            assert isinstance(reply, expected), reply
            return reply
        raise PeerLost("the line breaks again and again")

    def tell(self, body: m.Body, floor: int | None = None) -> None:
        """One-way, as pins and extents are given back; on the next line where this one broke.
        floor: of a call that is under way."""
        if self._line is None or self._line.lost:
            self._untold.append(body)
            return
        op = next(self._ops)
        request = m.Request(0, self.session, op, floor or op, 0, body)  # type: ignore[arg-type]
        self._line.send(frames.encode(request))

    async def _exchange(self, line: Line, request: m.Request, limit_s: float) -> m.Body:
        if line.lost:
            raise PeerLost("the line broke")
        answer: asyncio.Future[m.Body] = self.cluster.loop.create_future()
        began = self.cluster.loop.now
        line.answers[request.rid] = answer
        line.send(frames.encode(request))
        try:
            async with asyncio.timeout(limit_s if limit_s < math.inf else None):
                reply = await answer
        except TimeoutError:
            line.hang_up()
            self.cluster.late(self, request, line.machine, began)
            raise DeadlineExceeded("the peer says nothing") from None
        finally:
            line.answers.pop(request.rid, None)
        if self.cluster.loop.now - began > limit_s - GRACE_S + LATE_S:
            self.cluster.late(self, request, line.machine, began)
        if isinstance(reply, m.Failed):
            failure = from_wire(reply.code, reply.message, reply.details)
            if isinstance(failure, ClientClosed):
                self.close()
                raise PeerLost("the session ended at the peer")
            raise failure
        return reply

    def close(self) -> None:
        """The session ends: every connection closes."""
        for line in (self._line, self._anchor):
            if line is not None and not line.lost:
                line.hang_up()
                line._fail()

    def crash(self) -> None:
        self.close()
        self.machine.crashed = True
