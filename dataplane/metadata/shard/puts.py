"""Puts and adds: everything is checked first, and then everything is written.

`plan_put` checks the rows, groups and tags of a put and changes nothing, so that the shard's peer
knows what is new before it stores it. `put` checks the values too, and then changes the store. New
rows become one block per group. Only rows that exist already are handled one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from dataplane.errors import (
    FieldExists,
    GroupClosed,
    InvalidRows,
    PartitionSealed,
    RowsDropped,
    counted,
    without_group,
)
from dataplane.metadata.shard.blocks import UNKNOWN_SIZE, UNLIMITED, Block, Group
from dataplane.metadata.shard.drops import seal_if_full
from dataplane.metadata.shard.leases import Part
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.state import State, Write
from dataplane.metadata.tables import tags as tagging
from dataplane.metadata.tables.bits import rows_of
from dataplane.metadata.tables.incoming import RowsIn, rows_in
from dataplane.metadata.tables.keys import Keys, format_minted, some_of
from dataplane.metadata.tables.pieces import MAX_BLOCK_ROWS, Pieces, split
from dataplane.metadata.tables.remembered import of_group
from dataplane.wire.events import EventRecord, Kind
from dataplane.wire.messages import Put, PutDone
from dataplane.wire.tables import Name, Scalar

SHOWN_NAMES = 8
"""Names in an error."""

Tagging = Mapping[str, Sequence[Scalar]]
PUT = PutDone()
"""The usual reply to a change with values. Remembered replies share this object."""


class PutPlan(msgspec.Struct, eq=False):
    """A checked put. known: the block of each existing row; None if all rows are new. new:
    indices of the others. groups: per entry of the message's groups, None if it is new;
    new_groups: indices of those to create. taken: the message rows that it stores, if some are
    skipped. gone: how many of the skipped rows have been freed; the others exist as put."""

    rows: RowsIn
    count: int
    """rows of the message"""
    tags: Tagging
    known: list[Block | None] | None
    new: Sequence[int]
    groups: list[Group | None]
    new_groups: list[int]
    taken: list[int] | None = None
    gone: int = 0

    def places(self, at: Sequence[int]) -> Sequence[int]:
        """The indices in the message of rows of the plan."""
        return at if self.taken is None else [self.taken[place] for place in at]

    @property
    def answer(self) -> PutDone:
        """The reply after the put was stored."""
        if self.taken is None:
            return PUT
        return PutDone(gone=self.gone, there=self.count - len(self.taken) - self.gone)


def plan_put(state: State, asked: Put) -> PutPlan:
    """Check a put against the store, except for its values."""
    fields, tags, reuse = asked.values.fields, asked.tags, asked.reuse
    incoming = rows_in(asked.rows)
    if fields:
        state.check_fields(fields)
    if tags:
        tagging.check(tags, incoming.count, state.tag_names)
    new: Sequence[int] = range(incoming.count)
    known = state.index.blocks_of(incoming.keys)
    if known is not None:
        new = [i for i, block in enumerate(known) if block is None]
    taken, count = None, incoming.count
    gone: set[int] = set()
    buried = bool(new) and not reuse and _have_tombstones(state, incoming)
    if buried:
        gone = set(_gone(state, incoming, new))
    there: list[int] = []
    if known is not None:
        _check_known_groups(incoming, known)
        if not asked.replace:
            there = _existing_rows(
                incoming, known, state.arrived(asked.values, count).pieces.shape.live
            )
    if gone or there:
        over = gone.union(there)
        taken = [i for i in range(count) if i not in over]
        tags = tagging.only(tags, taken, count)
        incoming = incoming.only(taken)
        blocks = [None] * count if known is None else known
        known = [blocks[i] for i in taken]
        new = [i for i, block in enumerate(known) if block is None]
    if new:
        _check_new_rows(state, incoming, new, buried)
    groups, new_groups = _plan_groups(state, incoming, new, buried)
    return PutPlan(incoming, count, tags, known, new, groups, new_groups, taken, len(gone))


def put(state: State, op: Put, plan: PutPlan | None = None, now: float = 0.0) -> PutDone:
    """Store new rows, or merge fields and tags into existing ones. Return the reply.

    Rows that were put before are skipped, so a repeated put stores what is missing: rows that have
    every field of the put (without `replace`), and rows with names from the user that have been
    freed (without `reuse`).

    plan: the result of `plan_put` for the same rows, if nothing has changed since. A row for
    which the put has no value of a field keeps its value. The reply is remembered for retries.
    Raises FieldExists for a row that has only some of these fields (without `replace`),
    RowsDropped, GroupClosed, PartitionSealed, InvalidRows or LimitExceeded.
    """
    if plan is None:
        plan = plan_put(state, op)
    closed = _apply(state, plan, op)
    if plan.new:
        state.producers.note(op.holder, len(plan.new), now)
    if closed:
        seal_if_full(state)
    state.remember(op.change, plan.answer)
    state.tell(op)
    return plan.answer


def _apply(state: State, plan: PutPlan, op: Put) -> int:
    """Return how many groups closed. Once its values are checked, it cannot fail."""
    arrived = state.arrived(op.values, plan.count)
    state.hold(arrived)
    closed = _enter(state, plan, op, arrived.pieces) if plan.rows.count else 0
    state.settled(arrived)
    return closed


def _enter(state: State, plan: PutPlan, op: Put, pieces: Pieces) -> int:
    rows = plan.rows
    if op.reuse and len(state.tombstones):
        state.tombstones.remove(rows.keys[i] for i in plan.new)
        state.tombstones.remove(of_group(rows.group_keys[i]) for i in plan.new_groups)
    _enter_groups(state, plan, op.holder)
    _note_put(state, plan, op, pieces)
    touched = {group.key: group for group in plan.groups if group is not None}
    blocks = enter_rows(state, plan, pieces)
    known = [] if plan.known is None else _enter_known(state, plan, pieces)
    for block in known:
        if block.group:  # it may be in a group that the message leaves out
            touched[block.group] = state.groups[block.group]
    by = Write(pieces.fields, op.holder)
    closed = state.written(blocks + known, touched.values(), by)
    if (plan.tags or op.replace) and known:
        state.retag([block for block in known if block.live])
    return closed


def _enter_known(state: State, plan: PutPlan, pieces: Pieces) -> list[Block]:
    """Merge fields and tags into the plan's existing rows. Return their blocks."""
    parts = _known_parts(plan)
    homes = [(plan.places(part.at), part.rows, part.block.count) for part in parts]
    given = split(pieces.parts, homes) if parts else []
    for part, mine in zip(parts, given, strict=True):
        state.merge(part.block, mine, keep=False)
        if plan.tags:
            tags = tagging.only(plan.tags, part.at, plan.rows.count)
            state.set_tags(part.block, part.rows, tags)
    return [part.block for part in parts]


