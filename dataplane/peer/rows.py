"""Tables of rows as messages carry them: how many, and their values in one row. No
state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dataplane.errors import ProtocolError
from dataplane.metadata.tables.references import Array
from dataplane.wire.limits import ABSENT
from dataplane.wire.records import KEY, VALUE
from dataplane.wire.tables import INLINE, Column, Owner, Rows


def count(rows: Rows) -> int:
    if len(rows.keys) % KEY.itemsize:
        raise ProtocolError(
            f"a column of keys has {len(rows.keys)} bytes, which is not a multiple of 16"
        )
    return len(rows.keys) // KEY.itemsize


FEW_BYTES = 64 * VALUE.itemsize
"""Array of up to so many bytes are looked at one by one: numpy would cost more than all else that
is done with them here."""


def raw_values(columns: Sequence[Column]) -> bytes:
    """All VALUE records of columns in one row, leaves behind the values of each."""
    return b"".join([raw for one in columns for raw in (one.values, one.leaves)])


def flat_values(columns: Sequence[Column]) -> Array:
    """The same; read-only."""
    return np.frombuffer(raw_values(columns), VALUE)


def in_ranges(flat: Array, owners: Sequence[Owner]) -> npt.NDArray[np.bool_]:
    """Which of these values, that name these owners, lie in ranges of peers."""
    there: npt.NDArray[np.bool_] = flat["owner"] != ABSENT
    if INLINE in owners:
        there &= flat["owner"] != owners.index(INLINE)
    return there


def with_records(columns: Sequence[Column], raw: bytes | bytearray) -> list[Column]:
    """The columns with other records, in the order of `raw_values`."""
    result, at, records = [], 0, memoryview(raw)
    for one in columns:
        middle = at + len(one.values)
        end = middle + len(one.leaves)
        values, leaves = bytes(records[at:middle]), bytes(records[middle:end])
        result.append(Column(one.field, values, one.leaf_counts, leaves))
        at = end
    return result
