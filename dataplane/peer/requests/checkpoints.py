"""Checkpoints at the peer: which partitions exist, a snapshot of groups, and restored rows.

The client writes and reads the files. Restored rows are handled as if that client had put them:
rows into the shard of their partition, bytes into this host's arena. A restore therefore works
with any number of peers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import msgspec

from dataplane.memory.admission import Admission
from dataplane.metadata.roster.roster import Roster
from dataplane.metadata.shard import checkpoint
from dataplane.peer.host import Caller, Entry, call_end
from dataplane.peer.net.router import Router
from dataplane.peer.requests.puts import Writing
from dataplane.peer.requests.reads import Reading
from dataplane.peer.sessions import Session, Sessions
from dataplane.wire.checkpoint import (
    Census,
    CensusDone,
    Restore,
    Restored,
    Save,
    SaveDone,
    Survey,
    SurveyDone,
)
from dataplane.wire.limits import MAX_CHUNKS_PER_RESTORE
from dataplane.wire.messages import Body, Done, PutDone, Request
from dataplane.wire.tables import Values

FREED_S = 0.1
"""How long to ask again for a page whose values were freed. After that the client asks for fewer
rows, whose values arrive sooner."""


class Checkpoints:
    def __init__(
        self, writing: Writing, reading: Reading, router: Router, sessions: Sessions
    ) -> None:
        self.host, self.mesh = writing.host, router.mesh
        self.writing, self.reading, self.router = writing, reading, router
        self.sessions = sessions

    # save

    async def census(self, session: Session, request: Request, body: Census) -> Body:
        """List partitions under one roster. Repeat if the roster changes or a peer leaves during
        the call."""

        async def all_by(roster: Roster, left_s: float) -> CensusDone:
            asked = (
                self.mesh.call(one, Census(), timeout_s=left_s, epoch=roster.epoch)
                for one in roster.hosts
            )
            told: list[CensusDone] = await asyncio.gather(*asked)
            return CensusDone({name: n for one in told for name, n in one.partitions.items()})

        return await self.router.reach(all_by, call_end(self.host.now()))

    async def census_here(self, caller: Caller, body: Census) -> Body:
        entries = self.host.entries.items()
        return CensusDone({name: e.generation for name, e in entries if not e.store.restorer})

    async def survey(self, session: Session, request: Request, body: Survey) -> SurveyDone:
        found: SurveyDone = await self.router.ask(body)
        return found

    async def survey_here(self, caller: Caller, body: Survey) -> Body:
        entry = self.host.shard(body.partition, body.generation)
        return checkpoint.survey(entry.store, body.cursor)

    async def save(self, session: Session, request: Request, body: Save) -> SaveDone:
        """Return a page of a snapshot. Raises RowsGone if values were freed before they were
        read; a retry then omits their rows."""
        found: SaveDone = await self.reading.found(
            body, session, "checkpoint", in_place=False, freed_s=FREED_S
        )
        return found

    async def save_here(self, caller: Caller, body: Save) -> Body:
        entry = self.host.shard(body.partition, body.generation)
        return checkpoint.save(entry.store, body.groups, body.rows, body.nbytes)

    # restore

    async def restore(self, session: Session, request: Request, body: Restore) -> Body:
        grants = self.writing.grants
        try:
            committed = grants.commit(session, body.values, Admission.OPEN, MAX_CHUNKS_PER_RESTORE)
        except BaseException:
            grants.refused(session, body.values)
            raise
        asked = msgspec.structs.replace(body, values=committed.values, change=None)
        return await self.writing.store(session, asked, committed, self._restore_at)

    def restore_here(self, caller: Caller, body: Restore) -> Body | Awaitable[Body]:
        entry = self.host.shard(body.partition, body.generation)
        return self.writing.apply(entry, caller, body, self._restore_at)

    def _restore_at(self, entry: Entry, caller: Caller, body: Restore) -> PutDone:
        if body.rows.keys:
            self.writing.metadata_quota.check(Values(), has_new_rows=True)
        entry.store.restore(body)
        return PutDone()

    async def restored(self, session: Session, request: Request, body: Restored) -> Body:
        """Tell all shards of a restore that it is complete. This peer resends until each shard
        confirms, even if the client ends."""
        parts = {body.partition: body.generation, **body.others}
        told = asyncio.gather(*[self.router.tell(Restored(*part)) for part in parts.items()])
        self.sessions.completing[told] = session.id
        told.add_done_callback(self.sessions.completing.pop)
        for part, is_there in zip(parts.items(), await told, strict=True):
            if not is_there:
                raise self.host.gone(*part)
        return Done()

    def restored_here(self, caller: Caller, body: Restored) -> Body:
        self.host.shard(body.partition, body.generation).store.restored()
        return Done()
