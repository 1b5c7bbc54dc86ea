"""Log records: apply them to a store as the primary did, and make a snapshot of a store from them,
for a new backup, a promotion or a drain.

Nothing here waits or searches: each record names its rows. A record that does not fit the store
raises a typed error, and the store must not be used any more.

Applied to an empty store, a snapshot makes an equal one. A snapshot contains the store as it was
when the snapshot started. It is sent in pieces while the store changes; later records follow the
last piece. References that were freed but not reported yet are left out: the peer that takes over
reports its references to the owners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from msgspec.structs import replace

from dataplane.errors import DataplaneError, ProtocolError
from dataplane.metadata.shard import finishes, plans
from dataplane.metadata.shard.before_images import BeforeImages
from dataplane.metadata.shard.blocks import (
    ACKED,
    LEASED,
    PENDING,
    READY,
    SPLIT,
    UNKNOWN_SIZE,
    Block,
    Group,
    KeyIndex,
    Rows,
)
from dataplane.metadata.shard.leases import Lease, Member, Plan
from dataplane.metadata.shard.permits import DONE, Permit
from dataplane.metadata.shard.rows_out import tags_held
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables.bits import all_of, bytes_of, in_bytes, rows_of
from dataplane.metadata.tables.incoming import different
from dataplane.metadata.tables.keys import KEY_BYTES, PROGRESS, keys_in
from dataplane.metadata.tables.outgoing import OutgoingValues
from dataplane.metadata.tables.pieces import MAX_BLOCK_ROWS, Chunk, Piece, Pieces, pieces_of, split
from dataplane.metadata.tables.tags import MISSING
from dataplane.wire import tables as wire
from dataplane.wire.checkpoint import Restore, Restored
from dataplane.wire.journal import (
    Begun,
    Blocks,
    Declared,
    Ended,
    Given,
    Groups,
    Held,
    Joined,
    Leased,
    LogRecord,
    Lost,
    OneBlock,
    OneGroup,
    Pacing,
    Permitted,
    Ready,
    Relocated,
    Remembered,
    Returned,
    Settle,
    Summary,
)
from dataplane.wire.limits import MAX_CHUNKS_PER_MESSAGE, MAX_ROWS_PER_MESSAGE
from dataplane.wire.messages import Finish, Put, Tag, Withdraw
from dataplane.wire.packed import U8, column
from dataplane.wire.tables import PlanRows

MAX_RECORD_BYTES = 8 << 20
"""A snapshot splits records that are larger than this. A message holds `MAX_FRAME_BYTES`."""

_TOLD_STATES = {PENDING, LEASED, ACKED, SPLIT}
_BYTE, _F8 = np.dtype("u1"), np.dtype("<f8")


class _Mismatch(Exception):
    """A record does not fit the store. `apply` adds the partition and what to do."""


def apply(store: Store, record: LogRecord, now: float = 0.0) -> None:
    """Apply a record to a copy of its partition's store, which emits no records itself. Leases
    start at `now`.

    Raises ProtocolError if the store does not fit the record. The copy is then broken and must
    begin again from a snapshot. A copy collects freed references, too: drain `freed` and discard
    them, because the primary notifies the owners.
    """
    assert store.emit is None
    try:
        how = _HOW.get(type(record))
        if how is not None:
            how(store, record, now)
        else:
            store.carry_out(record)
    except (DataplaneError, _Mismatch) as exc:
        raise ProtocolError(
            f"cannot apply {type(record).__name__} to the backup's copy of partition "
            f"{store.partition!r}: {exc}. The copy must begin again from a snapshot",
            partition=store.partition,
        ) from exc


# what happens to a store while it is used


def _begun(store: Store, record: Begun, now: float) -> None:
    raise _Mismatch(
        f"unexpected start of partition {store.partition!r}: the copy has started it already"
    )


def _leased(store: Store, record: Leased, now: float) -> None:
    stage = store.stage(record.stage)
    _new_lease(store, record.lease)
    rows = Rows([(_block(store, number), in_bytes(bits)) for number, bits in record.rows])
    if any([bits & ~stage.of(block).ready or not bits for block, bits in rows.parts]):
        raise _Mismatch(
            f"lease {record.lease} of stage {record.stage!r}: expected only ready rows, got one "
            "that is not ready"
        )
    _each_once(rows)
    if record.unit == "rows":
        store.take_rows(stage, rows.parts)
    else:
        groups = store.groups_of(rows.parts)
        if len(rows) != sum([one.live for one in groups]) or any(
            [one.states[stage.number] != READY for one in groups]
        ):
            raise _Mismatch(
                f"lease {record.lease} of stage {record.stage!r}: every group must be ready and "
                "complete, but at least one group is not"
            )
        for group in groups:
            stage.lease_group(group)
    store.lease(stage, record.unit, rows, record.holder, now, record.claim, record.lease)


def _joined(store: Store, record: Joined, now: float) -> None:
    leases, plan = store.leases, store.leases.plans.get(record.stage)
    _new_lease(store, record.member)
    lease = finishes.lease_of(store, record.lease) if plan is None else plan.lease
    shape = record.shape if plan is None else plan.shape
    if (lease.number, lease.stage.name, shape) != (record.lease, record.stage, record.shape):
        raise _Mismatch(
            f"unexpected plan for stage {record.stage!r}: expected lease {lease.number} of stage "
            f"{lease.stage.name!r} with {shape}, got lease {record.lease} with {record.shape}"
        )
    if plan is None:
        for weights in record.rows.weights.values() if record.rows is not None else ():
            column(weights, _F8, lease.count)
        plan = Plan(lease, shape, record.rows or plans.plan_rows(lease, shape))
        leases.plans[record.stage] = plan
    who = record.rank, record.holder, record.claim
    plan.members[record.member] = Member(record.member, plan, *who, now, record.acked)


def _permitted(store: Store, record: Permitted, now: float) -> None:
    permits = store.permits
    if permits.limits is None:
        raise _Mismatch(
            f"unexpected permit {record.permit}: partition {store.partition!r} has no admission "
            "limits"
        )
    if record.permit in permits.given:
        raise _Mismatch(f"unexpected permit {record.permit}: it already exists")
    if record.count < 1:
        raise _Mismatch(
            f"invalid permit {record.permit}: expected 1 group or more, got {record.count}"
        )
    if not 0 <= record.used <= record.count:
        raise _Mismatch(
            f"permit {record.permit}: expected 0 to {record.count} used groups, got {record.used}"
        )
    permits.enter(
        Permit(
            record.permit, record.holder, record.version, record.count, record.count - record.used
        )
    )


def _relocated(store: Store, record: Relocated, now: float) -> None:
    chunks = column(record.chunks, U8)
    there = column(record.to_chunks, U8, len(chunks))
    store.relocate(record.owner, chunks, record.to_owner, there)


def _paced(store: Store, record: Pacing, now: float) -> None:
    permits = store.permits
    if record.version < permits.version:
        raise _Mismatch(
            f"invalid version of the trainer: expected {permits.version} or more, got "
            f"{record.version}"
        )
    if record.per_version < 0 or record.max_lag < 0:
        raise _Mismatch(
            f"invalid limits max_lag={record.max_lag}, per_version={record.per_version}: expected "
            "0 or more"
        )
    permits.version = record.version
    permits.begin(store)
    permits.limits = (record.max_lag, record.per_version) if record.per_version else None
    for version, groups in record.trained:
        permits.trained[version] = permits.trained.get(version, 0) + groups


# records that only a snapshot has


def _groups(store: Store, record: Groups, now: float) -> None:
    permits = store.permits
    for one in record.groups:
        _new(store.groups, [one.key], "group")
        sound = one.expected >= UNKNOWN_SIZE and 0 <= one.dropped <= one.gone and one.number > 0
        known = len(one.states) == len(store.stages) and set(one.states) <= _TOLD_STATES
        if not sound or not known or not 0 <= one.begun <= DONE * permits.counts:
            raise _Mismatch(f"group {one.number} has an invalid state: {one}")
        group = store.add_group(one.key, one.name, one.expected, one.number)
        group.seen, group.dropped, group.closed = one.gone, one.dropped, one.closed
        for stage in store.stages.values():
            stage.move_group(group, one.states[stage.number])
        group.begun = one.begun
        permits.done += one.begun == DONE
        store.last_number = max(store.last_number, one.number)
    permits.look_again()


def _blocks(store: Store, record: Blocks, now: float) -> None:
    for one in record.blocks:
        keys, live = keys_in(one.keys), in_bytes(one.live)
        if one.number < 1:
            raise _Mismatch(f"invalid block number {one.number}: expected 1 or more")
        if len(keys) > MAX_BLOCK_ROWS:
            raise _Mismatch(
                f"block {one.number}: expected at most {MAX_BLOCK_ROWS} rows, got {len(keys)}"
            )
        if not 0 < live < 1 << len(keys):
            raise _Mismatch(
                f"block {one.number}: expected at least one live row, and none beyond its "
                f"{len(keys)} rows"
            )
        if any([in_bytes(some) & ~live for some in (*one.acked, *one.returned)]):
            raise _Mismatch(f"block {one.number}: expected acked and returned rows to be live rows")
        if len(one.names or keys) != len(keys):
            raise _Mismatch(
                f"block {one.number}: expected one name per row, got {len(one.names or keys)} "
                f"names for {len(keys)} rows"
            )
        if not len(one.acked) == len(store.stages) == len(one.returned or one.acked):
            raise _Mismatch(
                f"block {one.number}: expected the rows of {len(store.stages)} stages, got acked "
                f"rows of {len(one.acked)} and returned rows of {len(one.returned)}"
            )
        if one.number in store.blocks:
            raise _Mismatch(f"unexpected block {one.number}: it already exists")
        if one.group and one.group not in store.groups:
            raise _Mismatch(
                f"block {one.number}: expected an existing group, got key {one.group[:16].hex()}"
            )
        _new(store.index, [keys[row] for row in rows_of(live)], "row")
        group = store.groups[one.group] if one.group else None
        block = store.add_block(keys, one.names, pieces_of(len(keys)), {}, group, one.number, live)
        store.last_number = max(store.last_number, one.number)
        for stage, acked in zip(store.stages.values(), one.acked, strict=True):
            if acked:
                stage.move(block, in_bytes(acked), PENDING, ACKED)
        for standing, returned in zip(block.standings, one.returned, strict=False):
            standing.returned = in_bytes(returned)


def _given(store: Store, record: Given, now: float) -> None:
    numbers: list[int] = column(record.numbers, U8).tolist()
    blocks = [_block(store, number) for number in numbers]
    if len(set(numbers)) < len(numbers):
        twice = Counter(numbers).most_common(1)[0][0]
        raise _Mismatch(f"expected each block once in the record, got block {twice} twice")
    counts = [block.count for block in blocks]
    arrived = store.arrived(record.values, sum(counts))
    _check_fields(store, arrived.pieces.fields)
    parts: Sequence[Piece[Chunk]] = arrived.pieces.parts
    if record.by:
        if len(record.by) != len(parts):
            raise _Mismatch(
                f"expected one writer per piece in the record, got {len(record.by)} writers for "
                f"{len(parts)} pieces"
            )
        parts = [replace(one, by=by) for one, by in zip(parts, record.by, strict=True)]
    spans = zip(counts, accumulate(counts), strict=True)
    homes = [(range(end - count, end), range(count), count) for count, end in spans]
    given = split(parts, homes)
    store.hold(arrived)
    for block, mine in zip(blocks, given, strict=True):
        gone = all_of(block.count) & ~block.live
        if gone and any([mine.live(field) & gone for field in mine.fields]):
            raise _Mismatch(
                f"expected values only for live rows of block {block.number}, got values for "
                "other rows"
            )
        if mine.chunks:
            store.merge(block, mine, keep=True)
    store.settled(arrived)


def _check_fields(store: Store, fields: Sequence[str]) -> None:
    """Progress is known by its stage's name."""
    store.check_fields([field for field in fields if PROGRESS not in field])
    for field in fields:
        stage, mark, name = field.rpartition(PROGRESS)
        if mark:
            store.check_fields([name], store.stage(stage).name)


