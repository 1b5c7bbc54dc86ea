"""Bytes of other hosts and of the spill file, copied here once for any number of readers.

Whole chunks are pulled. A pulled chunk becomes a cached copy
in the local arena. It counts towards the pull class, and is evicted when no pin holds it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from operator import gt
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    RowsGone,
    RowsLost,
    TransferFailed,
    TransportMissing,
    Unavailable,
    counted,
    duration,
    mixed_releases,
)
from dataplane.launch.values import AUTO, TransportChoice
from dataplane.memory.admission import Admission
from dataplane.memory.extents import Bytes, padded, some
from dataplane.memory.space import PULLER, Space
from dataplane.memory.spill import DISK
from dataplane.peer.host import ByLabel, Caller, Host, call_context
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.pull.paths import Paths, Sampling
from dataplane.peer.room.admission import Room
from dataplane.peer.room.pools import Pools
from dataplane.peer.tasks import first_of
from dataplane.transport.bulk_frames import COPY, GONE
from dataplane.transport.engine import BulkEngine
from dataplane.transport.registry import POOLS_ONLY, TCP
from dataplane.transport.seam import Remote
from dataplane.wire.events import EventRecord, Kind
from dataplane.wire.limits import MAX_PULLED_BYTES
from dataplane.wire.messages import Body
from dataplane.wire.packed import EXTENT, U8, Array, column
from dataplane.wire.peering import Pull, Pulled
from dataplane.wire.tables import Owner

log = logging.getLogger(__name__)

PULL_S = 30.0
CONTROL = "control"
"""The name in statistics of the link between peers, which carries small values."""
FOLLOWS_S = 3600.0
AT_ONCE = 128
"""The most small pulls in flight to one owner. More wait here, so that log records and heartbeats
on the link are not delayed."""
BEHIND_S = 0.3
"""How long a pull waits for a roster that lists the owner of the values."""
AGAIN_S = 0.5
"""The pause before an owner that was unreachable, but is not lost, is asked again."""
PASSES_S = 10.0
"""A rejected or broken transfer is repeated for this long, although the peer itself answers."""
LOOK_S = 0.5
"""The time after a pull until its owner is asked which chunks with copies here it has freed."""
MOST_LOOKED_AT = 16_384
"""The most chunks that an owner is asked about at once. The others follow after the next pull."""

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Pulls:
    host: Host
    mesh: Mesh
    room: Room
    pools: Pools
    transport: TransportChoice = AUTO
    sampling: Sampling = field(init=False)

    def __post_init__(self) -> None:
        self.engine: BulkEngine | None = None
        self.sampling = Sampling(self.host, self.mesh, self.room, self.pools, self.transport)
        required = self.transport.required not in (None, *POOLS_ONLY)
        self.paths = Paths(self.sampling, TCP, "values", required)
        self.brought: defaultdict[str, ByLabel] = defaultdict(ByLabel)
        """bytes of other hosts, by carrier and by the stage that they were for"""
        self.hits = 0
        self._under_way: dict[int, dict[int, asyncio.Future[None]]] = {}
        """pulls in flight, by the owner's incarnation and the number of the chunk"""
        self._turns = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(AT_ONCE))
        """limits of small pulls, by the owner's incarnation"""
        self._looked_at: set[Owner] = set()
        """owners that will be asked which chunks they have freed"""

    def use(self, engine: BulkEngine) -> None:
        """Set the engine that copies the bytes from now on."""
        self.engine = self.sampling.engine = engine
        self.paths.use(engine, [engine.transport] if engine.transport != TCP else [])

    def stats(self) -> dict[str, Any]:
        """The settings, the transports that run, why others do not, and the transport per peer."""
        engine = self.engine
        return {
            "requested": str(self.paths.choice),
            "runs": engine.transport if engine is not None else TCP,
            "missing": engine.missing if engine is not None else "",
            "tls": engine is not None and bool(engine.fingerprint),
            "peers": self.paths.shown(),
        }

    async def close(self, witnessed: bool = False) -> None:
        """Close. witnessed: the witness tells other peers that this process has exited."""
        if self.engine is not None:
            await self.engine.stop(witnessed)

    # reading from others

    async def bring(
        self, owner: Owner, remote: Array, nbytes: Array, holder: int
    ) -> tuple[Array, list[int]]:
        """Return a local chunk for each remote one of these sizes (u8).

        They are pinned for `holder`, and the caller releases the pins. Raises RowsGone or
        RowsLost.
        """
        space = self.host.space
        local = np.zeros(len(remote), U8)
        pins: list[int] = []
        rest = np.arange(len(remote))
        try:
            while True:
                found = space.copies.lookup(owner.incarnation, remote[rest])
                here = found != 0
                if some(here):
                    self.hits += int(np.count_nonzero(here))
                    pins.append(space.pin(holder, found[here]))
                    local[rest[here]] = found[here]
                    rest = rest[~here]
                    if not len(rest):
                        return local, pins
                keys: list[int] = remote[rest].tolist()
                coming = self._under_way.get(owner.incarnation, {})
                if waits := [coming[key] for key in keys if key in coming] if coming else []:
                    await self._wait_for_others(waits, owner)
                    continue
                local[rest], pin = await self._pull(owner, remote[rest], nbytes[rest], keys, holder)
                return local, [*pins, pin]
        except BaseException:
            self.room.unpin(holder, pins)
            raise

    def left_s(self) -> float:
        """Return the seconds that a pull may take: until the deadline of the call that reads."""
        return max(0.0, min(PULL_S, call_context.get().until - self.host.now()))

    async def _wait_for_others(self, waits: list[asyncio.Future[None]], owner: Owner) -> None:
        limit_s = self.left_s()
        ended, _ = await asyncio.wait(waits, timeout=limit_s)
        if not ended:
            raise DeadlineExceeded(
                f"timed out after {duration(limit_s)}, because another call on this host "
                f"is still fetching the same values from the peer at {owner.peer}: pass a "
                "longer timeout=",
                limit_s=limit_s,
            )

    async def _pull(
        self, owner: Owner, remote: Array, nbytes: Array, keys: list[int], holder: int
    ) -> tuple[Array, int]:
        """Copy chunks that no other call is pulling, in one transfer. Return the copies and their
        pin."""
        space = self.host.space
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        coming = self._under_way.setdefault(owner.incarnation, {})
        coming |= dict.fromkeys(keys, done)
        try:
            copies = await self._transfer(owner, remote, padded(nbytes))
            pin = space.pin(holder, copies)
            if owner.incarnation == DISK or self.host.roster.has(owner):
                space.copies.insert(owner.incarnation, remote, copies)
                if owner.incarnation != DISK and owner not in self._looked_at:
                    self._looked_at.add(owner)
                    self.mesh.spawn(self._drop_dead(owner))
            else:  # no reader will ask for it, and no owner reports its end
                space.release(copies)
            return copies, pin
        finally:
            for key in keys:
                del coming[key]
            if not coming:
                del self._under_way[owner.incarnation]
            done.set_result(None)

    async def _drop_dead(self, owner: Owner) -> None:
        """Drop copies of chunks that their owner has freed. Otherwise they would fill untouched
        pages of the arena until new values evict them."""
        await asyncio.sleep(LOOK_S)
        self._looked_at.discard(owner)
        chunks = self.host.space.copies.some_of(owner.incarnation, MOST_LOOKED_AT)
        dead = await self.dead(owner, chunks)
        if dead.any() and self.host.space.copies.drop(owner.incarnation, chunks[dead]):
            self.room.pump()

    async def dead(self, owner: Owner, chunks: Array) -> npt.NDArray[np.bool_]:
        """Return a mask of the chunks that their owner has freed; none if it does not reply. The
        peer asks only for the first MOST_LOOKED_AT of them."""
        dead = np.zeros(len(chunks), np.bool_)
        asked = chunks[:MOST_LOOKED_AT]
        try:
            reply = await self._exchange(owner, asked)
        except DataplaneError as exc:
            log.debug("could not ask peer %s which values it has freed: %s", owner.peer, exc)
        else:
            dead[np.frombuffer(reply.gone, np.uint8).nonzero()[0]] = True
        return dead

    def gone(self, owner: Owner) -> None:
        """Handle a process that is no longer a member."""
        self._turns.pop(owner.incarnation, None)
        self.paths.gone(owner)
        if self.host.space.copies.drop_owner(owner.incarnation):
            self.room.pump()

    async def _transfer(self, owner: Owner, remote: Array, sizes: Bytes) -> Array:
        """Copy whole chunks, which includes their padding."""
        if owner.incarnation == DISK:
            return await self._fill(sizes, functools.partial(self.pools.read, remote))
        began = self.host.now()
        until = began + self.left_s()
        while True:
            try:
                return await self._sent(owner, remote, sizes)
            except (Unavailable, TransferFailed):
                if not await self._should_retry(owner, began, until):
                    raise

    async def _sent(self, owner: Owner, remote: Array, sizes: Bytes) -> Array:
        await self._is_member(owner)
        if (nbytes := sum(sizes.tolist())) <= MAX_PULLED_BYTES:
            return await self._ask(owner, remote, sizes, nbytes)
        source = await self._remote(owner)

        async def write(dest: Array) -> None:
            reading = self._read(source, copies_of(remote, sizes, dest))
            gone = await self._while_member(owner, reading)
            if gone.any():
                raise _freed(int(gone.sum()), owner)

        return await self._fill(sizes, write)

    async def _ask(self, owner: Owner, remote: Array, sizes: Bytes, nbytes: int) -> Array:
        """Pull few bytes in one exchange on the control link, once there is space for them."""
        view = self.host.arena.view

        async def write(dest: Array) -> None:
            async with self._turns[owner.incarnation]:
                began = self.host.now()
                reply, at = await self._exchange(owner, remote, sizes), 0
            if reply.gone:
                raise _freed(len(reply.gone) - reply.gone.count(0), owner)
            if len(reply.data) != nbytes:
                raise mixed_releases(
                    f"invalid reply from the peer at {owner.peer}: expected {nbytes} bytes, got "
                    f"{len(reply.data)}"
                )
            for start, size in zip(dest.tolist(), sizes.tolist(), strict=True):
                view[start : start + size] = reply.data[at : at + size]
                at += size

            self.note(owner, CONTROL, nbytes, began)

        return await self._fill(sizes, write)

    def note(self, owner: Owner, way: str, nbytes: int, began: float) -> None:
        """Note that bytes of another peer have arrived, with the time of their request."""
        stage = call_context.get().stage
        self.brought[way].add(stage, nbytes)
        record = EventRecord(Kind.PULL, stage=stage, nbytes=nbytes, by=owner.peer, transport=way)
        self.host.events.add(record, began)

    async def _exchange(self, owner: Owner, remote: Array, sizes: Bytes | None = None) -> Pulled:
        """Ask the owner for the first bytes of each chunk, or which of them it has freed. Without
        sizes, ask only which it has freed."""
        reply: Pulled = await self.mesh.call(
            owner.peer,
            Pull(remote.tobytes(), b"" if sizes is None else sizes.tobytes()),
            to=owner.incarnation,
            timeout_s=self.left_s(),
        )
        if reply.gone and len(reply.gone) != len(remote):
            raise mixed_releases(
                f"invalid reply from the peer at {owner.peer}: expected {len(remote)} chunks, got "
                f"{len(reply.gone)}"
            )
        return reply

    async def _is_member(self, owner: Owner) -> None:
        """Raise RowsLost if the owner is no longer a member. A new link to it would never be
        made."""
        while not self.host.roster.has(owner):  # or not yet, if a newer roster is in flight
            until = min(self.host.now() + BEHIND_S, call_context.get().until)
            if not await self.host.another_roster(self.host.roster, until):
                raise _went(owner)

    async def _while_member(self, owner: Owner, reading: Coroutine[Any, Any, T]) -> T:
        """Raise RowsLost as soon as the owner is declared lost. A stopped owner sends nothing, so
        the read would not notice."""
        work = asyncio.ensure_future(reading)
        if work not in await first_of(work, self._lost(owner)):
            raise _went(owner)
        return work.result()

    async def _lost(self, owner: Owner) -> None:
        while self.host.roster.has(owner):
            await self.host.another_roster(self.host.roster, self.host.now() + FOLLOWS_S)

    async def _should_retry(self, owner: Owner, began: float, until: float) -> bool:
        """Return whether to ask an owner again, after a pause, whose values did not arrive: its
        host may be cut off or reject connections for a while. If the peer answers and only its bulk
        worker does not, the caller gets the error. Raise RowsLost if the owner is lost."""
        now = self.host.now()
        again = now < until and (now < began + PASSES_S or not self.mesh.is_linked(owner))
        if again:
            await self.host.another_roster(self.host.roster, min(until, now + AGAIN_S))
        if not self.host.roster.has(owner):
            raise _went(owner)
        return again

    async def ensure_mappable(
        self, chunks: Array, holder: int, reader: int = PULLER
    ) -> tuple[Array, list[int]]:
        """As `bring`, for distinct chunks of this peer: copy those that the reader cannot map,
        which depends on its pools."""
        space = self.host.space
        local, out = chunks.copy(), space.away(chunks, reader)
        pins = [space.pin(holder, chunks[~out])]
        if out.any():
            try:
                lengths = space.chunks.extents(chunks[out])["length"]
                disk = Owner(self.host.address, DISK)
                local[out], brought = await self.bring(disk, chunks[out], lengths, holder)
            except BaseException:
                self.room.unpin(holder, pins)
                raise
            pins += brought
        return local, pins

    async def take_over(self, owner: Owner, remote: Array, lengths: Array, extents: Array) -> Array:
        """Copy values of another peer into space that was reserved for new rows, so that this
        peer owns them. The result has 0 for each chunk that was freed there, and the other
        chunks are copied."""
        try:
            source = await self._remote(owner)
        except BaseException:
            self.host.space.give_back(PULLER, extents)
            raise

        def read(dest: Array) -> Awaitable[npt.NDArray[np.bool_]]:
            return self._read(source, copies_of(remote, lengths, dest))

        return await self.room.write(padded(lengths), extents, read, Admission.OPEN)

    @property
    def carried_bytes(self) -> int:
        """Bytes of other hosts' values that arrived on control links."""
        return sum(self.brought[CONTROL].sums.values())

    @property
    def pulled_bytes(self) -> int:
        """Bytes of other hosts' values that arrived by bulk transfer."""
        everything = sum(sum(by_stage.sums.values()) for by_stage in self.brought.values())
        return everything - self.carried_bytes

    async def _fill(self, sizes: Bytes, write: Callable[[Array], Awaitable[None]]) -> Array:
        """Reserve space, let `write` fill it, and return the copies."""
        room = self.room.for_copies(sizes)
        if room is None:
            _, extents = await self.room.reserve(PULLER, Admission.PULL, [sizes], self.left_s())
            return await self.room.write(sizes, extents, write, Admission.PULL)
        starts, fresh = room
        try:
            await write(starts)
        except BaseException:
            self.room.release(fresh)
            raise
        return fresh

    async def _read(self, source: Remote, copies: Array) -> npt.NDArray[np.bool_]:
        """Return which of the copies are freed at the owner. The others have arrived."""
        assert self.engine is not None
        way = await self.paths.take(source)
        began = self.host.now()
        try:
            outcome = await self.engine.read(source, copies, self.left_s(), way)
        except (TransferFailed, Unavailable, TransportMissing) as exc:
            again = self.paths.failed(source.owner, way, exc)
            if again == way and not isinstance(exc, TransferFailed):
                raise
            way = again
            outcome = await self.engine.read(source, copies, self.left_s(), way)
        except DeadlineExceeded as exc:
            self.paths.failed(source.owner, way, exc)
            raise
        self.note(source.owner, way, outcome.nbytes, began)
        return outcome.gone

    async def _remote(self, owner: Owner) -> Remote:
        if self.engine is None:
            raise Unavailable(
                f"cannot fetch values from the peer at {owner.peer}, because the local peer serves "
                "only its own host: to use several hosts, start each peer with --listen and --seeds"
            )
        hello = await self.mesh.hello(owner.peer)
        if hello.incarnation != owner.incarnation:
            raise _went(owner)
        return Remote(owner, hello.bulk, hello.bulk_fingerprint)

    # serving others

    def pull_here(self, caller: Caller, body: Pull) -> Body | Awaitable[Body]:
        chunks = column(body.chunks, U8)
        if not body.sizes:
            return Pulled(b"", self._gone(chunks))
        sizes = column(body.sizes, U8, len(chunks))
        if (nbytes := sum(sizes.tolist())) > MAX_PULLED_BYTES:
            raise mixed_releases(
                f"invalid pull of {nbytes} bytes: expected at most {MAX_PULLED_BYTES} bytes per "
                "request"
            )
        return self._of_what_is_here(chunks, functools.partial(self._pulled, sizes))

    def _pulled(self, sizes: Array, chunks: Array) -> Pulled:
        """Read the bytes without a pin, because nothing runs in between."""
        try:
            places = self.host.space.chunks.extents(chunks)
        except RowsGone:
            return Pulled(b"", self._gone(chunks))
        wanted, view = sizes.tolist(), self.host.arena.view
        lengths = places["length"].tolist()
        if any(map(gt, wanted, lengths)):
            most, size = next(one for one in zip(lengths, wanted, strict=True) if one[1] > one[0])
            raise mixed_releases(
                f"invalid pull of {size} bytes: expected at most {most} bytes, the size of the "
                "chunk"
            )
        parts = zip(places["offset"].tolist(), wanted, strict=True)
        return Pulled(b"".join([view[start : start + size] for start, size in parts]))

    def _gone(self, chunks: Array) -> bytes:
        return (~self.host.space.alive(chunks)).tobytes()

    def pin(self, chunks: Array) -> tuple[int, Array] | Awaitable[tuple[int, Array]]:
        """Pin the living ones of these chunks for a transfer that reads them. Return their
        positions."""
        return self._of_what_is_here(chunks, self._pin)

    def _pin(self, chunks: Array) -> tuple[int, Array]:
        return pinned(self.host.space, PULLER, chunks, self.host.space.alive(chunks))

    def _of_what_is_here(self, chunks: Array, act: Callable[[Array], T]) -> T | Awaitable[T]:
        """Return `act` of these chunks, with copies in place of those that are in the spill file or
        in a pool."""
        return self._of_copies(chunks, act) if self.host.space.any_away(chunks) else act(chunks)

    async def _of_copies(self, chunks: Array, act: Callable[[Array], T]) -> T:
        while True:
            alive = self.host.space.alive(chunks)
            keys, inverse = np.unique(chunks[alive], return_inverse=True)
            try:
                found, pins = await self.ensure_mappable(keys, PULLER)
                break
            except RowsGone:
                continue  # some were freed: retry with the rest
        try:
            local = np.zeros(len(chunks), U8)
            local[alive] = found[inverse]
            return act(local)
        finally:
            self.room.unpin(PULLER, pins)

    def unpin(self, pin: int) -> None:
        self.room.unpin(PULLER, [pin])


def pinned(
    space: Space, holder: int, chunks: Array, there: npt.NDArray[np.bool_]
) -> tuple[int, Array]:
    """Pin the living ones of these chunks. Return the pin, and the EXTENT of each, with offset GONE
    for a dead one."""
    places = np.zeros(len(chunks), EXTENT)
    places["offset"] = GONE
    if there.any():
        places[there] = space.chunks.extents(chunks[there])
    return space.pin(holder, chunks[there]), places


def copies_of(remote: Array, nbytes: Array, dest: Array) -> Array:
    copies = np.zeros(len(remote), COPY)
    copies["chunk"], copies["nbytes"], copies["dest"] = remote, nbytes, dest
    return copies


def _freed(count: int, owner: Owner) -> RowsGone:
    return RowsGone(
        f"the peer at {owner.peer} freed {counted(count, 'value')} before the local peer could "
        f"fetch {'it' if count == 1 else 'them'}: read or claim the rows again",
        peer=owner.peer,
    )


def _went(owner: Owner) -> RowsLost:
    return RowsLost(
        f"the peer at {owner.peer}, which held the values of these rows, was lost: if the "
        "partition has replicas=2, read the rows again; otherwise, put them again",
        peer=owner.peer,
    )
