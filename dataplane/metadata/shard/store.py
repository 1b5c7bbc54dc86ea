"""One partition: its definition and phase, rows, groups, stages and leases, and the records of its
changes, which a backup replays.

Sans-I/O: time is an argument (seconds, monotonic), and values are only references. Each call
either raises a typed error and changes nothing, or is applied whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from dataplane.errors import (
    InvalidRows,
    LimitExceeded,
    PartitionConflict,
    StageUndefined,
    TagConflict,
    counted,
    did_you_mean,
    mixed_releases,
)
from dataplane.metadata.shard import (
    checkpoint,
    drops,
    finishes,
    plans,
    puts,
    rows_out,
    takes,
)
from dataplane.metadata.shard.blocks import MAX_GROUP_ROWS
from dataplane.metadata.shard.permits import Permit
from dataplane.metadata.shard.stages import Counts
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables import tags as tagging
from dataplane.metadata.tables.bits import rows_of
from dataplane.metadata.tables.incoming import rows_in
from dataplane.metadata.tables.keys import hash_name
from dataplane.metadata.tables.pieces import nbytes_of
from dataplane.metadata.tables.tags import Tags
from dataplane.metadata.tables.where import checked
from dataplane.wire import tables as wire
from dataplane.wire.checkpoint import Restore, Restored
from dataplane.wire.events import EventRecord, Kind
from dataplane.wire.journal import (
    Declared,
    Ended,
    Pacing,
    Permitted,
    Relocated,
    Returned,
    Settle,
)
from dataplane.wire.limits import MAX_NAME_BYTES
from dataplane.wire.messages import (
    Advance,
    Body,
    Close,
    Done,
    Drop,
    Dropped,
    Finish,
    PutDone,
    Reset,
    Seal,
    Tag,
    Withdraw,
)
from dataplane.wire.packed import (
    U4,
    U8,
    Array,
)
from dataplane.wire.tables import (
    Change,
    Definition,
    Name,
    Owner,
    Scalar,
    Where,
)

_DONE = Done()


class Store(State):
    """The metadata of one partition: its tables, and the calls that change them."""

    def __repr__(self) -> str:
        return (
            f"<Store {self.partition!r} generation {self.generation}, {self.phase}: "
            f"{len(self)} rows, {len(self.groups)} groups, {len(self.leases)} leases>"
        )

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.index)

    # Methods that are written in files of their own: functions whose first argument is the store.
    put = puts.put
    take = takes.take
    join = plans.join
    lost = drops.lost

    # rows in

    def close(self, group: Name, n: int, change: Change | None = None) -> int:
        """Set how many rows a group has; some may be yet to come. Return 1 if that closes it."""
        closed = drops.close(self, group, n)
        if closed:
            drops.seal_if_full(self)
        self.tell(Close(self.partition, self.generation, group, n, change))
        return closed

    def tag(
        self,
        rows: wire.Rows,
        tags: dict[str, list[Scalar]],
        expect: Mapping[str, Scalar] | None = None,
        change: Change | None = None,
    ) -> None:
        """Merge tags into rows. Raises TagConflict, and changes nothing, unless all rows have
        `expect`."""
        rows_in(rows)
        found = rows_out.find_rows(self, rows.keys, rows.names)
        count = len(found)
        tagging.check(tags, count, self.tag_names)
        if expect:
            other = [
                block.name(row)
                for block, bits in found.parts
                for row in rows_of(bits & ~(block.tags or Tags(block.count)).expected(expect))
            ]
            if other:
                raise TagConflict(
                    f"{counted(len(other), 'row does', 'rows do')} not have the expected tags "
                    f"{dict(expect)} (for example row {other[0]!r}): read the current tags, "
                    "then decide whether to retry",
                    keys=other[: puts.SHOWN_NAMES],
                    rows=len(other),
                )
        at = 0
        for block, bits in found.parts:
            places = range(at, at + bits.bit_count())
            at = places.stop
            self.set_tags(block, rows_of(bits), tagging.only(tags, places, count))
        self.retag([block for block, _ in found.parts])
        keys = wire.Rows(rows.keys)
        self.tell(Tag(self.partition, self.generation, keys, tags, change=change))

    def seal(self, keep_short: bool = False, change: Change | None = None) -> int:
        """Accept no new rows from now on; new fields are still accepted. Open groups close at
        their current size. If groups have a fixed size, these are incomplete, and are dropped
        unless they are to be kept. Return how many closed. A repetition changes nothing."""
        if self.sealed:
            return 0
        self.tell(Seal(self.partition, self.generation, keep_short, change))
        return drops.seal(self, keep_short)

    # definition and stages

    def check_same(self, definition: Definition) -> None:
        """Raise PartitionConflict unless the partition has this definition."""
        if definition not in (self.declared, self.definition):
            raise PartitionConflict(
                f"partition {self.partition!r} was declared with "
                f"{plans.difference(self.declared, definition)}: drop the partition first, or "
                f"attach to it unchanged with plane.partition({self.partition!r})",
                partition=self.partition,
                declared=msgspec.to_builtins(self.declared),
            )

    def declare_stage(self, name: str, fields: Sequence[str]) -> None:
        """Declare a stage that was not declared with the partition. A repetition is a no-op.

        Raises StageUndefined under free="acked", because rows may be freed already, and
        PartitionConflict for a known stage with other fields.
        """
        known = self.stages.get(name)
        if known is not None:
            if set(known.fields) != set(fields):
                raise PartitionConflict(
                    f"stage {name!r} of partition {self.partition!r} is defined with the "
                    f"fields {known.fields}, but this claim asks for {list(fields)}: "
                    "leave out fields=, or claim for another stage",
                    stage=name,
                    fields=known.fields,
                )
            return
        if self.definition.free == "acked":
            names = ", ".join(map(repr, sorted(self.stages)))
            use = f"use one of its stages ({names}), or " if names else ""
            raise StageUndefined(
                f"partition {self.partition!r} has no stage "
                f"{name!r}{did_you_mean(name, self.stages)}: {use}declare all stages in "
                "plane.partition(stages=…). With free='acked', stages cannot be added later, "
                "because rows that a new stage needs may already be freed",
                stage=name,
            )
        self.check_stage_room(name, fields)
        self.add_stage(name, list(fields))
        self.tell(Declared(name, list(fields)))

    def reset(self, stage: str, change: Change | None = None) -> int:
        """Make the rows that a stage acked claimable again. Leased rows stay leased."""
        rows = self.stage(stage).reset(list(self.blocks.values()), list(self.groups.values()))
        self.tell(Reset(self.partition, self.generation, stage, change))
        return rows

    def finish(self, asked: Finish, now: float = 0.0) -> dict[str, int]:
        """Ack, release, drop or keep the rows of a lease, with added values, as one step.

        On a release the added values are progress, which only the stage itself gets, with the rows,
        until it acks them. Return, per field, how many rows kept a value that they had already.

        index: positions in the lease as it was granted; None for all unfinished rows. Raises
        LeaseExpired for a lease that has ended, and InvalidRows for a row that was finished
        before. A retry of a call that was already applied raises LeaseExpired with `repeated`,
        for a limited time from `now`.
        """
        lease = self.leases.get(asked.lease)
        if lease is None and (member := self.leases.member(asked.lease)) is not None:
            kept = plans.finish(self, member, asked, now)
        else:
            key = finishes.retry_key(asked, lease)
            finishes.reject_retry(self, asked, key)
            kept = finishes.finish(self, lease or finishes.lease_of(self, asked.lease), asked)
            if key is not None:
                self.leases.retry_keys.add(key, now)
        self.remember(asked.change, PutDone(kept=kept) if kept else puts.PUT)
        self.tell(asked)
        return kept

    def is_leased(self, lease_id: int) -> bool:
        """Whether this lease, or the plan of this member, has not ended."""
        leases = self.leases
        return leases.get(lease_id) is not None or leases.member(lease_id) is not None

    def release_holder(self, holder: int) -> int:
        """End the leases and permits of a holder that is gone. Its rows are ready again, ahead of
        rows that were never leased. Return the number of these rows."""
        if holder not in self.lessees:
            return 0
        self.permits.take_back(self.permits.of(holder))
        rows = sum([plans.end(self, one) for one in self.leases.members_of(holder)])
        rows += sum([finishes.give_back(self, one) for one in self.leases.of(holder)])
        self.tell(Returned(holder))
        return rows

    # how far producers run ahead

    def admit(self, number: int, holder: int, count: int, max_lag: int, per_version: int) -> bool:
        """Return a permit to open this many groups, if they may be started now."""
        permits = self.permits
        permits.check(self, count, max_lag, per_version)
        if not permits.fits(self, count, (max_lag + 1) * per_version):
            return False
        if permits.limits is None:
            self.tell(Pacing(permits.version, max_lag, per_version))
        permits.begin(self)
        permits.limits = max_lag, per_version
        permits.enter(Permit(number, holder, permits.version, count, count))
        self.tell(Permitted(number, holder, count, permits.version))
        return True

    def take_back(self, numbers: list[int]) -> None:
        """End these permits. Unknown ones ended before."""
        back = self.permits.take_back(numbers)
        if back:
            self.tell(Withdraw(self.partition, self.generation, back))

    def advance(self, version: int, change: Change | None = None) -> None:
        """Set the trainer's version. Groups that it has finished free their slots. A no-op for
        the same version; raises InvalidCall for an older one."""
        self.permits.advance(version, self)
        self.tell(Advance(self.partition, self.generation, version, change))
        self.happened(EventRecord(Kind.ADVANCE, version=version))

    # rows out

    def drop(
        self,
        rows: wire.Rows | None = None,
        groups: list[Name] | None = None,
        where: Where | None = None,
        change: Change | None = None,
    ) -> tuple[int, int]:
        """Drop rows by key, by group or by filter, including leased ones. Return (rows, bytes)."""
        if (given := sum(one is not None for one in (rows, groups, where))) != 1:
            raise InvalidRows(
                f"drop() takes one of rows, groups and a filter, but got {given or 'none'}: "
                "pass exactly one"
            )
        if groups is not None:
            dropped = drops.drop_groups(self, [hash_name(name) for name in groups])
        else:
            if rows is not None:  # unknown keys leave tombstones too
                self.tombstones.add(key for key in rows_in(rows).keys if key not in self.index)
                found = self.find(rows.keys)
            else:
                found = self.matching(checked(where))
            self.happened_to(found.parts, EventRecord(Kind.DROP))
            dropped = len(found), self.remove(found.parts, dropped=True)
        keys = None if rows is None else wire.Rows(rows.keys)
        self.tell(Drop(self.partition, self.generation, keys, groups, where, change))
        return dropped

    def clear(self, change: Change | None = None) -> tuple[int, int]:
        """Remove every row, because the partition was dropped. Return (rows, bytes)."""
        nbytes = nbytes_of((one.values, one.live) for one in self.blocks.values())
        dropped = len(self), nbytes
        self.remove(self.rows.parts)
        self.tell(Ended(change, *dropped))
        self.happened(EventRecord(Kind.DROP, rows=dropped[0], nbytes=dropped[1]))
        return dropped

    def relocate(self, old: Owner, chunks: Array, new: Owner, new_chunks: Array) -> Array:
        """Move chunks: chunks[i] of `old` becomes new_chunks[i] of `new`.

        Return u4 per chunk, 1 for a chunk that rows here use. The references to the old chunks
        are collected as freed.
        """
        ids, there = (one.tolist() for one in (chunks, new_chunks))
        if len({*ids}) != len(ids) or len({*there}) != len(ids):
            raise mixed_releases(
                f"cannot move {len(ids)} chunks to {len(there)} new ones: expected one distinct "
                "new chunk per old chunk"
            )
        moving = [self.chunk(old, number) for number in ids]
        for chunk, number in zip(moving, there, strict=True):
            if chunk is not None and number < 1:
                raise mixed_releases(f"invalid chunk number {number}: expected 1 or more")
            if chunk is not None and self.chunk(new, number) is not None:
                raise mixed_releases(
                    f"received chunk {number} of peer {new.peer}, but the partition already has a "
                    "chunk with this number"
                )
        for chunk, number in zip(moving, there, strict=True):
            if chunk is not None:
                self.rename(chunk, new, number)
        if self.emit is not None:
            self.emit(Relocated(old, chunks.tobytes(), new, new_chunks.tobytes()))
        return np.array([chunk is not None for chunk in moving], U4)

    def holdings(self) -> list[tuple[Owner, Array, Array]]:
        """Return every current reference: per owner chunk numbers and a u4 count for each."""
        return [(owner, *_counted([*mine])) for owner, mine in self._chunks.items()]

    def named(self, owner: Owner) -> tuple[Array, Array]:
        """Return the chunks of an owner that rows use: their numbers and sizes, u8 each."""
        chunks = self.chunks_at(owner)
        numbers = np.array([chunk.number for chunk in chunks], U8)
        nbytes = np.array([chunk.nbytes for chunk in chunks], U8)
        return numbers, nbytes

    def freed(self) -> list[tuple[Owner, Array, Array]]:
        """Drain the released references: per owner chunk numbers and a u4 count for each."""
        released, self.released = self.released, {}
        return [(owner, *_counted(numbers)) for owner, numbers in released.items()]

    def restore(self, op: Restore) -> None:
        """Store rows and groups of a checkpoint, even in a sealed partition. Raises
        PartitionConflict if one of them exists already."""
        checkpoint.restore(self, op)
        drops.seal_if_full(self)
        self.tell(op)

    def restored(self) -> None:
        """Note that the restore is complete. A repetition changes nothing."""
        if self.restorer:
            self.restorer = 0
            self.tell(Restored(self.partition, self.generation))

    def carry_out(self, op: Body) -> Body:
        """Apply one of `CHANGES`. Its reply is remembered."""
        outcome = CHANGES[type(op)](self, op)
        answer = Dropped(*outcome) if isinstance(op, Drop) else _DONE
        self.remember(op.change, answer)  # type: ignore[attr-defined]
        return answer

    def settle(self, op: Settle) -> bool:
        """Refuse a change from now on, unless it was applied. Return whether it was."""
        carried_out = self.answers.settle(op.change)
        self.tell(op)
        return carried_out

    # queries

    @property
    def phase(self) -> Literal["open", "sealed"]:
        return "sealed" if self.sealed else "open"

    def counts(self, stage: str, unit: str = "rows", where: Where | None = None) -> Counts:
        """Exact counts of a stage; with a filter, only of what matches now or is not ready yet."""
        return self.stage(stage).units(unit).count(where)

    def dirty(self) -> set[str]:
        """Drain the stages whose counts changed, or cannot grow any more."""
        return {name for name, stage in self.stages.items() if stage.drain_changed()}

    @property
    def lessees(self) -> set[int]:
        """Sessions that have leases or permits here."""
        return self.permits.holders | self.leases.holders


CHANGES: dict[type[Body], Callable[[Store, Any], Any]] = {
    Tag: lambda store, op: store.tag(op.rows, op.tags, op.expect, op.change),
    Drop: lambda store, op: store.drop(op.rows, op.groups, op.where, op.change),
    Close: lambda store, op: store.close(op.group, op.n, op.change),
    Seal: lambda store, op: store.seal(op.keep_short, op.change),
    Reset: lambda store, op: store.reset(op.stage, op.change),
    Advance: lambda store, op: store.advance(op.version, op.change),
}
"""Requests of clients that are also log records, with the store call of each."""


def _counted(numbers: list[int]) -> tuple[Array, Array]:
    """Return the distinct chunk numbers among these, and how often each occurs (u4)."""
    if len(set(numbers)) == len(numbers):
        return np.array(numbers, U8), np.ones(len(numbers), U4)
    many = Counter(numbers)
    return np.array([*many], U8), np.array([*many.values()], U4)


def check_definition(partition: str, definition: Definition) -> None:
    """Raise LimitExceeded for an invalid definition."""
    if not 0 < len(partition.encode()) <= MAX_NAME_BYTES:
        raise LimitExceeded(
            f"partition name {partition[:40]!r} is {len(partition.encode())} bytes long: "
            f"choose a name of 1 to {MAX_NAME_BYTES} bytes",
            limit=MAX_NAME_BYTES,
        )
    size = definition.group_size
    if size is not None and not 0 < size <= MAX_GROUP_ROWS:
        raise LimitExceeded(
            f"group_size={size} is invalid for partition {partition!r}: pass a value from 1 to "
            f"{MAX_GROUP_ROWS}",
            limit=MAX_GROUP_ROWS,
        )
