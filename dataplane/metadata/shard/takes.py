"""Taking ready units from a lane under a lease.

A take is met from the front of one lane, whole or not at all; what it costs depends on the units
taken, never on how many rows there are. Of the first ready units, those whose largest value lies on
the claimant's host go first, eight times past the oldest at most: where writers and readers share
hosts, rows stay where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec
import numpy as np
from msgspec.structs import replace

from dataplane.errors import FrameTooLarge, ProtocolError, counted
from dataplane.metadata.shard.blocks import Block, Group, Rows
from dataplane.metadata.shard.pull_credit import PullCredit, pulled_per_row, rounding
from dataplane.metadata.shard.stages import Lane, Picked, Stage
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables.bits import rows_of, to_mask
from dataplane.metadata.tables.references import Array
from dataplane.metadata.tables.values import Values
from dataplane.wire.limits import ALIGNMENT_BYTES, MAX_FRAME_BYTES
from dataplane.wire.messages import Want
from dataplane.wire.records import U4, VALUE, joined
from dataplane.wire.tables import INLINE, Owner, Where

_FIRST_LOOK = 64
NEAR_UNITS = 64
"""How far into a lane units are looked for that lie near whoever claims."""
GRANTED_BYTES = MAX_FRAME_BYTES * 3 // 4
"""Of records of values, and of values that live here, in one grant; names and tags come beside."""
NEAR_TURNS = 8
"""How often others may be taken past a lane's oldest unit."""

Kept = tuple[str, Where | None]
"""Ready units of this kind and filter, which are kept for a claim of theirs."""


class Taken(msgspec.Struct):
    """lease None: nothing was taken. needed_bytes: cut by the credit, which had to be this much for
    more, or any. rows: what was taken, for `rows_out.table`; it holds until the next change."""

    lease: int | None = None
    units: int = 0
    needed_bytes: int = 0
    rows: Rows | None = None


class _Found(msgspec.Struct, eq=False):
    """The first units of a lane that are not kept for others. oldest: the first of all, where they
    are ordered by where they lie."""

    units: Picked
    oldest: Picked = []
    blocked: bool = False
    needed_bytes: int = 0

    @property
    def count(self) -> int:
        return sum([bits.bit_count() for _, bits in self.units])

    def single(self) -> Picked:
        """One by one."""
        return [(unit, 1 << row) for unit, bits in self.units for row in rows_of(bits)]

    def first(self, count: int) -> _Found:
        return replace(self, units=self.single()[:count])


def take(
    state: State,
    stage: Stage,
    want: Want,
    holder: int,
    now: float,
    claim: int,
    credit: PullCredit | None,
    sealed: bool,
    kept: Sequence[Kept],
) -> Taken:
    """See `Store.take`."""
    if want.unit not in ("rows", "groups"):
        raise ProtocolError(f"a claim is for rows or groups, not {want.unit!r}")
    units = stage.units(want.unit)
    lane, ready = units.lane(want.where), units.ready(want.where)
    if want.budget_tag is None:
        least = 1 if sealed else max(1, min(want.minimum, want.count))
        if ready < least or want.count < 1:
            return Taken()
        far = credit is not None and len(state.peers) > 1
        look = max(NEAR_UNITS, want.count) if far and ready > want.count else want.count
        picked = _first(state, stage, want.unit, lane, min(ready, look), kept)
        if look > want.count and picked.count > want.count:
            assert credit is not None
            picked = _near(state, stage, lane, picked, credit.address).first(want.count)
    else:
        least = 1
        picked = _within_budget(state, stage, want, lane, kept)
    fields = credit.fields if credit else None
    if state.used_bytes + state.inline_bytes > GRANTED_BYTES:
        picked = _within_message(stage, want, picked, least, fields)
    if credit is not None and credit.most_bytes and not state.peers <= {credit.address}:
        picked = _within_credit(stage, picked, least, credit)
    full = picked.blocked or picked.needed_bytes or sealed or want.budget_tag is None
    count = picked.count
    if count < least or not full:
        return Taken(needed_bytes=picked.needed_bytes)
    if picked.oldest:
        passed = picked.oldest[0] not in picked.units
        lane.passed_over = lane.passed_over + 1 if passed else 0
    if want.unit == "rows":
        rows = state.take_rows(stage, _in_order(picked))
    else:
        groups = [group for group, _ in _in_order(picked)]
        rows = Rows([part for group in groups for part in stage.lease_group(group)])
    lease = state.lease(stage, want.unit, rows, holder, now, claim)
    return Taken(lease.number, count, picked.needed_bytes, rows)


