"""Handles put: reserves space for clients to write into, turns written bytes into chunks, and
stores rows at the shard of their partition, here or at another peer.

A client reserves space before it writes bytes. A message that names the written bytes commits
them as chunks of this host. Once it is answered, successfully or not, those extents belong to
the peer. Then the rows are stored. Chunks that a shard rejects are released, so a failure leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from dataplane.errors import (
    BackPressure,
    DataplaneError,
    LimitExceeded,
    ProtocolError,
    ShardFull,
    counted,
    mixed_releases,
)
from dataplane.memory.admission import Admission
from dataplane.memory.extents import Extent, room
from dataplane.metadata.shard.puts import plan_put
from dataplane.metadata.tables.incoming import too_many
from dataplane.peer.host import Caller, Entry, Host, waits_s
from dataplane.peer.requests.outgoing_changes import NO_CHUNKS, OutgoingChanges
from dataplane.peer.room.admission import Room, Units
from dataplane.peer.room.pools import Pools
from dataplane.peer.sessions import Session
from dataplane.peer.shards.metadata_quota import MetadataQuota
from dataplane.peer.shards.references import References
from dataplane.peer.shards.value_replicas import ValueReplicas
from dataplane.wire.checkpoint import Restore
from dataplane.wire.limits import (
    MAX_CHUNKS_PER_MESSAGE,
    MAX_PIECES_PER_MESSAGE,
)
from dataplane.wire.messages import (
    Body,
    Done,
    Finish,
    GiveBack,
    Put,
    PutDone,
    Request,
    Reserve,
    Reserved,
    Unpin,
)
from dataplane.wire.packed import (
    DIGEST,
    EXTENT,
    U8,
    Array,
    column,
)
from dataplane.wire.tables import INLINE, Chunk, Owner, Values

Carried = Put | Finish | Restore
"""Messages that bring values to a shard."""
Work = Callable[[Entry, Caller, Any], PutDone]
"""Applies such a message at the shard. The caller runs the effects after that."""
_HASH_BYTES = DIGEST["hash"].itemsize
MAX_AHEAD_BYTES = 64 << 20
"""The most that a reply grants ahead."""


class Committed(msgspec.Struct, eq=False):
    """Values of a message. chunks: their chunks at this peer, except inline ones, with one
    reference each. written: the chunks that the client wrote for the message. has_digests: later
    puts may share some of them."""

    values: Values
    chunks: Array = NO_CHUNKS
    written: Array = NO_CHUNKS
    has_digests: bool = False


class Grants:
    def __init__(self, host: Host, room: Room, pools: Pools) -> None:
        self.host = host
        self.room = room
        self.pools = pools

    # asked for by clients

    def reserve(self, session: Session, request: Request, body: Reserve) -> Body | Awaitable[Body]:
        """Reserve space for a put's next units. Reply at once if there is space and no other
        call waits for it."""
        if not body.pool and self.host.serves(body.partition):
            self.host.shard(body.partition, body.generation)
        self.host.space.check_extents(session.id)
        kind = Admission.CONTINUE if body.continuing else Admission.OPEN
        units = [column(unit, U8) for unit in body.units]
        if not body.digests:
            asked = session.id, kind, units
            pool = body.pool
            granted = self.pools.at_once(pool, *asked) if pool else self.room.at_once(*asked)
            if granted is not None:
                return Reserved(granted[0], granted[1].tobytes())
        return self._reserve_in_turn(session, body, kind, units, waits_s(request.deadline_ms))

    async def _reserve_in_turn(
        self, session: Session, body: Reserve, kind: Admission, units: Units, timeout_s: float
    ) -> Body:
        """Reserve space in the host arena. Chunks of known digests are pinned, so that the client
        can compare their bytes."""
        space = self.host.space
        known, pin = np.zeros(0, U8), 0
        places = np.zeros(0, EXTENT)
        if body.pool and body.digests:
            raise ProtocolError(
                "dedup= supports only values in host memory, but these values are on a device: "
                "copy them to the host, or leave out dedup="
            )
        if body.digests:
            known = space.digests.lookup(body.partition, column(body.digests, DIGEST))
            known[space.spilled(known)] = 0  # writing it again is as fast as reading it back
            found = known != 0
            pin = space.pin(session.id, known[found])
            places = np.zeros(len(known), EXTENT)
            places[found] = space.chunks.extents(known[found])
        session.waiting += 1
        try:
            count, extents = await self.room.reserve(session.id, kind, units, timeout_s)
        except BaseException:
            self.room.unpin(session.id, [pin])
            raise
        finally:
            session.waiting -= 1
        if body.pool:
            overflowed = sum(int(unit.sum()) for unit in units[:count])
            self.pools.overflowed(body.pool, overflowed)
        return Reserved(count, extents.tobytes(), known.tobytes(), places.tobytes(), pin)

    def give_back(self, session: Session, request: Request, body: GiveBack) -> Body:
        extents = column(body.extents, EXTENT)
        if len(extents) > MAX_PIECES_PER_MESSAGE:
            raise LimitExceeded(
                f"the client returned {len(extents)} extents in one message, over the limit of "
                f"{MAX_PIECES_PER_MESSAGE}. Install the same dataplane release everywhere",
                limit=MAX_PIECES_PER_MESSAGE,
            )
        self.host.space.give_back(session.id, extents)
        self.room.pump()
        return Done()

    def unpin(self, session: Session, request: Request, body: Unpin) -> Body:
        self.room.unpin(session.id, body.pins)
        return Done()

    def commit(
        self,
        session: Session,
        values: Values,
        kind: Admission,
        most_chunks: int = MAX_CHUNKS_PER_MESSAGE,
    ) -> Committed:
        """Commit the chunks that a client wrote, and reference the chunks that it shares: all or
        none. The shard checks the rest of the values."""
        if len(values.chunks) > most_chunks:
            raise too_many(values, most_chunks)
        if not values.chunks:
            return Committed(values)
        owners = values.owners
        inline = [owner == INLINE for owner in owners]
        if all(inline):
            return Committed(values)
        self._check_owners(owners)
        many, has_digests = len(owners), False
        extents: list[Extent] = []
        shared: list[Chunk] = []
        for one in values.chunks:
            at, nbytes, offset = one.owner, one.nbytes, one.offset
            if at < 0 or at >= many:
                raise mixed_releases(
                    f"invalid owner index {at} for chunk {one.number}: the message lists "
                    f"{counted(len(owners), 'owner')}"
                )
            if inline[at]:
                continue
            if one.digest:
                has_digests = True
            if nbytes < 0 or offset < 0 or (one.digest and len(one.digest) != _HASH_BYTES):
                raise mixed_releases(
                    f"invalid chunk of {nbytes} bytes at offset {offset}, with a digest of "
                    f"{len(one.digest)} bytes: expected a non-negative size and offset, and a "
                    f"digest of 0 or {_HASH_BYTES} bytes"
                )
            if one.number:
                shared.append(one)
            else:
                extents.append((offset, nbytes))
        if not extents and not shared:
            return Committed(values)
        known = self._shared(shared) if shared else NO_CHUNKS
        try:
            written = self.host.space.commit(session.id, extents, kind)
        except DataplaneError:
            self.host.space.release(known)
            raise
        numbers = iter(written.tolist())
        chunks = [
            one
            if inline[one.owner]
            else Chunk(
                one.owner,
                one.number or next(numbers),
                one.rows,
                one.nbytes,
                one.layout,
                one.inline,
            )
            for one in values.chunks
        ]
        values = Values(values.fields, owners, values.layouts, chunks, values.pieces)
        named = np.concatenate((written, known)) if shared else written
        return Committed(values, named, written, has_digests)

    def _check_owners(self, owners: Sequence[Owner]) -> None:
        """Raise ProtocolError unless these are the client's own peer and INLINE."""
        me = self.host.owner
        if others := [owner for owner in owners if owner not in (me, INLINE)]:
            raise mixed_releases(
                f"expected only chunks of the client's own peer {me.peer} (incarnation "
                f"{me.incarnation}), got one of peer {others[0].peer} (incarnation "
                f"{others[0].incarnation})"
            )

    def _shared(self, chunks: Sequence[Chunk]) -> Array:
        """Take references to chunks that a client shares. Raise ProtocolError unless each has the
        size that the message says."""
        for one in chunks:
            if not 0 < one.number < 1 << 64:
                raise mixed_releases(f"invalid chunk number {one.number}: expected 1 or more")
        known = np.array([one.number for one in chunks], U8)
        places = self.host.space.chunks.hold(known)
        for one, (_, length) in zip(chunks, places, strict=True):
            if room(one.nbytes) != length:
                self.host.space.release(known)
                raise mixed_releases(
                    f"chunk {one.number} has {length} bytes with its padding, but the message says "
                    f"{one.nbytes} bytes without it"
                )
        return known

    # after the client wrote

    def refused(self, session: Session, values: Values) -> None:
        """Take back what a rejected message wrote. Once answered, its extents belong to the
        peer, and waiting calls get their space: also if `commit` has already released them."""
        arena = [at for at, owner in enumerate(values.owners) if owner != INLINE]
        mine = [one for one in values.chunks if not one.number and one.owner in arena]
        with contextlib.suppress(ProtocolError, LimitExceeded, OverflowError):
            written = np.array([(one.offset, one.nbytes) for one in mine], EXTENT)
            self.host.space.give_back(session.id, written)
        self.room.pump()

    def ahead(self, session: Session, want_bytes: int, in_pools: Sequence[int] = ()) -> bytes:
        """Return the next reservation: in the host arena, unless another call waits for space
        there, and in the pools."""
        granted = b""
        if not want_bytes and not in_pools:
            return granted
        try:
            self.host.space.check_extents(session.id)
        except LimitExceeded:
            return granted
        if want_bytes and not len(self.room):
            nbytes = min(want_bytes, MAX_AHEAD_BYTES)
            granted = self.host.space.grant(session.id, Admission.OPEN, nbytes).tobytes()
        return granted + self.pools.ahead(session.id, in_pools) if in_pools else granted

    def keep_where_full(
        self, session: Session, committed: Committed, failure: BaseException
    ) -> None:
        """If a shard has no space for a message's inline chunks, keep its other chunks for the next
        message, which has no inline chunks. Otherwise a rejection would free the written chunks."""
        if isinstance(failure, ShardFull) and failure.details.get("values"):
            pin, _ = self.host.space.keep(session.id, committed.chunks)
            failure.details |= {"chunks": committed.chunks.tobytes(), "pin": pin}


