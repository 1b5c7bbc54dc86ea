"""Taking ready units under a lease.

A take is granted whole or not at all. Its cost depends on the units taken, never on the number
of rows. Of the first ready units, those whose values are local to the claiming host go first, then
the oldest. If writers and readers share hosts, values therefore stay where they are; if not, they
are pulled by one host for all stages. A claim with `in_order` gets the oldest units.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import msgspec

from dataplane.errors import FrameTooLarge, counted
from dataplane.metadata.shard import rows_out, weights
from dataplane.metadata.shard.blocks import SPLIT, Block, Group, Reader, Rows, first_parts
from dataplane.metadata.shard.stages import Picked, ReadyQueue, Stage
from dataplane.metadata.shard.state import State
from dataplane.metadata.shard.weights import Short, Unit
from dataplane.metadata.tables.bits import rows_of
from dataplane.metadata.tables.outgoing import OutgoingValues
from dataplane.metadata.tables.pieces import Chunk, Piece
from dataplane.wire.limits import MAX_FRAME_BYTES
from dataplane.wire.messages import Want
from dataplane.wire.tables import INLINE, Where

LOCAL_UNITS = 64
"""Of this many ready units, those that are local to the claim's peer go first."""
GRANTED_BYTES = MAX_FRAME_BYTES * 3 // 4
"""The most bytes of inline values and of records of values in one grant, without names and tags."""
MAX_SHORTS = 64
"""A `ReadyQueue` remembers at most this many short claims by budget, the latest ones."""

Reservation = tuple[str, Where | None]
"""Unit and filter of an older claim, for which the units that it wants are kept."""


class PullCredit(msgspec.Struct, frozen=True):
    """How much a claim's peer, at `address`, can pull. most_bytes: how much it can pull at once,
    0 for no limit. fields: what it fetches; None for all."""

    address: str = ""
    most_bytes: int = 0
    fields: list[str] | None = None

    def pulled(self, values: OutgoingValues) -> int:
        """Return the bytes that the claim's peer pulls for these values."""
        return values.pulled(self.address)


_ANY = PullCredit()


class Taken(msgspec.Struct):
    """The result of a take. lease None: nothing was taken. needed_bytes: the credit that more
    units, or any, would have needed. rows, values: the taken rows, and their values of the credit's
    fields; valid until the next change."""

    lease: int | None = None
    units: int = 0
    needed_bytes: int = 0
    rows: Rows | None = None
    values: OutgoingValues | None = None


class _Offer(msgspec.Struct, eq=False):
    """The units that a claim may get, in order. full: the claim need not wait for more."""

    units: Picked
    full: bool = True

    @property
    def count(self) -> int:
        return sum([bits.bit_count() for _, bits in self.units])

    def first(self, count: int) -> _Offer:
        return _Offer(first_parts(self.units, count))

    @property
    def rows(self) -> Rows:
        """The rows of these units; those of a block together."""
        parts: Picked = []
        for unit, bits in self.units:
            if isinstance(unit, Group):
                parts += [(block, block.live) for block in unit.blocks]
            elif parts and parts[-1][0] is unit and parts[-1][1] < bits & -bits:
                parts[-1] = unit, parts[-1][1] | bits
            else:
                parts.append((unit, bits))
        return Rows(parts)