def _ready(store: Store, record: Ready, now: float) -> None:
    stage = store.stage(record.stage)
    rows = _pending(
        stage, [(_block(store, number), in_bytes(bits)) for number, bits in record.rows]
    )
    keys = different(record.groups, "group")
    groups = [store.groups[key] for key in keys if key in store.groups]
    if len(groups) < len(keys):
        raise _Mismatch(
            f"stage {record.stage!r}: expected {len(keys)} existing groups, but "
            f"{len(keys) - len(groups)} of them do not exist"
        )
    if wrong := sum([one.states[stage.number] != PENDING for one in groups]):
        raise _Mismatch(
            f"stage {record.stage!r}: expected {len(keys)} pending groups, but {wrong} of them are "
            "not pending"
        )
    for at, (block, bits) in enumerate(rows.parts):
        stage.move(block, bits, PENDING, READY, at < record.returned)
    for at, group in enumerate(groups):
        stage.move_group(group, READY, at < record.returned)


def _held(store: Store, record: Held, now: float) -> None:
    stage = store.stage(record.stage)
    _new_lease(store, record.lease)
    gone: dict[int, Block] = {}
    parts: list[tuple[Block, int]] = []
    left: list[int] = []
    for number, raw, unfinished in record.parts:
        block = store.blocks.get(number) or gone.setdefault(
            number, Block(number, (), MAX_BLOCK_ROWS, 0, b"", pieces_of(MAX_BLOCK_ROWS))
        )
        bits, rest = in_bytes(raw), in_bytes(unfinished)
        if not bits or bits >> block.count:
            raise _Mismatch(
                f"lease {record.lease}: expected at least one row of block {number}, and none "
                f"beyond its {block.count} rows"
            )
        if rest & ~bits:
            raise _Mismatch(
                f"lease {record.lease}: expected the unfinished rows of block {number} to be "
                "leased rows"
            )
        parts.append((block, bits))
        left.append(rest)
    lease = Lease(record.lease, stage, Rows(parts), left, record.holder, now, record.claim)
    if lease.is_done:
        raise _Mismatch(f"lease {record.lease}: expected at least one unfinished row, got none")
    for block, bits in _pending(stage, lease.held.parts).parts:
        stage.move(block, bits, PENDING, LEASED)
    store.leases.add(lease)


