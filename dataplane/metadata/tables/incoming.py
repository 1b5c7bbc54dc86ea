"""What arrives in a put or an add, checked and as arrays, before anything is changed.

Everything here came from another process: a length, an index or a count that does not fit gets a
typed error, and nothing is believed because the sender should have known better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.errors import InvalidRows, LimitExceeded, ProtocolError, counted
from dataplane.metadata.tables.columns import Array
from dataplane.metadata.tables.key_index import pairs, repeated
from dataplane.wire.limits import (
    ABSENT,
    MAX_FIELDS,
    MAX_LEAVES_PER_ROW,
    MAX_NAME_BYTES,
    MAX_ROWS_PER_MESSAGE,
    NO_GROUP,
)
from dataplane.wire.records import KEY, U4, VALUE, column
from dataplane.wire.tables import Column, Name, Rows

_NO_KEYS = np.zeros((0, 2), np.uint64)
_NO_VALUES = np.zeros(0, VALUE)
_SHORT = 1_024
"""Rows up to which numpy's fixed cost is most of what checking a column takes."""


@dataclass(slots=True)
class RowsIn:
    """The rows of a message. group: per row an index into `group_keys`, -1 without group."""

    count: int
    keys: Array
    names: list[Name] | None
    group: Array | None
    group_keys: Array
    group_names: list[Name] | None


@dataclass(slots=True)
class ColumnIn:
    """One field. here: which rows have a value, None when all have; counts None: no leaves."""

    field: str
    values: Array
    here: Array | None
    counts: Array | None
    leaves: Array


def rows_in(rows: Rows, *, many: int = MAX_ROWS_PER_MESSAGE) -> RowsIn:
    """Check the rows of a message. InvalidRows when there are none, or one twice."""
    column(rows.keys, KEY)
    keys = pairs(rows.keys)
    count = len(keys)
    if not count:
        raise InvalidRows("there are no rows in this call; give at least one")
    if count > many:
        raise LimitExceeded(
            f"{count} rows in one message are over the limit of {many}", rows=count, limit=many
        )
    _check_names(rows.names, count, "keys")
    twice = repeated(keys)
    if len(twice):
        shown = rows.names[int(twice[0])] if rows.names else keys[twice[0]].tobytes().hex()
        raise InvalidRows(f"the key {shown!r} occurs twice in one call; a row is named once")
    group, group_keys = _groups_in(rows, count)
    return RowsIn(count, keys, rows.names, group, group_keys, rows.group_names)


def _groups_in(rows: Rows, count: int) -> tuple[Array | None, Array]:
    if not rows.group_keys and not rows.group_index and not rows.group_names:
        return None, _NO_KEYS
    column(rows.group_keys, KEY)
    group_keys = pairs(rows.group_keys)
    _check_names(rows.group_names, len(group_keys), "groups")
    if not rows.group_index:
        return None, group_keys
    index = column(rows.group_index, U4, count).astype(np.int64)
    if count == 1:
        last = index.item()
        if last == NO_GROUP:
            index[0] = last = -1
    else:
        index[index == NO_GROUP] = -1
        last = int(index.max())
    if last >= len(group_keys):
        raise ProtocolError(
            f"a row is in group number {last} of {len(group_keys)}", groups=len(group_keys)
        )
    if len(repeated(group_keys)):
        raise InvalidRows("a group is named twice in one message")
    return index, group_keys


def _check_names(names: Sequence[Name] | None, count: int, what: str) -> None:
    if names is not None and len(names) != count:
        raise InvalidRows(f"{len(names)} names for {count} {what}")