def take(
    state: State,
    name: str,
    want: Want,
    holder: int,
    now: float,
    claim: int = 0,
    credit: PullCredit = _ANY,
    sealed: bool = False,
    kept: Sequence[Reservation] = (),
) -> Taken:
    """Lease ready units of a stage: of the first ones, those that are local to the credit's peer,
    then the oldest. With `in_order`, lease the oldest.

    Takes `count` of them, or at least `minimum`; any number up to `count` if the whole partition
    is `sealed`; else nothing. A budget takes what fits the sum of its tag (count 0: any number),
    and unless `sealed` only once the next ready unit would not fit. Raises InvalidRows for a row
    whose tag is not a finite, non-negative number. credit: limits the units to those that the
    claim's peer may pull; `needed_bytes` says how much would have been needed. kept: older
    claims, for which the shard reserves units. claim: its number, which identifies the lease.
    """
    stage = state.stage(name)
    units, by_count = stage.units(want.unit), want.budget_tag is None
    queue = units.queue(want.where)
    least = max(1, min(want.minimum, want.count)) if by_count and not sealed else 1
    if queue.count < least or (by_count and want.count < 1):
        return Taken()
    if kept:
        queue = _unreserved(state, stage, want, kept)
        if queue.count < least:
            return Taken()
    if not by_count and not sealed and _is_short(queue, want, credit):
        return Taken()
    ready = queue.count
    if not by_count:
        most = want.count if want.count > 0 else ready
        offer = _by_budget(state, queue, want, most)
    elif not want.in_order and credit.address and len(state.peers) > 1 and ready > want.count:
        offer = _Offer(_local_first(stage, queue, want.count, credit.address))
    else:
        offer = _Offer(first_parts(queue, want.count))
    many = offer.count
    if many < least:
        return Taken()
    needed_bytes, rows = 0, offer.rows
    values = rows_out.claimed(state, rows, credit.fields, stage.name)
    if values.nbytes > GRANTED_BYTES or 0 < credit.most_bytes < credit.pulled(values):
        offer, needed_bytes = _cut(state, stage, want, offer, least, credit)
        many, rows = offer.count, offer.rows
        values = rows_out.claimed(state, rows, credit.fields, stage.name)
    if many < least or not (offer.full or sealed):
        if not by_count and not needed_bytes:
            _note_short(queue, want, credit, values)
        return Taken(needed_bytes=needed_bytes)
    if want.unit == "rows":
        state.take_rows(stage, rows.parts)
    else:
        for group, _ in offer.units:
            stage.lease_group(group)
    if credit.address:
        _note_reader(state, rows, credit)
    lease = state.lease(stage, want.unit, rows, holder, now, claim)
    return Taken(lease.number, many, needed_bytes, rows, values)


def _note_reader(state: State, rows: Rows, credit: PullCredit) -> None:
    """Note that the claim's peer now pulls these rows, so they are local to it for the next stage.
    Do nothing if it pulls only small fields: a reward stage must not replace one that reads
    images."""
    state.peers.add(credit.address)
    if len(state.peers) > 1:
        fields = None if credit.fields is None else frozenset(credit.fields)
        reader = Reader(credit.address, fields)
        for block, _ in rows.parts:
            if fields is not None:
                parts = block.values.parts
                pulled = [one for one in parts if not fields.isdisjoint(one.fields)]
                if 2 * _nbytes_of(pulled) < _nbytes_of(parts):
                    continue
            block.reader = reader


def _nbytes_of(parts: Sequence[Piece[Chunk]]) -> int:
    return sum([one.chunk.nbytes for one in parts])


# which units


def _unreserved(state: State, stage: Stage, want: Want, kept: Sequence[Reservation]) -> ReadyQueue:
    """Return the queue of the ready units that match and share no rows with units that are reserved
    for older claims."""
    others = tuple(kept)

    def free(unit: Unit, bits: int, groups: dict[Group, bool]) -> int:
        group = state.groups.get(unit.group) if isinstance(unit, Block) and bits else None
        if group is not None:
            if group not in groups:
                groups[group] = keeps(group)
            if groups[group]:
                return 0
        for of, where in others:
            if of == "rows" or isinstance(unit, Group):
                bits &= ~_wanted(state, of, where, unit, bits)
        return bits

    def keeps(group: Group) -> bool:
        # The group need not be complete: a row taken singly would split it.
        if group.states[stage.number] == SPLIT:
            return False
        forms = [where for of, where in others if of == "groups"]
        return any(where is None or state.test_group(where, group, 1) for where in forms)

    return stage.units(want.unit).unreserved(want.where, others, free, keeps)


def _wanted(state: State, of: str, where: Where | None, unit: Unit, bits: int) -> int:
    """Return the ready units that a claim of this form may get, alone or in part."""
    if where is None:
        return bits
    if isinstance(unit, Block):
        return state.test(where, unit, bits)
    if of == "groups":
        return state.test_group(where, unit, bits)
    return bits if any([state.test(where, one, one.live) for one in unit.blocks]) else 0


def _local_first(stage: Stage, queue: ReadyQueue, count: int, address: str) -> Picked:
    local, others = Picked(), Picked()
    for one, bits in first_parts(queue, max(LOCAL_UNITS, count)):
        (local if address in _hosts(stage, one) else others).append((one, bits))
    return first_parts(local + others, count)


