"""Fixed-size little-endian records, which messages carry as raw columns.

A column of records is `array.tobytes()` in a MessagePack `bin`; `column()` is the only reader and
checks the length. Keys are 16-byte records: minted (shard, session, counter) or the hash of a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import mixed_releases

EXTENT = np.dtype([("offset", "<u8"), ("length", "<u8")])
"""A contiguous part of the arena: reserved for writing, or (in a put) written as one chunk."""

KEY = np.dtype("V16")
"""A row or group key."""

DIGEST = np.dtype([("hash", "V16"), ("nbytes", "<u8")])
"""xxh3-128 of a chunk's bytes and layout, and its size: the key with which dedup finds it."""

U2, U4, U8 = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")
"""A column of U8 may hold chunk numbers, which the owner of the chunks assigns; 0: no chunk."""

Array = npt.NDArray[Any]


def column(data: bytes | memoryview, dtype: np.dtype, count: int | None = None) -> npt.NDArray[Any]:
    """Return a read-only view of a raw column. Raise ProtocolError unless it has `count`
    records."""
    if len(data) % dtype.itemsize or (count is not None and len(data) != count * dtype.itemsize):
        raise mixed_releases(
            f"a column of {dtype.itemsize}-byte records is {len(data)} bytes long: expected "
            f"{f'a multiple of {dtype.itemsize}' if count is None else count * dtype.itemsize}"
        )
    return np.frombuffer(data, dtype)


def joined(parts: Iterable[npt.NDArray[Any]], dtype: np.dtype) -> npt.NDArray[Any]:
    """Concatenate columns of records into a read-only column.

    np.concatenate promotes structured dtypes pair by pair, in Python.
    """
    return np.frombuffer(b"".join([part.tobytes() for part in parts]), dtype)
