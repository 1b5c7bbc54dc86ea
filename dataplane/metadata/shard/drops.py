"""How rows and groups go: dropped by the user, lost with a peer, closed by name or by the seal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.errors import (
    GroupClosed,
    InvalidRows,
    PartitionSealed,
    ProtocolError,
    RowsDropped,
    counted,
)
from dataplane.metadata.shard.rows_out import rows_of
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables.columns import Array
from dataplane.metadata.tables.groups import MAX_GROUP_ROWS
from dataplane.metadata.tables.key_index import pairs, repeated
from dataplane.metadata.tables.names import KEY_BYTES, format_minted, format_minted_many
from dataplane.metadata.tables.tombstones import of_groups
from dataplane.wire.tables import Name, Owner, Rows


@dataclass(frozen=True, slots=True)
class Lost:
    """What went with a peer: the rows, as they were named, and how many groups."""

    rows: Rows
    groups: int


def drop_rows(state: State, keys: Array) -> tuple[int, int]:
    """Drop rows by key; unknown ones leave a tombstone as well. Returns (rows, bytes)."""
    slots = state.index.find(keys)
    unknown = slots < 0
    if unknown.any():
        state.tombstones.add(keys[unknown])
        slots = slots[~unknown]
    return len(slots), state.remove_rows(slots, dropped=True)


def drop_groups(state: State, keys: Sequence[bytes]) -> tuple[int, int]:
    """Drop groups with all their rows, and refuse later rows of them. Returns (rows, bytes)."""
    if any(len(key) != KEY_BYTES for key in keys):
        raise ProtocolError(f"a group's key has {KEY_BYTES} bytes")
    if not keys:
        return 0, 0
    column = pairs(b"".join(dict.fromkeys(keys)))
    groups = state.groups.index.find(column)
    groups = groups[groups >= 0]
    state.tombstones.add(of_groups(column))
    _, slots = state.groups.members.gather(groups)
    slots = slots.astype(np.int64)
    still_open = groups[~state.groups.closed(groups)]
    closed = groups[state.groups.closed(groups)]
    nbytes = state.remove_rows(slots, dropped=True)
    # those that were closed went with their last row
    assert not len(state.groups.spent(closed))
    if len(still_open):
        state.remove_groups(still_open)
    return len(slots), nbytes


def lose(state: State, owner: Owner) -> Lost:
    """A peer is no more: rows with bytes there go, and with them their groups, whole.

    They leave no tombstones, so all of them may be put again.
    """
    live = state.live()
    state.fields.lose_progress(owner, live)
    hit = live[state.fields.at(owner, live)]
    groups = state.groups_of(hit)
    _, members = state.groups.members.gather(groups)
    slots = np.union1d(hit, members.astype(np.int64))
    # by key: a copy, whose slots are others, has to number them alike
    keys = state.index.keys[slots]
    slots = slots[np.lexsort((keys[:, 1], keys[:, 0]))]
    lost = Lost(rows_of(state, slots), len(groups))
    given = lost.rows.names
    state.losses.note(format_minted_many(lost.rows.keys) if given is None else given)
    closed = groups[state.groups.closed(groups)]
    state.closed_groups -= int(len(closed) - state.groups.all_dropped(closed).sum())
    still_open = np.setdiff1d(groups, closed)
    for stage in state.stages.values():
        stage.lose(slots)
    state.remove_rows(slots)
    if len(still_open):
        state.remove_groups(still_open)
    state.fields.forget_owner(owner)
    return lost


def close(state: State, key: bytes, size: int, name: Name | None) -> int:
    """Say how many rows a group has. Returns 1 when it closes with that, else 0."""
    if len(key) != KEY_BYTES:
        raise ProtocolError(f"a group's key has {KEY_BYTES} bytes")
    column = pairs(key)
    shown = format_minted(key) if name is None else name
    group = int(state.groups.index.find(column)[0])
    limit = state.definition.group_size or MAX_GROUP_ROWS
    if not 0 < size <= limit:
        raise InvalidRows(
            f"the group {shown!r} cannot close with {counted(size, 'row')}; give 1 to {limit}"
        )
    if group < 0:
        _expect_new(state, column, size, name, shown)
        return 0
    seen = int(state.groups.seen[group])
    if state.groups.closed(np.array([group]))[0]:
        if size != seen:
            raise GroupClosed(
                f"the group {shown!r} is closed with {counted(seen, 'row')}", rows=seen
            )
        return 0
    if size < seen:
        raise InvalidRows(
            f"the group {shown!r} has had {counted(seen, 'row')}; close it with as many", rows=seen
        )
    state.groups.expected[group] = size
    return state.close_groups(np.array([group])) if size == seen else 0


def end_open_groups(state: State, keep: bool) -> int:
    """The partition is sealed: open groups close at the size they have, empty ones go. Where groups
    have a size these are short, and are dropped unless they are to be kept. Returns how many
    closed."""
    groups = state.groups.open()
    empty = groups[state.groups.seen[groups] == 0]
    if len(empty):
        state.remove_groups(empty)
    rest = groups[state.groups.seen[groups] > 0]
    if not len(rest):
        return 0
    if state.definition.group_size is None or keep:
        return state.close_groups(rest)
    state.short_groups += len(rest)
    drop_groups(state, [key.tobytes() for key in state.groups.index.keys[rest]])
    return 0


def _expect_new(state: State, column: Array, size: int, name: Name | None, shown: Name) -> None:
    if state.tombstones.among(of_groups(column))[0]:
        raise RowsDropped(f"the group {shown!r} was dropped; it is cancelled", groups=[shown])
    if state.sealed:
        raise PartitionSealed(f"partition {state.partition!r} is sealed and takes no new groups")
    state.add_groups(column, None if name is None else [name], size)


def check_keys(rows: Rows) -> Array:
    """The keys of a call that names rows. InvalidRows for one named twice."""
    if not rows.keys or len(rows.keys) % KEY_BYTES:
        raise InvalidRows("there are no rows in this call; give at least one key")
    keys = pairs(rows.keys)
    if len(repeated(keys)):
        raise InvalidRows("a row is named twice in one call")
    return keys
