"""Changes that move no bytes: tags, drops, the closing of groups, resetting a stage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dataplane.metadata.names import hash_name
from dataplane.peer import rows as rowset
from dataplane.peer.host import Entry, Host
from dataplane.peer.mesh import Caller, Mesh, caller_of
from dataplane.peer.partitions import Partitions
from dataplane.peer.routing import Routing
from dataplane.peer.sessions import Session
from dataplane.wire.messages import Body, Close, Done, Drop, Dropped, Request, Reset, Tag


class Changes:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        partitions: Partitions,
        routing: Routing,
        settle: Callable[[Entry], None],
        tell: Callable[[Entry, str], Awaitable[None]],
    ) -> None:
        self.host = host
        self.mesh = mesh
        self.partitions = partitions
        self.routing = routing
        self.settle = settle
        self.tell = tell
        """reports a stage to its home at once"""
        mesh.handlers |= {
            Tag: self._tag_here,
            Drop: self._drop_here,
            Close: self._close_here,
            Reset: self._reset_here,
        }

    async def tag(self, session: Session, request: Request, body: Tag) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        parts = await self.routing.find(entry, body.rows)
        for address, index in parts:
            sub = body
            if len(parts) > 1:
                tags = {
                    t: v if len(v) == 1 else [v[i] for i in index] for t, v in body.tags.items()
                }
                rows = rowset.take_rows(body.rows, index)
                sub = Tag(body.partition, body.generation, rows, tags, body.expect)
            await self.mesh.call(address, sub, caller=caller_of(self.host, request, session))
        return Done()

    async def _tag_here(self, caller: Caller, body: Tag) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        entry.store.tag(body.rows, body.tags, body.expect)
        self.settle(entry)
        return Done()

    async def drop(self, session: Session, request: Request, body: Drop) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        caller = caller_of(self.host, request, session)
        if body.rows is None and body.groups is None and body.where is None:
            await self.partitions.drop(entry)
            return Dropped(0, 0)
        subs: list[tuple[str, Drop]] = []
        if body.where is not None:
            subs = [(member, body) for member in self.host.roster.members]
        elif body.groups is not None:
            found = await self.routing.find_groups(entry, body.groups)
            subs = [
                (address, Drop(body.partition, body.generation, groups=groups))
                for address, groups in found.items()
            ]
        elif body.rows is not None:
            for address, index in await self.routing.find(entry, body.rows):
                rows = rowset.take_rows(body.rows, index)
                subs.append((address, Drop(body.partition, body.generation, rows)))
        total = Dropped(0, 0)
        for address, sub in subs:
            dropped: Dropped = await self.mesh.call(address, sub, caller=caller)
            total.rows += dropped.rows
            total.bytes += dropped.bytes
        return total

    async def _drop_here(self, caller: Caller, body: Drop) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        groups = None if body.groups is None else [hash_name(g) for g in body.groups]
        rows, nbytes = entry.store.drop(rows=body.rows, groups=groups, where=body.where)
        self.settle(entry)
        return Dropped(rows, nbytes)

    async def close(self, session: Session, request: Request, body: Close) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        found = await self.routing.find_groups(entry, [body.group])
        for address in found:
            await self.mesh.call(address, body, caller=caller_of(self.host, request, session))
        return Done()

    async def _close_here(self, caller: Caller, body: Close) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        entry.store.close(hash_name(body.group), body.n, body.group)
        self.settle(entry)
        return Done()

    async def reset(self, session: Session, request: Request, body: Reset) -> Body:
        await self.mesh.call_all(body, caller=caller_of(self.host, request, session))
        return Done()

    async def _reset_here(self, caller: Caller, body: Reset) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        entry.store.reset(body.stage)
        self.settle(entry)
        # A home that still thought the stage drained would end the first claim after the reset.
        await self.tell(entry, body.stage)
        return Done()
