"""Changes that move no bytes: tags, drops of rows and partitions, closing groups, sealing,
resetting a stage, and the trainer's next version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataplane.metadata.shard import inspection
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.sessions import Session
from dataplane.peer.shards.partitions import Partitions
from dataplane.peer.shards.references import References
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


@dataclass(eq=False, repr=False)
class Changes:
    host: Host
    references: References
    partitions: Partitions
    settle: Callable[[Entry], None]

    def __post_init__(self) -> None:
        self.dropped_rows = 0
        """by clients of this host so far"""

    # asked for by clients

    async def change(
        self, session: Session, request: Request, body: Tag | Drop | Close | Seal | Reset | Advance
    ) -> Body:
        """Apply a change at the partition's shard, once, even if a retry reaches another peer."""
        done: Body = await self.references.change(body, self.host.caller(session.id))
        if isinstance(done, Dropped):
            self.dropped_rows += done.rows
        return done

    # at the shard

    def change_here(self, caller: Caller, body: Any) -> Body:
        if isinstance(body, Drop) and (body.rows, body.groups, body.where) == (None, None, None):
            there = self.host.entry(body.partition, body.generation)
            if there is not None:
                self.references.answered(there, caller, body)  # ChangeExpired where it was settled
            return self.partitions.drop(body.partition, body.generation, body.change)
        entry = self.host.shard(body.partition, body.generation)
        answer = self.references.answered(entry, caller, body)
        if answer is None:
            answer = entry.store.carry_out(body)
            self.settle(entry)
        if isinstance(answer, Dropped):  # what is remembered is the answer alone
            unknown = inspection.unknown_tags(entry.store, body.where)
            answer = Dropped(answer.rows, answer.bytes, unknown)
        return answer
