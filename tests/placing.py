"""The layout rule over columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataplane.errors import LimitExceeded
from dataplane.memory.extents import Bytes, Records, placed
from dataplane.wire.packed import U8


def place(sizes: npt.ArrayLike, extents: Records) -> Bytes:
    """The offset of each chunk in the arena, u8. extents: EXTENT records."""
    return np.array(placed(np.asarray(sizes, U8).tolist(), extents.tolist())[0], U8)


def fitting(sizes: npt.ArrayLike, extents: Records) -> int:
    """How many of the first chunks fit."""
    try:
        return len(place(sizes, extents))
    except LimitExceeded as exc:
        return int(exc.details["fitting"])
