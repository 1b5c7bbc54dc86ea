"""One stage of a store: the states of rows and groups, and queues of ready ones, one for each
filter of claims.

Rows move as bits of their block, so whole blocks are as fast as single rows. A group's state is
derived from its blocks. Nothing here scans: every change names its blocks.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from dataplane.metadata.shard.before_images import BeforeImages
from dataplane.metadata.shard.blocks import (
    ACKED,
    LEASED,
    PENDING,
    READY,
    SPLIT,
    Block,
    Group,
    Standing,
)
from dataplane.metadata.shard.weights import Short
from dataplane.metadata.tables.bits import with_all
from dataplane.metadata.tables.where import checked
from dataplane.wire.tables import Where

MAX_FILTERED_QUEUES = 32
"""queues of filters that no call waits for"""

Unit = Any
"""rows of a Block as bits, or one bit for a Group"""
Part = tuple[Any, int]
Picked = list[Part]
"""Units in an order."""

_FEW = 64
_STATES = [bytes([state]) for state in (PENDING, READY, LEASED, ACKED, SPLIT)]
Test = Callable[[Where, Unit, int], int]
Matches = Callable[[Unit, int], int]
"""Returns the mask of the rows of a unit that match; for a group, its mask or 0."""
_number = attrgetter("unit.number")


class QueueEntry(msgspec.Struct, gc=False, eq=False):
    """before: the entry of the same unit that entered the queue before this one. returned: whether
    a lease returned it."""

    unit: Unit
    bits: int
    before: QueueEntry | None = None
    returned: bool = False


class ReadyQueue:
    """A queue of ready units.

    Units that leases returned are first, in order of arrival, with one entry per unit. The others
    follow in the order in which they became ready. An entry holds the rows of a unit that became
    ready together. Rows that leave from behind the front are removed from their entry. Empty
    entries are skipped.

    matches(unit, bits): which of them pass the filter now; None for the queue without a filter.
    keeps(group): whether the filter lets no row of a group pass; `kept` has its last results.
    """

    def __init__(
        self,
        matches: Matches | None = None,
        keeps: Callable[[Group], bool] | None = None,
        kept: dict[Group, bool] | None = None,
    ) -> None:
        self._matches = matches
        self.keeps = keeps
        self.kept = {} if kept is None else kept
        self._returned: list[QueueEntry] = []
        self._queue: deque[QueueEntry] = deque()
        self._of: dict[Unit, QueueEntry] = {}
        """the last entry of each unit"""
        self._spent = 0
        """entries without rows"""
        self.images: BeforeImages | None = None
        """of a running snapshot that has not sent this queue yet"""
        self.count = 0
        self.shorts: list[Short] = []
        """the budgets that all units here cannot fill"""

    def __len__(self) -> int:
        return len(self._returned) + len(self._queue)

    def __iter__(self) -> Iterator[tuple[Unit, int]]:
        entries = itertools.chain(self._returned, self._queue) if self._returned else self._queue
        return ((one.unit, one.bits) for one in entries if one.bits)

    def entries(self) -> list[QueueEntry]:
        """All entries in order, empty ones too: some 7 ms for a million."""
        return [*self._returned, *self._queue]

    def holds(self, unit: Unit) -> int:
        """The rows of this unit in the queue."""
        bits, entry = 0, self._of.get(unit)
        while entry is not None:
            bits |= entry.bits
            entry = entry.before
        return bits

    def matching(self, unit: Unit, bits: int) -> int:
        """Return which of these pass the queue's filter now, ready or not."""
        return bits if self._matches is None else self._matches(unit, bits)

    def enter(self, unit: Unit, bits: int, returned: bool = False) -> None:
        """Add rows of a unit that became ready. returned: a lease returned them."""
        bits = self.matching(unit, bits)
        if not bits:
            return
        last = self._of.get(unit)
        if self.images is not None:
            self.images.keep_queue(self, last if returned else None)
        entry = QueueEntry(unit, bits, last, returned)
        if returned:
            self._return(entry)
        else:
            self._queue.append(entry)
            self._of[unit] = entry
        self.count += bits.bit_count()
        if self.shorts:
            held = self.holds(unit)
            self.shorts = [one for one in self.shorts if one.came(unit, held)]

    def _return(self, entry: QueueEntry) -> None:
        """Insert an entry in order of arrival, or add its rows to its unit's returned entry."""
        at = self._at(entry)
        if at < len(self._returned) and self._returned[at].unit is entry.unit:
            self._returned[at].bits |= entry.bits
        else:
            self._returned.insert(at, entry)
            self._of[entry.unit] = entry

    def _at(self, entry: QueueEntry) -> int:
        return bisect_left(self._returned, entry.unit.number, key=_number)

    def leave(self, unit: Unit, bits: int) -> None:
        """Remove rows of a unit that are no longer ready, if the queue has them."""
        entry = self._of.get(unit)
        if entry is None:
            return
        if self.images is not None:
            self.images.keep_queue(self, entry)
        queue = self._queue
        after: QueueEntry | None = None  # the last one that keeps rows
        while entry is not None:
            if gone := entry.bits & bits:
                self.count -= gone.bit_count()
                entry.bits ^= gone
            before = entry.before
            if entry.bits:
                after = entry
            else:
                if entry.returned:
                    del self._returned[self._at(entry)]
                else:
                    self._spent += 1
                entry.before = None
                if after is not None:
                    after.before = before
                elif before is not None:
                    self._of[unit] = before
                else:
                    del self._of[unit]
                    self._of = self._of or {}  # as `State.blocks`
            entry = before
        while queue and not queue[0].bits:
            queue.popleft()
            self._spent -= 1
        if self._spent > _FEW and 2 * self._spent > len(queue):
            self._queue = deque([one for one in queue if one.bits])
            self._spent = 0
        if self.shorts:
            held = self.holds(unit)
            self.shorts = [one for one in self.shorts if one.note_left(unit, held)]

    def units(self) -> Iterator[tuple[Unit, int]]:
        """Each unit once, with its rows in the queue."""
        return ((unit, self.holds(unit)) for unit in self._of)

    def retest(self, unit: Unit, ready: int) -> None:
        """Test a unit again after a change of its tags or values. What still matches keeps its
        position; new matches go last."""
        held = self.holds(unit)
        if held:
            self.shorts = [one for one in self.shorts if one.came(unit, held)]
        if self._matches is None:
            return
        match = self._matches(unit, ready)
        if held & ~match:
            self.leave(unit, held & ~match)
        if match & ~held:
            self.enter(unit, match & ~held)


