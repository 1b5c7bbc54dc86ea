"""The end of leases: ack, release, drop, and the death of a holder.

An ack and the fields added with it are one step. Rows that were dropped while leased are
skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xxhash

from dataplane.errors import InvalidRows, LeaseExpired, counted, mixed_releases
from dataplane.metadata.shard.blocks import ACKED, LEASED, progress_field
from dataplane.metadata.shard.leases import Lease, Part
from dataplane.metadata.shard.puts import add_fields, check_added
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables import tags as tagging
from dataplane.metadata.tables.bits import rows_of
from dataplane.metadata.tables.pieces import Pieces, split
from dataplane.wire.events import Reason
from dataplane.wire.messages import Finish
from dataplane.wire.packed import U4, column

REASONS = {
    "ack": Reason.ACK,
    "release": Reason.RELEASE,
    "drop": Reason.DROP,
    "abandon": Reason.DIED,
    "expire": Reason.EXPIRED,
}
"""How the rows of a lease leave it, by the outcome of the call that ended it."""
BACK = ("release", "abandon", "expire")
"""Outcomes after which rows are ready again."""
OUTCOMES = (*REASONS, "keep")


def lease_of(state: State, number: int) -> Lease:
    """The lease of this number; for a member of a plan, the plan's lease. Raises LeaseExpired if
    it has ended."""
    lease = state.leases.get(number)
    if lease is None and (member := state.leases.member(number)) is not None:
        return member.plan.lease
    if lease is None:
        raise LeaseExpired(
            state.leases.over.get(number)
            or (
                "this lease has ended: it was acked, released or dropped, or it timed out and its "
                "rows were returned to the stage. An earlier attempt of this call may have taken "
                "effect: read the rows to find out, or claim again"
            ),
            lease=number,
        )
    return lease


def retry_key(asked: Finish, lease: Lease | None) -> int | None:
    """Return a hash that only a retry of this call shares. Return None if a retry cannot be
    recognised: the call sets tags, or stores values with a release or a drop, or means all rows
    that are left of a lease that has ended or is partly finished.

    A retried ack carries the same values, because a client can add a field only once. lease: None
    if it has ended. The number may then be a plan's member, which is acked as a whole.
    """
    if asked.outcome not in ("ack", "release", "drop") or asked.tags:
        return None
    fields, index = asked.values.fields, asked.index
    if fields and asked.outcome != "ack":
        return None
    if index is None:
        if lease is None:
            return None if fields or asked.outcome != "ack" else member_key(asked.lease)
        if lease.many_left != lease.count:
            return None
        index = _every_row(lease.count)
    return _key(str(asked.lease), asked.outcome, *fields, index=index)


@lru_cache(16)
def _every_row(count: int) -> bytes:
    """Return the index column of a call that names all rows of a lease."""
    return np.arange(count, dtype=U4).tobytes()


def member_key(number: int) -> int:
    """Return the retry key of the ack of a plan's member, for when all ranks have acked."""
    return _key(str(number), "plan")


def _key(*words: str, index: bytes = b"") -> int:
    return xxhash.xxh3_64_intdigest("\0".join((*words, "")).encode() + index)


def reject_retry(state: State, asked: Finish, call: int | None) -> None:
    """Raise LeaseExpired with `repeated` if this call was already applied. The client's peer then
    confirms the call."""
    if call is not None and call in state.leases.retry_keys:
        raise LeaseExpired(
            f"an earlier {asked.outcome} of these rows of lease {asked.lease} has already taken "
            "effect: continue",
            lease=asked.lease,
            repeated=True,
        )