def columns_in(
    columns: Sequence[Column], rows: int, specs: int | None, owners: int | None
) -> list[ColumnIn]:
    """Check the columns of a message with this many specs and owners (None: not known yet)."""
    if not columns:
        return []
    if len(columns) > MAX_FIELDS:
        raise LimitExceeded(f"more than {MAX_FIELDS} fields in one message", limit=MAX_FIELDS)
    if len({one.field for one in columns}) != len(columns):
        raise InvalidRows("a field occurs twice in one call")
    sound = 1 < rows <= _SHORT and len(columns) > 1 and _are_whole(columns, specs, owners)
    return [_column_in(one, rows, specs, owners, sound) for one in columns]


def _are_whole(columns: Sequence[Column], specs: int | None, owners: int | None) -> bool:
    """Whether every row has every one of these fields, with a spec and an owner that there are.
    All columns at once; where they are not, each of them is looked at for what is wrong."""
    raw = b"".join([one.values for one in columns])
    if not raw or len(raw) % VALUE.itemsize:
        return False
    records = column(raw, VALUE)
    known = ABSENT if owners is None else min(owners, ABSENT)
    return int(records["owner"].max()) < known and (
        specs is None or int(records["spec"].max()) < specs
    )


def _column_in(
    one: Column, rows: int, specs: int | None, owners: int | None, sound: bool
) -> ColumnIn:
    """sound: nothing is wrong with its values, if they are as many as the rows."""
    if not one.field or len(one.field) > MAX_NAME_BYTES:
        raise InvalidRows(f"a field's name has 1 to {MAX_NAME_BYTES} characters")
    values = column(one.values, VALUE)
    if len(values) != rows:
        raise InvalidRows(
            f"field {one.field!r} has {counted(len(values), 'value')} for {counted(rows, 'row')}",
            field=one.field,
            values=len(values),
            rows=rows,
        )
    here: Array | None = None
    if sound:
        pass
    elif rows == 1:
        # numpy costs more than the work on a single record
        record = values.item()
        absent = record[5] == ABSENT
        here = np.zeros(1, np.bool_) if absent else None
        if not absent:
            _check_bounds(one.field, record[3], record[5], specs, owners)
    else:
        owner = values["owner"]
        if int(np.maximum.reduce(owner)) == ABSENT:
            here = owner != ABSENT
            _check_records(one.field, values[here], specs, owners)
        else:
            _check_records(one.field, values, specs, owners)
    counts, leaves = _leaves_in(one, rows, here, specs, owners)
    return ColumnIn(one.field, values, here, counts, leaves)


def _leaves_in(
    one: Column, rows: int, here: Array | None, specs: int | None, owners: int | None
) -> tuple[Array | None, Array]:
    if not one.leaf_counts and not one.leaves:
        return None, _NO_VALUES
    leaves = column(one.leaves, VALUE)
    if not one.leaf_counts:
        raise ProtocolError(f"field {one.field!r} has leaves but no counts of them")
    counts = column(one.leaf_counts, U4, rows).astype(np.int64)
    if int(counts.max()) > MAX_LEAVES_PER_ROW:
        raise LimitExceeded(
            f"field {one.field!r} has a row with {int(counts.max())} arrays; the limit is "
            f"{MAX_LEAVES_PER_ROW}",
            limit=MAX_LEAVES_PER_ROW,
        )
    if int(counts.sum()) != len(leaves) or (here is not None and counts[~here].any()):
        raise ProtocolError(f"the leaves of field {one.field!r} do not fit their counts")
    if len(leaves):
        _check_records(one.field, leaves, specs, owners)
    return counts, leaves


def _check_records(field: str, records: Array, specs: int | None, owners: int | None) -> None:
    if len(records):
        spec, owner = (int(np.maximum.reduce(records[part])) for part in ("spec", "owner"))
        _check_bounds(field, spec, owner, specs, owners)


def _check_bounds(field: str, spec: int, owner: int, specs: int | None, owners: int | None) -> None:
    if specs is not None and spec >= specs:
        raise ProtocolError(f"field {field!r} names spec {spec} of {specs}")
    if owners is not None and owner >= owners:
        raise ProtocolError(f"field {field!r} names owner {owner} of {owners}")