def _note_put(state: State, plan: PutPlan, op: Put, pieces: Pieces) -> None:
    """Note one event per group of the message. Its bytes are divided evenly among the rows."""
    if state.note is None:
        return
    rows, now = plan.rows, state.permits.version
    nbytes = sum([chunk.nbytes for chunk in pieces.chunks])
    if rows.group is None:
        put = EventRecord(Kind.PUT, rows=rows.count, nbytes=nbytes, worker=op.holder, version=now)
        put.client_s = op.client_s
        state.happened(put)
        return
    each: Mapping[int, int] = {0: rows.count} if rows.whole else Counter(rows.group)
    for at, many in each.items():
        name: Name = ""
        version = now
        if at >= 0:
            names, group = rows.group_names, plan.groups[at]
            version = now if group is None else min(now, group.begun)
            name = format_minted(rows.group_keys[at]) if names is None else names[at]
        put = EventRecord(Kind.PUT, group=name, rows=many, worker=op.holder, version=version)
        put.nbytes, put.client_s = nbytes * many // rows.count, op.client_s
        state.happened(put)


def add_fields(
    state: State, stage: Stage, parts: Sequence[tuple[Part, Pieces]], holder: int = 0
) -> dict[str, int]:
    """Write values that `check_added` accepted. Existing values stay, and are counted. holder:
    of the lease."""
    kept: dict[str, int] = {}
    fields: dict[str, None] = {}
    for part, values in parts:
        fields |= dict.fromkeys(values.fields)
        for name, stayed in state.merge(
            part.block, values.written_by(stage.name), keep=True
        ).items():
            kept[name] = kept.get(name, 0) + stayed
    blocks = [(part.block, part.bits) for part, _ in parts]
    by = Write(list(fields), holder, stage.name)
    state.written([block for block, _ in blocks], state.groups_of(blocks), by)
    return kept


