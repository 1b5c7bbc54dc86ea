"""Tables of rows as messages carry them: how many, their names, and their values in one row. No
state.

Values that live in the shard, as most small ones do, are told from others by bytes of their
records: numpy would cost more than all else that is done with them here."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import ProtocolError
from dataplane.metadata.tables.names import format_minted_many
from dataplane.wire.limits import ABSENT
from dataplane.wire.records import KEY, PLACE_ABSENT, PLACE_INLINE, RANGE, VALUE
from dataplane.wire.tables import Column, Name, Rows


def count(rows: Rows) -> int:
    if len(rows.keys) % KEY.itemsize:
        raise ProtocolError(f"a column of keys has {len(rows.keys)} bytes, not a multiple of 16")
    return len(rows.keys) // KEY.itemsize


def names(rows: Rows) -> list[Name]:
    """The keys as users know them."""
    return format_minted_many(rows.keys) if rows.names is None else rows.names


_ABSENT, _FLAGS = 0xFF, slice(20, None, 24)
_OWNER_LOW, _OWNER_HIGH = slice(22, None, 24), slice(23, None, 24)
"""Where VALUE records have their owner, and PLACE records, whose flags take 4 bytes, theirs."""


def all_inline(columns: list[Column]) -> list[Column] | None:
    """The columns of a client's message where all values live in the shard, whose owner is 1 there
    and becomes the first, and only one. None where others are among them."""
    found = []
    for one in columns:
        parts = []
        for raw in (one.values, one.leaves):
            if raw[_OWNER_LOW].strip(b"\1") or raw[_OWNER_HIGH].strip(b"\0"):
                return None
            owned = bytearray(raw)
            owned[_OWNER_LOW] = bytes(len(raw[_OWNER_LOW]))
            parts.append(bytes(owned))
        found.append(Column(one.field, parts[0], one.leaf_counts, parts[1]))
    return found


def inline_places(columns: list[Column], owner: int) -> list[Column] | None:
    """The columns with PLACE records, of values that all lie in the message, as this owner's do, or
    nowhere. None where others are among them."""
    found = []
    for one in columns:
        parts = [_inline_places(raw, owner) if raw else raw for raw in (one.values, one.leaves)]
        values, leaves = parts
        if values is None or leaves is None:
            return None
        found.append(Column(one.field, values, one.leaf_counts, leaves))
    return found


def _inline_places(raw: bytes, owner: int) -> bytes | None:
    # A PLACE has bytes and spec where a VALUE has them, and of what lies in the message the offset
    # where that has its range, of generation 0.
    highs, flags = _tables(owner)
    low = raw[_OWNER_LOW]
    told = low.translate(flags)
    if b"\0" in told or low.translate(highs) != raw[_OWNER_HIGH]:
        return None
    places, nothing = bytearray(raw), bytes(len(low))
    places[_FLAGS] = told
    places[21::24] = places[_OWNER_LOW] = places[_OWNER_HIGH] = nothing
    return bytes(places)


@cache
def _tables(owner: int) -> tuple[bytes, bytes]:
    """By the low byte of a record's owner, where that is `owner` or may be ABSENT: the high one
    that it must have, and the place's flags, which are 0 for all others."""
    highs, flags = bytearray(256), bytearray(256)
    highs[_ABSENT] = ABSENT >> 8
    flags[owner], flags[_ABSENT] = PLACE_INLINE, PLACE_ABSENT
    return bytes(highs), bytes(flags)


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