def _remembered(store: Store, record: Remembered, now: float) -> None:
    keys = different(record.keys, "key")
    for key, freed in zip(keys, column(record.freed, _BYTE, len(keys)).tolist(), strict=True):
        store.tombstones.add([key], bool(freed))
    store.losses.total += record.missed
    store.losses.note(record.lost)


def _summary(store: Store, record: Summary, now: float) -> None:
    store.check_fields(record.fields)
    groups = [group.number for group in store.groups.values()]
    if record.numbers < max([*groups, *store.blocks], default=0):
        raise _Mismatch(
            f"expected no group or block with a number above {record.numbers}, but one already "
            "exists"
        )
    store.sealed, store.last_number = record.sealed, record.numbers
    store.fields |= dict.fromkeys(record.fields, True)
    store.closed_groups, store.short_groups = record.closed_groups, record.short_groups
    store.tombstones.forgotten = record.forgotten
    for told in record.answers:
        store.answers.enter(told)
    for name, rows in record.lost.items():
        store.stage(name).lost = rows
    for name, rows in record.acked.items():
        store.stage(name).acked_rows = rows
    for name, (released, redelivered) in record.released.items():
        stage = store.stage(name)
        stage.released_rows, stage.redelivered_rows = released, redelivered
    for session, rows in record.producers:
        store.producers.note(session, rows, None)
    store.producers.add(record.put_rows - store.producers.rows)
    for key in column(record.done, U8).tolist():
        store.leases.retry_keys.add(key, now)