class Counts(NamedTuple):
    """Counts of the rows or groups of a stage, or of those that match a filter. Leased and pending
    ones may match when ready.

    ready: claimable now. remaining: ready, or may still become so. to_come: those and leased
    ones, which may come back. outstanding: not yet acked, dropped or lost for the stage,
    including groups of which rows were claimed singly, which no claim gets whole.
    """

    ready: int
    remaining: int
    to_come: int
    outstanding: int


class Units:
    """The rows or the groups of one stage: how many are in each state, and their queues.

    test: which rows of a unit pass a filter. The queue of a filter is created on first use.
    """

    def __init__(self, test: Test) -> None:
        self._test = test
        self.counts = [0] * 5
        self.plain = ReadyQueue()
        self._filtered: OrderedDict[bytes, ReadyQueue] = OrderedDict()  # the one used last is last
        self._wanted: Counter[bytes] = Counter()
        """filters of waiting calls; their queues are never dropped"""
        self.changed = True

    def add(self, count: int) -> None:
        """Add new units, all pending."""
        self.counts[PENDING] += count
        self.changed = True

    def move(self, unit: Unit, bits: int, was: int, to: int | None, returned: bool = False) -> None:
        """Set the state of units; None removes them. Ready ones are in the queues."""
        self.changed = True
        many = bits.bit_count()
        self.counts[was] -= many
        if to is not None:
            self.counts[to] += many
        if was == READY:
            self.plain.leave(unit, bits)
            for queue in self._filtered.values():
                queue.leave(unit, bits)
        elif to == READY:
            self.plain.enter(unit, bits, returned)
            for queue in self._filtered.values():
                queue.enter(unit, bits, returned)

    def retest(self, unit: Unit, ready: int) -> None:
        """Test a unit again after a change of its tags."""
        for queue in (self.plain, *self._filtered.values()) if ready else ():
            self.changed = True
            queue.retest(unit, ready)

    def queue(self, where: Where | None) -> ReadyQueue:
        """The queue of a filter. Raises ProtocolError for an invalid filter."""
        if where is None:
            return self.plain
        name = msgspec.msgpack.encode(where)
        if name not in self._filtered:
            wanted = checked(where)
            queue = ReadyQueue(lambda unit, bits: self._test(wanted, unit, bits))
            self._fill(name, queue, self.plain)
        self._filtered.move_to_end(name)
        return self._filtered[name]

    def unreserved(
        self,
        where: Where | None,
        kept: Sequence[tuple[str, Where | None]],
        free: Callable[[Unit, int, dict[Group, bool]], int],
        keeps: Callable[[Group], bool],
    ) -> ReadyQueue:
        """Return the queue of a filter without the units reserved for other claims. kept: the units
        and filters of these claims. free: the units that are not reserved. keeps: see
        `ReadyQueue`."""
        name = msgspec.msgpack.encode((where, kept))
        if name not in self._filtered:
            test = self._test
            groups: dict[Group, bool] = {}

            def matches(unit: Unit, bits: int) -> int:
                return free(unit, bits if where is None else test(where, unit, bits), groups)

            self._fill(name, ReadyQueue(matches, keeps, groups), self.queue(where))
        self._filtered.move_to_end(name)
        return self._filtered[name]

    def _fill(self, name: bytes, queue: ReadyQueue, of: ReadyQueue) -> None:
        for one in of.entries():
            if one.bits:
                queue.enter(one.unit, one.bits, one.returned)
        self._filtered[name] = queue
        self._evict()

    def regrouped(self, group: Group, number: int) -> None:
        """Note that a group changed. Drop the queues that no longer match its rows; the next use
        builds them again. number: of the stage."""
        for name, queue in list(self._filtered.items()):
            if queue.keeps is None or group not in queue.kept:
                continue  # none of its rows was tested
            kept = queue.keeps(group)
            if kept != queue.kept[group]:
                queue.kept[group] = kept
                ready = [(block, block.standings[number].ready) for block in group.blocks]
                if any(queue.holds(one) != queue.matching(one, bits) for one, bits in ready):
                    del self._filtered[name]
                    self.changed = True

    def forget_group(self, group: Group) -> None:
        """Note that a group without rows is removed."""
        for queue in self._filtered.values():
            queue.kept.pop(group, None)

    def want(self, where: Where | None, wanted: bool) -> None:
        """Note a call that waits for matches of a filter, or its end. The queue of the filter is
        kept that long. Raises ProtocolError for an invalid filter."""
        if where is None:
            return
        name = msgspec.msgpack.encode(where)
        if wanted:
            self.queue(where)
        self._wanted[name] += 1 if wanted else -1
        if not self._wanted[name]:
            del self._wanted[name]
            self._evict()

    def _evict(self) -> None:
        """Drop queues that no call waits for, the least recently used first."""
        while len(self._filtered) - len(self._wanted) > MAX_FILTERED_QUEUES:
            name, queue = self._filtered.popitem(last=False)
            if name in self._wanted:
                self._filtered[name] = queue

    def ready(self, where: Where | None) -> int:
        """How many units are ready and match."""
        return self.counts[READY] if where is None else self.queue(where).count

    def count(self, where: Where | None = None) -> Counts:
        """Exact counts."""
        ready, counts = self.ready(where), self.counts
        remaining = counts[PENDING] + ready
        to_come = remaining + counts[LEASED]
        return Counts(ready, remaining, to_come, to_come + counts[SPLIT])


