"""Changes that move no bytes: tags, drops, the closing of groups, resetting a stage."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from dataplane.errors import StaleEpoch, Unavailable
from dataplane.metadata.names import hash_name
from dataplane.peer import rows as rowset
from dataplane.peer.host import Caller, Entry, Host, call_deadline
from dataplane.peer.mesh import Mesh
from dataplane.peer.partitions import Partitions
from dataplane.peer.routing import Index, Routing
from dataplane.peer.sessions import Session, caller_of
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
        caller = caller_of(self.host, request, session)

        async def act(address: str, index: Index, epoch: tuple[int, int]) -> None:
            sub = body
            if len(index) < rowset.count(body.rows):
                tags = {
                    t: v if len(v) == 1 else [v[i] for i in index] for t, v in body.tags.items()
                }
                rows = rowset.take_rows(body.rows, index)
                sub = Tag(body.partition, body.generation, rows, tags, body.expect)
            await self.mesh.call(address, sub, caller=caller, epoch=epoch)

        find = functools.partial(self.routing.find, entry)
        await self.routing.visit(body.rows, find, act)
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
        total = Dropped(0, 0)

        async def ask(address: str, sub: Drop, epoch: tuple[int, int]) -> None:
            dropped: Dropped = await self.mesh.call(address, sub, caller=caller, epoch=epoch)
            total.rows += dropped.rows
            total.bytes += dropped.bytes

        find = functools.partial(self.routing.find, entry, shard=self.routing.shard())

        async def act(address: str, index: Index, epoch: tuple[int, int]) -> None:
            assert body.rows is not None
            rows = rowset.take_rows(body.rows, index)
            await ask(address, Drop(body.partition, body.generation, rows), epoch)
            # A put that moved names before it could see them dropped there is followed.
            for other, some in await find(rows):
                if other != address:
                    await act(other, index[some], epoch)

        if body.rows is not None:
            await self.routing.visit(body.rows, find, act)
            return total
        while True:
            roster = self.host.roster
            try:
                for address, sub in await self._drops(entry, body):
                    await ask(address, sub, roster.epoch)
                return total
            except (StaleEpoch, Unavailable):
                if not await self.host.another_roster(roster, call_deadline.get()):
                    raise

    async def _drops(self, entry: Entry, body: Drop) -> list[tuple[str, Drop]]:
        """Which peer drops what. What is dropped already does no harm to drop again."""
        if body.groups is None:
            return [(member, body) for member in self.host.roster.hosts]
        found = await self.routing.find_groups(entry, body.groups, self.routing.shard())
        return [
            (address, Drop(body.partition, body.generation, groups=groups))
            for address, groups in found.items()
        ]

    async def _drop_here(self, caller: Caller, body: Drop) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        groups = None if body.groups is None else [hash_name(g) for g in body.groups]
        rows, nbytes = entry.store.drop(rows=body.rows, groups=groups, where=body.where)
        self.settle(entry)
        return Dropped(rows, nbytes)

    async def close(self, session: Session, request: Request, body: Close) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        caller = caller_of(self.host, request, session)
        while True:
            roster = self.host.roster
            try:
                for address in await self.routing.find_groups(entry, [body.group]):
                    await self.mesh.call(address, body, caller=caller, epoch=roster.epoch)
                return Done()
            except (StaleEpoch, Unavailable):
                if not await self.host.another_roster(roster, call_deadline.get()):
                    raise

    async def _close_here(self, caller: Caller, body: Close) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        entry.store.close(hash_name(body.group), body.n, body.group)
        self.settle(entry)
        return Done()

    async def reset(self, session: Session, request: Request, body: Reset) -> Body:
        await self.mesh.call_all(body)
        return Done()

    async def _reset_here(self, caller: Caller, body: Reset) -> Body:
        entry = await self.partitions.entry(body.partition, body.generation)
        entry.store.reset(body.stage)
        self.settle(entry)
        # A home that still thought the stage drained would end the first claim after the reset.
        await self.tell(entry, body.stage)
        return Done()
