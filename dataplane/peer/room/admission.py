"""Which calls get space in the arena, and which wait for it.

Reservations wait in one queue per admission class, first come, first served. The peer looks at
them again whenever space is freed. A wait that nothing can end raises an error at once. Any
other wait ends at its deadline, with the figures of who holds the bytes. Claims that pull values
wait separately, each for all the space that it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.errors import BackPressure, DataplaneError, duration, sized
from dataplane.memory.admission import Admission
from dataplane.memory.extents import placed
from dataplane.memory.space import PULLER
from dataplane.metadata.shard import inspection, reasons
from dataplane.metadata.shard.reasons import Subject
from dataplane.metadata.tables.incoming import check_owners
from dataplane.metadata.tables.outgoing import pulled
from dataplane.peer.host import Entry, Host, call_context
from dataplane.peer.net.mesh import Mesh
from dataplane.peer.notices import Telling, Why
from dataplane.peer.tasks import within
from dataplane.wire.events import EventRecord, Kind, Reason
from dataplane.wire.packed import EXTENT, U8, Array
from dataplane.wire.peering import Activity, CanFree, StoredRows
from dataplane.wire.tables import Owner, Table

ASK_S = 1.0
"""Other peers are asked what their rows wait for this long before a call's deadline."""
REUSE_S = 0.5
"""Replies younger than this are reused: to answer takes a peer with many groups 0.1 s."""
MAX_ASKED = 8
"""The maximum number of peers asked for one message."""

_DOING = {
    Admission.OPEN: "a put of new rows",
    Admission.CONTINUE: "a put or add to existing groups",
    Admission.PULL: "a pull from other hosts or from the spill file",
}

REASONS = {
    Admission.OPEN: Reason.OPEN,
    Admission.CONTINUE: Reason.CONTINUE,
    Admission.PULL: Reason.PULL,
}

Units = list[npt.NDArray[np.uint64]]
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiter:
    holder: int
    admission: Admission
    units: Units
    granted: asyncio.Future[tuple[int, Array]]
    since: float


@dataclass(slots=True, eq=False)
class _StarvedClaim:
    nbytes: int
    turn: asyncio.Future[None]
    holder: int
    since: float
    stage: str


async def _in_pieces(items: list[T]) -> AsyncIterator[list[T]]:
    """Yield the blocks or chunks in pieces, and serve other calls after each."""
    for at in range(0, len(items), inspection.PIECE):
        yield items[at : at + inspection.PIECE]
        await asyncio.sleep(0)


