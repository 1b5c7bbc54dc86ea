"""Which ranges go from a full arena to the spill file, and where in it they lie. Without I/O.

Runs in the peer, under `space`. The oldest ranges go first, and none that somebody reads. A range
keeps its name on the way and stays in the file until it is freed; who reads it gets a copy of it
in the arena, kept like one of another host's range while there is room (`PulledCopies`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dataplane.memory.admission import Admission
from dataplane.memory.allocator import Allocator
from dataplane.memory.extents import Bytes, Records, Set, coalesce, page_up
from dataplane.memory.ranges import SPILLED, Freed, Ranges
from dataplane.wire.records import U8

DISK = 0
"""The incarnation that copies of spilled ranges are kept under: no peer has it."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Ranges on their way: `sources` in the arena, `places` in the file, their padded `lengths`."""

    ranges: Records
    sources: Bytes
    places: Bytes
    lengths: Bytes

    @property
    def start(self) -> int:
        """Where the one stretch of the file begins that all the places are in."""
        return int(self.places[0])

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())


class Spilled:
    """A spill file of at most `size_bytes`, a multiple of a page.

    A stretch that ranges left is used again only after `cleared`, so that nobody clears what the
    next one wrote.
    """

    def __init__(self, size_bytes: int, ranges: Ranges) -> None:
        self.size_bytes = size_bytes
        self.spilled_bytes = 0
        """Of living ranges in the file, padding included."""
        self._ranges = ranges
        self._allocator = Allocator(size_bytes)
        self._left: list[tuple[Bytes, Bytes]] = []
        self.on_left: Callable[[], None] = lambda: None
        """called when there are stretches to clear"""

    def __repr__(self) -> str:
        return f"<Spilled {self.spilled_bytes} of {self.size_bytes} B>"

    @property
    def has_left(self) -> bool:
        """Whether stretches wait to be cleared."""
        return bool(self._left)

    def choose(self, nbytes: int, pinned: Records) -> Move | None:
        """The oldest ranges that nobody reads, about so many bytes of them, and room for them in
        the file. None where there are none, or no room. `settle` or `give_up` ends the move."""
        ranges = self._ranges.by_age(below=Admission.PULL)
        read = np.isin(ranges.view(U8), np.ascontiguousarray(pinned).view(U8))
        ranges = ranges[~read]
        extents = self._ranges.extents(ranges)
        ends = np.cumsum(extents["length"])
        enough = int(np.searchsorted(ends, nbytes)) + 1
        fitting = int(np.searchsorted(ends, self._allocator.largest_free, "right"))
        upto = min(enough, fitting, len(ranges))
        if not upto:
            return None
        lengths = extents["length"][:upto]
        places = np.uint64(self._allocate(int(ends[upto - 1]))) + ends[:upto] - lengths
        return Move(ranges[:upto], extents["offset"][:upto], places, lengths)

    def settle(self, move: Move, pinned: Records) -> Freed:
        """The bytes are in the file. Ranges that live and that nobody began to read lie there from
        now on; the stretches of the arena that they left."""
        stay = ~self._ranges.alive(move.ranges)
        stay |= np.isin(move.ranges.view(U8), np.ascontiguousarray(pinned).view(U8))
        self._leave(move.places[stay], move.lengths[stay])
        going = ~stay
        self.spilled_bytes += int(move.lengths[going].sum())
        return self._ranges.move(move.ranges[going], move.places[going], SPILLED)

    def give_up(self, move: Move) -> None:
        """The bytes could not be written: the ranges stay where they are."""
        self._leave(move.places, move.lengths)

    def freed(self, places: Bytes, lengths: Bytes) -> None:
        """Ranges in the file died."""
        self.spilled_bytes -= int(lengths.sum())
        self._leave(places, lengths)

    def take_left(self) -> Set:
        """Drain the stretches to clear, neighbours joined."""
        starts = np.concatenate([places for places, _ in self._left])
        ends = np.concatenate([places + lengths for places, lengths in self._left])
        self._left.clear()
        return coalesce(starts, ends)

    def cleared(self, starts: Bytes, ends: Bytes) -> None:
        """They hold nothing any more, and may be written again."""
        self._allocator.free(starts, ends - starts)

    def _allocate(self, nbytes: int) -> int:
        """A stretch of the file that is there, to the byte."""
        taken = page_up(nbytes)
        start = self._allocator.allocate(taken)
        assert start is not None, (taken, self._allocator)
        if taken > nbytes:
            self._allocator.free(np.array([start + nbytes], U8), np.array([taken - nbytes], U8))
        return start

    def _leave(self, places: Bytes, lengths: Bytes) -> None:
        if len(places):
            self._left.append((places, lengths))
            self.on_left()
