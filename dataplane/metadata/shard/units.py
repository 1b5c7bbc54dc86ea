"""What one stage knows of its rows, or its groups: each one's state, and the lanes of ready ones.

Both kinds of unit go through the same states, so one class serves both. The lanes are made when
they are first claimed from; the sequence numbers say in which order units became ready, and units
that come back are numbered downwards, so that a lane made late has the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from dataplane.metadata.shard.lanes import Lane, entries_of
from dataplane.metadata.tables.columns import Array, grow
from dataplane.metadata.tables.where import Filter, parse
from dataplane.wire.tables import Where

PENDING, READY, LEASED, ACKED, SPLIT = range(5)
"""PENDING: not ready yet (and the state of ids that are not in use). SPLIT: a group of which the
stage took or acked rows singly; it is never offered whole again."""

MAX_FILTERED_LANES = 32
_NUMBERS = 1 << 32


class Units:
    """The rows, or the groups, of one stage. `test(filter, ids)` tests the tags of units."""

    def __init__(self, capacity: int, test: Callable[[Filter, Array], Array]) -> None:
        self._test = test
        self.state: Array = np.zeros(capacity, np.uint8)
        self._number: Array = np.zeros(capacity, np.uint32)
        self._first, self._next = 0, 0  # the numbers in use are [_first, _next), modulo 2**32
        self.counts = [0] * 5
        self._plain: Lane | None = None
        self._filtered: dict[bytes, Lane] = {}  # the one used last is last
        self.changed = True

    @property
    def nbytes(self) -> int:
        lanes = sum(lane.nbytes for lane in self._lanes())
        return self.state.nbytes + self._number.nbytes + lanes

    @property
    def remaining(self) -> int:
        """Neither leased nor done: ready, or may become ready."""
        return self.counts[PENDING] + self.counts[READY]

    @property
    def outstanding(self) -> int:
        """Not yet done."""
        return sum(self.counts) - self.counts[ACKED]

    def reserve(self, capacity: int) -> None:
        grow(self.state, capacity)
        grow(self._number, capacity)
        for lane in self._filtered.values():
            lane.reserve(capacity)

    def add(self, count: int) -> None:
        """New units, all pending."""
        self.counts[PENDING] += count
        self.changed = True

    def forget(self, ids: Array) -> None:
        """Units that are no more."""
        self.move(ids, PENDING)
        self.counts[PENDING] -= len(ids)

    def move(self, ids: Array, to: int, front: bool = False) -> None:
        """Give units (all different) another state; those that become ready enter the lanes."""
        count = len(ids)
        if not count:
            return
        self.changed = True
        were = self.state[ids].tobytes()
        left_ready = READY in were
        self.counts = [now - were.count(state) for state, now in enumerate(self.counts)]
        self.counts[to] += count
        if left_ready:
            for lane in self._filtered.values():
                lane.leave(ids)
        self.state[ids] = to
        if to == READY:
            self._enter(ids, front)

    def retest(self, ids: Array) -> None:
        """The tags of these units changed (for a group: of one of its rows)."""
        if not self._filtered:
            return
        ids = ids[self.state[ids] == READY]
        if len(ids):
            self.changed = True
            entries = entries_of(ids, self._number[ids])
            for lane in self._filtered.values():
                lane.retest(ids, entries)

    def lane(self, where: Where | None) -> Lane:
        """The lane of one filter. ProtocolError when the filter is none."""
        if where is None:
            if self._plain is None:
                self._plain = self._filled(Lane(self._current))
            return self._plain
        name = msgspec.msgpack.encode(where)
        lane = self._filtered.pop(name, None)
        if lane is None:
            wanted = parse(where)
            matches = lambda ids: self._test(wanted, ids)  # noqa: E731
            lane = self._filled(Lane(self._current, matches, len(self.state)))
            if len(self._filtered) >= MAX_FILTERED_LANES:
                del self._filtered[next(iter(self._filtered))]
        self._filtered[name] = lane
        return lane

    def ready(self, where: Where | None) -> int:
        """How many units are ready and match."""
        return self.counts[READY] if where is None else self.lane(where).count

    def is_ready(self, ids: Array, where: Where | None) -> Array:
        """Per unit: is it ready, and matches."""
        result: Array = (self.state[ids] == READY) & self.lane(where).holds(ids)
        return result

    def ready_ids(self) -> Array:
        """The ready units, in the order in which they became so."""
        ids = (self.state == READY).nonzero()[0]
        # modulo 2**32 as the numbers are; the order blurs after as many events, no more
        age = self._number[ids] - np.uint32(self._first % _NUMBERS)
        result: Array = ids[np.argsort(age, kind="stable")]
        return result

    def _lanes(self) -> list[Lane]:
        plain = [] if self._plain is None else [self._plain]
        return plain + list(self._filtered.values())

    def _current(self, ids: Array, numbers: Array) -> Array:
        result: Array = (self._number[ids] == numbers) & (self.state[ids] == READY)
        return result

    def _enter(self, ids: Array, front: bool) -> None:
        count = len(ids)
        if front:
            self._first -= count
            start = self._first
        else:
            start = self._next
            self._next += count
        numbers = (np.arange(start, start + count) % _NUMBERS).astype(np.uint32)
        self._number[ids] = numbers
        if self._plain is None and not self._filtered:
            return
        entries = entries_of(ids, numbers)
        for lane in self._lanes():
            lane.enter(ids, entries, front)

    def _filled(self, lane: Lane) -> Lane:
        ids = self.ready_ids()
        if len(ids):
            lane.enter(ids, entries_of(ids, self._number[ids]), front=False)
        return lane
