"""Pull credit: how many bytes a claim's peer would have to bring to itself, and how many it can.

Counted as they are pulled: a range once however many rows name it, up to the last byte that is
read, padded; and a page for every owner that is read from, and for what rides in the answer. Both
sides count by this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from dataplane.memory.extents import PAGE_BYTES, padded
from dataplane.metadata.tables.references import extents_of
from dataplane.metadata.tables.values import Values
from dataplane.wire.records import VALUE
from dataplane.wire.tables import INLINE, Owner


class PullCredit(msgspec.Struct, frozen=True):
    """The peer at `address` claims. most_bytes: what it can have pulled at once, 0 where nothing
    bounds that. fields: what it fetches; None: all."""

    address: str = ""
    most_bytes: int = 0
    fields: list[str] | None = None

    def pulled(self, values: Values) -> int:
        """Bytes that it brings to itself for these."""
        far = far_owners(self.address, values.owners)
        return pulled(far, values.blob) if far else 0


def far_owners(address: str, owners: Sequence[Owner]) -> list[int]:
    """Those of these owners that are other peers, by their places."""
    return [n for n, owner in enumerate(owners) if owner.peer not in (address, INLINE.peer)]


def pulled(far: Sequence[int], raw: bytes) -> int:
    """Bytes that a peer brings to itself for VALUE records, of which those of these owners are
    elsewhere."""
    records, sizes = np.frombuffer(raw, VALUE), []
    for number in far:
        mine = records[records["owner"] == number]
        if len(mine):
            sizes.append(PAGE_BYTES + int(padded(extents_of(mine)[2]).sum()))
    return PAGE_BYTES + sum(sizes) if sizes else 0
