"""A store that tells what it does, so that a backup can do the same.

Each call that changed something hands one operation to `emit`, after it has succeeded; a call that
raised hands none. `apply` carries operations out on a replica, or on a store that takes rows over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from dataplane.errors import DataplaneError, ProtocolError
from dataplane.metadata.columns import Array
from dataplane.metadata.credit import PullCredit
from dataplane.metadata.drops import Lost as LostRows
from dataplane.metadata.dump import dump
from dataplane.metadata.finishes import FinishOutcome
from dataplane.metadata.puts import PutOutcome, PutPlan
from dataplane.metadata.replay import carry_out
from dataplane.metadata.store import Store, Tagging
from dataplane.metadata.takes import Kept, Taken
from dataplane.wire.checkpoint import Restore
from dataplane.wire.journal import (
    Discarded,
    Ended,
    Expected,
    Leased,
    Lost,
    Op,
    Relocated,
    Returned,
    Sealed,
    Wrote,
)
from dataplane.wire.messages import Finish, Reset, Tag, Want
from dataplane.wire.peering import AddStage
from dataplane.wire.records import RANGE, U8
from dataplane.wire.tables import Column, Definition, Name, Owner, Rows, Scalar, Spec, Where

__all__ = ["JournaledStore", "apply", "dump"]


class JournaledStore(Store):
    """`emit`: takes each operation, at once; it must not raise. None: nothing is recorded."""

    def __init__(
        self,
        partition: str,
        definition: Definition,
        generation: int,
        lease_numbers: Iterator[int] | None = None,
        emit: Callable[[Op], None] | None = None,
    ) -> None:
        super().__init__(partition, definition, generation, lease_numbers)
        self.emit = emit

    def put(
        self,
        rows: Rows,
        columns: Sequence[Column],
        specs: Sequence[Spec],
        owners: Sequence[Owner],
        tags: Tagging,
        *,
        replace: bool = False,
        keep: bool = False,
        reuse: bool = False,
        plan: PutPlan | None = None,
    ) -> PutOutcome:
        outcome = super().put(
            rows, columns, specs, owners, tags, replace=replace, keep=keep, reuse=reuse, plan=plan
        )
        if self.emit is not None:
            op = Wrote(rows, list(columns), list(specs), list(owners), _lists(tags))
            op.mode = "replace" if replace else "keep" if keep else "new"
            op.reuse = reuse
            self.emit(op)
        return outcome

    def close(self, group_key: bytes, n: int, name: Name | None = None) -> int:
        closed = super().close(group_key, n, name)
        if self.emit is not None:
            self.emit(Expected(group_key, n, name))
        return closed

    def tag(self, rows: Rows, tags: Tagging, expect: Mapping[str, Scalar] | None = None) -> None:
        super().tag(rows, tags, expect)
        if self.emit is not None:
            self.emit(Tag(self.partition, self.generation, Rows(rows.keys), _lists(tags)))

    def seal(self, keep_short: bool = False) -> int:
        was_sealed = self.sealed
        closed = super().seal(keep_short)
        if self.emit is not None and not was_sealed:
            self.emit(Sealed(keep_short))
        return closed

    def declare_stage(self, name: str, fields: Sequence[str]) -> None:
        was_known = name in self.state.stages
        super().declare_stage(name, fields)
        if self.emit is not None and not was_known:
            self.emit(AddStage(self.partition, self.generation, name, list(fields)))

    def reset(self, stage: str) -> int:
        rows = super().reset(stage)
        if self.emit is not None:
            self.emit(Reset(self.partition, self.generation, stage))
        return rows

    def take(
        self,
        stage: str,
        want: Want,
        holder: int,
        now: float,
        claim: int = 0,
        credit: PullCredit | None = None,
        sealed: bool = False,
        kept: Sequence[Kept] = (),
    ) -> Taken:
        taken = super().take(stage, want, holder, now, claim, credit, sealed, kept)
        if self.emit is not None and taken.lease is not None:
            self.emit(self._leased(taken.lease))
        return taken

    def finish(
        self,
        lease_id: int,
        outcome: str,
        index: bytes | None,
        columns: Sequence[Column],
        specs: Sequence[Spec],
        owners: Sequence[Owner],
        tags: Tagging,
    ) -> FinishOutcome:
        done = super().finish(lease_id, outcome, index, columns, specs, owners, tags)
        if self.emit is not None:
            op = Finish(lease_id, outcome, index, list(columns), list(specs), _lists(tags))  # type: ignore[arg-type]
            op.owners = list(owners)
            self.emit(op)
        return done

    def release_holder(self, holder: int) -> int:
        numbers = [lease.number for lease in self.state.leases.of(holder)]
        rows = super().release_holder(holder)
        if self.emit is not None and numbers:
            self.emit(Returned(numbers))
        return rows

    def drop(
        self,
        rows: Rows | None = None,
        groups: Sequence[bytes] | None = None,
        where: Where | None = None,
    ) -> tuple[int, int]:
        dropped = super().drop(rows, groups, where)
        if self.emit is not None:
            keys = b"" if rows is None else rows.keys
            self.emit(Discarded(keys, b"".join(groups or ()), where))
        return dropped

    def clear(self) -> int:
        rows = super().clear()
        if self.emit is not None:
            self.emit(Ended())
        return rows

    def lost(self, owner: Owner) -> LostRows:
        lost = super().lost(owner)
        if self.emit is not None:
            self.emit(Lost(owner))
        return lost

    def relocate(
        self, old: Owner, ranges: Array, new: Owner, new_ranges: Array, reach: Array | None = None
    ) -> Array:
        moved = super().relocate(old, ranges, new, new_ranges, reach)
        if self.emit is not None:
            here, there = (one.astype(RANGE).tobytes() for one in (ranges, new_ranges))
            ends = b"" if reach is None else reach.astype(U8).tobytes()
            self.emit(Relocated(old, here, new, there, ends))
        return moved

    def restore(self, op: Restore) -> None:
        super().restore(op)
        if self.emit is not None:
            self.emit(op)

    def _leased(self, number: int) -> Leased:
        state = self.state
        lease = state.leases.get(number)
        assert lease is not None
        groups = state.groups_of(lease.slots) if lease.unit == "groups" else lease.slots[:0]
        return Leased(
            lease.stage.name,
            lease.unit,  # type: ignore[arg-type]
            number,
            state.index.keys[lease.slots].tobytes(),
            state.groups.index.keys[groups].tobytes(),
            lease.holder,
            lease.claim,
        )


def apply(store: Store, op: Op, now: float = 0.0) -> None:
    """Carry out an operation; leases begin at `now`. A journaled store hands on that very one.

    ProtocolError when the store is not as the operation expects: a replica is then broken, and is
    made anew from a dump. References and names that go are collected at a replica as well: drain
    `freed` and `unnamed` and forget them, for the primary tells their owners.
    """
    emit = None
    if isinstance(store, JournaledStore):
        emit, store.emit = store.emit, None
    try:
        carry_out(store, op, now)
    except DataplaneError as exc:
        raise ProtocolError(
            f"{type(op).__name__} does not fit this copy of partition {store.partition!r}, which "
            f"must be made anew: {exc}",
            partition=store.partition,
        ) from exc
    finally:
        if isinstance(store, JournaledStore):
            store.emit = emit
    if emit is not None:
        emit(op)


def _lists(tags: Tagging) -> dict[str, list[Scalar]]:
    return {name: list(values) for name, values in tags.items()}
