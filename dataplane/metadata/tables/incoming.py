"""Checks of the rows of a message, before anything changes. They come from another process, so
nothing is trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from dataplane.errors import InvalidRows, LimitExceeded, ProtocolError, counted
from dataplane.metadata.tables.keys import KeyRun, Keys, keys_in, run_in, some_of
from dataplane.wire.limits import MAX_ROWS_PER_MESSAGE, NO_GROUP
from dataplane.wire.records import U4, column
from dataplane.wire.tables import Name, Rows


class RowsIn(msgspec.Struct, eq=False):
    """The checked rows of a message. group: per row an index into `group_keys`, -1 without a
    group; None if no row has one. whole: all rows are in the only group."""

    keys: Keys
    names: Sequence[Name] | None
    group: Sequence[int] | None
    group_keys: list[bytes]
    group_names: Sequence[Name] | None
    whole: bool
    count: int

    def only(self, rows: Sequence[int]) -> RowsIn:
        """The same for some of the rows."""
        return RowsIn(
            some_of(self.keys, rows),
            None if self.names is None else [self.names[i] for i in rows],
            None if self.group is None else [self.group[i] for i in rows],
            self.group_keys,
            self.group_names,
            self.whole,
            len(rows),
        )


def different(raw: bytes, what: str) -> list[bytes]:
    """Return the keys of a KEY column. Raises ProtocolError if one appears twice."""
    keys = keys_in(raw)
    if len(set(keys)) != len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise ProtocolError(
            f"expected each {what} once in the message, got {twice.hex()} "
            "twice: install the same dataplane release everywhere"
        )
    return keys


def rows_in(rows: Rows) -> RowsIn:
    """Check the rows of a message. Raises InvalidRows if there are none, or one appears twice."""
    keys: Keys = run_in(rows.keys) or keys_in(rows.keys)
    count = len(keys)
    if not count:
        raise InvalidRows("this call has no rows: pass at least one row")
    if count > MAX_ROWS_PER_MESSAGE:
        raise LimitExceeded(
            f"this message has {count} rows, over the limit of {MAX_ROWS_PER_MESSAGE}: split the "
            "rows across several calls",
            rows=count,
            limit=MAX_ROWS_PER_MESSAGE,
        )
    if rows.names is not None and len(rows.names) != count:
        raise InvalidRows(
            f"got {counted(len(rows.names), 'name')} for {counted(count, 'key')}: pass one "
            "name per key"
        )
    if not isinstance(keys, KeyRun) and len(set(keys)) != count:
        twice = next(i for i, key in enumerate(keys) if key in keys[:i])
        shown = rows.names[twice] if rows.names else keys[twice].hex()
        raise InvalidRows(f"key {shown!r} appears twice in this call: give each row its own key")
    group, group_keys = _groups_in(rows, count)
    whole = len(group_keys) == 1 and rows.group_index == bytes(U4.itemsize * count)
    return RowsIn(keys, rows.names, group, group_keys, rows.group_names, whole, count)


def _groups_in(rows: Rows, count: int) -> tuple[Sequence[int] | None, list[bytes]]:
    if not rows.group_keys and not rows.group_index and not rows.group_names:
        return None, []
    group_keys = keys_in(rows.group_keys)
    if rows.group_names is not None and len(rows.group_names) != len(group_keys):
        raise InvalidRows(
            f"got {counted(len(rows.group_names), 'name')} for {counted(len(group_keys), 'group')}"
            ": pass one name per group"
        )
    if not rows.group_index:
        return None, group_keys
    if rows.group_index == bytes(U4.itemsize * count) and group_keys:
        index = [0] * count
    else:
        numbers = column(rows.group_index, U4, count).astype(np.int64)
        numbers[numbers == NO_GROUP] = -1
        index = numbers.tolist()
    if max(index) >= len(group_keys):
        raise ProtocolError(
            f"invalid group index {max(index)} for a row: the message has "
            f"{counted(len(group_keys), 'group')}. Install the same dataplane release "
            "everywhere",
            groups=len(group_keys),
        )
    if len(set(group_keys)) != len(group_keys):
        raise InvalidRows(
            f"this call lists {len(group_keys)} groups, but only {len(set(group_keys))} different "
            "ones: list each group once"
        )
    return index, group_keys
