"""Tables of rows as messages carry them: how many, their names, and their values in one row. No
state."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import ProtocolError
from dataplane.metadata.tables.names import format_minted_many
from dataplane.wire.records import KEY, RANGE, VALUE
from dataplane.wire.tables import Column, Name, Rows


def count(rows: Rows) -> int:
    if len(rows.keys) % KEY.itemsize:
        raise ProtocolError(f"a column of keys has {len(rows.keys)} bytes, not a multiple of 16")
    return len(rows.keys) // KEY.itemsize


def names(rows: Rows) -> list[Name]:
    """The keys as users know them."""
    return format_minted_many(rows.keys) if rows.names is None else rows.names


def flat_values(columns: list[Column]) -> npt.NDArray[Any]:
    """All VALUE records of columns in one row, leaves behind the values of each; read-only."""
    return np.frombuffer(b"".join(b for c in columns for b in (c.values, c.leaves)), VALUE)


def with_values(columns: list[Column], flat: npt.NDArray[Any]) -> list[Column]:
    """The columns with other records, in the order of `flat_values`."""
    raw, at = flat.tobytes(), 0
    result = []
    for c in columns:
        middle, end = at + len(c.values), at + len(c.values) + len(c.leaves)
        result.append(Column(c.field, raw[at:middle], c.leaf_counts, raw[middle:end]))
        at = end
    return result


def ranges_of(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The RANGE records at the head of VALUE records."""
    return values.view(np.uint64).reshape(-1, 3)[:, 0].copy().view(RANGE)
