"""What clients ask for: which part of the peer answers, and how an answer is given again.

What changes something is carried out once per operation id. A read that is repeated is done anew.
What an answer hands out that nobody received comes back: leases, extents, pins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dataplane.metadata.shard.reasons import Subject
from dataplane.metadata.shard.repeats import Operations
from dataplane.peer.door.client_door import WAITING
from dataplane.peer.host import Host
from dataplane.peer.net.once import Once, final
from dataplane.peer.notices import Telling
from dataplane.peer.requests.changes import Changes
from dataplane.peer.requests.checkpoints import Checkpoints
from dataplane.peer.requests.claims import Claims
from dataplane.peer.requests.finishes import Finishing
from dataplane.peer.requests.grants import Grants
from dataplane.peer.requests.puts import Writing
from dataplane.peer.requests.reads import Reading
from dataplane.peer.requests.waits import Waits
from dataplane.peer.room.admission import Room
from dataplane.peer.sessions import Session
from dataplane.peer.shards.admissions import Admissions
from dataplane.peer.shards.losses import LossReports
from dataplane.peer.shards.partitions import Partitions
from dataplane.wire import checkpoint as c
from dataplane.wire import messages as m
from dataplane.wire.records import EXTENT, column

ONCE = (
    m.Put,
    m.Finish,
    m.Tag,
    m.Drop,
    m.Close,
    m.Claim,
    m.Reset,
    m.Advance,
    m.Reserve,
    m.GiveBack,
)
"""Carried out once per operation id; a retry gets the same answer."""


class Answers:
    def __init__(
        self,
        host: Host,
        room: Room,
        partitions: Partitions,
        grants: Grants,
        writing: Writing,
        changes: Changes,
        reading: Reading,
        claims: Claims,
        finishing: Finishing,
        waits: Waits,
        losses: LossReports,
        admissions: Admissions,
        checkpoints: Checkpoints,
    ) -> None:
        self.host = host
        self.room = room
        self.partitions = partitions
        self.finishing = finishing
        self.admissions = admissions
        self._operations = Once(host.operations)
        self._claims = Once(claims.leases)
        """their operations hold no floor up: a claim may wait for days"""
        self._pinned: Operations[int] = Operations()
        """the pins that answers to reads handed out, by operation"""
        self.handlers: dict[type[m.Body], Any] = {
            m.Define: self._define,
            m.Seal: self._seal,
            m.Close: changes.change,
            m.Reset: changes.change,
            m.Reserve: grants.reserve,
            m.GiveBack: grants.give_back,
            m.Unpin: grants.unpin,
            m.Put: writing.put,
            m.Tag: changes.change,
            m.Drop: changes.change,
            m.Read: self._reads(reading.read),
            m.Claim: claims.claim,
            m.Fetch: self._reads(reading.fetch),
            m.Finish: finishing.finish,
            m.Wait: waits.wait,
            m.Admit: admissions.admit,
            m.Unadmit: admissions.unadmit,
            m.Advance: changes.change,
            m.Losses: losses.losses,
            **checkpoints.handlers,
        }
        for body in (*ONCE, c.Restore):
            self.handlers[body] = self._once(self.handlers[body])
        self.handlers[c.Save] = self._reads(self.handlers[c.Save])

    async def _define(self, session: Session, request: m.Request, body: m.Define) -> m.Body:
        session.partitions.add(body.partition)
        wait_s = request.deadline_ms / 1000
        known = body.partition in self.host.entries or body.partition in self.host.handles
        if body.definition is not None or known:
            return await self.partitions.define(body.partition, body.definition, wait_s)
        what = f"attaching to partition {body.partition!r}"
        with Telling(self.host, what, Subject("attach", body.partition), self._undeclared):
            return await self.partitions.define(body.partition, None, wait_s)

    async def _undeclared(self, limit_s: float) -> tuple[str, dict[str, Any]]:
        heard = sorted({*self.host.entries, *self.host.handles})
        known = ", ".join(map(repr, heard[:8])) or "none"
        return (
            f"nobody has declared it with plane.partition(NAME, stages=…) in run "
            f"{self.host.plane!r} (declared, as far as this host knows: {known})",
            {},
        )

    async def _seal(self, session: Session, request: m.Request, body: m.Seal) -> m.Body:
        await self.partitions.ask_home(body.partition, body)
        return m.Done()

    # asked again

    def _once(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Answer a repeated operation as the first time."""

        def once(session: Session, request: m.Request, body: m.Body) -> Any:
            if not request.op:
                return handler(session, request, body)
            who, op, floor = session.id, request.op, request.floor
            if isinstance(body, m.Claim):
                return self._claims.run(who, op, floor, 0, handler, session, request, body)
            if isinstance(body, WAITING):
                return self._operations.run(who, op, floor, 0, handler, session, request, body)
            return self._operations.run(who, op, floor, 0, final, handler, session, request, body)

        return once

    def _reads(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """A read that is repeated is done anew; the pin of its first answer, which nobody received,
        goes."""

        async def read(session: Session, request: m.Request, body: m.Body) -> m.Body:
            first = self._pinned.recall(session.id, request.op)
            if first is not None:
                self.host.space.unpin(session.id, [first])
            done: m.ReadDone | m.Fetched | c.SaveDone = await handler(session, request, body)
            self._pinned.remember(session.id, request.op, request.floor, done.pin)
            return done

        return read

    # what nobody received

    def unsent(self, session: Session, request: m.Request, body: m.Body) -> None:
        """The client gave up the call: what its answer hands out comes back.

        Nor is it handed out to a repetition: that gets what was done, or claims anew.
        """
        space = self.host.space
        match body:
            case m.Claimed(lease, pin, _):
                self.finishing.unheard(session, lease)
                space.unpin(session.id, [pin])
            case m.Admitted(permit, _):
                self.admissions.give_back(session, [permit])
            case m.Reserved():
                space.give_back(session.id, column(body.extents, EXTENT))
                space.unpin(session.id, [body.pin])
                self.host.operations.forget(session.id, request.op)
            case m.PutDone():
                space.give_back(session.id, column(body.extents, EXTENT))
                body.extents = b""
            case m.ReadDone() | m.Fetched() | c.SaveDone():
                space.unpin(session.id, [body.pin])
            case _:
                return
        self.room.pump()

    def ended(self, session: Session) -> None:
        """Nobody repeats its reads any more."""
        self._pinned.end(session.id)
