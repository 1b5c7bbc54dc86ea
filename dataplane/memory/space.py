"""The arena's space as the peer sees it: grants to writers, live chunks, and pins of readers. No
I/O.

The facade over allocator, chunks, quotas, holders and the cache of pulled copies. Every byte is
in one of three states: free, granted to a holder, or live in a chunk. The padding of a chunk to
64 bytes belongs to it. Chunks may be in a spill file instead. Nothing here waits: a request that
does not fit now gets less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import mixed_releases
from dataplane.memory.admission import DEFAULT_SHARES, Admission, Quotas, QuotaShares
from dataplane.memory.allocator import Allocator
from dataplane.memory.cache import PulledCopies
from dataplane.memory.chunks import POOL, SPILLED, Chunks, Counts, Digests, Freed
from dataplane.memory.extents import (
    Bytes,
    Extent,
    Mask,
    Numbers,
    Records,
    padded,
    page_down,
    page_up,
    some,
)
from dataplane.memory.holder import Holder
from dataplane.memory.spill import Move, Spilled
from dataplane.wire.limits import ALIGNMENT_BYTES, MAX_EXTENTS_PER_SESSION
from dataplane.wire.packed import EXTENT, U8

PULLER = 0
"""The holder under which the peer itself reserves room for pulls and pins chunks for others."""
MAX_EXTENTS = 1024
"""The most extents of one reservation. In a fragmented arena, fewer units fit."""
LONG_BYTES = 1 << 20
"""A longer reservation prefers several used extents of at least this length to untouched pages.
Untouched pages are ten times as slow to write, cost each reader a page fault, and add to the memory
that the host uses."""


class Space:
    """One arena of `size_bytes`, a multiple of a page.

    Holders are numbers that the caller chooses: client sessions, or PULLER.
    """

    def __init__(
        self,
        size_bytes: int,
        shares: QuotaShares = DEFAULT_SHARES,
        chunks: Chunks | None = None,
        base: int = 0,
        pool: int = 0,
    ) -> None:
        """chunks: the table that also has the chunks of the host's other memories. base: the first
        address. pool: the number of this memory among the host's pools; 0 for the arena."""
        assert size_bytes > 0 and size_bytes == page_down(size_bytes), size_bytes
        self.size_bytes = size_bytes
        self.base = base
        self._kind = pool * POOL
        self.chunks = Chunks() if chunks is None else chunks
        self.quotas = Quotas(size_bytes, shares)
        self.copies = PulledCopies(self.chunks, self.release)
        self.digests = Digests(self.chunks)
        self.waste_bytes: Callable[[], int] = lambda: 0
        """Bytes of chunks that no row uses. Only the metadata can tell."""
        self.spill: Spilled | None = None
        """The spill file, to which chunks of a full arena move; None: there is none."""
        self._allocator = Allocator(size_bytes, base)
        # in a pool, untouched pages are as quick to write as others
        self.long_bytes = size_bytes if pool else LONG_BYTES
        self._holders: dict[int, Holder] = {}
        self._live_bytes = [0, 0, 0]
        self._last_pin = 0

    def __repr__(self) -> str:
        return (
            f"<Space {sum(self._live_bytes)} B live, {self._granted_bytes()} B granted, "
            f"{self._allocator.free_bytes} B free, {len(self._holders)} holders>"
        )

    def reads_in_place(self, holder: int, numbers: Iterable[int]) -> None:
        """Note that this client has mapped these pools, numbered from 1. A plain space has none."""

    @property
    def quota_bytes(self) -> tuple[int, int, int]:
        """The largest unit per admission class."""
        opening, continuing, pulls = self.quotas.caps
        return opening, continuing, pulls

    @property
    def pullable_bytes(self) -> int:
        """What pulls could be granted now: free space, and copies that no reader pins."""
        room = self.quotas.room(Admission.PULL) + self.copies.evictable_bytes
        return page_down(min(room, self.quotas.caps[Admission.PULL]))

    @property
    def high_water(self) -> int:
        """The end of the highest byte ever granted; pages above were never touched."""
        return self._allocator.high_water

    # space to write

    def check_units(self, admission: int, units: Sequence[Bytes]) -> None:
        """Raise ValueTooLarge if one of these units, as for `reserve`, can never fit."""
        if units:
            self._lengths(admission, units)

    def reserve(self, holder: int, admission: int, units: Sequence[Bytes]) -> tuple[int, Records]:
        """Reserve space for the first units, each whole. Return how many fit, and the EXTENT
        records for them.

        units: per unit the u8 column of its chunks' sizes. `placement.placed` of all their sizes
        into the extents succeeds. If none fits: (0, empty). Raises ValueTooLarge if one never
        can.
        """
        done = 0
        extents: list[Extent] = []
        if units:
            ends, marks = self._lengths(admission, units)
            self._evict_into(admission, page_up(int(ends[-1])))
            first = page_up(int(ends[marks[1]]))
            prefer = self._holder(holder).recent
            while True:
                done, extents = self._allocate(admission, ends, marks, prefer)
                # The quota has room for the unit, but copies may fragment the free space.
                if done or self.quotas.room(admission) < first or not self.copies.evict(first):
                    break
        return done, self._grant(holder, admission, extents)

    def grant(self, holder: int, admission: int, nbytes: int) -> Records:
        """Reserve one extent of at most `nbytes` in advance. Reserve none unless half of the
        class's quota stays free."""
        nbytes = page_up(nbytes)
        extents: list[Extent] = []
        room = self.quotas.room(admission) - self.quotas.caps[admission] // 2
        if 0 < nbytes <= room:
            if nbytes > self.long_bytes:
                nbytes = min(nbytes, self._touched_bytes or nbytes)
            start = self._allocator.allocate(nbytes, self._holder(holder).recent)
            extents = [] if start is None else [(start, nbytes)]
        return self._grant(holder, admission, extents)

    def check_extents(self, holder: int) -> None:
        """Raise LimitExceeded if one more reservation could bring the holder too many separate
        extents."""
        if holder in self._holders:
            self._holders[holder].check(MAX_EXTENTS)

    def give_back(self, holder: int, extents: Records) -> None:
        """Return extents, or parts of them, that the holder will not write. Raises
        ProtocolError, and changes nothing, unless all of them are granted to it, and
        LimitExceeded if it would be left with too many. A no-op for a holder that was
        forgotten."""
        known = self._holders.get(holder)
        if known is not None:
            padded = self._padded(extents[extents["length"] > 0].tolist())
            self._free(padded, known.carve(padded, Admission.OPEN))

    # chunks

    def commit(self, holder: int, extents: Sequence[Extent], admission: int) -> Numbers:
        """Turn written extents into chunks with one reference each. Return their chunk numbers.

        All or nothing. Raises ProtocolError unless each is inside the holder's grants, starts at
        a multiple of 64 bytes and overlaps no other, and LimitExceeded if the holder would have
        too many separate extents. Padding belongs to the chunk.
        """
        padded = self._padded(extents)
        taken = self._holder(holder).carve(padded, admission)
        nbytes = sum(taken)
        if taken[admission] != nbytes:
            self._discharge(taken)
            self.quotas.charge(admission, nbytes)
        self._live_bytes[admission] += nbytes
        return self.chunks.add(padded, admission + self._kind)

    def for_copies(self, sizes: Bytes) -> tuple[Bytes, Numbers] | None:
        """Allocate adjacent chunks that the peer itself writes, with one reference each. Return
        their starts and chunk numbers, or None if no free range is long enough now.

        sizes: padded. The chunks are live from here on, and unknown to others.
        """
        ends = sizes.cumsum(dtype=U8)
        nbytes = ends.item(-1)
        self._evict_into(Admission.PULL, nbytes)
        if nbytes > self.quotas.room(Admission.PULL):
            return None
        if nbytes > self.long_bytes and nbytes > self._allocator.largest_touched:
            return None  # the caller then reserves several used extents
        start = self._allocator.cut(nbytes)
        if start is None:
            return None
        self.quotas.charge(Admission.PULL, nbytes)
        self._live_bytes[Admission.PULL] += nbytes
        starts = ends - sizes + U8.type(start)
        extents = list(zip(starts.tolist(), sizes.tolist(), strict=True))
        return starts, self.chunks.add(extents, Admission.PULL + self._kind)

    def alive(self, chunks: Numbers) -> Mask:
        """Return per chunk whether it is alive."""
        return self.chunks.alive(chunks)

    def hold(self, chunks: Numbers, counts: Counts = 1) -> None:
        """Add references to living chunks. Raises RowsGone, and changes nothing, if any is dead."""
        self.chunks.hold(chunks, counts)

    def release(self, chunks: Numbers, counts: Counts = 1) -> int:
        """Remove references. Return the bytes freed here. Dead chunks are skipped."""
        freed = self.chunks.release(chunks, counts)
        if self.spill is not None and self.spill.spilled_bytes:
            freed = self._freed_from_file(self.spill, freed)
        return self._freed(freed)

    def _freed_from_file(self, spill: Spilled, freed: Freed) -> Freed:
        """Free the extents in the spill file. Return the extents in memory."""
        out = [one for one in freed if one[2] == SPILLED]
        if not out:
            return freed
        spill.freed(out)
        return [one for one in freed if one[2] != SPILLED]

    def _freed(self, freed: Freed) -> int:
        """Free the extents of this memory that chunks left. Return their bytes."""
        if not freed:
            return 0
        by_class = [0, 0, 0]
        for _, length, kind in freed:
            by_class[kind % POOL] += length
            self._live_bytes[kind % POOL] -= length
        self._free([(start, length) for start, length, _ in freed], by_class)
        return sum(by_class)

    @property
    def all_here(self) -> bool:
        """Whether all chunks are in the arena."""
        return self.spill is None

    def away(self, chunks: Numbers, holder: int = 0) -> Mask:
        """Return per chunk whether this holder needs a copy to read it, because its bytes are in
        the spill file or in a pool that the holder does not map."""
        return self.spilled(chunks)

    def any_away(self, chunks: Numbers, holder: int = 0) -> bool:
        """Return whether this holder needs a copy of any chunk."""
        return not self.all_here and some(self.away(chunks, holder))

    # the spill file

    def spilled(self, chunks: Numbers) -> Mask:
        """Return per chunk whether it is in the spill file."""
        if self.spill is None or not self.spill.spilled_bytes:
            return np.zeros(len(chunks), np.bool_)
        spilled: Mask = self.chunks.kinds(chunks) == SPILLED
        return spilled

    def choose_spill(self, nbytes: int) -> Move | None:
        """See `Spilled.choose`."""
        return None if self.spill is None else self.spill.choose(nbytes, self._pinned())

    def settle_spill(self, move: Move) -> int:
        """See `Spilled.settle`. Return the bytes freed here."""
        assert self.spill is not None
        return self._freed(self.spill.settle(move, self._pinned()))

    # readers

    def pin(self, holder: int, chunks: Numbers) -> int:
        """Pin chunks for a reader until `unpin`. Return the pin's id, which is never reused; 0
        for no chunks. Raises RowsGone, and changes nothing, if any is dead. The column stays
        with the pin."""
        assert not self.any_away(chunks, holder)
        return self.keep(holder, chunks)[0]

    def keep(self, holder: int, chunks: Numbers) -> tuple[int, list[Extent]]:
        """Pin chunks wherever their bytes are, for a caller that does not read them. Return the
        pin's id and the extents, padding included."""
        if not len(chunks):
            return 0, []
        places = self.chunks.hold(chunks)
        self._last_pin += 1
        self._holder(holder).pins[self._last_pin] = chunks
        return self._last_pin, places

    def unpin(self, holder: int, ids: Iterable[int]) -> int:
        """Release pins. Unknown ones are skipped. Return the freed bytes."""
        known = self._holders.get(holder)
        if known is None:
            return 0
        columns = [known.pins.pop(number) for number in set(ids) if number in known.pins]
        if not columns:
            return 0
        return self.release(columns[0] if len(columns) == 1 else np.concatenate(columns))

    def pinned(self, holder: int) -> dict[int, Numbers]:
        """The chunks of each pin of the holder."""
        known = self._holders.get(holder)
        return dict(known.pins) if known else {}

    # holders

    def holds(self, holder: int) -> bool:
        """Whether the holder may write or read anything in the arena."""
        known = self._holders.get(holder)
        return known is not None and bool(known.granted_bytes or known.pins)

    def disown(self, holder: int) -> None:
        """Quarantine a holder that is lost but whose processes may live: what it has stays
        charged until `forget`, and no other holder gets it."""
        if holder in self._holders:
            self._holders[holder].quarantined = True

    def forget(self, holder: int) -> int:
        """Free the grants and pins of a holder whose processes have all exited. Return the freed
        bytes."""
        known = self._holders.get(holder)
        if known is None:
            return 0
        freed = self.unpin(holder, list(known.pins)) + known.granted_bytes
        self._free(known.grants, known.granted_by_class)
        del self._holders[holder]
        return freed

    def holders(self) -> list[tuple[int, int, int]]:
        """(holder, bytes granted, bytes pinned) of every holder with grants or pins, the largest
        first."""
        held = [
            (number, holder.granted_bytes, self._pinned_bytes([holder]))
            for number, holder in self._holders.items()
        ]
        return sorted((row for row in held if row[1] or row[2]), key=lambda row: -row[1] - row[2])

    def stats(self) -> dict[str, Any]:
        """Return `figures` and the waste, which is part of used and spilled."""
        return {**self.figures(), "waste_bytes": self.waste_bytes()}

    @property
    def used_bytes(self) -> int:
        return sum(self._live_bytes)

    def figures(self) -> dict[str, Any]:
        """Current figures, in bytes. size = used + granted + free, exactly. pinned and cached
        are parts of used; quarantined is part of used and granted. spilled is separate, in a
        file of at most spill_bytes."""
        everybody = list(self._holders.values())
        lost = [holder for holder in everybody if holder.quarantined]
        return {
            "size_bytes": self.size_bytes,
            "used_bytes": self.used_bytes,
            "granted_bytes": self._granted_bytes(),
            "quarantined_bytes": sum(holder.granted_bytes for holder in lost)
            + self._pinned_bytes(lost),
            "pinned_bytes": self._pinned_bytes(everybody),
            "cached_bytes": self.copies.cached_bytes,
            "spilled_bytes": self.spill.spilled_bytes if self.spill else 0,
            "spill_bytes": self.spill.size_bytes if self.spill else 0,
            "free_bytes": self._allocator.free_bytes,
            "largest_free_bytes": self._allocator.largest_free,
            "touched_bytes": self._allocator.high_water - self.base,
            "chunks": self.chunks.live,
            "pins": sum(len(holder.pins) for holder in everybody),
            "classes": {
                admission.name.lower(): {
                    "used_bytes": self._live_bytes[admission],
                    "granted_bytes": self.quotas.used[admission] - self._live_bytes[admission],
                    "room_bytes": self.quotas.room(admission),
                    "cap_bytes": self.quotas.caps[admission],
                }
                for admission in Admission
            },
        }

    # internals

    def _holder(self, number: int) -> Holder:
        holder = self._holders.get(number)
        if holder is None:
            most = math.inf if number == PULLER else MAX_EXTENTS_PER_SESSION
            holder = self._holders[number] = Holder(most)
        return holder

    def _granted_bytes(self) -> int:
        return sum(holder.granted_bytes for holder in self._holders.values())

    def _pinned(self) -> Numbers:
        """Return the chunks that any holder pins."""
        return pinned_by(self._holders.values())

    def _pinned_bytes(self, holders: Iterable[Holder]) -> int:
        return self._bytes_of(pinned_by(holders))

    def _bytes_of(self, chunks: Numbers) -> int:
        return int(self.chunks.extents(chunks)["length"].sum())

    def _padded(self, extents: Sequence[Extent]) -> list[Extent]:
        """Return extents that a client named, padded. Raises ProtocolError for one outside the
        arena."""
        base, size = self.base, self.size_bytes
        padded: list[Extent] = []
        for start, length in extents:
            if not base <= start < base + size or length > size or start % ALIGNMENT_BYTES:
                raise mixed_releases(
                    f"extent {len(padded)} of {len(extents)} ({length} bytes at offset {start}) "
                    f"is outside the arena of {self.size_bytes} bytes, or its offset is not a "
                    f"multiple of {ALIGNMENT_BYTES}"
                )
            padded.append((start, length + -length % ALIGNMENT_BYTES or ALIGNMENT_BYTES))
        return padded

    def _lengths(
        self, admission: int, units: Sequence[Bytes]
    ) -> tuple[Bytes, npt.NDArray[np.intp]]:
        """Return the running sum of the chunks' bytes, from 0, and the index of each unit's first
        chunk. Raises ValueTooLarge if a unit can never fit."""
        sizes = np.concatenate(units).astype(U8, copy=False)
        if len(sizes):
            # before the sum, which must not overflow for sizes from a client
            self.quotas.check_unit(admission, int(sizes.max()))
        ends = np.concatenate((np.zeros(1, U8), np.cumsum(padded(sizes), dtype=U8)))
        marks = np.zeros(len(units) + 1, np.intp)
        np.cumsum(np.fromiter(map(len, units), np.intp, len(units)), out=marks[1:])
        self.quotas.check_unit(admission, int(np.diff(ends[marks]).max()))
        return ends, marks

    def _allocate(
        self,
        admission: int,
        ends: Bytes,
        marks: npt.NDArray[np.intp],
        prefer: Iterable[Extent],
    ) -> tuple[int, list[Extent]]:
        """Allocate extents for the first units, in order, and return how many units fit.

        ends, marks: as `_lengths` returns them; chunk k is between ends[k] and ends[k + 1].
        An extent holds as many chunks as possible; a unit may have several.
        """
        allocator, room = self._allocator, page_down(self.quotas.room(admission))
        done = int(ends[marks].searchsorted(U8.type(room), "right")) - 1
        last = int(marks[done])
        at = 0
        taken: list[tuple[int, Extent]] = []
        while at < last and len(taken) < MAX_EXTENTS:
            rest, first = int(ends[last] - ends[at]), int(ends[at + 1] - ends[at])
            for reach in self._reaches(rest, first):
                upto = int(ends.searchsorted(ends[at] + U8.type(min(reach, room)), "right")) - 1
                upto = min(upto, last)
                nbytes = page_up(int(ends[upto] - ends[at]))
                start = allocator.allocate(nbytes, prefer) if upto > at else None
                if start is not None:
                    break
            else:
                break
            taken.append((at, (start, nbytes)))
            at, room = upto, room - nbytes
        if at == last:
            return done, [extent for _, extent in taken]
        done = int(marks.searchsorted(at, "right")) - 1
        end = int(ends[marks[done]])
        extents: list[Extent] = []
        for first, (start, length) in taken:
            kept = min(length, page_up(max(0, end - int(ends[first]))))
            if kept:
                extents.append((start, kept))
            if kept < length:  # the rest is part of a unit that did not fit
                allocator.free([(start + kept, length - kept)])
        return done, extents

    def _reaches(self, nbytes: int, first: int) -> Iterator[int]:
        """Yield lengths to try for the next extent of these bytes, the best first. first: bytes of
        the first chunk, which may be the only one that does not fit into used pages."""
        if nbytes > self.long_bytes and (touched := self._touched_bytes):
            yield touched
            yield first
        yield nbytes
        yield self._allocator.largest_free

    @property
    def _touched_bytes(self) -> int:
        """The longest free extent of used pages, if it is worth an extent of its own; else 0."""
        touched = self._allocator.largest_touched
        return touched if touched >= self.long_bytes else 0

    def _evict_into(self, admission: int, nbytes: int) -> None:
        """Evict pulled copies if that frees space for this class."""
        short = nbytes - self.quotas.balance(admission)
        if admission != Admission.PULL:
            # evicting copies inside the guarantee of pulls frees no space for other classes
            pulls = self.quotas.used[Admission.PULL] - self.quotas.guaranteed[Admission.PULL]
            short = min(short, pulls)
        if short > 0:
            self.copies.evict(short)

    def _grant(self, holder: int, admission: int, extents: list[Extent]) -> Records:
        """Charge allocated extents to the holder. Return their EXTENT records, in this order."""
        if extents:
            self.quotas.charge(admission, sum([length for _, length in extents]))
            self._holder(holder).grant(extents, admission)
        return np.array(extents, EXTENT)

    def _free(self, extents: Sequence[Extent], by_class: Sequence[int]) -> None:
        """Free extents that were charged to the classes with these bytes."""
        self._allocator.free(extents)
        self._discharge(by_class)

    def _discharge(self, by_class: Sequence[int]) -> None:
        for admission, nbytes in enumerate(by_class):
            self.quotas.charge(admission, -nbytes)


def pinned_by(holders: Iterable[Holder]) -> Numbers:
    """The distinct chunks that any of these pins."""
    columns = [pin for holder in holders for pin in holder.pins.values()]
    return np.unique(np.concatenate([np.zeros(0, U8), *columns]))
