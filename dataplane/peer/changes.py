"""Changes that move no bytes: tags, drops, the closing of groups, resetting a stage."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.metadata.names import hash_name
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.sessions import Session, caller_of
from dataplane.wire.messages import Body, Close, Done, Drop, Dropped, Request, Reset, Tag


class Changes:
    def __init__(
        self, host: Host, mesh: Mesh, partitions: Partitions, settle: Callable[[Entry], None]
    ) -> None:
        self.host = host
        self.partitions = partitions
        self.settle = settle
        mesh.handlers |= {
            Tag: self._tag_here,
            Drop: self._drop_here,
            Close: self._close_here,
            Reset: self._reset_here,
        }

    # asked for by clients

    async def change(
        self, session: Session, request: Request, body: Tag | Drop | Close | Reset
    ) -> Body:
        """At the partition's shard."""
        entry = await self.partitions.entry(body.partition, body.generation)
        caller = caller_of(self.host, request, session)
        done: Body = await self.partitions.ask_home(entry.name, body, caller)
        return done

    async def drop(self, session: Session, request: Request, body: Drop) -> Body:
        if body.rows is not None or body.groups is not None or body.where is not None:
            return await self.change(session, request, body)
        entry = await self.partitions.entry(body.partition, body.generation)
        await self.partitions.drop(entry)
        return Dropped(0, 0)

    # at the shard

    async def _tag_here(self, caller: Caller, body: Tag) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        entry.store.tag(body.rows, body.tags, body.expect)
        self.settle(entry)
        return Done()

    async def _drop_here(self, caller: Caller, body: Drop) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        groups = None if body.groups is None else [hash_name(g) for g in body.groups]
        rows, nbytes = entry.store.drop(rows=body.rows, groups=groups, where=body.where)
        self.settle(entry)
        return Dropped(rows, nbytes)

    async def _close_here(self, caller: Caller, body: Close) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        entry.store.close(hash_name(body.group), body.n, body.group)
        self.settle(entry)
        return Done()

    async def _reset_here(self, caller: Caller, body: Reset) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        entry.store.reset(body.stage)
        self.settle(entry)
        return Done()