def _in_order(found: _Found) -> Picked:
    """Rows of a block together, and what was reordered in the order of its lane again: that is the
    order of the units as they were found, `oldest`."""
    if not found.oldest:
        units = found.units
    else:
        places = {(id(unit), bits): place for place, (unit, bits) in enumerate(found.oldest)}
        units = sorted(found.units, key=lambda one: places[id(one[0]), one[1]])
    joined_up: Picked = []
    for unit, bits in units:
        if joined_up and joined_up[-1][0] is unit and joined_up[-1][1] < bits & -bits:
            joined_up[-1] = unit, joined_up[-1][1] | bits
        else:
            joined_up.append((unit, bits))
    return joined_up


def _first(
    state: State, stage: Stage, unit: str, lane: Lane, count: int, kept: Sequence[Kept]
) -> _Found:
    """The first `count` units that are not kept for others, fewer where there are not so many."""
    look = count
    while True:
        found = _Found(lane.first(look))
        if not kept:
            return found
        mine = _Found(_not_kept(state, stage, unit, found.units, kept))
        if mine.count >= count or found.count < look:
            return mine if mine.count <= count else mine.first(count)
        look *= 2


def _not_kept(state: State, stage: Stage, unit: str, units: Picked, kept: Sequence[Kept]) -> Picked:
    """Without units that are, or have rows in common with what is, kept for another claim."""
    for of, where in kept:
        lane = stage.units(of).lane(where)
        if of == unit:
            units = [(one, bits & ~lane.holds(one)) for one, bits in units]
        elif unit == "groups":
            units = [one for one in units if not any(lane.holds(b) for b in one[0].blocks)]
        else:
            units = [
                one
                for one in units
                if not one[0].group or not lane.holds(state.groups[one[0].group])
            ]
    return [(one, bits) for one, bits in units if bits]


def _near(state: State, stage: Stage, lane: Lane, found: _Found, address: str) -> _Found:
    """The near units first; the oldest one before all where it was passed over too often."""
    units = found.single()
    hosts = _hosts_of(stage, units)
    order = sorted(range(len(units)), key=lambda place: hosts[place] != address)
    if lane.passed_over >= NEAR_TURNS:
        order = [0, *(place for place in order if place)]
    return replace(found, units=[units[place] for place in order], oldest=units)


def near(state: State, stage: str, unit: str, where: Where | None) -> Counter[str]:
    """Of the first ready units, how many have their largest value at which peer (address)."""
    found = state.stage(stage)
    if not found.units(unit).ready(where):
        return Counter()
    first = found.units(unit).lane(where).first(NEAR_UNITS)
    hosts = Counter(_hosts_of(found, _Found(first).single()))
    del hosts[INLINE.peer]
    return hosts


def _hosts_of(stage: Stage, units: Picked) -> list[str]:
    """The address of the peer that has the largest value of each unit, of the stage's fields;
    values that live here are nobody's."""
    known: dict[int, tuple[list[str], list[int]]] = {}
    found = []
    for unit, bits in units:
        best, most = INLINE.peer, 0
        for block, rows in _parts_of(unit, bits):
            if block.number not in known:
                known[block.number] = _largest(block.values, stage.fields)
            peers, sizes = known[block.number]
            for row in rows_of(rows):
                if sizes[row] > most or not best:
                    best, most = peers[row], sizes[row]
        found.append(best)
    return found


