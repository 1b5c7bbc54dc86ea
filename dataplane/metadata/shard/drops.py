"""Removing rows and groups: dropped by the user, lost with a peer, or closed by name or by the
seal."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.errors import (
    GroupClosed,
    InvalidRows,
    PartitionSealed,
    RowsDropped,
    counted,
)
from dataplane.metadata.shard.blocks import MAX_GROUP_ROWS, READY, Group, Rows, names_of
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables.keys import KEY_BYTES, format_minted_many, hash_name
from dataplane.metadata.tables.remembered import of_group
from dataplane.wire.events import EventRecord, Kind
from dataplane.wire.journal import Lost
from dataplane.wire.tables import Name, Owner


def drop_groups(state: State, keys: Sequence[bytes]) -> tuple[int, int]:
    """Drop groups with all their rows, and refuse later rows of them. Return (rows, bytes)."""
    keys = list(dict.fromkeys(keys))
    groups = [state.groups[key] for key in keys if key in state.groups]
    state.tombstones.add(map(of_group, keys))
    still_open = [group for group in groups if not group.closed]
    rows = Rows([(block, block.live) for group in groups for block in group.blocks])
    state.happened_to(rows.parts, EventRecord(Kind.DROP))
    many, nbytes = len(rows), state.remove(rows.parts, dropped=True)
    state.remove_groups(still_open)  # closed groups were removed with their last row
    return many, nbytes


def lost(state: State, owner: Owner) -> int:
    """Remove rows with bytes at a lost peer, and their whole groups. Return how many.

    They leave no tombstones, so they can be put again.
    """
    state.lose_progress(owner)
    hit = state.at(owner)
    groups = state.groups_of(hit.parts)
    parts = [(block, bits) for block, bits in hit.parts if not block.group]
    parts += [(block, block.live) for group in groups for block in group.blocks]
    rows = Rows(parts)
    keys = rows.keys
    names = names_of(rows, keys)
    state.losses.note(format_minted_many(keys) if names is None else names)
    state.closed_groups -= sum([one.closed and not one.all_dropped for one in groups])
    still_open = [group for group in groups if not group.closed]
    for stage in state.stages.values():
        stage.lost += sum([(bits & ~stage.of(block).acked).bit_count() for block, bits in parts])
    state.happened_to(parts, EventRecord(Kind.LOST, by=owner.peer))
    state.remove(parts)
    state.remove_groups(still_open)
    state.released.pop(owner, None)
    state.answers.forget(owner)
    state.tell(Lost(owner))
    return len(keys) // KEY_BYTES


def close(state: State, name: Name, size: int) -> int:
    """Set how many rows a group has. Return 1 if that closes it, else 0."""
    key = hash_name(name)
    group = state.groups.get(key)
    limit = state.definition.group_size or MAX_GROUP_ROWS
    if not 0 < size <= limit:
        raise InvalidRows(
            f"cannot close group {name!r} with n={size}: pass a value from 1 to {limit}"
        )
    if group is None:
        if not state.tombstones.freed(of_group(key)):  # else this is a repetition
            if state.tombstones.dropped(of_group(key)):
                raise RowsDropped(
                    f"group {name!r} was dropped, so it cannot be closed: skip this "
                    "call, or first put the group again with reuse=True",
                    groups=[name],
                )
            if state.sealed:
                raise PartitionSealed(
                    f"partition {state.partition!r} is sealed, so group {name!r} "
                    "cannot be added: use another partition"
                )
            state.add_group(key, name, size)
        return 0
    if group.closed:
        if size != group.seen:
            raise GroupClosed(
                f"group {name!r} is already closed with {counted(group.seen, 'row')}, so "
                f"it cannot be closed again with n={size}: use another group id",
                rows=group.seen,
            )
        return 0
    if size < group.seen:
        raise InvalidRows(
            f"cannot close group {name!r} with n={size}, because it already has "
            f"{counted(group.seen, 'row')} (dropped rows count too): pass n={group.seen} or more",
            rows=group.seen,
        )
    if state.images is not None:
        state.images.keep_group(group)
    group.expected = size
    return int(size == group.seen and _close_now(state, group))


def _close_now(state: State, group: Group) -> bool:
    """Close a group as `State.close_group` does, when the call and not a row completes it."""
    made = state.close_group(group)
    for stage in state.stages.values():
        if group.live and group.states[stage.number] == READY:
            state.happened(EventRecord(Kind.READY, stage=stage.name, group=group.name))
    return made


def seal_if_full(state: State) -> None:
    """Seal the partition once its declared number of groups has closed. Backups derive this from
    recorded changes."""
    groups = state.declared.groups
    if groups is not None and state.closed_groups >= groups and not state.sealed:
        seal(state)


def seal(state: State, keep: bool = False) -> int:
    """Close open groups at their current size, and remove empty ones. If groups have a fixed
    size, these are incomplete, and are dropped unless they are to be kept. Return how many
    closed."""
    state.sealed = True
    state.happened(EventRecord(Kind.SEAL))
    for stage in state.stages.values():
        stage.rows.changed = True  # no more rows can come
    groups = [group for group in state.groups.values() if not group.closed]
    state.remove_groups([group for group in groups if not group.seen])
    rest = [group for group in groups if group.seen]
    if state.definition.group_size is None or keep:
        return sum([_close_now(state, group) for group in rest])
    state.short_groups += len(rest)
    drop_groups(state, [group.key for group in rest])
    return 0
