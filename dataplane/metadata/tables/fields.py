"""Where the values of rows lie: one column of VALUE records a field, and the leaves of some rows.

Specs and owners are kept once a store; records that come in are rewritten to these numbers, and
those that go out carry only the ones they use. Every record stands for one reference to its range:
what is overwritten, refused or removed is collected, so that the owner can be told.

What a stage gave back as progress lies in columns beside the fields, of which only that stage
knows: they are nobody's reason to be ready, and rows are not lost with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dataplane.errors import FieldUnknown, LimitExceeded
from dataplane.memory.extents import every, some
from dataplane.metadata.tables.columns import Array, Ragged, grow
from dataplane.metadata.tables.incoming import ColumnIn
from dataplane.metadata.tables.interning import Numbers, SpecsAndOwners
from dataplane.metadata.tables.references import Move, by_owner, extents_of
from dataplane.metadata.tables.small_values import HERE, Arriving, Blocks, told
from dataplane.wire.limits import (
    ABSENT,
    ALIGNMENT_BYTES,
    INLINE_LIMIT_BYTES,
    MAX_FIELDS,
    PACK_LIMIT_BYTES,
)
from dataplane.wire.records import RANGE, U4, VALUE, joined
from dataplane.wire.tables import INLINE, Column, Owner, Spec

_NO_VALUE = np.zeros(1, VALUE)
_NO_VALUE["owner"] = ABSENT
_ONE = np.ones(1, U4)


class Fields:
    """The fields of a store's rows. `present` has one bit a field and row, and one a field of which
    a stage gave progress back. progress: stage → field → bit."""

    def __init__(self) -> None:
        self.present: Array = np.zeros(0, np.uint64)
        self.names: dict[str, int] = {}
        self.progress: dict[str, dict[str, int]] = {}
        self._free = list(range(MAX_FIELDS))[::-1]
        self._values: dict[int, Array] = {}
        self._leaves: dict[int, Ragged] = {}
        self._known = SpecsAndOwners()
        self._blocks = Blocks()
        self._released: list[Array] = []

    @property
    def nbytes(self) -> int:
        columns = [self.present, *self._values.values()]
        return sum(c.nbytes for c in columns) + sum(r.nbytes for r in self._leaves.values())

    @property
    def inline_bytes(self) -> int:
        """What the blocks of small values take that live here."""
        return self._blocks.nbytes

    def reserve(self, capacity: int) -> None:
        grow(self.present, capacity)
        for values in self._values.values():
            grow(values, capacity)
        for leaves in self._leaves.values():
            leaves.reserve(capacity)

    def check_room(self, names: Sequence[str]) -> None:
        """LimitExceeded unless the partition may have these fields too."""
        # the sum is cheap and nearly always enough
        if len(names) > len(self._free):
            self._check_new(names, self.names)

    def check_progress_room(self, stage: str, names: Sequence[str]) -> None:
        """The same for fields that a stage gives progress of."""
        if len(names) > len(self._free):
            self._check_new(names, self.progress.get(stage, {}))

    def _check_new(self, names: Sequence[str], known: Mapping[str, int]) -> None:
        if len(set(names) - known.keys()) > len(self._free):
            self._forget_past_progress()
        new = len(set(names) - known.keys())
        if new > len(self._free):
            raise LimitExceeded(
                f"a partition has at most {MAX_FIELDS} fields, those included of which a stage "
                f"gave back progress that some row still has; {new} of {names} are new",
                limit=MAX_FIELDS,
            )

    def _forget_past_progress(self) -> None:
        """What no row has any progress of makes room for others."""
        anywhere = int(np.bitwise_or.reduce(self.present, initial=np.uint64(0)))
        for known in self.progress.values():
            for name, bit in list(known.items()):
                if not anywhere >> bit & 1:
                    del known[name]
                    self._values.pop(bit, None)
                    self._leaves.pop(bit, None)
                    self._free.append(bit)

    def check_known(self, names: Sequence[str]) -> None:
        """FieldUnknown for a name that no row of the store ever had."""
        for name in names:
            if self.names.get(name, -1) not in self._values:
                there = sorted(known for known, bit in self.names.items() if bit in self._values)
                raise FieldUnknown(f"no row has a field {name!r}; there are {there}", field=name)

    def known(self, names: Sequence[str], stage: str = "") -> list[str]:
        """Those that some row of the store has had, or that the stage has given progress of."""
        progress = self.progress.get(stage, {})
        return [n for n in names if self.names.get(n, -1) in self._values or n in progress]

    def know(self, names: Sequence[str]) -> None:
        """Some row, somewhere, has had these fields; `check_room` was asked."""
        for name in names:
            self._column(self.bit(name))

    def bit(self, name: str) -> int:
        """The number of a field, which gets one now if it is new."""
        number = self.names.get(name)
        if number is None:
            number = self.names[name] = self._free.pop()
        return number

    def mask(self, names: Sequence[str]) -> int:
        return sum(1 << self.bit(name) for name in dict.fromkeys(names))

    def known_mask(self, names: Sequence[str]) -> int:
        """Of those of these fields that have a number; the others get none."""
        return sum(1 << self.names[name] for name in dict.fromkeys(names) if name in self.names)

    def have(self, name: str, slots: Array) -> Array:
        """Which rows have the field."""
        if name not in self.names:
            return np.zeros(len(slots), np.bool_)
        return self._has(self.names[name], slots)

    def _has(self, bit: int, slots: Array) -> Array:
        result: Array = (self.present[slots] & np.uint64(1 << bit)) != 0
        return result

    def intern(
        self, specs: Sequence[Spec], owners: Sequence[Owner], inline: bytes = b""
    ) -> Numbers:
        """The store's numbers of a message's specs and owners, and the way in for what it brought
        of small values."""
        if self._known.crowded:
            self._known.compact([*self._values.values(), *(r.pool for r in self._leaves.values())])
        arriving = Arriving(self._blocks, inline) if INLINE in owners else None
        return self._known.intern(specs, owners, arriving)

    def write(self, slots: Array, one: ColumnIn, numbers: Numbers, keep: bool) -> int:
        """Write one column; `numbers` is what `intern` answered.

        Returns the number of rows whose present value stayed (`keep`). The references that lost,
        old or new, are collected.
        """
        return self._write(self.bit(one.field), slots, one, numbers, keep)

    def write_progress(self, stage: str, slots: Array, one: ColumnIn, numbers: Numbers) -> None:
        """The same for what a stage gives back as its progress, in place of what it gave before."""
        known = self.progress.setdefault(stage, {})
        if one.field not in known:
            known[one.field] = self._free.pop()
        self._write(known[one.field], slots, one, numbers, keep=False)

    def end_progress(self, stage: str, slots: Array, names: Sequence[str] | None = None) -> None:
        """A stage has no progress with these rows any more: of these fields, None: of any."""
        for name, bit in self.progress.get(stage, {}).items():
            if names is None or name in names:
                self._end_progress(bit, slots[self._has(bit, slots)])

    def _end_progress(self, bit: int, slots: Array) -> None:
        self._forget(slots, bit)
        self.present[slots] &= ~np.uint64(1 << bit)

    def _write(self, bit: int, slots: Array, one: ColumnIn, numbers: Numbers, keep: bool) -> int:
        if len(slots) == 1 and one.here is None and one.counts is None:
            slot = slots.item()
            present = self.present.item(slot)
            if not present >> bit & 1:
                self._column(bit)[slot] = numbers.applied_to_one(one.values.item())
                self.present[slot] = present | 1 << bit
                return 0
        values, leaves = numbers.applied(one.values), one.leaves
        counts, here = one.counts, one.here
        if len(leaves):
            leaves = numbers.applied(leaves)
        there = (self.present[slots] >> np.uint64(bit) & np.uint64(1)).astype(np.bool_)
        kept = 0
        if some(there):
            refused = there if here is None else there & here
            kept = int(np.count_nonzero(refused))
            if keep:
                self._release(values[refused], counts, leaves, refused)
                here = ~there if here is None else here & ~there
            else:
                self._forget(slots[refused], bit)
                kept = 0
        if here is not None:
            if counts is not None:
                leaves = leaves[np.repeat(here, counts)]
                counts = counts[here]
            slots, values = slots[here], values[here]
        self._store(bit, slots, values, counts, leaves)
        return kept

    def write_new(self, slots: Array, columns: Sequence[ColumnIn], numbers: Numbers) -> None:
        """Write columns of rows that have no field yet. Values that every row has, without leaves,
        are renumbered together: numpy's fixed cost is most of what a few rows take."""
        plain = [one for one in columns if one.here is None and one.counts is None]
        if len(slots) == 1 or len(columns) < 2 or len(plain) < len(columns):
            for one in columns:
                self.write(slots, one, numbers, keep=False)
            return
        values = numbers.applied(joined([one.values for one in columns], VALUE))
        written = 0
        for one, own in zip(columns, values.reshape(len(columns), -1), strict=True):
            bit = self.bit(one.field)
            self._column(bit)[slots] = own
            written |= 1 << bit
        self.present[slots] |= np.uint64(written)

    def refuse(self, records: Array, numbers: Numbers) -> None:
        """References that came for rows which are gone."""
        if len(records):
            self._released.append(numbers.applied(records))

    def remove(self, slots: Array) -> int:
        """The rows are no more. Returns the bytes that their values had."""
        present = self.present[slots]
        everywhere, anywhere = (int(how.reduce(present)) for how in (np.bitwise_and, np.bitwise_or))
        before = len(self._released)
        for bit in self._values:
            if everywhere >> bit & 1:
                self._forget(slots, bit)
            elif anywhere >> bit & 1:
                self._forget(slots[(present & np.uint64(1 << bit)) != 0], bit)
        self.present[slots] = 0
        return sum(int(np.add.reduce(r["nbytes"])) for r in self._released[before:])

    def gather(
        self, slots: Array, names: Sequence[str] | None, stage: str = ""
    ) -> tuple[list[Column], list[Spec], list[Owner], bytes]:
        """Columns of VALUE records for these rows, with the specs and owners that they use, and the
        bytes of the values that live here. stage: with all its progress.

        FieldUnknown for a name that no row of the store ever had.
        """
        progress = self.progress.get(stage)
        self.check_known([n for n in names or () if not progress or n not in progress])
        picked: list[tuple[str, Array, bytes, Array]] = []
        present = self.present[slots]
        everywhere = int(np.bitwise_and.reduce(present)) if len(slots) else 0
        for name in self.names if names is None else dict.fromkeys(names):
            bit = self.names.get(name, -1)
            if bit not in self._values:
                continue
            values = self._values[bit][slots]
            if not everywhere >> bit & 1:
                there = self.have(name, slots)
                values[~there] = _NO_VALUE[0]
                if names is None and not there.any():
                    continue
            counts, leaves = b"", _NO_VALUE[:0]
            if bit in self._leaves:
                lengths, leaves = self._leaves[bit].gather(slots)
                counts = lengths.astype(U4).tobytes() if len(leaves) else b""
            picked.append((name, values, counts, leaves))
        if progress:
            self._gather_progress(slots, progress, names or (), picked)
        parts = [part.tobytes() for one in picked for part in (one[1], one[3])]
        records = np.frombuffer(bytearray(b"".join(parts)), VALUE)
        inline = self._blocks.collect(records)
        specs, owners = self._known.outgoing(records)
        raw, columns, at = records.tobytes(), [], 0
        for name, values, counts, leaves in picked:
            middle = at + values.nbytes
            end = middle + leaves.nbytes
            columns.append(Column(name, raw[at:middle], counts, raw[middle:end]))
            at = end
        return columns, specs, owners, inline

    def _gather_progress(
        self,
        slots: Array,
        progress: Mapping[str, int],
        named: Sequence[str],
        picked: list[tuple[str, Array, bytes, Array]],
    ) -> None:
        """Progress that some of these rows have, or that is asked for by name, joins what was
        picked. A row's own field goes before progress of that name."""
        for name, bit in progress.items():
            there = self._has(bit, slots) & ~self.have(name, slots)
            if not there.any() and name not in named:
                continue
            at = next((i for i, one in enumerate(picked) if one[0] == name), len(picked))
            own, own_counts, own_leaves = np.full(len(slots), _NO_VALUE[0]), b"", _NO_VALUE[:0]
            if at < len(picked):
                _, own, own_counts, own_leaves = picked.pop(at)
            own[there] = self._values[bit][slots[there]]
            counts = np.frombuffer(own_counts or bytes(4 * len(slots)), U4).astype(np.int64)
            rows = np.repeat(np.arange(len(slots)), counts)
            if bit in self._leaves:
                lengths, leaves = self._leaves[bit].gather(slots[there])
                counts[there] += lengths
                rows = np.concatenate([rows, np.repeat(there.nonzero()[0], lengths)])
                own_leaves = joined([own_leaves, leaves], VALUE)[np.argsort(rows, kind="stable")]
            told = counts.astype(U4).tobytes() if len(own_leaves) else b""
            picked.insert(at, (name, own, told, own_leaves))

    def told_bytes(self, slots: Array, names: Sequence[str] | None, stage: str = "") -> Array:
        """What each of these rows adds to a message that tells of its values (i8): records, and
        what lives here. stage: also of its progress."""
        result = np.zeros(len(slots), np.int64)
        of_names = [self.names.get(name, -1) for name in (self.names if names is None else names)]
        for bit in (*of_names, *self.progress.get(stage, {}).values()):
            if bit in self._values:
                there = self._has(bit, slots)
                result += VALUE.itemsize + np.where(there, told(self._values[bit][slots]), 0)
            if bit in self._leaves:
                counts, leaves = self._leaves[bit].gather(slots)
                sums = np.append(0, np.cumsum(VALUE.itemsize + told(leaves)))
                ends = np.cumsum(counts)
                result += U4.itemsize + sums[ends] - sums[ends - counts]
        return result

    def may_tell(self, rows: int, nbytes: int) -> bool:
        """Whether a message that tells of so many rows may get so large: an upper bound."""
        most = VALUE.itemsize + INLINE_LIMIT_BYTES
        return bool(self._leaves) or rows * len(self._values) * most > nbytes

    def elsewhere(
        self, slots: Array, names: Sequence[str] | None, address: str, stage: str = ""
    ) -> tuple[Array, Array]:
        """(position among `slots`, VALUE record) of values and leaves that another peer owns.
        stage: also of its progress."""
        rows, records = [np.zeros(0, np.intp)], [_NO_VALUE[:0]]
        others = [owner.peer != address and owner != INLINE for owner in self._known.owners]
        if not any(others):
            return rows[0], records[0]
        far = np.array(others, np.bool_)
        of_names = [self.names.get(name, -1) for name in (self.names if names is None else names)]
        for bit in (*of_names, *self.progress.get(stage, {}).values()):
            if bit in self._values:
                # The owners first: mostly none is far, and the rest need not be looked at.
                there = far[self._values[bit]["owner"][slots]]
                if some(there):
                    out = there.nonzero()[0]
                    out = out[self._has(bit, slots[out])]
                    rows.append(out)
                    records.append(self._values[bit][slots[out]])
            if bit in self._leaves:
                counts, leaves = self._leaves[bit].gather(slots)
                out = far[leaves["owner"]]
                rows.append(np.repeat(np.arange(len(slots)), counts)[out])
                records.append(leaves[out])
        return np.concatenate(rows), joined(records, VALUE)

    def largest_at(self, slots: Array, mask: int) -> tuple[Array, Array]:
        """Who has the largest value of each of these rows, of the fields in `mask`, as a number for
        `owner`, and its bytes. The leaves of a value count together, for the owner of the first;
        values that live here are nobody's."""
        most, owners = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
        for bit in (bit for bit in self._values if mask >> bit & 1):
            values = self._values[bit][slots]
            there = self.present[slots] >> np.uint64(bit) & np.uint64(1)
            nbytes = values["nbytes"].astype(np.int64) * there.astype(np.int64)
            owner = values["owner"]
            if bit in self._leaves:
                counts, leaves = self._leaves[bit].gather(slots)
                some = counts > 0
                first = (np.cumsum(counts) - counts)[some]
                if len(first):
                    nbytes[some] = np.add.reduceat(leaves["nbytes"].astype(np.int64), first)
                    owner[some] = leaves["owner"][first]
            larger = (nbytes > most) & (owner != HERE)
            most[larger], owners[larger] = nbytes[larger], owner[larger]
        return owners, most

    @property
    def owners(self) -> Sequence[Owner]:
        """By their numbers; `HERE` is nobody's."""
        return self._known.owners

    @property
    def scattered(self) -> bool:
        """Whether values have been at several peers."""
        return len(self._known.owners) > 2

    def released(self) -> list[tuple[Owner, Array, Array]]:
        """Drain the references that went: per owner RANGE records and how many of each (u4). Those
        to values that live here are let go of."""
        if not self._released:
            return []
        records = joined(self._released, VALUE)
        self._released = []
        here = records["owner"] == HERE
        if every(here):
            self._blocks.release(records)
            return []
        if some(here):
            self._blocks.release(records[here])
            records = records[~here]
        if len(records) == 1:
            number, generation, _, _, _, owner = records.item()
            return [(self._known.owners[owner], np.array([(number, generation)], RANGE), _ONE)]
        return by_owner(records, self._known.owners)

    def holdings(self, slots: Array) -> list[tuple[Owner, Array, Array]]:
        """Every reference that these rows hold: per owner RANGE records and how many of each."""
        parts = [_NO_VALUE[:0]]
        for bit, values in self._values.items():
            parts.append(values[slots[self._has(bit, slots)]])
            if bit in self._leaves:
                parts.append(self._leaves[bit].gather(slots)[1])
        records = joined(parts, VALUE)
        return by_owner(records[records["owner"] != HERE], self._known.owners)

    def relocate(
        self,
        slots: Array,
        old: Owner,
        ranges: Array,
        new: Owner,
        new_ranges: Array,
        reach: Array | None = None,
    ) -> Array:
        """See `Store.relocate`, for the values of these rows."""
        number = self._known.owner_number(old)
        if number is None or not len(ranges):
            return np.zeros(len(ranges), U4)
        to = self._known.intern([], [new]).owners[0]
        move = Move(number, ranges, to, new_ranges, reach)
        for bit, column in self._values.items():
            having = slots[self._has(bit, slots)]
            values = column[having]
            self._released.append(move.carry(values))
            column[having] = values
            if bit in self._leaves:
                counts, leaves = self._leaves[bit].gather(slots)
                moved = move.carry(leaves)
                if len(moved):
                    self._released.append(moved)
                    self._leaves[bit].set(slots, counts, leaves)
        return move.counts

    def at(self, owner: Owner, slots: Array) -> Array:
        """Which of these rows have a value, or a leaf of one, at this owner. What they have there
        of a stage's progress is no more a reason to lose them than it was one to be ready."""
        result = np.zeros(len(slots), np.bool_)
        for bit in self.names.values():
            if bit in self._values:
                result |= self._at(bit, owner, slots)
        return result

    def _at(self, bit: int, owner: Owner, slots: Array) -> Array:
        number = self._known.owner_number(owner)
        if number is None:
            return np.zeros(len(slots), np.bool_)
        result: Array = (self._values[bit]["owner"][slots] == number) & self._has(bit, slots)
        if bit in self._leaves:
            counts, leaves = self._leaves[bit].gather(slots)
            row = np.repeat(np.arange(len(slots)), counts)
            result[row[leaves["owner"] == number]] = True
        return result

    def lose_progress(self, owner: Owner, slots: Array) -> None:
        """What these rows had at a peer that is no more of anybody's progress is gone."""
        for known in self.progress.values():
            for bit in known.values():
                self._end_progress(bit, slots[self._at(bit, owner, slots)])

    def forget_owner(self, owner: Owner) -> None:
        """Drop collected references to ranges of a peer that is no more."""
        number = self._known.owner_number(owner)
        self._released = [records[records["owner"] != number] for records in self._released]

    def named(self, slots: Array, owner: Owner) -> tuple[Array, Array, Array]:
        """See `Store.idle`, for the values of these rows."""
        number = self._known.owner_number(owner)
        found = [_NO_VALUE[:0]]
        for bit, values in self._values.items() if number is not None else ():
            found.append(values[slots[self._has(bit, slots)]])
            if bit in self._leaves:
                found.append(self._leaves[bit].gather(slots)[1])
        return extents_of(np.concatenate([r[r["owner"] == number] for r in found]))

    def bytes_at(self, slots: Array) -> dict[str, int]:
        """Bytes of these rows' values by the peer that has them."""
        total: dict[str, int] = {}
        for bit, values in self._values.items():
            records = [values[slots[self._has(bit, slots)]]]
            if bit in self._leaves:
                records.append(self._leaves[bit].gather(slots)[1])
            for r in records:
                for number in np.unique(r["owner"][r["owner"] != HERE]).tolist():
                    peer = self._known.owners[number].peer
                    nbytes = int(r["nbytes"][r["owner"] == number].sum())
                    total[peer] = total.get(peer, 0) + nbytes
        return total

    def volume(self, slots: Array) -> tuple[int, int, int]:
        """(bytes of all values of these rows; of those that are packed; that live here)."""
        total = packed = inline = 0
        for bit, values in self._values.items():
            records = [values[slots[self._has(bit, slots)]]]
            if bit in self._leaves:
                records.append(self._leaves[bit].gather(slots)[1])
            for r in records:
                nbytes, here = r["nbytes"].astype(np.int64), r["owner"] == HERE
                total += int(nbytes.sum())
                inline += int(nbytes[here].sum())
                packed += int(nbytes[(nbytes < PACK_LIMIT_BYTES) & ~here].sum())
        return total, packed, inline

    def packs(self, slots: Array, owner: Owner) -> tuple[Array, int]:
        """(the different blocks of packed values at an owner, as RANGE; bytes alive in them)."""
        number = self._known.owner_number(owner)
        blocks: list[Array] = []
        alive = 0
        for bit, values in self._values.items() if number is not None else ():
            records = [values[slots[self._has(bit, slots)]]]
            if bit in self._leaves:
                records.append(self._leaves[bit].gather(slots)[1])
            for r in records:
                r = r[(r["owner"] == number) & (r["nbytes"] < PACK_LIMIT_BYTES)]
                padded = -(-r["nbytes"].astype(np.int64) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                alive += int(np.maximum(padded, ALIGNMENT_BYTES).sum())
                blocks.append(
                    np.unique(
                        r["range"].astype(np.uint64)
                        | r["generation"].astype(np.uint64) << np.uint64(32)
                    )
                )
        different = np.unique(np.concatenate(blocks)) if blocks else np.zeros(0, np.uint64)
        return different.view(RANGE), alive

    def _column(self, bit: int) -> Array:
        column = self._values.get(bit)
        if column is None:
            column = self._values[bit] = np.zeros(len(self.present), VALUE)
        return column

    def _store(
        self, bit: int, slots: Array, values: Array, counts: Array | None, leaves: Array
    ) -> None:
        self._column(bit)[slots] = values
        self.present[slots] |= np.uint64(1 << bit)
        if counts is not None and len(leaves):
            if bit not in self._leaves:
                self._leaves[bit] = Ragged(VALUE, len(self.present))
            self._leaves[bit].set(slots, counts, leaves)

    def _forget(self, slots: Array, bit: int) -> None:
        """Values that go: collect their references."""
        if not len(slots):
            return
        self._released.append(self._values[bit][slots])
        if bit in self._leaves:
            self._released.append(self._leaves[bit].gather(slots)[1])
            self._leaves[bit].clear(slots)

    def _release(self, values: Array, counts: Array | None, leaves: Array, refused: Array) -> None:
        self._released.append(values)
        if counts is not None:
            self._released.append(leaves[np.repeat(refused, counts)])
