"""The number of rows in a message."""

from __future__ import annotations

from dataplane.errors import ProtocolError
from dataplane.wire.records import KEY
from dataplane.wire.tables import Rows


def count(rows: Rows) -> int:
    if len(rows.keys) % KEY.itemsize:
        raise ProtocolError(
            f"the key column is {len(rows.keys)} bytes long, which is not a multiple of 16: "
            "install the same dataplane release everywhere"
        )
    return len(rows.keys) // KEY.itemsize