# checks


def _block(store: Store, number: int) -> Block:
    try:
        return store.blocks[number]
    except KeyError:
        raise _Mismatch(f"unknown block {number}: expected an existing block") from None


def _each_once(rows: Rows) -> Rows:
    """Return the rows. Raise ProtocolError if one of them is listed twice."""
    if len(rows.parts) > 1:
        seen: Counter[int] = Counter()
        for block, bits in rows.parts:
            if seen[block.number] & bits:
                raise _Mismatch(
                    f"expected each row once in the record, got a row of block {block.number} twice"
                )
            seen[block.number] |= bits
    return rows


def _pending(stage: Stage, parts: Sequence[tuple[Block, int]]) -> Rows:
    """These rows, all of which must be pending."""
    if wrong := sum([(bits & ~stage.pending(block)).bit_count() for block, bits in parts]):
        raise _Mismatch(
            f"stage {stage.name!r}: expected only pending rows, but {wrong} rows are not pending"
        )
    return _each_once(Rows(parts))


def _new(index: KeyIndex | Mapping[bytes, object], keys: Sequence[bytes], what: str) -> None:
    new = {key for key in keys if key not in index}  # a view would be searched linearly
    if len(new) < len(keys):
        raise _Mismatch(
            f"expected {len(keys)} new {what}s, but {len(keys) - len(new)} of them already exist "
            "or are listed twice"
        )
    if wrong := [len(key) for key in new if len(key) != KEY_BYTES]:
        raise _Mismatch(f"invalid {what} key: expected {KEY_BYTES} bytes, got {wrong[0]}")


