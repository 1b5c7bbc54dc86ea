"""What clients ask for: which part of the peer answers, and how an answer is given again.

What changes something is carried out once per operation id. A read that is repeated is done anew.
What an answer hands out that nobody received comes back: leases, extents, pins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dataplane.errors import PartitionUndefined
from dataplane.metadata.shard.reasons import FIRST_S, Subject
from dataplane.metadata.shard.store import CHANGES
from dataplane.peer.door.client_door import WAITING
from dataplane.peer.notices import Telling, Why
from dataplane.peer.once import Once, Operations, final
from dataplane.peer.sessions import Session
from dataplane.wire import checkpoint as c
from dataplane.wire import messages as m
from dataplane.wire.records import EXTENT, column

if TYPE_CHECKING:
    from dataplane.peer.peer import Peer


ONCE: frozenset[type[m.Body]] = frozenset(
    {m.Claim, m.Reserve, m.GiveBack, m.Put, m.Finish, c.Restore, *CHANGES}
)
"""Operations that are carried out once however often a client asks for them."""


class Answers:
    def __init__(self, peer: Peer) -> None:
        self.peer, self.host = peer, peer.host
        self._operations = Once(peer.host.operations)
        self._claims = Once(peer.claims.leases)
        """their operations hold no floor up: a claim may wait for days"""
        self._pinned: Operations[int] = Operations()
        """the pins that answers to reads handed out, by operation"""
        self.handlers: dict[type[m.Body], Any] = {
            m.Define: self._define,
            m.Seal: peer.changes.change,
            m.Close: peer.changes.change,
            m.Reset: peer.changes.change,
            m.Reserve: peer.grants.reserve,
            m.GiveBack: peer.grants.give_back,
            m.Unpin: peer.grants.unpin,
            m.Put: peer.writing.put,
            m.Tag: peer.changes.change,
            m.Drop: peer.changes.change,
            m.Read: self._reads(peer.reading.read),
            m.Claim: peer.claims.claim,
            m.Fetch: self._reads(peer.reading.fetch),
            m.Finish: peer.finishing.finish,
            m.Wait: peer.waits.wait,
            m.Admit: peer.waits.admit,
            m.Withdraw: peer.waits.withdraw,
            m.Advance: peer.changes.change,
            m.Losses: peer.partitions.losses,
            c.Census: peer.checkpoints.census,
            c.Survey: peer.checkpoints.survey,
            c.Save: self._reads(peer.checkpoints.save),
            c.Restore: peer.checkpoints.restore,
        }
        self.handlers |= {body: self._once(body, self.handlers[body]) for body in ONCE}

    async def _define(self, session: Session, request: m.Request, body: m.Define) -> m.Body:
        session.partitions.add(body.partition)
        wait_s = request.deadline_ms / 1000
        if body.generation:
            looked: m.Defined = await self.peer.router.ask(body)
            return looked
        if body.definition is not None:
            return await self.peer.partitions.define(body.partition, body.definition, wait_s)
        name, directory = body.partition, self.peer.directory

        def why() -> Why:
            return directory.undeclared(name), {}

        what = f"attaching to partition {name!r}"
        learning = self.peer.mesh.spawn(directory.learn_names(FIRST_S / 2))
        try:
            with Telling(self.host, what, Subject("attach", name), why):
                return await self.peer.partitions.define(name, None, wait_s)
        except PartitionUndefined as exc:
            await directory.learn_names()
            said = f"partition {name!r} does not exist: {directory.undeclared(name)}"
            raise PartitionUndefined(said, **exc.details) from exc
        finally:
            learning.cancel()

    # asked again

    def _once(self, kind: type[m.Body], handler: Callable[..., Any]) -> Callable[..., Any]:
        """Answer a repeated operation as the first time."""
        run = (self._claims if kind is m.Claim else self._operations).run
        how = (handler,) if kind in WAITING else (final, handler)

        def once(session: Session, request: m.Request, body: m.Body) -> Any:
            if not request.op:
                return handler(session, request, body)
            return run(session.id, request.op, request.floor, *how, session, request, body)

        return once

    def _reads(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """A read that is repeated is done anew; the pin of its first answer, which nobody received,
        goes."""

        async def read(session: Session, request: m.Request, body: m.Body) -> m.Body:
            first = self._pinned.recall(session.id, request.op)
            if first is not None:
                self.peer.room.unpin(session.id, [first])
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
                self.peer.finishing.release(session, lease, heard=False)
                space.unpin(session.id, [pin])
            case m.Admitted(permit, _):
                self.peer.waits.give_back(session, [permit])
            case m.Reserved():
                space.give_back(session.id, column(body.extents, EXTENT))
                space.unpin(session.id, [body.pin])
                self.host.operations.forget(session.id, request.op)
            case m.PutDone():
                space.give_back(session.id, column(body.extents, EXTENT))
                body.extents = b""
            case m.Failed(details={m.UNHEARD: True}) if isinstance(
                request.body, m.Put | m.Finish | c.Restore
            ):
                self.peer.grants.refused(session, request.body.ranges)
            case m.Failed(details={"pin": int(pin)}):
                space.unpin(session.id, [pin])
            case m.ReadDone() | m.Fetched() | c.SaveDone():
                space.unpin(session.id, [body.pin])
            case _:
                return
        self.peer.room.pump()

    def ended(self, session: Session) -> None:
        """Nobody repeats its reads any more."""
        self._pinned.end(session.id)