def _hosts(stage: Stage, unit: Block | Group) -> set[str]:
    """The addresses of the peers that a unit is local to: the one that owns most of its bytes, and
    the one whose stage read it last, if at least half of its bytes are there now. Only bytes of the
    stage's fields count if it names some, and inline values are local to nobody. The rows of a
    block are local to the same peers."""
    blocks = [unit] if isinstance(unit, Block) else unit.blocks
    reader, read = blocks[0].reader, 0
    owned: Counter[str] = Counter()
    for block in blocks:
        for part in block.values.parts:
            owner = part.chunk.owner
            if owner == INLINE:
                continue
            used = part.live.bit_count() / max(1, part.chunk.rows)
            counts = not stage.fields or not set(stage.fields).isdisjoint(part.fields)
            nbytes = int(part.chunk.nbytes * used) if counts else 0
            owned[owner.peer] += nbytes
            if reader is not None and reader.has(owner.peer, part.fields, block):
                read += nbytes
    hosts = {max(owned, key=owned.__getitem__, default=INLINE.peer)}
    if reader is not None and 2 * read >= owned.total():
        hosts.add(reader.address)
    return hosts


def _by_budget(state: State, queue: ReadyQueue, want: Want, most: int) -> _Offer:
    """Return as many units from the front as fit the sum of a tag, at most `most`, and at least
    one: a unit heavier than every budget would otherwise block the queue for ever. Raise
    InvalidRows if one of the units has a row without weight."""
    assert want.budget_tag is not None
    units: Picked = []
    total: int | Fraction = 0
    for one, bits in queue:
        for row in rows_of(bits):
            if len(units) == most:
                return _Offer(units)
            weight = weights.weight_of(one, 1 << row, want.budget_tag)
            if units and (
                total >= want.budget
                if weight is None
                else not weights.fits(total + weight, want.budget)
            ):
                return _Offer(units)
            if weight is None:
                rows = itertools.chain.from_iterable(weights.parts_of(*part) for part in queue)
                weights.check(rows, want.budget_tag, "budget=", state.tag_names)
            assert weight is not None
            units.append((one, 1 << row))
            total += weight
    full = bool(units) and total >= want.budget or 0 < want.count <= len(units)
    return _Offer(units, full)


def _is_short(queue: ReadyQueue, want: Want, credit: PullCredit) -> bool:
    """Return whether it is known that a queue has too little for a budget."""
    claimed = want.budget_tag, want.budget, credit
    known = any([(one.tag, one.budget, one.grant) == claimed for one in queue.shorts])
    return known and not 0 < want.count <= queue.count


def _share(credit: PullCredit, values: OutgoingValues) -> float:
    """Return the share of the largest possible grant that these values take."""
    pulled = credit.pulled(values) / credit.most_bytes if credit.most_bytes else 0.0
    return max(pulled, values.nbytes / GRANTED_BYTES)


def _note_short(queue: ReadyQueue, want: Want, credit: PullCredit, values: OutgoingValues) -> None:
    """Note that a whole queue, with these values, is too little for a budget."""
    assert want.budget_tag is not None

    def share(unit: Block | Group) -> float:
        blocks = [unit] if isinstance(unit, Block) else unit.blocks
        return sum([_share(credit, OutgoingValues([(b.values, b.live)])) for b in blocks])

    free = 1.0 - _share(credit, values)
    short = Short(want.budget_tag, want.budget, credit, share, free, queue.units())
    if short.holds:
        queue.shorts = [*queue.shorts[1 - MAX_SHORTS :], short]


# how many of them


def _cut(
    state: State, stage: Stage, want: Want, offer: _Offer, least: int, credit: PullCredit
) -> tuple[_Offer, int]:
    """Return the units that fit into one message and that the claim's peer can pull, and the credit
    that more units would need. Raise FrameTooLarge if `least` units do not fit into a message."""

    def values(count: int) -> OutgoingValues:
        return rows_out.claimed(state, offer.first(count).rows, credit.fields, stage.name)

    count = offer.count
    while (nbytes := values(count).nbytes) > GRANTED_BYTES:
        if count == least:
            raise _too_large(want, least, nbytes)
        count = max(least, min(count - 1, count * GRANTED_BYTES // nbytes))
    if not 0 < credit.most_bytes < credit.pulled(values(count)):
        return offer.first(count), 0
    fitting = bisect_right(
        range(1, count + 1), credit.most_bytes, key=lambda many: credit.pulled(values(many))
    )
    enough = min(max(least, fitting + 1), count)
    return offer.first(fitting), credit.pulled(values(enough))


def _too_large(want: Want, least: int, nbytes: int) -> FrameTooLarge:
    return FrameTooLarge(
        f"a reply with {counted(least, want.unit.removesuffix('s'), want.unit)}, including "
        f"inline values, would be {nbytes} bytes long, over the limit of {GRANTED_BYTES}: "
        f"claim fewer {want.unit}, or pass a smaller min= to accept fewer than you ask for. "
        "Claiming fewer fields may not help, because the inline values of all fields of a row "
        "travel together",
        size=nbytes,
        limit=GRANTED_BYTES,
    )