def _new_lease(store: Store, number: int) -> None:
    if store.is_leased(number):
        raise _Mismatch(f"unexpected lease {number}: it already exists")


# a snapshot


PIECE_ROWS = 4096
"""A record of a snapshot has at most this many rows, groups or keys: about 10 ms of work."""


def snapshot(store: Store, many: int | None = None) -> Generator[LogRecord, None, None]:
    """Yield the records that make an equal store. Each has at most `many` rows (or one block),
    groups or keys; `PIECE_ROWS` by default. A lease is one record, and starts again with its full
    time where it is applied.

    The records describe the store at the first `next()`, whatever happens to it before the last
    one. The first step references what exists, and copies only which rows are left of leases.
    """
    many = many or PIECE_ROWS
    assert many <= MAX_ROWS_PER_MESSAGE
    images = store.keep_images()
    try:
        for record in _snapshot_records(store, images, many):
            yield record
            assert store.images is images, "another snapshot of this store was started"
    finally:
        store.drop_images(images)


def _snapshot_records(store: Store, images: BeforeImages, many: int) -> Iterator[LogRecord]:
    # Everything is noted before the first record is yielded.
    stages = list(store.stages.values())
    first: list[LogRecord] = [Declared(one.name, list(one.fields)) for one in stages]
    first += _permit_records(store)
    groups, blocks = list(store.groups.values()), list(store.blocks.values())
    leases = [(lease, list(lease.left)) for lease in store.leases]
    buried = store.tombstones.parts()
    last: list[LogRecord] = [
        record for plan in store.leases.plans.values() for record in _plan_records(plan)
    ]
    last += [*_loss_records(store), _summary_record(store)]

    yield from first
    for some in _pieces(groups, many):
        yield Groups([_group_record(images.group(one), len(stages)) for one in some])
    for some_blocks in _some_blocks(blocks, images, many):
        yield Blocks([_block_record(one, len(stages)) for one in some_blocks])
        yield from _value_records(some_blocks, images)
        rows = Rows([(block, block.live) for block in some_blocks])
        yield from _tag_records(store.partition, store.generation, rows)
    for stage in stages:
        for ready, back in images.queue(stage.rows.plain, many):
            row_masks = [(block.number, bytes_of(bits)) for block, bits in ready]
            yield Ready(stage.name, row_masks, returned=back)
        for ready, back in images.queue(stage.groups.plain, many):
            yield Ready(stage.name, [], b"".join([group.key for group, _ in ready]), back)
    for lease, left in leases:
        yield _lease_record(lease, left)
    for part in images.tombstones(buried):
        for gone in _pieces(list(part.items()), many):
            yield Remembered(b"".join([key for key, _ in gone]), bytes(freed for _, freed in gone))
    yield from last


