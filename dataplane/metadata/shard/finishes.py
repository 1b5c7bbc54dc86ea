"""The end of leases: ack, release, drop, and the holder's death.

An ack and what was added to its rows are one step. Rows that were dropped while they were leased
are passed over; their holder learns how many there were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dataplane.errors import InvalidRows, LeaseExpired, ProtocolError
from dataplane.memory.extents import every, some
from dataplane.metadata.shard.leases import Lease
from dataplane.metadata.shard.puts import add_fields, check_added, discard, only
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables.columns import Array
from dataplane.metadata.tables.incoming import ColumnIn, columns_in
from dataplane.metadata.tables.small_values import check_inline
from dataplane.wire.records import U4, column
from dataplane.wire.tables import Column, Owner, Scalar, Spec

OUTCOMES = ("ack", "release", "drop", "keep")


@dataclass(frozen=True, slots=True)
class FinishOutcome:
    """rows: how many were finished. gone: leased rows that had been dropped or lost meanwhile.
    kept: per field, rows whose value was there already and stayed. bytes: freed by a drop."""

    kept: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    gone: int = 0
    bytes: int = 0


def lease_of(state: State, number: int) -> Lease:
    """Of one who takes part in a plan, the plan's. LeaseExpired when it ended."""
    lease = state.leases.get(number)
    if lease is None and (member := state.leases.member(number)) is not None:
        return member.plan.lease
    if lease is None:
        raise LeaseExpired(
            state.leases.why_ended(number)
            or "this lease has ended: its time was up and its rows went back to the stage, or it "
            "was finished before. Nothing of this call was stored; claim again",
            lease=number,
        )
    return lease


def finish(
    state: State,
    lease: Lease,
    outcome: str,
    index: bytes | None,
    columns: Sequence[Column],
    specs: Sequence[Spec],
    owners: Sequence[Owner],
    tags: Mapping[str, Sequence[Scalar]],
    inline: bytes,
) -> FinishOutcome:
    """See `Store.finish`."""
    if outcome not in OUTCOMES:
        raise ProtocolError(f"a lease ends by one of {OUTCOMES}, not by {outcome!r}")
    if columns and outcome == "drop":
        raise InvalidRows("rows that are dropped take no new fields; ack them")
    positions = _positions(lease, index)
    if not len(positions):
        if columns:
            raise InvalidRows("fields for no rows of the lease")
        return FinishOutcome()
    added = columns_in(columns, len(positions), len(specs), len(owners))
    check_inline(added, owners, inline)
    names = [one.field for one in added]
    if outcome == "release":
        state.fields.check_progress_room(lease.stage.name, names)
    else:
        state.fields.check_room(names)
    state.tags.check(tags, len(positions))

    slots = lease.slots[positions]
    there = state.incarnation[slots] == lease.incarnations[positions]
    gone = 0 if every(there) else len(positions) - int(np.count_nonzero(there))
    if gone:
        slots = slots[there]
    check_added(state, None if outcome == "release" else lease.stage, slots, added, there)
    if gone:
        added = [discard(state, one, there, specs, owners, inline) for one in added]
        tags = {name: only(values, there) for name, values in tags.items()}
    kept: dict[str, int] = {}
    if len(slots):
        if tags:
            state.tags.set(slots, tags)
            state.retag(slots)
        if outcome == "release":
            _note_progress(state, lease, slots, added, specs, owners, inline)
        elif added:
            kept = add_fields(state, lease.stage, slots, added, specs, owners, inline)
        if state.fields.progress and outcome in ("ack", "keep"):
            done = None if outcome == "ack" else names
            state.fields.end_progress(lease.stage.name, slots, done)
    told = bool(columns or tags)
    freed = _end(state, lease, outcome, positions, slots, told)
    return FinishOutcome(kept, len(slots), gone, freed)


def _note_progress(
    state: State,
    lease: Lease,
    slots: Array,
    columns: Sequence[ColumnIn],
    specs: Sequence[Spec],
    owners: Sequence[Owner],
    inline: bytes,
) -> None:
    if not columns:
        return
    numbers = state.fields.intern(specs, owners, inline)
    for one in columns:
        state.fields.write_progress(lease.stage.name, slots, one, numbers)


def give_back(state: State, lease: Lease) -> int:
    """The lease ends without an outcome; returns the rows that came back."""
    count = state.come_back(lease, lease.left.nonzero()[0])
    state.leases.end(lease)
    return count


def give_back_all(state: State, leases: Sequence[Lease]) -> int:
    """Several leases end; the rows of the oldest come first."""
    return sum(give_back(state, lease) for lease in reversed(leases))


def _positions(lease: Lease, index: bytes | None) -> Array:
    """The positions in the lease that a message is about. InvalidRows unless all are left."""
    if index is None:
        return lease.left.nonzero()[0]
    positions = column(index, U4).astype(np.int64)
    if len(positions) and int(positions.max()) >= len(lease.slots):
        raise InvalidRows(
            f"row {int(positions.max())} of a lease of {len(lease.slots)}", rows=len(lease.slots)
        )
    if len(np.unique(positions)) != len(positions):
        raise InvalidRows("a row of the lease is named twice")
    if not lease.left[positions].all():
        raise InvalidRows("a row of the lease was acked, released or dropped before")
    return positions


def _end(
    state: State, lease: Lease, outcome: str, positions: Array, slots: Array, told: bool
) -> int:
    """told: whether something came with it, by which a release is its holder's own."""
    freed = 0
    if outcome == "release":
        state.come_back(lease, positions)
    elif outcome == "drop":
        freed = state.remove_rows(slots, dropped=True)
    elif outcome == "ack" and len(slots):
        lease.stage.ack(slots)
        groups = state.groups_of(slots)
        if len(groups):
            lease.stage.settle(groups)
            if state.permits.counts and state.definition.free == "drop":
                state.permits.acked(state, groups)
        state.free_acked(slots)
    if outcome != "keep":
        lease.left[positions] = False
        if not some(lease.left):
            # What comes again, after the rows went back, must not pass for something that is in.
            returned = outcome == "release" and not told
            (state.leases.end if returned else state.leases.finish)(lease)
    return freed
