"""Changes that move no bytes: tags, drops of rows and partitions, closing groups, sealing,
resetting a stage, and the trainer's next version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataplane.errors import StaleEpoch
from dataplane.metadata.shard import inspection
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.requests.outgoing_changes import OutgoingChanges
from dataplane.peer.sessions import Session
from dataplane.peer.shards.partitions import Partitions
from dataplane.peer.shards.references import References, check_caller
from dataplane.wire.journal import Settle
from dataplane.wire.messages import (
    Advance,
    Body,
    Close,
    Drop,
    Dropped,
    Request,
    Reset,
    Seal,
    Tag,
)
from dataplane.wire.peering import Settled


@dataclass(eq=False, repr=False)
class Changes:
    host: Host
    outgoing: OutgoingChanges
    references: References
    partitions: Partitions
    run_effects: Callable[[Entry], None]

    def __post_init__(self) -> None:
        self.dropped_rows = 0
        """by clients of this host"""

    # asked for by clients

    async def change(
        self, session: Session, request: Request, body: Tag | Drop | Close | Seal | Reset | Advance
    ) -> Body:
        """Apply a change at the partition's shard, once, even if a retry reaches another peer."""
        done: Body = await self.outgoing.send(body, self.host.caller(session.id))
        if isinstance(done, Dropped):
            self.dropped_rows += done.rows
        return done

    # at the shard

    def change_here(self, caller: Caller, body: Any) -> Body:
        if isinstance(body, Drop) and (body.rows, body.groups, body.where) == (None, None, None):
            there = self.host.entry(body.partition, body.generation)
            if there is not None:
                self.references.answered(there, caller, body)  # ChangeExpired if it was settled
            return self.partitions.drop(body.partition, body.generation, body.change)
        entry = self.host.shard(body.partition, body.generation)
        answer = self.references.answered(entry, caller, body)
        if answer is None:
            answer = entry.store.carry_out(body)
            self.run_effects(entry)
        if isinstance(answer, Dropped):  # the store does not remember unknown tags
            unknown = inspection.unknown_tags(entry.store, body.where)
            answer = Dropped(answer.rows, answer.bytes, unknown)
        return answer

    def settle_here(self, caller: Caller, body: Settle) -> Body:
        """Answer whether a change took effect. If not, the shard refuses it from now on. Raise
        StaleEpoch while the shard moves: its new peer then reports what it references."""
        entry = self.host.entry(body.partition, body.generation)
        check_caller(body.change, caller)
        if entry is not None:
            self.host.speak()
            return Settled(entry.store.settle(body))
        if self.host.address in self.host.roster.leaving:
            raise StaleEpoch(
                f"the peer at {self.host.address} is leaving, and may already have moved the "
                f"shard of partition {body.partition!r} to another peer: repeat the call"
            )
        return Settled(False)
