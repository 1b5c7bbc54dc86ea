"""Fixed-size little-endian records that travel as raw columns inside messages.

A column of records is `array.tobytes()` in a MessagePack `bin`; `column()` is the only reader and
checks the length. Keys are 16-byte records: minted (shard, session, counter) or the hash of a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import ProtocolError

VALUE = np.dtype(
    [
        ("range", "<u4"),  # the owner's range, or in a put: index into the message's ranges
        ("generation", "<u4"),  # of that range; 0 in a put from a client
        ("nbytes", "<u8"),
        ("spec", "<u4"),  # index into the table of specs that travels beside the column
        ("delta", "<u2"),  # where in the range the value starts (packs are at most 64 KiB)
        ("owner", "<u2"),  # index into the table of owners; ABSENT: the row lacks the field
    ]
)
"""Where the bytes of one value lie, whichever host they are on. 24 bytes."""
ONE_VALUE = Struct("<IIQIHH")

PLACE = np.dtype([("offset", "<u8"), ("nbytes", "<u8"), ("spec", "<u4"), ("flags", "<u4")])
"""A value inside the local arena, as a client reads it. `flags` 1: the row lacks the field; 2: it
lies in the message, `offset` bytes behind the start of `inline`."""
ONE_PLACE = Struct("<QQII")

EXTENT = np.dtype([("offset", "<u8"), ("length", "<u8")])
"""A stretch of the arena: granted for writing, or (in a put) written as one range."""

RANGE = np.dtype([("range", "<u4"), ("generation", "<u4")])
"""A range by its identity at its owner."""

KEY = np.dtype("V16")
"""A row or group key."""

DIGEST = np.dtype([("hash", "V16"), ("nbytes", "<u8")])
"""xxh3-128 of a value's bytes, and their number: the name under which dedup looks for it."""

U2, U4, U8 = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")

PLACE_ABSENT = 1
PLACE_INLINE = 2

Array = npt.NDArray[np.generic]


def column(data: bytes | memoryview, dtype: np.dtype, count: int | None = None) -> npt.NDArray[Any]:
    """A read-only view of a raw column; ProtocolError unless it holds exactly `count` records."""
    if len(data) % dtype.itemsize or (count is not None and len(data) != count * dtype.itemsize):
        raise ProtocolError(
            f"a column of {dtype.itemsize}-byte records has {len(data)} bytes: expected "
            f"{f'a multiple of {dtype.itemsize}' if count is None else count * dtype.itemsize}"
        )
    return np.frombuffer(data, dtype)


def joined(parts: Iterable[npt.NDArray[Any]], dtype: np.dtype) -> npt.NDArray[Any]:
    """Columns of records one behind the other, read-only.

    np.concatenate promotes structured dtypes pair by pair, in Python.
    """
    return np.frombuffer(b"".join([part.tobytes() for part in parts]), dtype)
