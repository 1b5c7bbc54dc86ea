"""The arena's space as the peer sees it: who may write, what lives, who reads. No I/O.

The facade over allocator, ranges, quotas, holders and the cache of pulled copies. Every byte is
in one of three states: free, granted to a holder, or live in a range. The padding of a range to
64 bytes belongs to it. Ranges may be in a spill file instead. Nothing here waits: a request that
does not fit now gets less.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import LimitExceeded, mixed_releases
from dataplane.memory.admission import (
    DEFAULT_SHARES,
    LONG_BYTES,
    MAX_EXTENTS,
    Admission,
    Room,
    ShareOfEach,
    Shares,
)
from dataplane.memory.allocator import Allocator
from dataplane.memory.cache import PulledCopies
from dataplane.memory.extents import (
    PAGE_BYTES,
    Bytes,
    Extent,
    Mask,
    Records,
    Span,
    page_down,
    some,
)
from dataplane.memory.ranges import POOL, SPILLED, Counts, Digests, Freed, Ranges
from dataplane.memory.spill import Move, Spilled
from dataplane.wire.limits import ALIGNMENT_BYTES, MAX_STRETCHES_PER_SESSION
from dataplane.wire.packed import EXTENT, RANGE, U8, joined

PULLER = 0
"""The holder under which the peer itself reserves room for pulls and pins ranges for others."""
_REMEMBERED = 4
"""Stretches granted to a client last."""


class Space:
    """One arena of `size_bytes`, a multiple of a page.

    Holders are numbers that the caller chooses: client sessions, or PULLER.
    """

    def __init__(
        self,
        size_bytes: int,
        shares: ShareOfEach = DEFAULT_SHARES,
        ranges: Ranges | None = None,
        base: int = 0,
        pool: int = 0,
    ) -> None:
        """ranges: the table that also has the ranges of the host's other memories. base: the first
        address. pool: the number of this memory among the host's pools; 0 for the arena."""
        assert size_bytes > 0 and size_bytes == page_down(size_bytes), size_bytes
        self.size_bytes = size_bytes
        self.base = base
        self._kind = pool * POOL
        self.ranges = Ranges() if ranges is None else ranges
        self.shares = Shares(size_bytes, shares)
        self.copies = PulledCopies(self.ranges, self.release)
        self.digests = Digests(self.ranges)
        self.waste_bytes: Callable[[], int] = lambda: 0
        """Bytes of chunks that no row has any more; only the metadata knows."""
        self.spill: Spilled | None = None
        """Where ranges go that have no place here, if anywhere."""
        self._allocator = Allocator(size_bytes, base)
        # In a pool, pages that nobody has touched are as quick to write as others.
        long_bytes = size_bytes if pool else LONG_BYTES
        self._room = Room(self._allocator, self.shares, self.copies, long_bytes)
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
    def share_bytes(self) -> tuple[int, int, int]:
        """The largest unit per admission class."""
        opening, continuing, pulls = self.shares.caps
        return opening, continuing, pulls

    @property
    def pullable_bytes(self) -> int:
        """What pulls could be granted now: free space, and copies that no reader pins."""
        room = self.shares.room(Admission.PULL) + self.copies.evictable_bytes
        return page_down(min(room, self.shares.caps[Admission.PULL]))

    @property
    def high_water(self) -> int:
        """The end of the highest byte ever granted; pages above were never touched."""
        return self._allocator.high_water

    # room to write

    def check_units(self, admission: int, units: Sequence[npt.NDArray[np.uint64]]) -> None:
        """Raise ValueTooLarge if one of these units, as for `reserve`, can never fit."""
        if units:
            self._room.lengths(admission, units)

    def reserve(
        self, holder: int, admission: int, units: Sequence[npt.NDArray[np.uint64]]
    ) -> tuple[int, Records]:
        """Reserve space for the first units, each whole. Return how many fit, and the EXTENT
        records for them.

        units: per unit the u8 column of its ranges' sizes. `placement.placed` of all their sizes
        into the extents succeeds. If none fits: (0, empty). Raises ValueTooLarge if one never
        can.
        """
        prefer = self._holder(holder).recent
        done, spans = self._room.take_units(admission, units, prefer)
        return done, self._grant(holder, admission, spans)

    def grant(self, holder: int, admission: int, nbytes: int) -> Records:
        """Reserve space in advance: one EXTENT, or none unless half of the class's quota stays
        free."""
        prefer = self._holder(holder).recent
        return self._grant(holder, admission, self._room.take_ahead(admission, nbytes, prefer))

    def check_stretches(self, holder: int) -> None:
        """Raise LimitExceeded if one more reservation could bring the holder too many separate
        stretches."""
        if holder in self._holders:
            self._holders[holder].check(MAX_EXTENTS)

    def give_back(self, holder: int, extents: Records) -> None:
        """Return extents, or parts of them, that the holder will not write. Raises
        ProtocolError, and changes nothing, unless all of them are granted to it, and
        LimitExceeded if too many stretches would be left. A no-op for a holder that was
        forgotten."""
        known = self._holders.get(holder)
        if known is None:
            return
        padded = self._padded(extents[extents["length"] > 0].tolist())
        taken = known.carve(padded, Admission.OPEN)
        self._room.give_back([(start, start + length) for start, length in padded], taken)

    def give_back_all(self, holder: int) -> int:
        """Return everything granted to the holder; its pins stay. Return the bytes."""
        known = self._holders.get(holder)
        if known is None:
            return 0
        spans, taken = known.take_grants()
        self._room.give_back(spans, taken)
        return sum(taken)

    # ranges

    def commit(
        self, holder: int, extents: Sequence[Extent], refs: Counts, admission: int
    ) -> Records:
        """Turn written extents into ranges with these references (u4 each). Return their RANGE
        records.

        All or nothing. Raises ProtocolError unless each is inside the holder's grants, starts at
        a multiple of 64 bytes, overlaps no other and has references, and LimitExceeded if the
        holder would have too many separate stretches. Padding belongs to the range.
        """
        padded = self._padded(extents)
        if not isinstance(refs, int):
            self._check_counts(refs, len(padded))
        taken = self._holder(holder).carve(padded, admission)
        nbytes = sum(taken)
        if taken[admission] != nbytes:
            for granted_under, part in enumerate(taken):
                self.shares.discharge(granted_under, part)
            self.shares.charge(admission, nbytes)
        self._live_bytes[admission] += nbytes
        return self.ranges.add(padded, refs, admission + self._kind)

    def for_copies(self, sizes: Bytes) -> tuple[Bytes, Records] | None:
        """Allocate adjacent ranges that the peer itself writes, with one reference each. Return
        their starts and RANGE records, or None if no free range is long enough now.

        sizes: padded. The ranges are live from here on, and unknown to others.
        """
        ends = sizes.cumsum(dtype=U8)
        nbytes = ends.item(-1)
        start = self._room.cut(Admission.PULL, nbytes)
        if start is None:
            return None
        self._live_bytes[Admission.PULL] += nbytes
        starts = ends - sizes + U8.type(start)
        stretches = list(zip(starts.tolist(), sizes.tolist(), strict=True))
        return starts, self.ranges.add(stretches, 1, Admission.PULL + self._kind)

    def alive(self, ranges: Records) -> Mask:
        """Per RANGE, whether that generation lives."""
        return self.ranges.alive(ranges)

    def hold(self, ranges: Records, counts: Counts = 1) -> None:
        """Add references to living ranges. Raises RowsGone, and changes nothing, if any is dead."""
        self.ranges.hold(ranges, counts)

    def release(self, ranges: Records, counts: Counts = 1) -> int:
        """Remove references. Return the bytes freed here. Dead ranges are skipped."""
        freed = self.ranges.release(ranges, counts)
        if self.spill is not None and self.spill.spilled_bytes:
            freed = self._freed_from_file(self.spill, freed)
        return self._freed(freed)

    def _freed_from_file(self, spill: Spilled, freed: Freed) -> Freed:
        """What is left of these, lying in the arena."""
        out = [one for one in freed if one[2] == SPILLED]
        if not out:
            return freed
        spill.freed(out)
        return [one for one in freed if one[2] != SPILLED]

    def _freed(self, freed: Freed) -> int:
        """Free the stretches of this memory that ranges left. Return their bytes."""
        if not freed:
            return 0
        self._allocator.free([(start, start + length) for start, length, _ in freed])
        by_class = [0, 0, 0]
        for _, length, kind in freed:
            by_class[kind % POOL] += length
        for admission, nbytes in enumerate(by_class):
            if nbytes:
                self._live_bytes[admission] -= nbytes
                self.shares.discharge(admission, nbytes)
        return sum(by_class)

    @property
    def all_here(self) -> bool:
        """Whether all ranges are in the arena."""
        return self.spill is None

    def away(self, ranges: Records, holder: int = 0) -> Mask:
        """Per RANGE, whether this holder needs a copy to read it, because its bytes are in the
        spill file or in a pool that the holder does not map."""
        return self.spilled(ranges)

    def any_away(self, ranges: Records, holder: int = 0) -> bool:
        """Whether this holder needs a copy of any."""
        return not self.all_here and some(self.away(ranges, holder))

    # the spill file

    def spilled(self, ranges: Records) -> Mask:
        """Per RANGE, whether it is in the spill file."""
        if self.spill is None or not self.spill.spilled_bytes:
            return np.zeros(len(ranges), np.bool_)
        return self.ranges.spilled(ranges)

    def choose_spill(self, nbytes: int) -> Move | None:
        """See `Spilled.choose`."""
        return None if self.spill is None else self.spill.choose(nbytes, self._pinned())

    def settle_spill(self, move: Move) -> int:
        """See `Spilled.settle`. Return the bytes freed here."""
        assert self.spill is not None
        return self._freed(self.spill.settle(move, self._pinned()))

    # readers

    def pin(self, holder: int, ranges: Records) -> int:
        """Pin ranges for a reader until `unpin`. Return the pin's id, which is never reused; 0
        for no ranges. Raises RowsGone, and changes nothing, if any is dead. The column stays
        with the pin."""
        assert not self.any_away(ranges, holder)
        return self.keep(holder, ranges)[0]

    def keep(self, holder: int, ranges: Records) -> tuple[int, list[Extent]]:
        """As `pin`, wherever their bytes are: held for somebody who does not read them. Return also
        where they lie, padding included."""
        if not len(ranges):
            return 0, []
        places = self.ranges.hold(ranges)
        self._last_pin += 1
        self._holder(holder).pins[self._last_pin] = ranges
        return self._last_pin, places

    def unpin(self, holder: int, ids: Iterable[int]) -> int:
        """Release pins. Unknown ones are skipped. Return the freed bytes."""
        known = self._holders.get(holder)
        if known is None:
            return 0
        columns = [known.pins.pop(number) for number in set(ids) if number in known.pins]
        if not columns:
            return 0
        return self.release(columns[0] if len(columns) == 1 else joined(columns, RANGE))

    def pinned(self, holder: int) -> dict[int, Records]:
        """The RANGE column of each pin of the holder."""
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
        if holder not in self._holders:
            return 0
        freed = self.give_back_all(holder) + self.unpin(holder, list(self.pinned(holder)))
        del self._holders[holder]
        return freed

    def holders(self) -> list[tuple[int, int, int]]:
        """(holder, bytes granted, bytes pinned) of all that hold something, the largest first."""
        held = [
            (number, holder.granted_bytes, self._pinned_bytes([holder]))
            for number, holder in self._holders.items()
        ]
        return sorted((row for row in held if row[1] or row[2]), key=lambda row: -row[1] - row[2])

    def stats(self) -> dict[str, Any]:
        """`figures`, and the waste, which is part of used and spilled."""
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
            "ranges": self.ranges.live,
            "pins": sum(len(holder.pins) for holder in everybody),
            "classes": {
                admission.name.lower(): {
                    "used_bytes": self._live_bytes[admission],
                    "granted_bytes": self.shares.used[admission] - self._live_bytes[admission],
                    "room_bytes": self.shares.room(admission),
                    "cap_bytes": self.shares.caps[admission],
                }
                for admission in Admission
            },
        }

    # inside

    def _holder(self, number: int) -> Holder:
        holder = self._holders.get(number)
        if holder is None:
            most = math.inf if number == PULLER else MAX_STRETCHES_PER_SESSION
            holder = self._holders[number] = Holder(most)
        return holder

    def _granted_bytes(self) -> int:
        return sum(holder.granted_bytes for holder in self._holders.values())

    def _pinned(self) -> Records:
        """What anybody reads."""
        return pinned_by(self._holders.values())

    def _pinned_bytes(self, holders: Iterable[Holder]) -> int:
        return self._bytes_of(pinned_by(holders))

    def _bytes_of(self, ranges: Records) -> int:
        return int(self.ranges.extents(ranges)["length"].sum())

    @staticmethod
    def _check_counts(refs: npt.NDArray[np.integer], ranges: int) -> None:
        if len(refs) != ranges:
            raise mixed_releases(
                f"expected one reference count per written range, got {len(refs)} for {ranges} "
                "ranges"
            )
        if refs.min(initial=1) < 1:
            raise mixed_releases("a written range has a reference count of 0: expected 1 or more")

    def _padded(self, extents: Sequence[Extent]) -> list[Extent]:
        """Extents that a client named, padded, checked to be in the arena."""
        padded, base, size = list[Extent](), self.base, self.size_bytes
        for start, length in extents:
            if not base <= start < base + size or length > size or start % ALIGNMENT_BYTES:
                raise mixed_releases(
                    f"extent {len(padded)} of {len(extents)} ({length} bytes at offset {start}) "
                    f"is outside the arena of {self.size_bytes} bytes, or its offset is not a "
                    f"multiple of {ALIGNMENT_BYTES}"
                )
            padded.append((start, length + -length % ALIGNMENT_BYTES or ALIGNMENT_BYTES))
        return padded

    def _grant(self, holder: int, admission: int, spans: list[Span]) -> Records:
        """Write allocated, charged spans down as the holder's. Their EXTENTs, in this order."""
        if spans:
            self._holder(holder).grant(spans, admission)
        return np.array([(start, end - start) for start, end in spans], EXTENT)


