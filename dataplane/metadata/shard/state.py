"""The rows and groups of one store, kept consistent with stages and leases.

Every operation of the store changes them through these methods, so readiness, group states and
counts follow each change at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import count
from operator import neg
from typing import NamedTuple

import msgspec

from dataplane.errors import (
    InvalidRows,
    LimitExceeded,
    StageUndefined,
    did_you_mean,
)
from dataplane.metadata.shard.before_images import BeforeImages
from dataplane.metadata.shard.blocks import (
    LEASED,
    PENDING,
    READY,
    SPLIT,
    Block,
    Group,
    KeyIndex,
    Rows,
    Standing,
    packed,
    progress_field,
    progress_in,
)
from dataplane.metadata.shard.leases import Lease, Leases, Part
from dataplane.metadata.shard.permits import Permits
from dataplane.metadata.shard.stages import Stage
from dataplane.metadata.tables.answers import Answers
from dataplane.metadata.tables.bits import all_of, bytes_of, rows_of
from dataplane.metadata.tables.incoming import ValuesIn, values_in
from dataplane.metadata.tables.keys import KEY_BYTES, PROGRESS, Keys, is_minted, records_of
from dataplane.metadata.tables.pieces import Chunk, Pieces, nbytes_of, pieces_of
from dataplane.metadata.tables.remembered import LostNames, Producers, Tombstones, of_group
from dataplane.metadata.tables.tags import Tags
from dataplane.metadata.tables.where import test as holding
from dataplane.wire import tables as wire
from dataplane.wire.events import EventRecord, Kind, Reason
from dataplane.wire.journal import Leased, LogRecord, Unit
from dataplane.wire.limits import MAX_CHUNKS_PER_MESSAGE, MAX_FIELDS, MAX_NAME_BYTES, MAX_STAGES
from dataplane.wire.tables import Body, Change, Definition, Name, Owner, Scalar, Where

_NO_VALUES = pieces_of(0)

Note = Callable[[EventRecord, float | None], None]
"""Takes a record and the monotonic time when its subject began; None if it took no time."""


class Write(NamedTuple):
    """A write: its fields, the client, and the stage that it is for ("": a put)."""

    fields: Sequence[str] = ()
    worker: int = 0
    stage: str = ""


NO_WRITE = Write()


def _became_ready(stage: Stage, by: Write) -> EventRecord:
    for field in stage.fields:
        if field in by.fields:
            break
    else:
        field = ""
    return EventRecord(Kind.READY, stage=stage.name, field=field, worker=by.worker, by=by.stage)


class State:
    """One partition. `definition`: with stages that were declared later. fields: those that rows
    have had (True), or that stages wait for.

    emit: receives the record of each change, at once, after it succeeded; it must not raise.
    None: nothing is recorded. A record contains what was decided, but not what follows from
    records. note: receives a record of each event, for people; it must not raise. None at a
    backup. numbers: for leases; all stores of a peer have the same iterator.
    """

    def __init__(
        self,
        partition: str,
        definition: Definition,
        generation: int,
        numbers: Iterator[int] | None = None,
        emit: Callable[[LogRecord], None] | None = None,
    ) -> None:
        self.partition = partition
        self.declared = self.definition = definition
        self.generation = generation
        self.numbers = numbers or count(1)
        self.emit = emit
        self.note: Note | None = None
        self.index = KeyIndex()
        self.blocks: dict[int, Block] = {}
        """by number, in the order in which they were put"""
        self.groups: dict[bytes, Group] = {}
        self.fields: dict[str, bool] = {}
        self.progress: set[str] = set()
        """names of progress fields; those of removed rows too, while the limit allows it"""
        self._chunks: dict[Owner, dict[int, Chunk]] = {}
        """chunks in arenas that rows use; the shard has one reference for each"""
        self._dead_bytes: dict[Owner, int] = {}
        """bytes of these chunks whose rows no longer use them"""
        self.tag_names: set[str] = set()
        self.stages: dict[str, Stage] = {}
        self.leases = Leases()
        self.answers = Answers()
        self.permits = Permits()
        self.tombstones = Tombstones()
        self.sealed = False
        self.restorer = 0
        """the session whose restore of the partition is not complete; 0: none"""
        self.short_groups = 0
        """groups that the seal dropped, because they had fewer rows than groups have"""
        self.closed_groups = 0
        self.losses = LostNames()
        self.producers = Producers()
        self.released: dict[Owner, list[int]] = {}
        """released references that were not yet reported to their owners"""
        self.peers: set[str] = set()
        """peers that own values, or have read some"""
        self.inline_bytes = 0
        """bytes of inline values"""
        self.used_bytes = 0
        """memory that the rows take, without inline values"""
        self.last_number = 0
        """the last number of a block or group; every copy has the same one"""
        self.images: BeforeImages | None = None
        """of a running snapshot"""
        for name, fields in definition.stages.items():
            self.check_stage_room(name, fields)
            self.add_stage(name, fields)

    def tell(self, op: LogRecord) -> None:
        """Emit the record of a change."""
        if self.emit is not None:
            self.emit(op)

    def happened(self, record: EventRecord, since: float | None = None) -> None:
        """Note an event of this partition. record: without partition, generation and time."""
        if self.note is not None:
            record.partition, record.generation = self.partition, self.generation
            self.note(record, since)

    def happened_to(
        self, parts: Sequence[tuple[Block, int]], record: EventRecord, since: float | None = None
    ) -> None:
        """Note one event of rows for each of their groups, and one for rows without a group."""
        if self.note is None:
            return
        record.partition, record.generation = self.partition, self.generation
        if len(parts) == 1:  # most calls, so this path must stay cheap
            block, bits = parts[0]
            record.group = self.groups[block.group].name if block.group else ""
            record.rows = bits.bit_count()
            self.note(record, since)
            return
        rows: dict[bytes, int] = {}
        for block, bits in parts:
            rows[block.group] = rows.get(block.group, 0) + bits.bit_count()
        for key, many in rows.items():
            of = copy(record)
            of.group, of.rows = self.groups[key].name if key else "", many
            self.note(of, since)

    def knows(self, change: Change | None) -> bool:
        """Return whether the change was applied or settled."""
        return change is not None and change in self.answers

    def remember(self, change: Change | None, answer: Body) -> None:
        """Remember the reply to a change that was applied, for its retries. None: the change
        cannot be retried."""
        if change is not None:
            self.answers.remember(change, answer)

    @property
    def nbytes(self) -> int:
        return self.used_bytes + self.tombstones.nbytes

    # snapshots

    def keep_images(self) -> BeforeImages:
        """Start to save images for a snapshot, until `drop_images`. A store has one snapshot at a
        time: a new one replaces the previous one."""
        self.images = BeforeImages(self.last_number)
        for stage in self.stages.values():
            stage.keep_images(self.images)
        self.tombstones.on_change = self.images.keep_tombstones
        return self.images

    def drop_images(self, images: BeforeImages) -> None:
        """End a snapshot."""
        if self.images is images:
            self.images = self.tombstones.on_change = None
            for stage in self.stages.values():
                stage.keep_images(None)

    # stages

    def stage(self, name: str) -> Stage:
        try:
            return self.stages[name]
        except KeyError:
            known = ", ".join(map(repr, sorted(self.stages)))
            use = f"use one of its stages ({known}), " if known else ""
            raise StageUndefined(
                f"partition {self.partition!r} has no stage "
                f"{name!r}{did_you_mean(name, self.stages)}: {use}declare the new stage in "
                "plane.partition(stages=…), or claim with fields=[…]",
                stage=name,
            ) from None

    def check_stage_room(self, name: str, fields: Sequence[str]) -> None:
        """Raise LimitExceeded unless the partition may have this stage too."""
        if len(self.stages) >= MAX_STAGES:
            raise LimitExceeded(
                f"cannot add stage {name[:40]!r}, because the partition already has {MAX_STAGES} "
                "stages, the maximum: use fewer stages",
                limit=MAX_STAGES,
            )
        if not 0 < len(name) <= MAX_NAME_BYTES:
            raise LimitExceeded(
                f"the stage name {name[:40]!r} has {len(name)} characters: choose a name of 1 to "
                f"{MAX_NAME_BYTES} characters",
                limit=MAX_NAME_BYTES,
            )
        self.check_fields(fields)

    def add_stage(self, name: str, fields: list[str]) -> None:
        stages = {**self.definition.stages, name: fields}
        self.definition = msgspec.structs.replace(self.definition, stages=stages)
        stage = Stage(name, fields, len(self.stages), self.test, self.test_group)
        self.stages[name] = stage
        for field in fields:
            self.fields.setdefault(field, False)
        self.permits.look_again()
        stage.rows.add(len(self.index))
        stage.groups.add(len(self.groups))
        for block in self.blocks.values():
            block.standings = (*block.standings, Standing())
            stage.complete(block)
        for group in self.groups.values():
            group.states += bytes([PENDING])
            stage.settle(group)

    # fields

    def check_fields(self, names: Sequence[str], stage: str | None = None) -> None:
        """Raise unless the partition may have these fields too. stage: the stage that adds
        progress of these fields."""
        if stage is None and all(map(self.fields.get, names)):
            return
        if wrong := next((name for name in names if PROGRESS in name), None):
            raise InvalidRows(
                f"field name {wrong[:40]!r} contains {PROGRESS!r}, which is reserved for "
                "values that release(values=…) stores: use another name"
            )
        if stage is None:
            new = [name for name in names if name not in self.fields]
        else:
            new = [name for name in names if progress_field(stage, name) not in self.progress]
        if new and len(new) + len(self.fields) + len(self.progress) > MAX_FIELDS:
            every = [field for block in self.blocks.values() for field in block.values.fields]
            self.progress = {field for field in every if PROGRESS in field}
        if new and len(new) + len(self.fields) + len(self.progress) > MAX_FIELDS:
            raise LimitExceeded(
                f"cannot add {'field' if len(new) == 1 else 'fields'} "
                f"{', '.join(map(repr, new)):.200}, because a partition can "
                f"have at most {MAX_FIELDS} fields, including those that release(values=…) "
                "stores: use fewer fields",
                limit=MAX_FIELDS,
            )

    # values

    def arrived(
        self, values: wire.Values, rows: int, most_chunks: int = MAX_CHUNKS_PER_MESSAGE
    ) -> ValuesIn:
        """Check the values of a message about this many rows, and change nothing."""
        return values_in(values, rows, self._chunks, most_chunks)

    def hold(self, arrived: ValuesIn) -> None:
        """Hold the chunks of a message that is being applied, until `settled`, so that none is
        freed while it moves from one block to another."""
        if arrived.known:
            self._count_rows(arrived.known, (1,) * len(arrived.known))

    def settled(self, arrived: ValuesIn) -> None:
        """End the application of a message: its chunks are used, or released."""
        for chunk in arrived.pieces.chunks + arrived.unused:
            if not chunk.live_rows and chunk.number:  # no row takes it
                self._release(chunk)
        if arrived.known:
            for chunk in arrived.known:  # the shard had a reference, and needs no other
                self._release(chunk)
            self._count_rows(arrived.known, (-1,) * len(arrived.known))

    def _count_values(self, before: Pieces, after: Pieces) -> None:
        """Count the change of a block's values. Release chunks that no row uses any more."""
        old, new = before.chunks, after.chunks
        had, has = before.shape.used, after.shape.used
        many = len(old)
        if new[:many] == old and has[:many] == had:  # most often, values are added
            self._count_rows(new[many:], has[many:])
            return
        more = dict(zip(new, has, strict=True))
        for chunk, rows in zip(old, had, strict=True):
            more[chunk] = more.get(chunk, 0) - rows
        self._count_rows(more, more.values())

    def _count_rows(self, chunks: Iterable[Chunk], more: Iterable[int]) -> None:
        """Add `more` to the rows that have a value in each chunk. The first row makes the chunk
        known. When the last row goes, the chunk is released."""
        for chunk, many in zip(chunks, more, strict=True):
            was = chunk.live_rows
            now = was + many
            if not was:
                chunk.live_rows = now
                if chunk.inline:
                    self.inline_bytes += len(chunk.inline)
                if chunk.number:
                    self._name(chunk)
            elif not now:
                if chunk.inline:
                    self.inline_bytes -= len(chunk.inline)
                if chunk.number:
                    self._unname(chunk)
                    self._release(chunk)
                chunk.live_rows = 0
            else:
                dead, chunk.live_rows = chunk.dead_bytes, now
                if chunk.number:
                    self._add_dead(chunk.owner, chunk.dead_bytes - dead)

    def rename(self, chunk: Chunk, owner: Owner, number: int) -> None:
        """Give a chunk another owner and number. The old reference is collected as freed."""
        if self.images is not None:
            self.images.keep_chunk(chunk)
        self._unname(chunk)
        self._release(chunk)
        chunk.owner, chunk.number = owner, number
        self._name(chunk)

    def _release(self, chunk: Chunk) -> None:
        """Collect a released reference."""
        self.released.setdefault(chunk.owner, []).append(chunk.number)

    def _name(self, chunk: Chunk) -> None:
        mine = self._chunks.get(chunk.owner)
        if mine is None:
            mine = self._chunks[chunk.owner] = {}
            self.peers.add(chunk.owner.peer)
        mine[chunk.number] = chunk
        if chunk.live_rows < chunk.rows:
            self._add_dead(chunk.owner, chunk.dead_bytes)

    def _unname(self, chunk: Chunk) -> None:
        mine = self._chunks[chunk.owner]
        del mine[chunk.number]
        if chunk.live_rows < chunk.rows:
            self._add_dead(chunk.owner, -chunk.dead_bytes)
        if not mine:  # an emptied dict keeps its size
            del self._chunks[chunk.owner]
            self._dead_bytes.pop(chunk.owner, None)

    def _add_dead(self, owner: Owner, nbytes: int) -> None:
        if nbytes:
            self._dead_bytes[owner] = self.dead_bytes(owner) + nbytes

    # lookups

    @property
    def rows(self) -> Rows:
        """All rows."""
        return Rows([(block, block.live) for block in self.blocks.values()])

    def find(self, raw: bytes) -> Rows:
        """The existing rows of these KEY records, in their order."""
        parts: list[tuple[Block, int]] = []
        at, index = 0, self.index
        while at < len(raw):
            key = raw[at : at + KEY_BYTES]
            block = index.get(key)
            at += KEY_BYTES
            if block is None:
                continue
            row = block.row(key)
            bits, many = 1 << row, block.count - row
            if many > 1 and raw.startswith(block.keys[row + 1], at):
                rest = records_of(block.keys, row + 1, block.count)
                if block.live >> row == all_of(many) and raw.startswith(rest, at):
                    bits = block.live >> row << row  # all that follows it in the block
                    at += len(rest)
            if parts and parts[-1][0] is block and parts[-1][1] < bits & -bits:
                bits |= parts.pop()[1]
            parts.append((block, bits))
        return Rows(parts)

    def matching(self, where: Where) -> Rows:
        """All rows that match a filter."""
        found = [(b, self.test(where, b, b.live)) for b in self.blocks.values()]
        return Rows([one for one in found if one[1]])

    def groups_of(self, parts: Iterable[tuple[Block, int]]) -> list[Group]:
        """The distinct groups of these rows, in order of occurrence."""
        keys = dict.fromkeys([block.group for block, _ in parts])
        return [self.groups[key] for key in keys if key]

    def chunk(self, owner: Owner, number: int) -> Chunk | None:
        """Return the chunk with this owner and number, or None if no row uses it."""
        mine = self._chunks.get(owner)
        return None if mine is None else mine.get(number)

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks in arenas that rows use."""
        return [chunk for mine in self._chunks.values() for chunk in mine.values()]

    def chunks_at(self, owner: Owner) -> list[Chunk]:
        """The chunks of an owner."""
        return list(self._chunks.get(owner, {}).values())

    def at(self, owner: Owner) -> Rows:
        """The rows with a value at this owner. A stage's progress there does not count, because
        it did not make them ready either."""
        found = []
        for block, fields in self._in_chunks(self.chunks_at(owner)):
            bits = 0
            for field, rows in fields.items():
                if PROGRESS not in field:
                    bits |= rows
            if bits:
                found.append((block, bits))
        return Rows(found)

    def lose_progress(self, owner: Owner) -> None:
        """Remove progress values at a lost peer."""
        for block, fields in self._in_chunks(self.chunks_at(owner)):
            for field, rows in fields.items():
                if PROGRESS in field:
                    self.change(block, block.values.without(rows, [field]))

    def _in_chunks(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Block, dict[str, int]]]:
        """Yield each block whose rows use some of these chunks, with the rows, by field."""
        if chunks:
            for block in list(self.blocks.values()):
                if fields := block.values.inside(chunks):
                    yield block, fields

    def dead_bytes(self, owner: Owner) -> int:
        """The approximate bytes of chunks at this owner that belong to rows which no longer use
        them."""
        return self._dead_bytes.get(owner, 0)

    # adding rows

    def _next(self) -> int:
        self.last_number += 1
        return self.last_number

    def add_group(self, key: bytes, name: Name | None, expected: int, number: int = 0) -> Group:
        """Add an open group. number: its number at the primary; 0 if it is new everywhere."""
        group = Group(
            number or self._next(),
            key,
            None if name is None or is_minted(name) else name,
            expected,
            bytes(len(self.stages)),
        )
        self.groups[key] = group
        self.used_bytes += group.nbytes_each
        for stage in self.stages.values():
            stage.groups.add(1)
        self.permits.opened(group)
        return group

    def add_block(
        self,
        keys: Keys,
        names: Sequence[Name] | None,
        values: Pieces,
        tags: Mapping[str, Sequence[Scalar]],
        group: Group | None,
        number: int = 0,
        live: int = 0,
    ) -> Block:
        """Add rows; call `written` afterwards. number, live: the block's number at the primary,
        and which of its rows exist; 0 if it is new everywhere."""
        many, packed_names = len(keys), packed(names)
        block = Block(
            number or self._next(),
            self.index.kept(keys, packed_names is None),
            many,
            live or all_of(many),
            b"" if group is None else group.key,
            values,
            tuple([Standing() for _ in self.stages]),
            packed_names,
        )
        if tags:
            block.tags = Tags(many)
            block.tags.set(range(many), tags)
            self.tag_names |= tags.keys()
        self.blocks[block.number] = block
        many = block.live.bit_count()
        self.index.add(block)
        self.used_bytes += block.nbytes
        self._note_fields(values.fields)
        self._count_rows(values.chunks, values.shape.used)
        for stage in self.stages.values():
            stage.rows.add(many)
        if group is not None:
            group.blocks = (*group.blocks, block)
            group.live += many
            group.seen += many
            for stage in self.stages.values():
                stage.regrouped(group)
        return block

    def merge(self, block: Block, values: Pieces, keep: bool) -> dict[str, int]:
        """Merge values into existing rows. Return, per field, how many rows kept their value
        (`keep`). Call `written` afterwards."""
        found, kept = block.values.overlaid(values, keep)
        self._note_fields(values.fields)
        self.change(block, found)
        return kept

    def _note_fields(self, fields: Sequence[str]) -> None:
        if all(map(self.fields.get, fields)):
            return
        for field in fields:
            if PROGRESS in field:
                self.progress.add(field)
            else:
                self.fields[field] = True

    def set_tags(
        self, block: Block, rows: Sequence[int], tags: Mapping[str, Sequence[Scalar]]
    ) -> None:
        """Set tags of rows; call `retag` afterwards."""
        if self.images is not None:
            self.images.keep_block(block)
        before = 0 if block.tags is None else block.tags.nbytes
        block.tags = Tags(block.count) if block.tags is None else block.tags.copy()
        block.tags.set(rows, tags)
        self.tag_names |= tags.keys()
        self.used_bytes += block.tags.nbytes - before

    def change(self, block: Block, values: Pieces) -> None:
        """Replace the values of a block."""
        if self.images is not None:
            self.images.keep_block(block)
        self.used_bytes += values.nbytes - block.values.nbytes
        self._count_values(block.values, values)
        block.values = values

    def end_progress(
        self, block: Block, stage: str, bits: int, fields: Iterable[str] | None = None
    ) -> None:
        """Remove a stage's progress of these rows: of these fields, or of all (None)."""
        mine = progress_in(block.values.fields, stage)
        gone = [field for field, name in mine.items() if fields is None or name in fields]
        if gone:
            self.change(block, block.values.without(bits, gone))

    def written(
        self, blocks: Sequence[Block], groups: Iterable[Group], by: Write = NO_WRITE
    ) -> int:
        """Update readiness after rows of these groups were written. Return how many closed
        groups count as made. The start version of an open group depends on what was leased and
        acked of it, and does not change."""
        ready = []
        for one in self.stages.values():
            if rows := [(block, bits) for block in blocks if (bits := one.complete(block))]:
                ready.append(one)
                if self.note is not None:
                    self.happened_to(rows, _became_ready(one, by))
        made = 0
        for group in groups:
            if group.is_full:
                made += self.close_group(group)
            elif group.closed:
                for stage in ready:
                    stage.settle(group)
        return made

    def close_group(self, group: Group) -> bool:
        """Close a group at its current size. Return whether it counts as made, because it was
        not cancelled."""
        if self.images is not None:
            self.images.keep_group(group)
        group.expected, group.closed = group.seen, True
        for stage in self.stages.values():
            stage.settle(group)
        made = not group.all_dropped
        self.closed_groups += made
        if group.is_spent:
            self.remove_groups([group], ended=True)
        return made

    def retag(self, blocks: Sequence[Block]) -> None:
        """Update queues after the tags of rows changed."""
        groups = self.groups_of([(block, 0) for block in blocks])
        for stage in self.stages.values():
            stage.retest(blocks, groups)

    # removing rows

    def free_acked(self, parts: Sequence[tuple[Block, int]]) -> None:
        """Under free="acked", free the given rows that every declared stage has acked."""
        if self.definition.free != "acked" or not self.definition.stages:
            return
        done = []
        for block, bits in parts:
            for standing in block.standings:
                bits &= standing.acked
            if bits:
                done.append((block, bits))
        if done:
            self.remove(done, freed=True)

    def remove(
        self, parts: Sequence[tuple[Block, int]], dropped: bool = False, freed: bool = False
    ) -> int:
        """Remove distinct rows. Remember dropped ones, and freed ones with names from the user.
        Return the approximate bytes of dropped values."""
        by_block: dict[int, int] = {}
        for block, bits in parts:
            by_block[block.number] = by_block.get(block.number, 0) | bits
        groups: dict[bytes, Group] = {}
        buried: list[bytes] = []
        values = [(self.blocks[n].values, bits) for n, bits in by_block.items()] if dropped else []
        for number, bits in by_block.items():
            block = self.blocks[number]
            if dropped:
                buried += [block.keys[row] for row in rows_of(bits)]
            elif freed and (names := block.names) is not None:
                buried += [block.keys[row] for row in rows_of(bits) if not is_minted(names[row])]
            self._take_out(block, bits)
            if block.group:
                group = groups[block.group] = self.groups[block.group]
                if self.images is not None:
                    self.images.keep_group(group)
                many = bits.bit_count()
                group.live -= many
                if dropped:
                    group.dropped += many
                if not block.live:
                    group.blocks = tuple([one for one in group.blocks if one is not block])
        if buried:
            self.tombstones.add(buried, freed=not dropped)
        if groups:
            self._leave(list(groups.values()), dropped, freed)
        return nbytes_of(values)

    def _take_out(self, block: Block, bits: int) -> None:
        if self.images is not None:
            self.images.keep_block(block)
        for stage in self.stages.values():
            stage.forget(block, bits)
        self.index.remove(block, bits)
        if bits == block.live:
            self.used_bytes -= block.nbytes
            del self.blocks[block.number]
            self.blocks = self.blocks or {}  # an emptied dict keeps its size
            self._count_rows(block.values.chunks, map(neg, block.values.shape.used))
            block.values, block.live = _NO_VALUES, 0
            return
        self.change(block, block.values.without(bits))
        block.live ^= bits

    def remove_groups(self, groups: Sequence[Group], ended: bool = False) -> None:
        """Remove groups without rows. ended: groups with a row that was not dropped count as
        finished, and names from the user are remembered."""
        if ended:
            names = [one.key for one in groups if one.given is not None and not one.all_dropped]
            self.tombstones.add(map(of_group, names), freed=True)
        for group in groups:
            self.permits.removed(group, ended and not group.all_dropped)
            for stage in self.stages.values():
                stage.remove_group(group)
            del self.groups[group.key]
            self.used_bytes -= group.nbytes_each
        self.groups = self.groups or {}

    def _leave(self, groups: Sequence[Group], dropped: bool, freed: bool) -> None:
        if dropped:
            self.closed_groups -= sum(
                [one.closed and not one.live and one.all_dropped for one in groups]
            )
        self.remove_groups([one for one in groups if one.is_spent], ended=freed or dropped)
        for group in groups:
            if not group.is_spent:
                for stage in self.stages.values():
                    stage.settle(group)
                    stage.retest((), [group])

    # leases

    def lease(
        self,
        stage: Stage,
        unit: Unit,
        rows: Rows,
        holder: int,
        now: float,
        claim: int = 0,
        number: int = 0,
    ) -> Lease:
        """Record a lease of rows that were just taken. The record contains the rows, not how
        they were found. number: its number at the primary; 0 if it is new everywhere."""
        left = [bits for _, bits in rows.parts]
        number = number or next(self.numbers)
        lease = Lease(number, stage, rows, left, holder, now, claim)
        self.leases.add(lease)
        stage.claimed_at = now
        begun = EventRecord(Kind.LEASE_BEGIN, stage=stage.name, worker=holder, lease=lease.number)
        self.happened_to(rows.parts, begun)
        if self.emit is not None:
            parts = [(block.number, bytes_of(bits)) for block, bits in rows.parts]
            self.emit(Leased(stage.name, unit, number, parts, holder, claim))
        return lease

    def take_rows(self, stage: Stage, parts: Sequence[tuple[Block, int]]) -> Rows:
        """Lease ready rows singly."""
        for block, bits in parts:
            stage.move(block, bits, READY, LEASED)
        for group in self.groups_of(parts):
            stage.move_group(group, SPLIT)
        return Rows(parts)

    def left(
        self,
        lease: Lease,
        parts: Sequence[tuple[Block, int]],
        reason: Reason,
        client_s: float = 0.0,
    ) -> None:
        """Note that rows leave a lease."""
        ended = EventRecord(
            Kind.LEASE_END,
            reason=reason,
            stage=lease.stage.name,
            worker=lease.holder,
            lease=lease.number,
            client_s=client_s,
        )
        if parts:
            self.happened_to(parts, ended, lease.started)
        else:  # others dropped them
            self.happened(ended, lease.started)

    def requeue(self, lease: Lease, parts: Sequence[Part] | None = None) -> int:
        """Make rows of a lease ready again, ahead of rows that were never leased. Return how many
        still exist."""
        if parts is None:
            back = list(lease.held.parts)
        else:
            back = [(one.block, bits) for one in parts if (bits := one.bits & one.block.live)]
        for block, bits in back:
            lease.stage.move(block, bits, LEASED, READY, returned=True)
        for group in self.groups_of(back):
            lease.stage.settle(group, returned=True)
        return sum([bits.bit_count() for _, bits in back])

    # filters

    @staticmethod
    def test(where: Where, block: Block, bits: int) -> int:
        tags = Tags(block.count) if block.tags is None else block.tags
        return bits & holding(where, tags)

    def test_group(self, where: Where, group: Group, bits: int) -> int:
        """Return `bits` if the filter holds for all rows of the group, else 0."""
        if not group.live:
            return 0
        holds = all(self.test(where, b, b.live) == b.live for b in group.blocks)
        return bits if holds else 0