@dataclass(eq=False, repr=False)
class Writing:
    host: Host
    grants: Grants
    outgoing: OutgoingChanges
    references: References
    value_replicas: ValueReplicas
    metadata_quota: MetadataQuota
    run_effects: Callable[[Entry], None]

    async def put(self, session: Session, request: Request, body: Put) -> Body:
        """Put rows. Do not wait if the shard is local and has space, and no replicas are made."""
        kind = Admission.CONTINUE if body.continuing else Admission.OPEN
        try:
            committed = self.grants.commit(session, body.values, kind)
        except BaseException:
            self.grants.refused(session, body.values)
            raise
        sent, body.values = body.values, committed.values
        done = await self.store(session, body, committed, self._put_into)
        if committed.has_digests:
            self._share(body.partition, sent.chunks, committed.values.chunks)
        if body.pin:
            self.host.space.unpin(session.id, [body.pin])
        self.host.put_by_clients += body.rows.count - done.gone
        ahead = self.grants.ahead(session, body.want_bytes, body.want_in_pools)
        return PutDone(ahead, gone=done.gone, there=done.there)

    async def store(
        self,
        session: Session,
        body: Carried,
        committed: Committed,
        work: Work,
        keep: Callable[[BaseException], None] | None = None,
    ) -> PutDone:
        """Apply a message that brings values at its partition's shard, wherever that is. Do not
        wait if the shard is local, makes no replicas and has space.

        Repeat the message as another change while the shard is full: a waiting put must not block
        the acks that free space. keep: keeps the values of a call that failed, because its caller
        will name them again.
        """
        caller, unreferenced = self.host.caller(session.id), committed.chunks
        full_at, tries = 0.0, 0
        try:
            while True:
                entry = self.host.entry(body.partition, body.generation)
                try:
                    if entry is None or (entry.replicas is not None and body.values.chunks):
                        done: PutDone = await self.outgoing.send(body, caller, committed.chunks)
                    else:
                        body.change = None
                        done = work(entry, caller, body)
                        unreferenced = NO_CHUNKS  # the rows have the references of the message
                        self.run_effects(entry)
                    return done
                except BackPressure as full:
                    if full.details.get("values"):  # the client stores them in the arena instead
                        raise
                    full_at, tries = full_at or self.host.now(), tries + 1
                    await self.metadata_quota.wait_to_retry(session, full, tries)
        except BaseException as exc:
            if keep is None:
                self.grants.keep_where_full(session, committed, exc)
            else:
                keep(exc)
            raise
        finally:
            if tries:
                self.metadata_quota.waited(session, full_at)
            if len(unreferenced):
                self.grants.room.release(unreferenced)

    def _share(self, partition: str, sent: Sequence[Chunk], stored: Sequence[Chunk]) -> None:
        """Let later puts find the chunks of a message that have digests."""
        pairs = [(new, old) for new, old in zip(sent, stored, strict=True) if new.digest]
        digests = np.array([(new.digest, new.nbytes) for new, _ in pairs], DIGEST)
        chunks = np.array([old.number for _, old in pairs], U8)
        self.host.space.digests.enter(partition, digests, chunks)

    # at the shard

    def apply(
        self, entry: Entry, caller: Caller, body: Carried, work: Work
    ) -> Body | Awaitable[Body]:
        """Apply a change that names values, once, even if it is repeated. Do not wait unless
        replicas of the values must be made first."""
        if entry.replicas is None or not body.values.chunks or entry.store.knows(body.change):
            return self._once(entry, caller, body, work)
        return self._with_copies(entry, caller, body, work)

    async def _with_copies(self, entry: Entry, caller: Caller, body: Carried, work: Work) -> Body:
        async with self.value_replicas.beforehand(entry, body):
            self.host.check_still(entry, caller)
            return self._once(entry, caller, body, work)

    def _once(self, entry: Entry, caller: Caller, body: Carried, work: Work) -> Body:
        answer = self.references.answered(entry, caller, body)
        if answer is None:
            answer = work(entry, caller, body)
            self.run_effects(entry)
        return answer

    def put_here(self, caller: Caller, body: Put) -> Body | Awaitable[Body]:
        entry = self.host.shard(body.partition, body.generation)
        return self.apply(entry, caller, body, self._put_into)

    def _put_into(self, entry: Entry, caller: Caller, body: Put) -> PutDone:
        plan = plan_put(entry.store, body)
        self.metadata_quota.check(body.values, bool(plan.new))
        body.holder = caller.session
        return entry.store.put(body, plan, self.host.now())