def _loss_records(store: Store) -> Iterator[LogRecord]:
    names, number, missed = store.losses.after(0)
    while names or missed:  # forgotten names count too, so that the names keep their numbers
        yield Remembered(lost=names, missed=missed)
        names, number, missed = store.losses.after(number)


def _summary_record(store: Store) -> Summary:
    return Summary(
        store.sealed,
        store.last_number,
        store.closed_groups,
        store.short_groups,
        store.tombstones.forgotten,
        [name for name, had in store.fields.items() if had],
        list(store.answers.records()),
        {name: stage.lost for name, stage in store.stages.items() if stage.lost},
        {name: stage.acked_rows for name, stage in store.stages.items() if stage.acked_rows},
        {
            name: (stage.released_rows, stage.redelivered_rows)
            for name, stage in store.stages.items()
            if stage.released_rows
        },
        store.producers.rows,
        [(session, rows) for session, rows, _ in reversed(store.producers.latest(0.0))],
        np.array(list(store.leases.retry_keys), U8).tobytes(),
    )


def _permit_records(store: Store) -> Iterator[LogRecord]:
    permits = store.permits
    if permits.counts:
        max_lag, per_version = permits.limits or (0, 0)
        yield Pacing(permits.version, max_lag, per_version, sorted(permits.trained.items()))
        for one in permits.given.values():
            used = one.count - one.left
            yield Permitted(one.number, one.holder, one.count, one.version, used)


def _group_record(group: Group, stages: int) -> OneGroup:
    return OneGroup(
        group.number,
        group.key,
        group.given,
        group.expected,
        group.seen - group.live,
        group.dropped,
        group.closed,
        group.states[:stages].replace(
            bytes([READY]), bytes([PENDING])
        ),  # `Ready` records say in which order
        group.begun,
    )


def _some_blocks(of: Sequence[Block], images: BeforeImages, many: int) -> Iterator[list[Block]]:
    """Yield the blocks of each record, as they were when the snapshot started."""
    rows, nbytes = 0, 0
    some: list[Block] = []
    for block in of:
        image = images.block(block)
        size = image.nbytes + sum([len(one.inline) for one in image.values.chunks])
        rows, nbytes = rows + block.count, nbytes + size
        if some and (rows > many or nbytes > MAX_RECORD_BYTES):
            yield images.blocks(some)
            some, rows, nbytes = [], block.count, size
        some.append(block)
    if some:
        yield images.blocks(some)


def _block_record(block: Block, stages: int) -> OneBlock:
    keys = block.keys_of(all_of(block.count))
    standings = block.standings[:stages]
    acked = [bytes_of(one.acked) for one in standings]
    returned = [bytes_of(one.returned & block.live) for one in standings]
    live = bytes_of(block.live)
    sets = acked, returned if any(returned) else []
    return OneBlock(block.number, block.group, keys, block.names, live, *sets)


