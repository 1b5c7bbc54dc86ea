"""Which calls get space in the arena, and which wait for it.

Reservations wait in one queue per admission class, first come, first served. The peer looks at
them again whenever space is freed. A wait that nothing can end raises an error at once. Any
other wait ends at its deadline, with the figures of who holds the bytes. Claims that pull values
wait separately, each for all the space that it needs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import BackPressure, duration, sized
from dataplane.memory.admission import Admission
from dataplane.memory.placement import extents_of, placed
from dataplane.memory.space import PULLER
from dataplane.metadata.shard import inspection, reasons
from dataplane.metadata.shard.reasons import Subject
from dataplane.metadata.tables.incoming import check_owners
from dataplane.metadata.tables.outgoing import pulled
from dataplane.peer.host import Entry, Host, call_context
from dataplane.peer.notices import Telling, Why
from dataplane.peer.tasks import within
from dataplane.wire.events import Kind, Reason, Record
from dataplane.wire.records import U8, Array
from dataplane.wire.tables import Table

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


class Room:
    """Admission to the host arena. Calls never wait for space in a pool."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.space = host.space
        self.on_wait: list[Callable[[], None]] = []
        """called when somebody begins to wait"""
        self.beyond: Callable[[], tuple[type[BackPressure], str]] = lambda: (BackPressure, "")
        """what ends a wait in vain, and what is to be said of where else values may go"""
        self.waited = [0] * len(Admission)
        """how many had to wait, by class"""
        self.waited_s = [0.0] * len(Admission)
        self.refused = [0] * len(Admission)
        """waits that ended in BackPressure"""
        self._lines: dict[Admission, deque[Waiter]] = {a: deque() for a in Admission}
        self._promised: dict[int, int] = {}
        """by a number that each claim has chosen"""
        self._promised_bytes = 0
        """all of them together"""
        self._claims: dict[int, _StarvedClaim] = {}
        self._by_rank = [self._lines[admission] for admission in sorted(Admission, reverse=True)]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def producers(self) -> int:
        """The number of puts and adds that wait for space."""
        return len(self) - len(self._lines[Admission.PULL])

    def waiting(self, admission: Admission) -> int:
        """How many reservations of this class wait now."""
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

        def look() -> Why:
            return self._full(waiter, "").message, {"reason": REASONS[admission]}

        began, by = self._host.now(), self._most_by()
        self.waited[admission] += 1
        self._waits()
        try:
            what = f"request for arena space for {_DOING[admission]}"
            with Telling(self._host, what, Subject(f"space for {_DOING[admission]}"), look):
                return await within(timeout_s, waiter.granted)
        except BaseException as exc:
            given = waiter.granted
            if given.done() and not given.cancelled() and given.exception() is None:
                space.give_back(holder, given.result()[1])  # it came as it was given up
                self.pump()
            if isinstance(exc, TimeoutError):
                raise self._back_pressure(
                    waiter, f"no space was freed within {duration(timeout_s)}"
                ) from exc
            raise
        finally:
            self.waited_s[admission] += self._host.now() - began
            self._waited(REASONS[admission], holder, began, by)
            if waiter in line:
                line.remove(waiter)
                self.pump()

    async def write(
        self,
        sizes: npt.NDArray[np.uint64],
        extents: Array,
        write: Callable[[Array], Awaitable[npt.NDArray[np.bool_] | None]],
        refs: Array,
        kind: Admission,
    ) -> Array:
        """Write bytes into space that the peer itself reserved, here or in a pool. Return their
        RANGE records.

        Nothing is kept if it fails. write: returns a mask of values that were freed before they
        arrived, or None. Those get generation 0.
        """
        space = self.space
        try:
            offsets, left = placed(sizes.tolist(), extents.tolist())
            dest = np.array(offsets, U8)
            gone = await write(dest)
            written = list(zip(offsets, sizes.tolist(), strict=True))
            fresh = space.commit(PULLER, written, refs, kind)
        except BaseException:
            space.give_back(PULLER, extents)
            raise
        if left:
            space.give_back(PULLER, extents_of(left))
        if gone is not None and gone.any():
            self.release(fresh[gone], refs[gone])
            fresh[gone] = 0
        return fresh

    def release(self, ranges: Array, counts: Array | int = 1) -> None:
        """Release references. Waiting calls get what is freed."""
        if self.space.release(ranges, counts):
            self.pump()

    def unpin(self, holder: int, pins: list[int]) -> None:
        """Release pins. Copies that no reader pins can be evicted, although no byte is free yet."""
        self.space.unpin(holder, pins)
        self.pump()

    def pump(self) -> None:
        """Grant waiting reservations in order, the highest class first, after space was freed or
        a caller left."""
        for line in self._by_rank:
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

    def end_in_vain(self) -> None:
        """Raise BackPressure in all waiting producers, because no client is left that could free
        space."""
        writers = [w for a in (Admission.OPEN, Admission.CONTINUE) for w in self._lines[a]]
        for waiter in writers:
            if not waiter.granted.done():
                waiter.granted.set_exception(
                    self._back_pressure(
                        waiter, "no client can free space, because all of them are waiting"
                    )
                )

    def _back_pressure(self, waiter: Waiter, why: str) -> BackPressure:
        self.refused[waiter.admission] += 1
        return self._full(waiter, why)

    def _full(self, waiter: Waiter, why: str) -> BackPressure:
        host, stats, now = self._host, self.space.stats(), self._host.now()
        needed = int(waiter.units[0].sum())
        room = stats["classes"][waiter.admission.name.lower()]["room_bytes"]
        entries = [entry for entry in host.entries.values() if len(entry.store)]
        entries.sort(key=lambda entry: -len(entry.store))
        holders = self._holders()
        remarks, free = [], stats["free_bytes"]
        if room < needed <= free:
            remarks.append(
                f"{sized(free)} of the arena are free, but reserved for other kinds of calls"
            )
        longest, stretch = int(waiter.units[0].max(initial=0)), stats["largest_free_bytes"]
        if needed <= room and longest > stretch:
            remarks.append(
                f"the free space is fragmented: one value needs {sized(longest)}, but the largest "
                f"free range has {sized(stretch)}"
            )
        kind_of, beyond = self.beyond()
        full = reasons.FullArena(
            host.name,
            _DOING[waiter.admission],
            needed,
            room,
            stats["used_bytes"],
            stats["size_bytes"],
            [self._kept(entry, now) for entry in entries],
            len(host.lent),
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
            rows={entry.name: len(entry.store) for entry in entries},
            idle_stages={k.partition: [stage for stage, _, _ in k.idle] for k in full.kept},
            holders=holders,
        )

    def _holders(self) -> list[dict[str, Any]]:
        """What each process has of this arena, the largest first. A process may have several
        sessions: views outlive the one that read them."""
        by_who: dict[str, dict[str, Any]] = {}
        for holder, granted, pinned in self.space.holders():
            who = "the peer itself" if holder == PULLER else self._host.who(holder)
            held = by_who.setdefault(who, {"holder": who, "granted_bytes": 0, "pinned_bytes": 0})
            held["granted_bytes"] += granted
            held["pinned_bytes"] += pinned
        return sorted(by_who.values(), key=lambda one: -one["granted_bytes"] - one["pinned_bytes"])

    def _waited(self, reason: Reason, holder: int, began: float, by: str, stage: str = "") -> None:
        record = Record(Kind.ROOM_WAIT, reason=reason, stage=stage, worker=holder, by=by)
        self._host.events.waited(record, began)

    def going_on(self) -> list[Record]:
        """Return a record of each call that waits for space: its reason and start time, as for a
        wait that ends now."""
        waiting = [(REASONS[p.admission], "", p.holder, p.since) for q in self._by_rank for p in q]
        waiting += [(Reason.PULL, c.stage, c.holder, c.since) for c in self._claims.values()]
        now, by, found = self._host.now(), self._most_by() if waiting else "", list[Record]()
        for reason, stage, holder, since in waiting:
            record = Record(Kind.ROOM_WAIT, now, reason, stage=stage, worker=holder, by=by)
            record.seconds = max(0.0, now - since)
            found.append(record)
        return found

    def _most_by(self) -> str:
        """Who holds most of this arena: a client, by what it has reserved or in view, or a
        partition, by its rows, with who keeps them from being freed."""
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
            return "rows of partitions that other peers serve" if len(self._host.lent) else ""
        now, name = self._host.now(), f"rows of partition {entry.name!r}"
        if entry.store.definition.free == "drop":
            return f"{name}, which stay until they are dropped"
        if idle := inspection.idle(entry.store, now):
            return f"{name}, which stage {idle[0][0]!r} has not claimed"
        if leases := inspection.holders(entry.store, now):
            holder, stage, *_ = max(leases, key=lambda one: one[2])
            return f"{name}, leased by {self._host.who(holder)} for stage {stage!r}"
        return name

    def _kept(self, entry: Entry, now: float) -> reasons.StoredRows:
        store = entry.store
        held = sorted(inspection.holders(store, now), key=lambda one: -one[2])
        leases = [(self._host.who(holder), stage, rows, age) for holder, stage, rows, age in held]
        return reasons.StoredRows(
            entry.name,
            len(store),
            inspection.idle(store, now),
            leases,
            inspection.lacks(store),
            store.definition.free == "drop",
        )

    # claims that pull

    @property
    def starved(self) -> int:
        """The number of claims that wait for space."""
        return len(self._claims)

    def credit_bytes(self) -> int:
        """The bytes that claims may still pull from other hosts."""
        return max(0, self.space.pullable_bytes - self._promised_bytes)

    def promise(self, claim: int, nbytes: int) -> bool:
        """Whether this claim may pull this many bytes, all of them or none. They count until
        `back` is called. A claim that waits for space holds its rows but no space, so no two
        claims wait for each other."""
        if nbytes > self.credit_bytes():
            return False
        self._promised_bytes += nbytes - self._promised.get(claim, 0)
        self._promised[claim] = nbytes
        return True

    def back(self, claim: int) -> None:
        """Note that the claim's bytes are here, or will not come."""
        if nbytes := self._promised.pop(claim, 0):
            self._promised_bytes -= nbytes
            self._look_at_claims()

    def _look_at_claims(self) -> None:
        """Those who have waited longest get theirs."""
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
        """Why a claim waits for space, and the figures."""
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