class Room:
    """Admission to the host arena. Calls never wait for space in a pool."""

    def __init__(self, host: Host, mesh: Mesh) -> None:
        self._host = host
        self._mesh = mesh
        self.space = host.space
        self.on_wait: list[Callable[[], None]] = []
        """called when a call begins to wait"""
        self.beyond: Callable[[], tuple[type[BackPressure], str]] = lambda: (BackPressure, "")
        """the error for a wait without success, and where else values may be stored"""
        self.waited = [0] * len(Admission)
        """number of calls that had to wait, by class"""
        self.waited_s = [0.0] * len(Admission)
        self.refused = [0] * len(Admission)
        """waits that ended in BackPressure"""
        ranked = sorted(Admission, reverse=True)
        self._lines: dict[Admission, deque[Waiter]] = {a: deque() for a in ranked}
        """by class, the highest first"""
        self._promised: dict[int, int] = {}
        """bytes that claims may pull, by a number that each claim has chosen"""
        self._promised_bytes = 0
        """the sum of these"""
        self._claims: dict[int, _StarvedClaim] = {}
        self._activities: dict[Owner, Activity | None] = {}
        """the replies of other peers; None: no reply yet"""
        self._asked_at = -math.inf
        self._asking: list[asyncio.Task[None]] = []
        self._looked_at = -math.inf
        self._looking: asyncio.Task[None] | None = None
        self._kept: tuple[list[StoredRows], int] = [], 0
        """bytes of this arena that rows here keep, at `_looked_at`"""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def producers(self) -> int:
        """The number of puts and adds that wait for space."""
        return len(self) - len(self._lines[Admission.PULL])

    def waiting(self, admission: Admission) -> int:
        """Return how many reservations of this class wait now."""
        return len(self._lines[admission])

    def at_once(self, holder: int, admission: Admission, units: Units) -> tuple[int, Array] | None:
        """As `reserve`, but return None instead of waiting."""
        if self._lines[admission]:
            return None
        count, extents = self.space.reserve(holder, admission, units)
        return (count, extents) if count else None

    def for_copies(self, sizes: npt.NDArray[np.uint64]) -> tuple[Array, Array] | None:
        """As `Space.for_copies`. Also None if a call waits for space for pulls."""
        return None if self._lines[Admission.PULL] else self.space.for_copies(sizes)

    async def reserve(
        self, holder: int, admission: Admission, units: Units, timeout_s: float
    ) -> tuple[int, Array]:
        """Reserve the first units that fit, whole, with their extents; at least one.

        Raise ValueTooLarge at once for a unit that never fits, and BackPressure if no space is
        freed in time.
        """
        space = self.space
        line = self._lines[admission]
        granted = self.at_once(holder, admission, units)
        if granted is not None:
            return granted
        if line:
            space.check_units(admission, units)
        granted_later = asyncio.get_running_loop().create_future()
        waiter = Waiter(holder, admission, units, granted_later, self._host.now())
        line.append(waiter)
        try:
            return await self._in_turn(waiter, timeout_s)
        except (TimeoutError, BackPressure) as exc:
            self.refused[admission] += 1
            if isinstance(exc, TimeoutError):  # `_in_turn` has asked other peers already
                await self._look()
            else:
                await self._learn()
            why = str(exc) or f"no space was freed within {duration(timeout_s)}"
            raise self._full(waiter, why) from exc

    async def _in_turn(self, waiter: Waiter, timeout_s: float) -> tuple[int, Array]:
        """Wait in line. Ask other peers for the reason shortly before the deadline."""
        admission, line = waiter.admission, self._lines[waiter.admission]

        def look() -> Why:
            return self._full(waiter, "").message, {"reason": REASONS[admission]}

        by = self._most_by()
        self.waited[admission] += 1
        self._waits()
        space_for, ask_s = f"space for {_DOING[admission]}", min(ASK_S, timeout_s / 2)
        what, subject = f"request for arena {space_for}", Subject(space_for)
        try:
            with Telling(self._host, what, subject, look, learn=self._learn):
                with contextlib.suppress(TimeoutError):
                    return await within(timeout_s - ask_s, asyncio.shield(waiter.granted))
                self._ask_peers()
                return await within(ask_s, waiter.granted)
        except BaseException:
            given = waiter.granted
            if given.done() and not given.cancelled() and given.exception() is None:
                self.space.give_back(
                    waiter.holder, given.result()[1]
                )  # granted while the caller stopped waiting
                self.pump()
            raise
        finally:
            self.waited_s[admission] += self._host.now() - waiter.since
            self._waited(REASONS[admission], waiter.holder, waiter.since, by)
            if waiter in line:
                line.remove(waiter)
                self.pump()

    async def write(
        self,
        sizes: npt.NDArray[np.uint64],
        extents: Array,
        write: Callable[[Array], Awaitable[npt.NDArray[np.bool_] | None]],
        kind: Admission,
    ) -> Array:
        """Write bytes into space that the peer itself reserved, here or in a pool. Return their
        chunk numbers.

        Nothing is kept if it fails. write: returns a mask of values that were freed before they
        arrived, or None. Those get number 0.
        """
        space = self.space
        try:
            offsets, left = placed(sizes.tolist(), extents.tolist())
            dest = np.array(offsets, U8)
            gone = await write(dest)
            written = list(zip(offsets, sizes.tolist(), strict=True))
            fresh = space.commit(PULLER, written, kind)
        except BaseException:
            space.give_back(PULLER, extents)
            raise
        if left:
            space.give_back(PULLER, np.array(left, EXTENT))
        if gone is not None and gone.any():
            self.release(fresh[gone])
            fresh[gone] = 0
        return fresh

    def release(self, chunks: Array, counts: Array | int = 1) -> None:
        """Release references. Waiting calls get the freed space."""
        if self.space.release(chunks, counts):
            self.pump()

    def unpin(self, holder: int, pins: list[int]) -> None:
        """Release pins. Copies that no reader pins can be evicted, although no byte is free yet."""
        self.space.unpin(holder, pins)
        self.pump()

    def pump(self) -> None:
        """Grant waiting reservations in order, the highest class first, after space was freed or
        a caller left."""
        for line in self._lines.values():
            while line:
                waiter = line[0]
                count, extents = self.space.reserve(waiter.holder, waiter.admission, waiter.units)
                if not count:
                    break
                line.popleft()
                if not waiter.granted.done():
                    waiter.granted.set_result((count, extents))
                else:
                    self.space.give_back(waiter.holder, extents)
        self._look_at_claims()

    def _waits(self) -> None:
        for told in self.on_wait:
            told()

    def fail_waiting(self) -> None:
        """Raise BackPressure in all waiting producers, because no client is left that could free
        space."""
        why = "no client can free space, because all of them are waiting"
        writers = [w for a in (Admission.OPEN, Admission.CONTINUE) for w in self._lines[a]]
        for waiter in writers:
            if not waiter.granted.done():
                waiter.granted.set_exception(BackPressure(why))

    # who holds the bytes

    async def _learn(self) -> None:
        """Learn what rows wait for, here and at other peers."""
        self._ask_peers()
        await self._look()
        if self._asking:
            await asyncio.wait(self._asking, timeout=ASK_S)

    async def _look(self) -> None:
        """Learn what rows here wait for, unless that was less than REUSE_S ago."""
        if self._looking is None or self._looking.done():
            if self._host.now() <= self._looked_at + REUSE_S:
                return
            self._looking = self._mesh.spawn(self._look_here())
        await asyncio.wait([self._looking])

    async def _look_here(self) -> None:
        self._looked_at = self._host.now()
        self._kept = await self.kept(self._host.owner)

    def _ask_peers(self) -> None:
        """Ask the peers whose rows keep the most values here what those rows wait for. Peers that
        were asked less than REUSE_S ago are not asked again."""
        host, now = self._host, self._host.now()
        if now <= self._asked_at + REUSE_S:
            return
        self._asked_at, roster = now, host.roster
        copied = [o for o in roster.owners if roster.backup_of(o.peer)[0] == host.address]
        remote = host.remote_references
        asked = sorted({*remote.peers, *copied}, key=remote.count, reverse=True)
        self._activities = dict.fromkeys(asked[:MAX_ASKED])
        self._asking = [self._mesh.spawn(self._ask(owner)) for owner in self._activities]

    async def _ask(self, owner: Owner) -> None:
        with contextlib.suppress(DataplaneError):  # unknown then, as the message says
            self._activities[owner] = await self._mesh.call(
                owner.peer, CanFree(why=True), timeout_s=ASK_S, to=owner.incarnation
            )

    async def kept(self, owner: Owner) -> tuple[list[StoredRows], int]:
        """The partitions served here with the most bytes in an owner's arena, and how many more
        have values there."""
        entries = list(self._host.entries.values())
        sizes = [(await self._bytes_at(entry, owner), entry) for entry in entries]
        found = sorted((one for one in sizes if one[0]), key=lambda one: -one[0])
        shown, more = found[: reasons.SHOWN_OTHERS], len(found[reasons.SHOWN_OTHERS :])
        return [await self._stored(entry, nbytes) for nbytes, entry in shown], more

    async def _bytes_at(self, entry: Entry, owner: Owner) -> int:
        """Bytes in an owner's arena that rows of a partition keep, with its replicas."""
        host, store, copies = self._host, entry.store, entry.replicas
        chunks, nbytes = store.chunks_at(owner), 0
        if copies is not None and owner == host.owner:
            nbytes += sum([int(copies.held(one)[1].sum()) for one in copies.owners])
        elif copies is not None and owner.peer == host.roster.backup_of(host.address)[0]:
            chunks += store.chunks_at(host.owner)
        async for some in _in_pieces(chunks):
            nbytes += sum([chunk.nbytes for chunk in some])
        return nbytes

    async def _stored(self, entry: Entry, nbytes: int) -> StoredRows:
        store = entry.store
        lacks: Counter[tuple[str, str]] = Counter()
        async for some in _in_pieces(list(store.blocks.values())):
            lacks += inspection.lacks(store, some)
        now = self._host.now()
        held = sorted(inspection.holders(store, now), key=lambda one: -one[2])
        return StoredRows(
            entry.name,
            len(store),
            nbytes,
            inspection.unleased(store, now),
            [(self._host.who(who), of, n, s) for who, of, n, s in held[: reasons.SHOWN_LEASES]],
            [(stage, field, rows) for (stage, field), rows in lacks.items()],
            store.definition.free == "drop",
        )

    def _full(self, waiter: Waiter, why: str) -> BackPressure:
        host, stats, now = self._host, self.space.stats(), self._host.now()
        remote = host.remote_references
        kept, more = list(self._kept[0]), self._kept[1]
        silent: list[tuple[str, int]] = []
        for owner, activity in self._activities.items():
            if activity is not None:
                kept += activity.kept
                more += activity.more
            elif values := remote.count(owner):
                silent.append((self._mesh.others.name(owner.peer), values))
        kept.sort(key=lambda one: -one.nbytes)
        needed = int(waiter.units[0].sum())
        room = stats["classes"][waiter.admission.name.lower()]["room_bytes"]
        holders = self._holders()
        remarks, free = [], stats["free_bytes"]
        if room < needed <= free:
            remarks.append(
                f"{sized(free)} of the arena are free, but reserved for other kinds of calls"
            )
        longest, largest = int(waiter.units[0].max(initial=0)), stats["largest_free_bytes"]
        if needed <= room and longest > largest:
            remarks.append(
                f"the free space is fragmented: one value needs {sized(longest)}, but the largest "
                f"free range has {sized(largest)}"
            )
        kind_of, beyond = self.beyond()
        full = reasons.FullArena(
            host.name,
            _DOING[waiter.admission],
            needed,
            room,
            stats["used_bytes"],
            stats["size_bytes"],
            kept,
            more,
            silent,
            sum([remote.count(one) for one in remote.peers if one not in self._activities]),
            [(h["holder"], h["granted_bytes"] + h["pinned_bytes"]) for h in holders],
            any(subject.kind == "claim" for subject, *_ in host.notices.waits(now)),
            [*remarks, *([beyond] if beyond else [])],
        )
        return kind_of(
            reasons.of_full_arena(full, why),
            needed_bytes=needed,
            room_bytes=room,
            free_bytes=stats["free_bytes"],
            arena_bytes=stats["size_bytes"],
            spilled_bytes=stats["spilled_bytes"],
            rows={one.partition: one.rows for one in kept},
            idle_stages={one.partition: reasons.idle_stages(one) for one in kept},
            holders=holders,
        )

    def _holders(self) -> list[dict[str, Any]]:
        """Return each process's bytes in this arena, the largest first. A process may have several
        sessions: views outlive the session that read them."""
        by_who: dict[str, dict[str, Any]] = {}
        for holder, granted, pinned in self.space.holders():
            who = "the peer itself" if holder == PULLER else self._host.who(holder)
            held = by_who.setdefault(who, {"holder": who, "granted_bytes": 0, "pinned_bytes": 0})
            held["granted_bytes"] += granted
            held["pinned_bytes"] += pinned
        return sorted(by_who.values(), key=lambda one: -one["granted_bytes"] - one["pinned_bytes"])

    def _waited(self, reason: Reason, holder: int, began: float, by: str, stage: str = "") -> None:
        record = EventRecord(Kind.ROOM_WAIT, reason=reason, stage=stage, worker=holder, by=by)
        self._host.events.waited(record, began)

    def going_on(self) -> list[EventRecord]:
        """Return a record of each call that waits for space: its reason and start time, as for a
        wait that ends now."""
        waiting = [
            (REASONS[p.admission], "", p.holder, p.since) for q in self._lines.values() for p in q
        ]
        waiting += [(Reason.PULL, c.stage, c.holder, c.since) for c in self._claims.values()]
        now, by = self._host.now(), self._most_by() if waiting else ""
        found: list[EventRecord] = []
        for reason, stage, holder, since in waiting:
            record = EventRecord(Kind.ROOM_WAIT, now, reason, stage=stage, worker=holder, by=by)
            record.seconds = max(0.0, now - since)
            found.append(record)
        return found

    def _most_by(self) -> str:
        """Return who holds most of this arena: a client, by its reserved and mapped bytes, or a
        partition, by its rows, with the clients that keep them from being freed."""
        holders = self._holders()
        if holders:
            most = holders[0]
            if (
                most["granted_bytes"] + most["pinned_bytes"]
                > self.space.figures()["used_bytes"] // 2
            ):
                return f"reservations and views of {most['holder']}"
        entries = self._host.entries.values()
        entry = max(entries, key=lambda one: len(one.store), default=None)
        if entry is None or not len(entry.store):
            elsewhere = len(self._host.remote_references)
            return "rows of partitions that other peers serve" if elsewhere else ""
        now, name = self._host.now(), f"rows of partition {entry.name!r}"
        if entry.store.definition.free == "drop":
            return f"{name}, which stay until they are dropped"
        if idle := inspection.idle(entry.store, now):
            return f"{name}, which stage {idle[0][0]!r} has not claimed"
        if leases := inspection.holders(entry.store, now):
            holder, stage, *_ = max(leases, key=lambda one: one[2])
            return f"{name}, leased by {self._host.who(holder)} for stage {stage!r}"
        return name

    # claims that pull

    @property
    def starved(self) -> int:
        """The number of claims that wait for space."""
        return len(self._claims)

    def credit_bytes(self) -> int:
        """The bytes that claims may still pull from other hosts."""
        return max(0, self.space.pullable_bytes - self._promised_bytes)

    def promise(self, claim: int, nbytes: int) -> bool:
        """Return whether this claim may pull this many bytes, all of them or none. They count until
        `back` is called. A claim that waits for space holds its rows but no space, so no two claims
        wait for each other."""
        if nbytes > self.credit_bytes():
            return False
        self._promised[claim] = nbytes
        self._promised_bytes += nbytes
        return True

    def back(self, claim: int) -> None:
        """Note that the claim's bytes are here, or will not arrive."""
        if nbytes := self._promised.pop(claim, 0):
            self._promised_bytes -= nbytes
            self._look_at_claims()

    def _look_at_claims(self) -> None:
        """Give credit to the claims that have waited longest."""
        for claim, starved in self._claims.items():
            if not starved.turn.done() and self.promise(claim, starved.nbytes):
                starved.turn.set_result(None)

    async def promised(self, claim: int, holder: int, nbytes: int, timeout_s: float | None) -> bool:
        """Wait until the claim may pull its bytes. False at the deadline. Call `back` in both
        cases."""
        turn = asyncio.get_running_loop().create_future()
        began, by, stage = self._host.now(), self._most_by(), call_context.get().stage
        self._claims[claim] = _StarvedClaim(nbytes, turn, holder, began, stage)
        self._waits()
        try:
            await asyncio.wait([turn], timeout=timeout_s)
            return turn.done()
        finally:
            del self._claims[claim]
            self._waited(Reason.PULL, holder, began, by, stage)

    def why(self, needed_bytes: int) -> Why:
        """Return why a claim waits for space, with figures."""
        stats, may = self.space.stats(), self.credit_bytes()
        pinned = stats["pinned_bytes"]
        return (
            f"the next rows need {sized(needed_bytes)} from other hosts, but this arena now has "
            f"space for only {sized(may)} ({sized(pinned)} are in views or being read, "
            f"{sized(stats['used_bytes'])} of {sized(stats['size_bytes'])} are used): delete "
            "batches and arrays that you no longer read",
            {
                "reason": Reason.PULL,
                "needed_bytes": needed_bytes,
                "credit_bytes": may,
                "pinned_bytes": pinned,
            },
        )

    def needed(self, table: Table) -> int:
        """The bytes that a granted table pulls to this host. Raises ProtocolError for a chunk
        without a valid owner."""
        owners, here = table.values.owners, self._host.address
        if all([not one.peer or one.peer == here for one in owners]):
            return 0
        check_owners(table.values)
        chunks = [(owners[chunk.owner], chunk.nbytes) for chunk in table.values.chunks]
        return pulled(chunks, here)