def check_added(stage: Stage | None, parts: Sequence[tuple[Part, Pieces]]) -> None:
    """Raise FieldExists if another writer has set a field of these rows.

    Values that the stage itself added before are kept. None: for progress, which may not name an
    existing field.
    """
    fields = dict.fromkeys([name for _, values in parts for name in values.fields])
    for name in fields:
        taken: list[Name] = []
        count = 0
        for part, values in parts:
            there = part.block.values.live(name)
            if stage is not None and there:
                there &= ~part.block.values.added(stage.name, name)
            if hit := there & values.live(name):
                count += hit.bit_count()
                shown_here = rows_of(hit)[: SHOWN_NAMES - len(taken)]
                taken += [part.block.name(row) for row in shown_here]
        if not count:
            continue
        others = f" from a writer other than stage {stage.name!r}" if stage is not None else ""
        what = "Add the values" if stage is not None else "Store the values of release()"
        raise FieldExists(
            f"{counted(count, 'row already has', 'rows already have')} a value for field {name!r}"
            f"{others} (for example row {taken[0]!r}). Nothing was stored. "
            f"{what} under another field name",
            field=name,
            keys=taken,
        )


def shown(names: Sequence[Name] | None, keys: Keys, places: Sequence[int]) -> list[Name]:
    """The first few names at these indices, for a message and its details."""
    few = places[:SHOWN_NAMES]
    return [format_minted(keys[i]) if names is None else names[i] for i in few]


def _have_tombstones(state: State, rows: RowsIn) -> bool:
    """Whether some of these rows or groups were here before."""
    if not len(state.tombstones):
        return False
    has_any = state.tombstones.has_any
    return has_any(rows.keys) or has_any([of_group(key) for key in rows.group_keys])


def _gone(state: State, rows: RowsIn, new: Sequence[int]) -> list[int]:
    """The rows that were freed, or whose group was freed, if they have names from the user."""
    freed = state.tombstones.freed
    gone = [i for i in new if freed(rows.keys[i])]
    over = {at for at, key in enumerate(rows.group_keys) if freed(of_group(key))}
    if over and rows.group is not None:
        gone += [i for i in new if rows.group[i] in over]
    return gone


def _check_new_rows(state: State, rows: RowsIn, new: Sequence[int], buried: bool) -> None:
    """buried: some rows or groups of the message were here before, and may not be used again."""
    if buried:
        dropped = [i for i in new if state.tombstones.dropped(rows.keys[i])]
        if dropped:
            keys = shown(rows.names, rows.keys, dropped)
            said = counted(
                len(dropped),
                f"row of this put (key {keys[0]!r}) was",
                f"rows of this put (for example key {keys[0]!r}) were",
            )
            raise RowsDropped(
                f"{said} dropped earlier from partition {state.partition!r}. "
                f"{_instead_of(len(dropped), rows.count, 'rows')}",
                keys=keys,
                rows=len(dropped),
            )
    size = state.definition.group_size
    if size is not None:
        alone = len(new) if rows.group is None else 0
        if rows.group is not None and not rows.whole:
            alone = sum([rows.group[i] < 0 for i in new])
        if alone:
            raise without_group(alone, size)
    if state.sealed:
        if rows.group is not None and buried:
            groups = sorted({rows.group[i] for i in new if rows.group[i] >= 0})
            _check_new_groups(state, rows, groups)  # the seal may have dropped them
        raise PartitionSealed(
            f"partition {state.partition!r} is sealed and takes no new rows, but "
            f"{counted(len(new), 'row of this put is', 'rows of this put are')} new: put "
            "new rows into another partition. If this partition is left over from an earlier "
            "launch of the run, call connect(fresh=True) to start with an empty run",
            partition=state.partition,
            rows=len(new),
        )


