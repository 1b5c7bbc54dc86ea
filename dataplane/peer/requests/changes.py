"""Changes that move no bytes: tags, drops of rows and of partitions, the closing of groups, the
seal, resetting a stage, the trainer's next version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables.names import hash_name
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.net.router import Router
from dataplane.peer.sessions import Session, caller_of
from dataplane.peer.shards.partitions import Partitions
from dataplane.wire.messages import (
    Advance,
    Body,
    Close,
    Done,
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
    router: Router
    partitions: Partitions
    settle: Callable[[Entry], None]

    def __post_init__(self) -> None:
        self.router.mesh.handlers |= dict.fromkeys(_CHANGES, self._change_here) | {
            Drop: self._drop_here
        }

    # asked for by clients

    async def change(
        self, session: Session, request: Request, body: Tag | Drop | Close | Seal | Reset | Advance
    ) -> Body:
        """At the partition's shard: once, also where another peer has it when it is asked again."""
        if isinstance(body, Tag | Reset):
            body.number = next(self.host.lease_numbers)
        done: Body = await self.router.ask(body, caller_of(self.host, request, session))
        return done

    # at the shard

    def _change_here(self, caller: Caller, body: Any) -> Body:
        entry = self.host.shard(body.partition, body.generation)
        _CHANGES[type(body)](entry.store, body)
        self.settle(entry)
        return Done()

    def _drop_here(self, caller: Caller, body: Drop) -> Body:
        if body.rows is None and body.groups is None and body.where is None:
            self.partitions.drop(body.partition, body.generation)
            return Dropped(0, 0)
        entry = self.host.shard(body.partition, body.generation)
        groups = None if body.groups is None else [hash_name(g) for g in body.groups]
        rows, nbytes = entry.store.drop(rows=body.rows, groups=groups, where=body.where)
        self.settle(entry)
        return Dropped(rows, nbytes)


_CHANGES: dict[type[Body], Callable[[Store, Any], object]] = {
    Tag: lambda store, body: store.tag(body.rows, body.tags, body.expect, body.number),
    Close: lambda store, body: store.close(hash_name(body.group), body.n, body.group),
    Seal: lambda store, body: store.seal(body.keep_short),
    Reset: lambda store, body: store.reset(body.stage, body.number),
    Advance: lambda store, body: store.advance(body.version),
}
