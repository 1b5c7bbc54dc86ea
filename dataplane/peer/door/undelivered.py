"""Takes back leases, permits, extents and pins of replies that no client received.

A repeated request does not receive them again. It receives the outcome of the first attempt, or
it claims again.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.peer.host import Host
from dataplane.peer.requests.leases import Finishing
from dataplane.peer.requests.puts import Grants
from dataplane.peer.requests.waits import Waits
from dataplane.peer.sessions import Session
from dataplane.wire import checkpoint as c
from dataplane.wire import messages as m
from dataplane.wire.packed import EXTENT, column


@dataclass(eq=False, repr=False)
class Undelivered:
    host: Host
    grants: Grants
    finishing: Finishing
    waits: Waits

    def take_back(self, session: Session, request: m.Request, reply: m.Body) -> None:
        """Take back the contents of a reply whose client cancelled the call or closed its
        connection."""
        space = self.host.space
        match reply:
            case m.Claimed(lease, pin, _):
                self.finishing.release(session, lease, heard=False)
                space.unpin(session.id, [pin])
            case m.Admitted(permit, _):
                self.waits.give_back(session, [permit])
            case m.Reserved():
                space.give_back(session.id, column(reply.extents, EXTENT))
                space.unpin(session.id, [reply.pin])
                session.repeats.forget(request.op)
            case m.PutDone():
                space.give_back(session.id, column(reply.extents, EXTENT))
                reply.extents = b""
            case m.Failed(details={m.UNHEARD: True}) if isinstance(
                request.body, m.Put | m.Finish | c.Restore
            ):
                self.grants.refused(session, request.body.values)
            case m.Failed(details={"pin": int(pin)}):
                space.unpin(session.id, [pin])
            case m.ReadDone() | m.Fetched() | c.SaveDone():
                space.unpin(session.id, [reply.pin])
            case _:
                return
        self.grants.room.pump()