def _existing_rows(
    rows: RowsIn, known: Sequence[Block | None], brought: Mapping[str, int]
) -> list[int]:
    """Return the positions of rows that have every field that the message brings for them. Raise
    FieldExists for a row that has only some of them: another put has set those. brought: rows of
    the message, by field."""
    there = []
    partly: list[tuple[int, str]] = []
    has_it: dict[tuple[int, str], int] = {}
    digits = {name: f"{bits:0{len(known)}b}"[::-1] for name, bits in brought.items()}
    for place, block in enumerate(known):
        if block is None:
            continue
        row, came = block.row(rows.keys[place]), 0
        has: list[str] = []
        for name, given in digits.items():
            if given[place] == "1":
                came += 1
                live = has_it.get((block.number, name))
                if live is None:
                    live = has_it[block.number, name] = block.values.live(name)
                if live >> row & 1:
                    has.append(name)
        if has and len(has) == came:
            there.append(place)
        elif has:
            partly.append((place, has[0]))
    if partly:
        name = partly[0][1]
        keys = shown(rows.names, rows.keys, [place for place, field in partly if field == name])
        raise FieldExists(
            f"{counted(len(partly), 'row already has', 'rows already have')} some, but not all, "
            f"of the fields of this put (for example, row {keys[0]!r} has field {name!r}). "
            "Nothing was stored. To overwrite existing fields, pass replace=True",
            field=name,
            keys=keys,
        )
    return there


def _plan_groups(
    state: State, rows: RowsIn, new: Sequence[int], buried: bool
) -> tuple[list[Group | None], list[int]]:
    """(each group of the message, None if new; indices of the groups to create)."""
    if rows.group is None or not rows.group_keys:
        return [], []
    groups = [state.groups.get(key) for key in rows.group_keys]
    if rows.whole:
        joining = [len(new)]
    else:
        counts = Counter([rows.group[i] for i in new])
        joining = [counts[at] for at in range(len(groups))]
    made = [at for at, group in enumerate(groups) if group is None and joining[at]]
    if made and buried:
        _check_new_groups(state, rows, made)
    size = state.definition.group_size
    room = UNLIMITED if size is None else size
    over = [at for at, g in enumerate(groups) if joining[at] > (room if g is None else g.room)]
    if over:
        names = shown(rows.group_names, rows.group_keys, over)
        raise GroupClosed(_no_room(names[0], groups[over[0]], room, joining[over[0]]), groups=names)
    return groups, made


def _no_room(name: Name, group: Group | None, size: int, added: int) -> str:
    """Why a group has no room for the new rows of a put."""
    if group is not None and group.closed:
        return (
            f"group {name!r} already has all its {counted(group.seen, 'row')} and accepts "
            "no more: a restarted producer should continue with its next group"
        )
    seen, size = (0, size) if group is None else (group.seen, group.seen + group.room)
    return (
        f"group {name!r} has {seen} of {counted(size, 'row')}, so this put cannot add "
        f"{added} more: use another group id. If this put repeats an earlier one, pass "
        "the same key= values, and rows that exist are skipped"
    )


def _check_new_groups(state: State, rows: RowsIn, made: Sequence[int]) -> None:
    dropped = [at for at in made if state.tombstones.dropped(of_group(rows.group_keys[at]))]
    if dropped:
        names = shown(rows.group_names, rows.group_keys, dropped)
        said = counted(
            len(dropped),
            f"group of this put ({names[0]!r}) was",
            f"groups of this put (for example {names[0]!r}) were",
        )
        given = len(rows.group_keys) + bool(rows.group and min(rows.group) < 0)
        raise RowsDropped(
            f"{said} dropped earlier from partition {state.partition!r}. "
            f"{_instead_of(len(dropped), given, 'groups')}",
            groups=names,
        )