def _value_records(blocks: Sequence[Block], images: BeforeImages) -> Iterator[Given]:
    """Yield the values of these blocks, with what stages stored when they released rows: several
    records if one would be too large for a message or describe too many chunks. A copy of the store
    has an inline chunk once for each record that describes it."""
    pieces, nbytes = 0, 0
    some: dict[int, Pieces] = {}
    for block in blocks:
        for parts in _pieces(block.values.parts, MAX_CHUNKS_PER_MESSAGE):
            mine = pieces_of(block.count, parts)
            size = OutgoingValues([(mine, all_of(mine.count))]).nbytes
            full = pieces + len(parts) > MAX_CHUNKS_PER_MESSAGE or nbytes + size > MAX_RECORD_BYTES
            if some and full:
                yield _given_record(some, images)
                some, pieces, nbytes = {}, 0, 0
            some[block.number] = mine
            pieces, nbytes = pieces + len(parts), nbytes + size
    if some:
        yield _given_record(some, images)


def _given_record(values: Mapping[int, Pieces], images: BeforeImages) -> Given:
    """values: by the number of the block."""
    told = OutgoingValues([(one, all_of(one.count)) for one in values.values()])
    numbers = np.array(list(values), U8).tobytes()
    return Given(numbers, told.on_wire(images.names), told.by if any(told.by) else [])


def _tag_records(partition: str, generation: int, rows: Rows) -> Iterator[Tag]:
    """Yield the tags of these rows: one record for the tags that all rows have, and one for each
    other tag. If they are too large for a message, each half of the rows has separate records."""
    tags = tags_held(rows)
    nbytes = sum([len(v) for values in tags.values() for v in values if isinstance(v, str)])
    if len(rows) > 1 and nbytes > MAX_RECORD_BYTES:
        each, middle = list(rows), len(rows) + 1 >> 1
        for half in (each[:middle], each[middle:]):
            yield from _tag_records(partition, generation, Rows.of(half))
        return
    all_have = {name: values for name, values in tags.items() if MISSING not in values}
    if all_have:
        yield Tag(partition, generation, wire.Rows(rows.keys), all_have)
    each = list(rows)
    for name, values in tags.items():
        if name not in all_have:
            having = [at for at, value in enumerate(values) if value is not MISSING]
            keys = b"".join([block.keys[row] for block, row in [each[at] for at in having]])
            told = {name: [values[at] for at in having]}
            yield Tag(partition, generation, wire.Rows(keys), told)


def _lease_record(lease: Lease, left: Sequence[int]) -> Held:
    """left: of each part, the rows that are not finished."""
    return Held(
        lease.stage.name,
        lease.number,
        [
            (block.number, bytes_of(bits), bytes_of(rest))
            for (block, bits), rest in zip(lease.rows.parts, left, strict=True)
        ],
        lease.holder,
        lease.claim,
    )


def _plan_records(plan: Plan) -> Iterator[Joined]:
    of = plan.lease.stage.name, plan.lease.number, plan.shape
    rows: PlanRows | None = plan.rows
    for one in plan.members.values():
        yield Joined(*of, one.number, one.rank, one.holder, one.claim, rows, one.acked)
        rows = None  # only the first record has the rows


def _pieces(of: Sequence[Any], many: int) -> Iterator[Sequence[Any]]:
    return (of[at : at + many] for at in range(0, len(of), many))


_HOW: dict[type[Any], Callable[[Store, Any, float], object]] = {
    Begun: _begun,
    Leased: _leased,
    Returned: lambda store, record, now: store.release_holder(record.holder),
    Joined: _joined,
    Put: lambda store, record, now: store.put(record, now=now),
    Finish: lambda store, record, now: store.finish(record, now),
    Declared: lambda store, record, now: store.declare_stage(record.stage, record.fields),
    Ended: lambda store, record, now: store.clear(record.change),
    Settle: lambda store, record, now: store.settle(record),
    Permitted: _permitted,
    Withdraw: lambda store, record, now: store.take_back(record.numbers),
    Pacing: _paced,
    Lost: lambda store, record, now: store.lost(record.owner),
    Relocated: _relocated,
    Restore: lambda store, record, now: store.restore(record),
    Restored: lambda store, record, now: store.restored(),
    Groups: _groups,
    Blocks: _blocks,
    Given: _given,
    Ready: _ready,
    Held: _held,
    Remembered: _remembered,
    Summary: _summary,
}
