"""References of shards to values in arenas: bytes live as long as a shard references them.

Shards here reference values of this peer and of other peers, and tell the owner when a reference
ends. Shards on other peers reference values here, see `RemoteReferences`. If such a peer dies,
the peer that takes over its shards reports its references. Before this peer frees a value, it finds
out which peer took over which shards.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from typing import Any

import numpy as np

from dataplane.errors import DataplaneError, mixed_releases
from dataplane.metadata.shard.replicas import named_by
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.room.admission import Room
from dataplane.wire.messages import Body, Done
from dataplane.wire.packed import U4, U8, Array, column
from dataplane.wire.peering import Inherited, Release
from dataplane.wire.tables import Change, Owner

log = logging.getLogger(__name__)

MOST_CHUNKS = 1 << 20
"""The most chunks that one message lists as released or taken over."""
AGAIN_S = 2.0
"""The pause before an owner that refused a release gets it again."""


class References:
    def __init__(self, host: Host, mesh: Mesh, room: Room) -> None:
        self.host = host
        self.mesh = mesh
        self.room = room
        self.remote_references = host.remote_references
        self._freed: dict[Owner, list[tuple[bytes, bytes]]] = {}
        """by owner: released references not yet reported to it, as chunk numbers and counts"""
        self._telling: dict[Owner, set[asyncio.Task[Any]]] = {}
        """owners that have not yet confirmed which of their values this peer took over"""
        self._releases = itertools.count(1)
        self._heard: dict[Owner, int] = {}
        """number of the last `Release` of each peer"""

    # at the shards' peer: references to values anywhere

    def answered(self, entry: Entry, caller: Caller, body: Any) -> Body | None:
        """Return the earlier reply to a change, or None if the change is new. May raise
        ChangeExpired.

        If another peer applied the change, that peer had references to its values, and this
        one has them now.
        """
        change = body.change
        if change is None:
            return None
        check_caller(change, caller)
        answer = entry.store.answers.to(change)
        if answer is not None and (change.caller, change.number) in entry.inherited:
            entry.inherited.discard((change.caller, change.number))
            for owner, chunks, _ in named_by(body):
                self.let_go(owner, chunks, np.ones(len(chunks), U4))
        return answer

    def let_go(self, owner: Owner, chunks: Array, counts: Array) -> bool:
        """Release values that a shard here no longer references. The bytes may be on another
        peer. Return whether bytes were freed here."""
        if owner == self.host.owner:
            return bool(self.host.space.release(chunks, counts))
        freed = chunks.tobytes(), np.asarray(counts, "<u4").tobytes()
        if owner in self._freed:
            self._freed[owner].append(freed)
        else:
            self._freed[owner] = [freed]
            self.mesh.spawn(self._release_there(owner))
        return False

    async def _release_there(self, owner: Owner) -> None:
        """Tell an owner which references ended. References that end while a message is in flight go
        with the next one."""
        while self._freed[owner]:
            try:
                await self._release_once(owner)
            except DataplaneError as exc:  # the owner released nothing
                log.warning(
                    "peer %s: could not free unreferenced values (%s), retrying", owner.peer, exc
                )
                await self.host.another_roster(self.host.roster, self.host.now() + AGAIN_S)
        del self._freed[owner]

    async def _release_once(self, owner: Owner) -> None:
        """Send one `Release`, after the owner has confirmed what this peer took over. Before that,
        the owner counts these references for the lost peer: it would release nothing, and would
        then count them for this peer for ever. Messages that wait for the backup, or are repeated,
        may arrive in another order."""
        progress = self.host.progress
        while (telling := self._telling.get(owner)) or not progress.is_settled:
            # More values may be taken over and released during each of these waits.
            await (asyncio.wait(telling) if telling else progress.reached(math.inf))
        chunks, counts = (b"".join(columns) for columns in zip(*self._freed[owner], strict=True))
        most = MOST_CHUNKS * U8.itemsize, MOST_CHUNKS * U4.itemsize
        rest = chunks[most[0] :], counts[most[1] :]
        self._freed[owner] = [rest] if rest[0] else []
        # An owner gets one message at a time, so it needs to know of no other.
        body = Release(chunks[: most[0]], counts[: most[1]], next(self._releases))
        try:
            await self.mesh.tell(owner, body)
        except DataplaneError:
            self._freed[owner].insert(0, (body.chunks, body.counts))
            raise

    def took_over(self, owner: Owner, body: Inherited) -> None:
        """Tell an owner of values which of them a lost peer's shards reference. This peer now
        serves those shards. Releases that follow are sent after that."""
        task = self.mesh.spawn(self._report_references(owner, body))
        self._telling.setdefault(owner, set()).add(task)
        task.add_done_callback(lambda _: self._report_done(owner, task))

    async def _report_references(self, owner: Owner, body: Inherited) -> None:
        chunks = np.frombuffer(body.chunks, U8)
        ids, at = np.unique(chunks, return_inverse=True)
        counts = np.zeros(len(ids), U4)
        np.add.at(counts, at, np.frombuffer(body.counts, U4))
        for first in range(0, max(1, len(ids)), MOST_CHUNKS):
            behind = first + MOST_CHUNKS
            part = ids[first:behind].tobytes(), counts[first:behind].tobytes()
            more = behind < len(ids)
            await self.mesh.tell(owner, Inherited(body.origin, *part, body.began, more))

    def _report_done(self, owner: Owner, task: asyncio.Task[Any]) -> None:
        self._telling[owner].discard(task)
        if not self._telling[owner]:
            del self._telling[owner]

    # at the owner of the values

    def release_here(self, caller: Caller, body: Release) -> Body:
        """Release references of a shard, but only those that it has: the peer may have been
        declared lost."""
        chunks = column(body.chunks, U8)
        counts = column(body.counts, U4, len(chunks))
        if body.number > self._heard.get(caller.owner, 0):
            self._heard[caller.owner] = body.number
            self.room.release(chunks, self.remote_references.release(caller.owner, chunks, counts))
        return Done()

    def gone(self, owner: Owner) -> None:
        """Handle a process that is no longer a member. If it had no shards, no peer speaks for
        it: values that were in flight to it, under a roster that gave it shards, cannot have
        arrived."""
        self._heard.pop(owner, None)
        if self.host.successors.current(owner) == owner:
            self.room.release(*self.remote_references.lost(owner))

    def inherited(self, caller: Caller, body: Inherited) -> Body:
        """Handle the report of a peer that took over a lost peer's shards, or was assigned them
        empty. Values that it does not list are freed."""
        chunks = column(body.chunks, U8)
        counts = column(body.counts, U4, len(chunks))
        successor = None if caller.owner == self.host.owner else caller.owner
        origins = [o for o in self.remote_references.peers if self._is_about(body, caller.owner, o)]
        self.room.release(
            *self.remote_references.inherited(origins, successor, chunks, counts, body.more)
        )
        return Done()

    def _is_about(self, body: Inherited, sender: Owner, owner: Owner) -> bool:
        """Return whether the report covers `owner`'s references: `origin` had its shards, or took
        them over before it was lost too. Or `sender` got them empty, by a roster that is not later
        than its first one."""
        if owner == body.origin:
            return True
        # A roster may assign shards to a peer that has yet to join, by its address alone.
        about = (body.origin, sender) if body.began else (body.origin,)
        for given_at, successor in self.host.successors.after(owner):
            if successor in about:
                return not body.began or given_at <= body.began
        return False


def check_caller(change: Change, caller: Caller) -> None:
    """Raise ProtocolError if a peer sent another peer's change."""
    if change.caller != caller.owner:
        raise mixed_releases(
            f"peer {caller.address} sent a change made by peer {change.caller.peer}, but a peer "
            "may send only its own changes"
        )
