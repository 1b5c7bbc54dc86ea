"""Changes that move no bytes: tags, drops of rows and of partitions, the closing of groups,
resetting a stage, the trainer's next version."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.errors import DataplaneError, TagConflict, Unavailable
from dataplane.metadata.tables.names import hash_name
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.net.mesh import Mesh
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
    Tag,
)


class Changes:
    def __init__(
        self,
        host: Host,
        mesh: Mesh,
        router: Router,
        partitions: Partitions,
        settle: Callable[[Entry], None],
    ) -> None:
        self.host = host
        self.router = router
        self.partitions = partitions
        self.settle = settle
        mesh.handlers |= {
            Tag: self._tag_here,
            Drop: self._drop_here,
            Close: self._close_here,
            Reset: self._reset_here,
            Advance: self._advance_here,
        }

    # asked for by clients

    async def change(
        self, session: Session, request: Request, body: Tag | Drop | Close | Reset | Advance
    ) -> Body:
        """At the partition's shard. Unavailable as well where rows do not have the tags that were
        expected, and this call may be why: a shard that was lost had perhaps set them."""
        caller = caller_of(self.host, request, session)
        lost: list[Unavailable] = []

        def hear(why: DataplaneError) -> None:
            if isinstance(why, Unavailable):
                lost.append(why)

        try:
            done: Body = await self.router.ask(body, caller, hear=hear)
        except TagConflict as exc:
            if not lost:
                raise
            raise Unavailable(
                f"{lost[0].message}; what answered then does not find the tags that were expected "
                f"({exc.message}), which this call may have set itself: read them",
                **exc.details,
            ) from exc
        return done

    # at the shard

    def _tag_here(self, caller: Caller, body: Tag) -> Body:
        entry = self.host.shard(body.partition, body.generation)
        entry.store.tag(body.rows, body.tags, body.expect)
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

    def _close_here(self, caller: Caller, body: Close) -> Body:
        entry = self.host.shard(body.partition, body.generation)
        entry.store.close(hash_name(body.group), body.n, body.group)
        self.settle(entry)
        return Done()

    def _reset_here(self, caller: Caller, body: Reset) -> Body:
        entry = self.host.shard(body.partition, body.generation)
        entry.store.reset(body.stage)
        self.settle(entry)
        return Done()

    def _advance_here(self, caller: Caller, body: Advance) -> Body:
        entry = self.host.shard(body.partition, body.generation)
        entry.store.advance(body.version)
        self.settle(entry)
        return Done()
