"""Pull credit: how many bytes a claim's peer would have to bring to itself, and how many it can.

Counted as they are pulled: a range once however many rows name it, up to the last byte that is
read, padded; and a page for every owner that is read from, and for what rides in the answer. Both
sides count by this file.
"""

from __future__ import annotations

import msgspec
import numpy as np

from dataplane.memory.extents import PAGE_BYTES, padded
from dataplane.metadata.tables.references import Array, unique
from dataplane.wire.records import U8


class PullCredit(msgspec.Struct, frozen=True):
    """The peer at `address` claims. most_bytes: what it can have pulled at once, 0 where nothing
    bounds that. fields: what it fetches; None: all."""

    address: str
    most_bytes: int = 0
    fields: list[str] | None = None


def pulled_per_row(rows: Array, records: Array, count: int) -> Array:
    """Bytes of each of `count` rows (i8); what several need is the first one's.

    records: VALUE records that lie elsewhere; rows: which row each belongs to.
    """
    result = np.zeros(count, np.int64)
    order = np.argsort(rows, kind="stable")
    rows, records = rows[order], records[order]
    for owner in unique(records["owner"]):
        mine = records["owner"] == owner
        of = records[mine]
        keys = of["generation"].astype(U8) << np.uint64(32) | of["range"]
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        needed = np.zeros(len(first), U8)
        np.maximum.at(needed, inverse, of["nbytes"] + of["delta"])
        np.add.at(result, rows[mine][first], padded(needed).astype(np.int64))
    return result


def rounding(records: Array) -> int:
    """What is added for whole pages: one for every owner that is read from."""
    return PAGE_BYTES * (len(unique(records["owner"])) + 1)