class Holder:
    """One client's grants and pins, from which counts are derived. They end when the client
    releases them, or when every process that mapped them has exited. Adjacent extents of one holder
    are merged.

    The classes of grants are stored as bytes per class, not per extent: written bytes may be
    charged to another class than they were granted for.
    """

    def __init__(self, most_stretches: float = math.inf) -> None:
        self.most_stretches = most_stretches
        """How many separate stretches it may have."""
        self.pins: dict[int, Records] = {}
        self.quarantined = False
        """Lost, but its processes may live and write: nothing of it is used for others."""
        self.granted_by_class = [0, 0, 0]
        self.recent: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        """Stretches granted last; the client still has them mapped, so it gets them first."""
        self._starts: list[int] = []
        """Of the stretches that it may write, in order."""
        self._ends: list[int] = []

    def __repr__(self) -> str:
        lost = " quarantined" if self.quarantined else ""
        return f"<Holder granted={self.granted_bytes} B pins={len(self.pins)}{lost}>"

    @property
    def granted_bytes(self) -> int:
        return sum(self.granted_by_class)

    @property
    def grants(self) -> list[Span]:
        """All extents that it may write, in order."""
        return list(zip(self._starts, self._ends, strict=True))

    def grant(self, spans: Sequence[Span], admission: int) -> None:
        """Add free spans."""
        starts, ends = self._starts, self._ends
        for start, end in spans:
            self.recent.append((start // PAGE_BYTES * PAGE_BYTES, end))
            self.granted_by_class[admission] += end - start
            at = bisect_left(starts, start)
            before, after = at > 0 and ends[at - 1] == start, starts[at : at + 1] == [end]
            if before and after:
                ends[at - 1] = ends.pop(at)
                del starts[at]
            elif before:
                ends[at - 1] = end
            elif after:
                starts[at] = start
            else:
                starts.insert(at, start)
                ends.insert(at, end)

    def carve(self, extents: Sequence[Extent], admission: int) -> list[int]:
        """Take extents out of the grants. Return the bytes per class that they were granted under.

        `admission` is used up first. Raises ProtocolError, and takes nothing, unless every extent
        is inside the grants and none overlaps another, and LimitExceeded if too many stretches
        would be left. Takes O(log n) per extent, and copies the n stretches at most once.
        """
        starts, ends = self._starts, self._ends
        joined, nbytes = list[Span](), 0
        begin = end = -1
        for start, length in sorted(extents):
            nbytes += length
            if start == end:  # most extents are neighbours
                end += length
                continue
            if start < end:
                raise mixed_releases(
                    f"two of the {len(extents)} extents of the arena in this message overlap"
                )
            if end >= 0:
                joined.append((begin, end))
            begin, end = start, start + length
        if end >= 0:
            joined.append((begin, end))
        # What is left of the stretches from `first` to `at`, all of which are replaced at once:
        # one insertion per extent would move all later stretches each time.
        left_starts, left_ends = list[int](), list[int]()
        first, at, edge = 0, -1, 0
        for start, end in joined:
            found = bisect_right(starts, start) - 1
            if found < 0 or end > ends[found]:
                raise mixed_releases(
                    f"bytes {start}..{end} of the arena are not reserved for this client",
                    offset=start,
                    end=end,
                )
            if found != at:
                if at < 0:
                    first = found
                else:
                    if edge < ends[at]:
                        left_starts.append(edge)
                        left_ends.append(ends[at])
                    left_starts += starts[at + 1 : found]
                    left_ends += ends[at + 1 : found]
                at, edge = found, starts[found]
            if edge < start:
                left_starts.append(edge)
                left_ends.append(start)
            edge = end
        if joined:
            if edge < ends[at]:
                left_starts.append(edge)
                left_ends.append(ends[at])
            self.check(len(left_starts) - (at + 1 - first))
            starts[first : at + 1], ends[first : at + 1] = left_starts, left_ends
        return self._uncharge(nbytes, admission)

    def check(self, more: int) -> None:
        """Raise LimitExceeded if so many more stretches would be too many."""
        stretches = len(self._starts) + more
        if stretches > self.most_stretches:
            raise LimitExceeded(
                f"after this call, the client would hold {stretches} separate writable ranges of "
                f"the arena, over the limit of {self.most_stretches}: finish or cancel some "
                "pending puts first",
                limit=self.most_stretches,
            )

    def take_grants(self) -> tuple[list[Span], list[int]]:
        """Remove and return all grants, and their bytes per class."""
        spans, by_class = self.grants, self.granted_by_class
        self._starts, self._ends, self.granted_by_class = [], [], [0, 0, 0]
        return spans, by_class

    def _uncharge(self, nbytes: int, admission: int) -> list[int]:
        taken = [0, 0, 0]
        for candidate in (admission, 0, 1, 2):
            if not nbytes:
                break
            part = min(nbytes, self.granted_by_class[candidate])
            self.granted_by_class[candidate] -= part
            taken[candidate] += part
            nbytes -= part
        assert nbytes == 0, nbytes
        return taken


def pinned_by(holders: Iterable[Holder]) -> Records:
    """The distinct ranges that any of these pins."""
    columns = [pin for holder in holders for pin in holder.pins.values()]
    distinct: Records = np.unique(joined(columns, U8)).view(RANGE)
    return distinct
