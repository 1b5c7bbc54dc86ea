"""RANGE records as numbers, which name chunks at their owner."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.wire.records import RANGE, U8

Array = npt.NDArray[Any]


def ids_of(records: Array) -> Array:
    """The range that each RANGE record names, as one u8: its first field."""
    ids: Array = records.view(U8).reshape(-1, records.itemsize // U8.itemsize)[:, 0]
    return ids


def ranges_of(ids: Array) -> Array:
    """The RANGE records of such numbers."""
    return np.ascontiguousarray(ids).view(RANGE)
