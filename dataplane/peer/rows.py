"""The number of rows in a message."""

from __future__ import annotations

from dataplane.errors import mixed_releases
from dataplane.wire.records import KEY
from dataplane.wire.tables import Rows


def count(rows: Rows) -> int:
    if len(rows.keys) % KEY.itemsize:
        raise mixed_releases(
            f"the key column is {len(rows.keys)} bytes long, which is not a multiple of 16"
        )
    return len(rows.keys) // KEY.itemsize