def _instead_of(dropped: int, given: int, what: str) -> str:
    """What to do about rows or groups that were dropped."""
    if dropped == given:
        return (
            f"A restarted producer should continue with its next {what}. To put new rows in their "
            "place, pass reuse=True"
        )
    return f"Leave the dropped {what} out and repeat the put, or pass reuse=True"


def _check_known_groups(rows: RowsIn, known: Sequence[Block | None]) -> None:
    if rows.group is None or not rows.group_keys:
        return
    wrong = [
        place
        for place, (block, at) in enumerate(zip(known, rows.group, strict=True))
        if block is not None and at >= 0 and block.group != rows.group_keys[at]
    ]
    if wrong:
        keys = shown(rows.names, rows.keys, wrong)
        raise InvalidRows(
            f"row {keys[0]!r} already belongs to another group, and a row cannot change its group: "
            "use another key, or pass the group that the row belongs to",
            keys=keys,
        )


def _enter_groups(state: State, plan: PutPlan, holder: int) -> None:
    """Create the plan's new groups. holder: the session whose permits they use; 0: none."""
    rows, size = plan.rows, state.definition.group_size or UNKNOWN_SIZE
    made = []
    for at in plan.new_groups:
        name = None if rows.group_names is None else rows.group_names[at]
        plan.groups[at] = group = state.add_group(rows.group_keys[at], name, size)
        made.append(group)
    if holder and made:
        state.permits.use(holder, made)


def enter_rows(state: State, plan: PutPlan, pieces: Pieces) -> list[Block]:
    """Create the plan's new rows: one block per group. pieces: of the message."""
    rows, parts = plan.rows, new_parts(plan)
    whole = len(parts) == 1 and len(plan.new) == rows.count
    if whole and plan.taken is None:
        given = [pieces]
    else:
        homes = [(plan.places(at), range(len(at)), len(at)) for _, at in parts]
        given = split(pieces.parts, homes)
    blocks = []
    for (group, at), mine in zip(parts, given, strict=True):
        names = rows.names
        if names is not None and not whole:
            names = [names[i] for i in at]
        tags = plan.tags if whole or not plan.tags else tagging.only(plan.tags, at, rows.count)
        keys = rows.keys if whole else some_of(rows.keys, at)
        blocks.append(state.add_block(keys, names, mine, tags, group))
    return blocks


def new_parts(plan: PutPlan) -> list[tuple[Group | None, Sequence[int]]]:
    """The new rows, divided into blocks."""
    rows, new = plan.rows, plan.new
    if not new:
        return []
    if rows.group is None or rows.whole:
        return _cut(plan.groups[0] if plan.groups else None, new)
    by_group: dict[int, list[int]] = {}
    for i in new:
        by_group.setdefault(rows.group[i], []).append(i)
    found: list[tuple[Group | None, Sequence[int]]] = []
    for index, at in by_group.items():
        found += _cut(plan.groups[index] if index >= 0 else None, _run(at))
    return found


def _cut(group: Group | None, new: Sequence[int]) -> list[tuple[Group | None, Sequence[int]]]:
    many = MAX_BLOCK_ROWS
    return [(group, new[at : at + many]) for at in range(0, len(new), many)]


def _known_parts(plan: PutPlan) -> list[Part]:
    """The existing rows of the plan, block by block."""
    found: dict[int, tuple[Block, list[int], list[int]]] = {}
    for place, block in enumerate(plan.known or ()):
        if block is not None:
            _, rows, at = found.setdefault(block.number, (block, [], []))
            rows.append(block.row(plan.rows.keys[place]))
            at.append(place)
    return [Part(0, block, _run(rows), _run(at)) for block, rows, at in found.values()]


def _run(numbers: Sequence[int]) -> Sequence[int]:
    """Return consecutive indices as a range."""
    run = range(numbers[0], numbers[0] + len(numbers))
    return run if list(run) == numbers else numbers