def _largest(values: Values, fields: Sequence[str]) -> tuple[list[str], list[int]]:
    """Per row who has its largest value, and its bytes. The arrays inside of a value count
    together, for the owner of the first."""
    most, owners = np.zeros(values.count, np.int64), np.full(values.count, -1)
    here = values.owners.index(INLINE) if INLINE in values.owners else -2
    for name, records in zip(values.fields, values.grid(), strict=True):
        if fields and name not in fields:
            continue
        there = to_mask(values.having([name]), values.count)
        nbytes = np.where(there, records["nbytes"].astype(np.int64), 0)
        owner = records["owner"].astype(np.int64)
        for row, raw in enumerate(values.arrays(name) if values.leaves else ()):
            if raw:
                leaves = np.frombuffer(raw, VALUE)
                nbytes[row], owner[row] = leaves["nbytes"].sum(), leaves["owner"][0]
        larger = (nbytes > most) & (owner != here)
        most[larger], owners[larger] = nbytes[larger], owner[larger]
    peers = [INLINE.peer if n < 0 else values.owners[n].peer for n in owners.tolist()]
    return peers, most.tolist()


def _within_budget(
    state: State, stage: Stage, want: Want, lane: Lane, kept: Sequence[Kept]
) -> _Found:
    """As many units from the front as fit the sum of a tag, at most `count` if that is set, and at
    least one."""
    assert want.budget_tag is not None
    most = want.count if want.count > 0 else stage.units(want.unit).ready(want.where)
    look = min(_FIRST_LOOK, most)
    while True:
        found = _first(state, stage, want.unit, lane, look, kept)
        units = found.single()
        sums = list(accumulate(_number(want.budget_tag, *one) for one in units))
        # at least one: a unit heavier than every budget would be in the way for ever
        fitting = max(_fitting(sums, want.budget), min(1, len(sums)))
        if fitting < len(units) or len(units) < look or look >= most:
            break
        look = min(2 * look, most)
    # a full count ends a claim as a full budget does
    blocked = fitting < len(units) or (0 < want.count <= fitting)
    full = bool(fitting) and sums[fitting - 1] >= want.budget
    return replace(found, units=units[:fitting], blocked=blocked or full)


def _fitting(sums: Sequence[float], most: float) -> int:
    """How many of the first come to no more than that."""
    return int(np.searchsorted(np.array(sums), most, side="right"))


def _number(tag: str, unit: Block | Group, bits: int) -> float:
    return sum(
        block.tags.number(tag, row)
        for block, rows in _parts_of(unit, bits)
        if block.tags is not None
        for row in rows_of(rows)
    )


def _within_message(
    stage: Stage, want: Want, picked: _Found, least: int, fields: list[str] | None
) -> _Found:
    """Cut what was picked to what one message tells of. FrameTooLarge where that is too little."""
    blocks = [block for unit, bits in picked.units for block, _ in _parts_of(unit, bits)]
    if sum([block.values.nbytes + block.inline_bytes for block in blocks]) <= GRANTED_BYTES:
        return picked
    each = _per_unit(picked, lambda block: _told(block, fields, stage.name))
    sums = list(accumulate(each))
    fitting = _fitting(sums, GRANTED_BYTES)
    if fitting == len(sums):
        return picked
    if fitting < least:
        raise FrameTooLarge(
            f"{counted(least, want.unit.removesuffix('s'), want.unit)} with their small values "
            f"are {sums[least - 1]} bytes of a message, the limit is {GRANTED_BYTES}: claim "
            "fewer rows at a time (or with min=), or fewer fields with fields=",
            size=sums[least - 1],
            limit=GRANTED_BYTES,
        )
    return replace(picked.first(fitting), blocked=True)


