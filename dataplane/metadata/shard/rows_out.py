"""Rows as they go out: the table of a lease or of a read, and which rows a read means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.errors import InvalidRows, RowsGone, counted
from dataplane.memory.extents import every, some
from dataplane.metadata.shard.finishes import lease_of
from dataplane.metadata.shard.puts import shown
from dataplane.metadata.shard.state import State
from dataplane.metadata.tables.columns import Array
from dataplane.metadata.tables.key_index import pairs
from dataplane.metadata.tables.names import format_minted_many
from dataplane.metadata.tables.where import Filter, test
from dataplane.wire.limits import MAX_ROWS_PER_MESSAGE, NO_GROUP
from dataplane.wire.records import KEY, U4, column
from dataplane.wire.tables import Name, Rows, Table


def leased_rows(state: State, number: int) -> Array:
    """The rows of a lease that are not finished. RowsGone when some were dropped meanwhile."""
    lease = lease_of(state, number)
    positions = lease.left.nonzero()[0]
    slots = state.held(lease, positions)
    if len(slots) < len(positions):
        gone = len(positions) - len(slots)
        raise RowsGone(
            f"{gone} of {counted(len(positions), 'row')} of lease {number}: dropped or lost",
            rows=gone,
        )
    return slots


def leased_at(state: State, number: int, index: bytes) -> tuple[Array, bytes]:
    """See `Store.leased_at`. InvalidRows for a position that the lease does not have."""
    lease = lease_of(state, number)
    positions = column(index, U4)
    if len(positions) and int(positions.max()) >= len(lease.slots):
        raise InvalidRows(f"row {int(positions.max())} of a lease of {len(lease.slots)}")
    slots = lease.slots[positions]
    there = lease.left[positions] & (state.incarnation[slots] == lease.incarnations[positions])
    return slots[there], positions[there].tobytes()


def table(
    state: State, slots: Array, fields: Sequence[str] | None, tags: bool, stage: str = ""
) -> Table:
    """These rows with their columns and tags, and a stage's progress. FieldUnknown for a field that
    no row ever had."""
    columns, specs, owners, inline = state.fields.gather(slots, fields, stage)
    found = state.tags.table(slots) if tags else {}
    return Table(rows_of(state, slots), columns, specs, owners, found, inline)


def rows_of(state: State, slots: Array) -> Rows:
    """Keys, names and groups of these rows."""
    keys = state.index.keys[slots].tobytes()
    names = names_of(state.names, slots, keys)
    index, groups = _groups(state, slots)
    if not len(groups):
        return Rows(keys, names)
    group_keys = state.groups.index.keys[groups].tobytes()
    return Rows(keys, names, index, group_keys, names_of(state.groups.names, groups, group_keys))


def find_rows(state: State, rows: Rows) -> Array:
    """The slots of rows named by key. RowsGone when one of them is not there."""
    column(rows.keys, KEY)
    keys = pairs(rows.keys)
    slots = state.index.find(keys)
    gone = (slots < 0).nonzero()[0]
    if len(gone):
        names = shown(rows.names, keys, gone)
        dropped = gone[state.tombstones.among(keys[gone])]
        raise RowsGone(
            f"{len(gone)} of {counted(len(keys), 'row is', 'rows are')} not in partition "
            f"{state.partition!r}: {names}; freed, dropped, or never put",
            keys=names,
            dropped=shown(rows.names, keys, dropped),
            rows=len(gone),
        )
    return slots


def read(
    state: State, rows: Rows | None, where: Filter | None, limit: int, after: bytes
) -> tuple[Array, bool]:
    """(the slots of the rows a read means, whether there are more)."""
    most = min(limit, MAX_ROWS_PER_MESSAGE) if limit > 0 else MAX_ROWS_PER_MESSAGE
    slots = state.live() if rows is None else find_rows(state, rows)
    if after:
        last = find_rows(state, Rows(after))[0]
        passed = (slots == last).nonzero()[0]
        slots = slots[int(passed[0]) + 1 if len(passed) else 0 :]
    if where is not None:
        slots = slots[test(where, state.tags, slots)]
    return slots[:most], len(slots) > most


def names_of(given: dict[int, Name], ids: Array, keys: bytes) -> list[Name] | None:
    """The names of rows or groups, None where all of them are minted."""
    if not given:
        return None
    found = [given.get(id_) for id_ in ids.tolist()]
    if None not in found:
        return found  # type: ignore[return-value]
    if not any(name is not None for name in found):
        return None
    minted = format_minted_many(keys)
    return [minted[i] if name is None else name for i, name in enumerate(found)]


def _groups(state: State, slots: Array) -> tuple[bytes, Array]:
    """(the group_index column, the groups in the order in which they occur)."""
    groups = state.group[slots].astype(np.int64)
    if not some(groups >= 0):
        return b"", np.zeros(0, np.int64)
    if every(groups == groups[0]):
        return bytes(4 * len(slots)), groups[:1]
    different, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.argsort(first[different >= 0]) + np.count_nonzero(different < 0)
    place = np.full(len(different), NO_GROUP, np.int64)
    place[rank] = np.arange(len(rank))
    return place[inverse].astype(U4).tobytes(), different[rank]
