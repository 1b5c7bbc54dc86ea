"""The operations of a log: applied to a store as on the primary, and a store as the operations that
rebuild it, for a new backup, a promotion or a drain.

Nothing here waits or searches: each operation names its rows. An operation that does not fit the
store raises a typed error, and the store must not be used any more.

Applied to an empty store, a dump makes an equal one. A dump contains the store as it was when
the dump started. It is sent in pieces while the store changes; later operations follow the last
piece. References that were freed but not reported yet are left out: the peer that takes over
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
    Rows,
)
from dataplane.metadata.shard.index import KeyIndex
from dataplane.metadata.shard.leases import Lease, Member, Plan
from dataplane.metadata.shard.permits import DONE, Permit
from dataplane.metadata.shard.rows_out import tags_held
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.shard.store import Store
from dataplane.metadata.tables.bits import all_of, bytes_of, in_bytes, rows_of
from dataplane.metadata.tables.incoming import different
from dataplane.metadata.tables.keys import keys_in
from dataplane.metadata.tables.names import KEY_BYTES, PROGRESS
from dataplane.metadata.tables.outgoing import OutgoingValues
from dataplane.metadata.tables.pieces import MAX_BLOCK_ROWS, Chunk, Piece, Pieces, pieces_of, split
from dataplane.metadata.tables.tags import MISSING
from dataplane.wire import tables as wire
from dataplane.wire.checkpoint import Restore
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
    Lost,
    OneBlock,
    OneGroup,
    Op,
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
from dataplane.wire.records import RANGE, U8, column
from dataplane.wire.tables import PlanRows

MAX_OP_BYTES = 8 << 20
"""More about rows than this is told in several operations; a message takes `MAX_FRAME_BYTES`."""

_TOLD_STATES = {PENDING, LEASED, ACKED, SPLIT}
_BYTE, _F8 = np.dtype("u1"), np.dtype("<f8")


class _Mismatch(Exception):
    """An operation does not fit its replica. `apply` adds the partition and what to do."""


def apply(store: Store, op: Op, now: float = 0.0) -> None:
    """Apply an operation to a store that records nothing itself. Leases start at `now`.

    Raises ProtocolError if the store does not fit the operation. The replica is then broken and
    must resync from a dump. A replica collects freed references too: drain `freed` and discard
    them, because the primary notifies the owners.
    """
    assert store.emit is None
    try:
        how = _HOW.get(type(op))
        if how is not None:
            how(store, op, now)
        else:
            store.carry_out(op)
    except (DataplaneError, _Mismatch) as exc:
        raise ProtocolError(
            f"cannot apply {type(op).__name__} to the replica of partition {store.partition!r}: "
            f"{exc}. The replica must resync from a snapshot",
            partition=store.partition,
        ) from exc


# what happens to a store while it is used


def _begun(store: Store, op: Begun, now: float) -> None:
    raise _Mismatch(
        f"unexpected start of partition {store.partition!r}: the replica has started it already"
    )


def _leased(store: Store, op: Leased, now: float) -> None:
    stage = store.stage(op.stage)
    _new_lease(store, op.lease)
    rows = Rows([(_block(store, number), in_bytes(bits)) for number, bits in op.rows])
    if any([bits & ~stage.of(block).ready or not bits for block, bits in rows.parts]):
        raise _Mismatch(
            f"lease {op.lease} of stage {op.stage!r}: expected only ready rows, got one that is "
            "not ready"
        )
    _each_once(rows)
    if op.unit == "rows":
        store.take_rows(stage, rows.parts)
    else:
        groups = store.groups_of(rows.parts)
        if len(rows) != sum([one.live for one in groups]) or any(
            [one.states[stage.number] != READY for one in groups]
        ):
            raise _Mismatch(
                f"lease {op.lease} of stage {op.stage!r}: every group must be ready and complete, "
                "but at least one group is not"
            )
        for group in groups:
            stage.lease_group(group)
    store.lease(stage, op.unit, rows, op.holder, now, op.claim, op.lease)


def _joined(store: Store, op: Joined, now: float) -> None:
    leases, plan = store.leases, store.leases.plans.get(op.stage)
    _new_lease(store, op.member)
    lease = finishes.lease_of(store, op.lease) if plan is None else plan.lease
    shape = op.shape if plan is None else plan.shape
    if (lease.number, lease.stage.name, shape) != (op.lease, op.stage, op.shape):
        raise _Mismatch(
            f"unexpected plan for stage {op.stage!r}: expected lease {lease.number} of stage "
            f"{lease.stage.name!r} with {shape}, got lease {op.lease} with {op.shape}"
        )
    if plan is None:
        for weights in op.rows.weights.values() if op.rows is not None else ():
            column(weights, _F8, lease.count)
        plan = Plan(lease, shape, op.rows or plans.plan_rows(lease, shape))
        leases.plans[op.stage] = plan
    who = op.rank, op.holder, op.claim
    plan.members[op.member] = Member(op.member, plan, *who, now, op.acked)


def _permitted(store: Store, op: Permitted, now: float) -> None:
    permits = store.permits
    if permits.limits is None:
        raise _Mismatch(
            f"unexpected permit {op.permit}: partition {store.partition!r} has no admission limits"
        )
    if op.permit in permits.given:
        raise _Mismatch(f"unexpected permit {op.permit}: it already exists")
    if op.count < 1:
        raise _Mismatch(f"invalid permit {op.permit}: expected 1 group or more, got {op.count}")
    if not 0 <= op.used <= op.count:
        raise _Mismatch(f"permit {op.permit}: expected 0 to {op.count} used groups, got {op.used}")
    permits.enter(Permit(op.permit, op.holder, op.version, op.count, op.count - op.used))


def _relocated(store: Store, op: Relocated, now: float) -> None:
    ranges = column(op.ranges, RANGE)
    there = column(op.to_ranges, RANGE, len(ranges))
    store.relocate(op.owner, ranges, op.to_owner, there)


def _paced(store: Store, op: Pacing, now: float) -> None:
    permits = store.permits
    if op.version < permits.version:
        raise _Mismatch(
            f"invalid version of the trainer: expected {permits.version} or more, got {op.version}"
        )
    if op.per_version < 0 or op.max_lag < 0:
        raise _Mismatch(
            f"invalid limits max_lag={op.max_lag}, per_version={op.per_version}: expected 0 or more"
        )
    permits.version = op.version
    permits.begin(store)
    permits.limits = (op.max_lag, op.per_version) if op.per_version else None
    for version, groups in op.trained:
        permits.trained[version] = permits.trained.get(version, 0) + groups


# what a dump adds


def _groups(store: Store, op: Groups, now: float) -> None:
    permits = store.permits
    for one in op.groups:
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


def _blocks(store: Store, op: Blocks, now: float) -> None:
    for one in op.blocks:
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


def _given(store: Store, op: Given, now: float) -> None:
    numbers: list[int] = column(op.numbers, U8).tolist()
    blocks = [_block(store, number) for number in numbers]
    if len(set(numbers)) < len(numbers):
        twice = Counter(numbers).most_common(1)[0][0]
        raise _Mismatch(f"expected each block once in the record, got block {twice} twice")
    counts = [block.count for block in blocks]
    arrived = store.arrived(op.values, sum(counts))
    _check_fields(store, arrived.pieces.fields)
    parts: Sequence[Piece[Chunk]] = arrived.pieces.parts
    if op.by:
        if len(op.by) != len(parts):
            raise _Mismatch(
                f"expected one writer per piece in the record, got {len(op.by)} writers for "
                f"{len(parts)} pieces"
            )
        parts = [replace(one, by=by) for one, by in zip(parts, op.by, strict=True)]
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


def _ready(store: Store, op: Ready, now: float) -> None:
    stage = store.stage(op.stage)
    rows = _pending(stage, [(_block(store, number), in_bytes(bits)) for number, bits in op.rows])
    keys = different(op.groups, "group")
    groups = [store.groups[key] for key in keys if key in store.groups]
    if len(groups) < len(keys):
        raise _Mismatch(
            f"stage {op.stage!r}: expected {len(keys)} existing groups, but "
            f"{len(keys) - len(groups)} of them do not exist"
        )
    if wrong := sum([one.states[stage.number] != PENDING for one in groups]):
        raise _Mismatch(
            f"stage {op.stage!r}: expected {len(keys)} pending groups, but {wrong} of them are not "
            "pending"
        )
    for block, bits in rows.parts:
        stage.move(block, bits, PENDING, READY)
    for group in groups:
        stage.move_group(group, READY)


def _held(store: Store, op: Held, now: float) -> None:
    stage = store.stage(op.stage)
    _new_lease(store, op.lease)
    gone = dict[int, Block]()
    parts, left = list[tuple[Block, int]](), list[int]()
    for number, raw, unfinished in op.parts:
        block = store.blocks.get(number) or gone.setdefault(
            number, Block(number, (), MAX_BLOCK_ROWS, 0, b"", pieces_of(MAX_BLOCK_ROWS))
        )
        bits, rest = in_bytes(raw), in_bytes(unfinished)
        if not bits or bits >> block.count:
            raise _Mismatch(
                f"lease {op.lease}: expected at least one row of block {number}, and none beyond "
                f"its {block.count} rows"
            )
        if rest & ~bits:
            raise _Mismatch(
                f"lease {op.lease}: expected the unfinished rows of block {number} to be leased "
                "rows"
            )
        parts.append((block, bits))
        left.append(rest)
    lease = Lease(op.lease, stage, Rows(parts), left, op.holder, now, op.claim)
    if lease.is_done:
        raise _Mismatch(f"lease {op.lease}: expected at least one unfinished row, got none")
    for block, bits in _pending(stage, lease.held.parts).parts:
        stage.move(block, bits, PENDING, LEASED)
    store.leases.add(lease)


def _remembered(store: Store, op: Remembered, now: float) -> None:
    keys = different(op.keys, "key")
    for key, freed in zip(keys, column(op.freed, _BYTE, len(keys)).tolist(), strict=True):
        store.tombstones.add([key], bool(freed))
    store.losses.total += op.missed
    store.losses.note(op.lost)


def _summary(store: Store, op: Summary, now: float) -> None:
    store.check_fields(op.fields)
    groups = [group.number for group in store.groups.values()]
    if op.numbers < max([*groups, *store.blocks], default=0):
        raise _Mismatch(
            f"expected no group or block with a number above {op.numbers}, but one already exists"
        )
    store.sealed, store.last_number = op.sealed, op.numbers
    store.fields |= dict.fromkeys(op.fields, True)
    store.closed_groups, store.short_groups = op.closed_groups, op.short_groups
    store.tombstones.forgotten = op.forgotten
    for told in op.answers:
        store.answers.enter(told)
    for name, rows in op.lost.items():
        store.stage(name).lost = rows
    for name, rows in op.acked.items():
        store.stage(name).acked_rows = rows
    for name, (released, redelivered) in op.released.items():
        stage = store.stage(name)
        stage.released_rows, stage.redelivered_rows = released, redelivered
    for session, rows in op.producers:
        store.producers.note(session, rows, None)
    store.producers.add(op.put_rows - store.producers.rows)
    for key in column(op.done, U8).tolist():
        store.leases.retry_keys.add(key, now)


# checks


def _block(store: Store, number: int) -> Block:
    try:
        return store.blocks[number]
    except KeyError:
        raise _Mismatch(f"unknown block {number}: expected an existing block") from None


def _each_once(rows: Rows) -> Rows:
    """ProtocolError where a row is among them twice."""
    if len(rows.parts) > 1:
        seen = Counter[int]()
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
    new = {key for key in keys if key not in index}  # a view would be walked through, not looked in
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


# a dump


PIECE_ROWS = 4096
"""An operation of a dump is about so many rows, groups or keys: some 10 ms of work."""


def dump(store: Store, many: int | None = None) -> Generator[Op, None, None]:
    """The operations that make an equal store, each about at most `many` rows (or one block),
    groups or keys; `PIECE_ROWS` by default. A lease is one operation, and starts anew where it is
    applied, with its full time.

    They describe the store at the first `next()`, whatever happens to it before the last one.
    The first step references what exists, and copies only which rows are left of leases.
    """
    many = many or PIECE_ROWS
    assert many <= MAX_ROWS_PER_MESSAGE
    images = store.keep_images()
    try:
        for op in _told(store, images, many):
            yield op
            assert store.images is images, "another dump of this store was started"
    finally:
        store.drop_images(images)


def _told(store: Store, images: BeforeImages, many: int) -> Iterator[Op]:
    # All that is noted comes before the first operation.
    stages = list(store.stages.values())
    first: list[Op] = [Declared(one.name, list(one.fields)) for one in stages]
    first += _permits_told(store)
    groups, blocks = list(store.groups.values()), list(store.blocks.values())
    leases = [(lease, list(lease.left)) for lease in store.leases]
    buried = store.tombstones.parts()
    last: list[Op] = [op for plan in store.leases.plans.values() for op in _plan_told(plan)]
    last += [*_losses_told(store), _summary_told(store)]

    yield from first
    for some in _pieces(groups, many):
        yield Groups([_group_told(images.group(one), len(stages)) for one in some])
    for some_blocks in _some_blocks(blocks, images, many):
        yield Blocks([_block_told(one, len(stages)) for one in some_blocks])
        yield from _values_told(some_blocks, images)
        rows = Rows([(block, block.live) for block in some_blocks])
        yield from _tags_told(store.partition, store.generation, rows)
    for stage in stages:
        for ready in images.queue(stage.rows.plain, many):
            yield Ready(stage.name, [(block.number, bytes_of(bits)) for block, bits in ready])
        for ready in images.queue(stage.groups.plain, many):
            yield Ready(stage.name, groups=b"".join([group.key for group, _ in ready]))
    for lease, left in leases:
        yield _lease_told(lease, left)
    for part in images.tombstones(buried):
        for gone in _pieces(list(part.items()), many):
            yield Remembered(b"".join([key for key, _ in gone]), bytes(freed for _, freed in gone))
    yield from last


def _losses_told(store: Store) -> Iterator[Op]:
    names, number, missed = store.losses.after(0)
    while names or missed:  # what is forgotten as well: the names keep their numbers
        yield Remembered(lost=names, missed=missed)
        names, number, missed = store.losses.after(number)


def _summary_told(store: Store) -> Summary:
    return Summary(
        store.sealed,
        store.last_number,
        store.closed_groups,
        store.short_groups,
        store.tombstones.forgotten,
        [name for name, had in store.fields.items() if had],
        list(store.answers.told()),
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


def _permits_told(store: Store) -> Iterator[Op]:
    permits = store.permits
    if permits.counts:
        max_lag, per_version = permits.limits or (0, 0)
        yield Pacing(permits.version, max_lag, per_version, sorted(permits.trained.items()))
        for one in permits.given.values():
            used = one.count - one.left
            yield Permitted(one.number, one.holder, one.count, one.version, used)


def _group_told(group: Group, stages: int) -> OneGroup:
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
        ),  # `Ready` says in which order
        group.begun,
    )


def _some_blocks(of: Sequence[Block], images: BeforeImages, many: int) -> Iterator[list[Block]]:
    """Blocks that are told together, as they were."""
    some, rows, nbytes = list[Block](), 0, 0
    for block in of:
        image = images.block(block)
        size = image.nbytes + sum([len(one.inline) for one in image.values.chunks])
        rows, nbytes = rows + block.count, nbytes + size
        if some and (rows > many or nbytes > MAX_OP_BYTES):
            yield images.blocks(some)
            some, rows, nbytes = [], block.count, size
        some.append(block)
    if some:
        yield images.blocks(some)


def _block_told(block: Block, stages: int) -> OneBlock:
    keys = block.keys_of(all_of(block.count))
    standings = block.standings[:stages]
    acked = [bytes_of(one.acked) for one in standings]
    returned = [bytes_of(one.returned & block.live) for one in standings]
    live = bytes_of(block.live)
    sets = acked, returned if any(returned) else []
    return OneBlock(block.number, block.group, keys, block.names, live, *sets)


def _values_told(blocks: Sequence[Block], images: BeforeImages) -> Iterator[Given]:
    """Their values, and what stages gave back of them; in more operations where that would be too
    large for a message, or would describe too many chunks. A copy has an inline chunk once for each
    operation that describes it."""
    some, pieces, nbytes = dict[int, Pieces](), 0, 0
    for block in blocks:
        for parts in _pieces(block.values.parts, MAX_CHUNKS_PER_MESSAGE):
            mine = pieces_of(block.count, parts)
            size = OutgoingValues([(mine, all_of(mine.count))]).nbytes
            full = pieces + len(parts) > MAX_CHUNKS_PER_MESSAGE or nbytes + size > MAX_OP_BYTES
            if some and full:
                yield _given_told(some, images)
                some, pieces, nbytes = {}, 0, 0
            some[block.number] = mine
            pieces, nbytes = pieces + len(parts), nbytes + size
    if some:
        yield _given_told(some, images)


def _given_told(values: Mapping[int, Pieces], images: BeforeImages) -> Given:
    """values: by the number of the block."""
    told = OutgoingValues([(one, all_of(one.count)) for one in values.values()])
    numbers = np.array(list(values), U8).tobytes()
    return Given(numbers, told.on_wire(images.names), told.by if any(told.by) else [])


def _tags_told(partition: str, generation: int, rows: Rows) -> Iterator[Tag]:
    """In one operation where all have the same, in more where that would be too large for a
    message."""
    tags = tags_held(rows)
    nbytes = sum([len(v) for values in tags.values() for v in values if isinstance(v, str)])
    if len(rows) > 1 and nbytes > MAX_OP_BYTES:
        each, middle = list(rows), len(rows) + 1 >> 1
        for half in (each[:middle], each[middle:]):
            yield from _tags_told(partition, generation, Rows.of(half))
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


def _lease_told(lease: Lease, left: Sequence[int]) -> Held:
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


def _plan_told(plan: Plan) -> Iterator[Joined]:
    of = plan.lease.stage.name, plan.lease.number, plan.shape
    rows: PlanRows | None = plan.rows
    for one in plan.members.values():
        yield Joined(*of, one.number, one.rank, one.holder, one.claim, rows, one.acked)
        rows = None  # only the first one says it


def _pieces(of: Sequence[Any], many: int) -> Iterator[Sequence[Any]]:
    return (of[at : at + many] for at in range(0, len(of), many))


_HOW: dict[type[Any], Callable[[Store, Any, float], object]] = {
    Begun: _begun,
    Leased: _leased,
    Returned: lambda store, op, now: store.release_holder(op.holder),
    Joined: _joined,
    Put: lambda store, op, now: store.put(op, now=now),
    Finish: lambda store, op, now: store.finish(op, now),
    Declared: lambda store, op, now: store.declare_stage(op.stage, op.fields),
    Ended: lambda store, op, now: store.clear(op.change),
    Settle: lambda store, op, now: store.settle(op),
    Permitted: _permitted,
    Withdraw: lambda store, op, now: store.take_back(op.numbers),
    Pacing: _paced,
    Lost: lambda store, op, now: store.lost(op.owner),
    Relocated: _relocated,
    Restore: lambda store, op, now: store.restore(op),
    Groups: _groups,
    Blocks: _blocks,
    Given: _given,
    Ready: _ready,
    Held: _held,
    Remembered: _remembered,
    Summary: _summary,
}