def _per_unit(picked: _Found, per_row: Callable[[Block], list[int]]) -> list[int]:
    """What each unit comes to, by what each row of its blocks does."""
    known: dict[int, list[int]] = {}
    found = []
    for unit, bits in picked.single():
        total = 0
        for block, rows in _parts_of(unit, bits):
            if block.number not in known:
                known[block.number] = per_row(block)
            total += sum([known[block.number][row] for row in rows_of(rows)])
        found.append(total)
    return found


def _told(block: Block, fields: Sequence[str] | None, stage: str) -> list[int]:
    """What each row adds to a message that tells of its values: records, and what lives here, with
    the stage's progress."""
    result = np.zeros(block.count, np.int64)
    for values, name, rows, records in _records(block, fields, stage):
        here = values.owners.index(INLINE) if INLINE in values.owners else -1
        sizes = np.where(records["owner"] == here, records["nbytes"].astype(np.int64) + 7 & -8, 0)
        np.add.at(result, rows, sizes + VALUE.itemsize)
        if values.leaves and name in values.leaves:
            result += U4.itemsize
    return result.tolist()


def _records(
    block: Block, fields: Sequence[str] | None, stage: str
) -> Iterator[tuple[Values, str, Array, Array]]:
    """(whose, field, row of each, VALUE records) of these fields, and of the stage's progress."""
    progress = (block.progress or {}).get(stage)
    for values in [block.values] if progress is None else [block.values, progress]:
        for name, rows, records in values.per_row():
            if fields is None or values is progress or name in fields:
                yield values, name, rows, records


def _within_credit(stage: Stage, picked: _Found, least: int, credit: PullCredit) -> _Found:
    """Cut what was picked to the bytes that the claim's peer can have pulled."""
    far = _elsewhere(stage, picked, credit)
    if far is None:
        return picked
    of, records = far
    pages = rounding(records)
    most = int((records["nbytes"] + records["delta"] + np.uint64(ALIGNMENT_BYTES)).sum())
    if most + pages <= credit.most_bytes:  # whatever several have in common
        return picked
    units = picked.single()
    sums = np.cumsum(pulled_per_row(of, records, len(units)))
    sums += np.where(sums > 0, pages, 0)
    fitting = int(np.searchsorted(sums, credit.most_bytes, side="right"))
    if fitting == len(units):
        return picked
    enough = min(max(least, fitting + 1), len(units))
    needed = int(sums[enough - 1])
    return replace(picked.first(fitting), blocked=False, needed_bytes=needed)


def _elsewhere(stage: Stage, picked: _Found, credit: PullCredit) -> tuple[Array, Array] | None:
    """(which unit it is of, VALUE record) of all that other peers own; owners numbered alike. None
    where they own nothing."""
    near = (credit.address, INLINE.peer)
    numbers: dict[Owner, int] = {}
    of, found, at = list[Array](), list[Array](), 0
    for unit, bits in picked.units:
        for block, rows in _parts_of(unit, bits):
            if not any(owner.peer not in near for v in block.everything for owner in v.owners):
                continue
            places = np.full(block.count, -1)
            places[list(rows_of(rows))] = at
            if unit is block:
                places[list(rows_of(rows))] += np.arange(rows.bit_count())
            for values, _, which, records in _records(block, credit.fields, stage.name):
                far = np.array([owner.peer not in near for owner in values.owners], np.bool_)
                mine = far[records["owner"]] & (places[which] >= 0)
                if mine.any():
                    alike = [numbers.setdefault(one, len(numbers)) for one in values.owners]
                    those = records[mine]
                    those["owner"] = np.array(alike)[those["owner"]]
                    of.append(places[which[mine]])
                    found.append(those)
        at += bits.bit_count()
    return (np.concatenate(of), joined(found, VALUE)) if found else None


def _parts_of(unit: Block | Group, bits: int) -> Sequence[tuple[Block, int]]:
    """The rows of a unit."""
    if isinstance(unit, Block):
        return [(unit, bits)]
    return [(block, block.live) for block in unit.blocks]