def finish(state: State, lease: Lease, asked_for: Finish) -> dict[str, int]:
    """See `Store.finish`."""
    outcome, values, tags = asked_for.outcome, asked_for.values, asked_for.tags
    if outcome not in OUTCOMES:
        raise mixed_releases(
            f"invalid outcome {outcome!r:.40} for a lease: expected one of {', '.join(OUTCOMES)}"
        )
    if values.fields and outcome == "drop":
        raise InvalidRows(
            "cannot add fields to rows that this call drops: ack the rows "
            "instead, or add the fields in an earlier call"
        )
    index = asked_for.index
    asked = lease.unfinished() if index is None else lease.at(_positions(lease, index))
    count = sum([len(part.rows) for part in asked])
    if not count:
        if values.fields or values.chunks:
            raise InvalidRows(
                "this call adds fields, but selects no rows of the lease: select at least one row"
            )
        return {}
    parts = [there for part in asked if (there := part.there()).rows]
    added: list[tuple[Part, Pieces]] = []
    arrived = state.arrived(values, count)
    pieces = arrived.pieces
    if pieces.chunks:
        released = outcome in BACK
        state.check_fields(pieces.fields, lease.stage.name if released else None)
        added = _added(pieces, parts)
        check_added(None if released else lease.stage, added)
    if tags:
        tagging.check(tags, count, state.tag_names)
    if tags:
        for part in parts:
            state.set_tags(part.block, part.rows, tagging.only(tags, part.at, count))
        state.retag([part.block for part in parts])
    kept: dict[str, int] = {}
    stage = lease.stage.name
    state.hold(arrived)
    if outcome in BACK:
        for part, mine in added:
            names = {field: progress_field(stage, field) for field in mine.fields}
            state.merge(part.block, mine.renamed(names), keep=False)
    elif added:
        kept = add_fields(state, lease.stage, added, lease.holder)
    if state.progress and outcome in ("ack", "keep"):
        done = None if outcome == "ack" else pieces.fields
        for part in parts:
            state.end_progress(part.block, stage, part.bits, done)
    state.settled(arrived)
    _end(state, lease, asked_for, asked, parts)
    return kept


def _added(pieces: Pieces, parts: Sequence[Part]) -> list[tuple[Part, Pieces]]:
    """Return what each part gets of a message."""
    every = range(pieces.count)
    if len(parts) == 1 and parts[0].at == parts[0].rows == every == range(parts[0].block.count):
        return [(parts[0], pieces)]  # all rows of a block, in their order
    mine = split(pieces.parts, [(p.at, p.rows, p.block.count) for p in parts])
    return list(zip(parts, mine, strict=True))


def give_back(state: State, lease: Lease, reason: Reason = Reason.DIED) -> int:
    """End a lease without an outcome. Return how many rows are ready again."""
    state.left(lease, lease.held.parts, reason)
    count = state.requeue(lease)
    state.leases.end(lease)
    return count


def positions_of(lease: Lease, index: bytes) -> list[int]:
    """The row indices of a call. Raises InvalidRows for an index that the lease does not have."""
    positions: list[int] = column(index, U4).tolist()
    if positions and max(positions) >= lease.count:
        raise InvalidRows(
            f"row index {max(positions)} is out of range, because lease {lease.number} "
            f"has {counted(lease.count, 'row')}: pass indices from 0 to {lease.count - 1}",
            rows=lease.count,
        )
    return positions


def _positions(lease: Lease, index: bytes) -> list[int]:
    """The positions in the lease that a message is about. InvalidRows unless all are left."""
    positions = positions_of(lease, index)
    if len(set(positions)) != len(positions):
        twice = next(p for p, count in Counter(positions).items() if count > 1)
        raise InvalidRows(
            f"row index {twice} of lease {lease.number} appears twice in this call: list "
            "each row once"
        )
    for part in lease.at(positions):
        if over := part.bits & ~lease.left[part.number]:
            which = f"row {part.block.name(rows_of(over)[0])!r}" if part.block.keys else "a row"
            raise InvalidRows(
                f"{which} of lease {lease.number} was already acked, released or "
                "dropped: leave this row out of the call"
            )
    return positions


def _end(
    state: State,
    lease: Lease,
    asked_for: Finish,
    asked: Sequence[Part],
    parts: Sequence[Part],
) -> None:
    outcome, rows = asked_for.outcome, [(part.block, part.bits) for part in parts]
    if outcome in REASONS:
        state.left(lease, rows, REASONS[outcome], asked_for.client_s)
    if outcome in BACK:
        state.requeue(lease, parts)
    elif outcome == "drop" and rows:
        state.remove(rows, dropped=True)
    elif outcome == "ack" and rows:
        for block, bits in rows:
            lease.stage.move(block, bits, LEASED, ACKED)
        groups = state.groups_of(rows)
        for group in groups:
            lease.stage.settle(group)
        if state.permits.counts and state.definition.free == "drop":
            state.permits.acked(state, groups)
        state.free_acked(rows)
    if outcome != "keep":
        for part in asked:
            lease.left[part.number] &= ~part.bits
        if lease.is_done:
            state.leases.end(lease)
