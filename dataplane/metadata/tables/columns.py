"""Columns of numpy that grow in place; nothing may keep a view of one across a call that adds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.memory.extents import every

Array = npt.NDArray[Any]

_SMALLEST = 64
_DOUBLES_UP_TO = 1 << 16


def capacity_for(now: int, need: int) -> int:
    """The next size of a table that holds `now` and must hold `need`.

    Doubling while small; by half when large, so that the unused part stays a third at most.
    """
    if need <= now:
        return now
    step = now * 2 if now < _DOUBLES_UP_TO else now + now // 2
    return max(_SMALLEST, step, need)


def grow(column: Array, capacity: int) -> None:
    """Make a column longer in place (realloc, which moves large blocks without copying them)."""
    if len(column) < capacity:
        column.resize((capacity, *column.shape[1:]), refcheck=False)


def unique(ids: Array) -> Array:
    """The different ids, sorted. Most columns have one; `np.unique` takes 20 µs to see it."""
    if len(ids) < 2:
        return ids
    return ids[:1] if every(ids == ids[0]) else np.unique(ids)