class Stage:
    """One stage. number: the index of its state in blocks and groups."""

    def __init__(self, name: str, fields: list[str], number: int, test: Test, of_group: Test):
        self.name = name
        self.fields = fields
        self.number = number
        self.rows = Units(test)
        self.groups = Units(of_group)
        self.lost = 0
        """rows that were lost with a peer before this stage acked them"""
        self.acked_rows = 0
        """in total, removed rows included"""
        self.released_rows = 0
        """rows returned by leases without an ack, in total"""
        self.redelivered_rows = 0
        """released rows that were leased again"""
        self.claimed_at: float | None = None
        """when a client last claimed its rows, as far as this copy knows"""
        self.images: BeforeImages | None = None
        """of a running snapshot"""

    def units(self, unit: str) -> Units:
        return self.rows if unit == "rows" else self.groups

    def of(self, block: Block) -> Standing:
        return block.standings[self.number]

    def keep_images(self, images: BeforeImages | None) -> None:
        """Start to save images for a snapshot, or stop (None)."""
        self.images = self.rows.plain.images = self.groups.plain.images = images

    def drain_changed(self) -> bool:
        """Whether counts changed since the last call."""
        changed = self.rows.changed or self.groups.changed
        self.rows.changed = self.groups.changed = False
        return changed

    # rows; `settle` of their groups follows

    def pending(self, block: Block) -> int:
        mine = self.of(block)
        return block.live & ~(mine.ready | mine.leased | mine.acked)

    def complete(self, block: Block) -> int:
        """Make rows ready that now have all fields that the stage needs, and return them."""
        mine = block.standings[self.number]
        pending = block.live & ~(mine.ready | mine.leased | mine.acked)
        if pending:
            pending &= block.values.having(self.fields)
            if pending:
                pending = block.live if pending == block.live else pending  # one object for both
                self.move(block, pending, PENDING, READY)
        return pending

    def move(
        self, block: Block, bits: int, was: int, to: int | None, returned: bool = False
    ) -> None:
        """Set the state of rows; None removes them. returned: a lease returned them, so they go
        ahead of rows that were never leased."""
        if self.images is not None:
            self.images.keep_block(block)
        mine = block.standings[self.number]
        if was == READY:
            mine.ready ^= bits
            if to == LEASED and mine.returned:
                self.redelivered_rows += (bits & mine.returned).bit_count()
        elif was == LEASED:
            mine.leased ^= bits
            if to == READY:
                mine.returned |= bits
                self.released_rows += bits.bit_count()
        elif was == ACKED:
            mine.acked ^= bits
        if to == READY:
            mine.ready = with_all(mine.ready, bits)
        elif to == LEASED:
            mine.leased = with_all(mine.leased, bits)
        elif to == ACKED:
            mine.acked = with_all(mine.acked, bits)
            mine.returned &= ~bits
            self.acked_rows += bits.bit_count()
        self.rows.move(block, bits, was, to, returned)

    def forget(self, block: Block, bits: int) -> None:
        """Remove rows that no longer exist."""
        mine = block.standings[self.number]
        if acked := mine.acked & bits:  # no call waits for fewer acked rows
            mine.acked ^= acked
            self.rows.counts[ACKED] -= acked.bit_count()
            bits ^= acked
        if not bits:
            return
        for was, rows in ((READY, mine.ready), (LEASED, mine.leased)):
            if gone := rows & bits:
                self.move(block, gone, was, None)
                bits ^= gone
        if bits:
            self.move(block, bits, PENDING, None)

    # groups

    def lease_group(self, group: Group) -> None:
        """Lease a ready group whole."""
        self.move_group(group, LEASED)
        for block in group.blocks:
            self.move(block, block.live, READY, LEASED)

    def settle(self, group: Group, returned: bool = False) -> None:
        """Set the state of a group from its rows."""
        number, now = self.number, group.states[self.number]
        ready = acked = group.closed and group.live > 0
        some = False
        for block in group.blocks:
            mine = block.standings[number]
            ready = ready and mine.ready == block.live
            acked = acked and mine.acked == block.live
            some = some or mine.acked > 0
        if acked:
            then = ACKED
        elif now == SPLIT or some:
            then = SPLIT
        elif ready:
            then = READY
        else:
            # a leased group stays so until its rows are all back, or all acked
            then = LEASED if now == LEASED else PENDING
        if then != now:
            self.move_group(group, then, returned)

    def move_group(self, group: Group, to: int, returned: bool = False) -> None:
        was = group.states[self.number]
        if was != to:
            if self.images is not None:
                self.images.keep_group(group)
            states, number = group.states, self.number
            group.states = states[:number] + _STATES[to] + states[number + 1 :]
            self.groups.move(group, 1, was, to, returned)
            if SPLIT in (was, to):
                self.regrouped(group)

    def regrouped(self, group: Group) -> None:
        """Test the ready rows of a group again after a change of its rows, their tags, or whether
        it is split."""
        self.rows.regrouped(group, self.number)

    def remove_group(self, group: Group) -> None:
        """Remove a group without rows."""
        self.groups.move(group, 1, group.states[self.number], None)
        self.rows.forget_group(group)

    def retest(self, blocks: Iterable[Block], groups: Iterable[Group]) -> None:
        """Test rows again after a change of their tags, or of a group's size."""
        for block in blocks:
            self.rows.retest(block, self.of(block).ready)
        for group in groups:
            self.groups.retest(group, int(group.states[self.number] == READY))
            self.regrouped(group)

    def reset(self, blocks: Sequence[Block], groups: Iterable[Group]) -> int:
        """Make every acked row ready again. Return how many."""
        rows = 0
        for group in groups:
            if group.states[self.number] in (SPLIT, ACKED) and group.live:
                self.move_group(group, PENDING)
        for block in blocks:
            if again := self.of(block).acked:
                self.move(block, again, ACKED, READY)
                rows += again.bit_count()
        for group in groups:
            if group.live:
                self.settle(group)
        return rows
