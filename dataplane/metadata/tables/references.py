"""References to ranges, as VALUE records bear them: how many there are, and moving them.

A range is told by its owner, number and generation; a record that names it is one reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import ProtocolError
from dataplane.memory.extents import PAGE_BYTES, every, padded
from dataplane.wire.records import RANGE, U4, U8, VALUE
from dataplane.wire.tables import INLINE, Owner

Array = npt.NDArray[Any]

WHOLE = np.iinfo(np.uint64).max
"""Further than any range reaches."""


def ids_of(records: Array) -> Array:
    """The range that each VALUE or RANGE record names, as one u8: what it begins with."""
    ids: Array = records.view(U8).reshape(-1, records.itemsize // U8.itemsize)[:, 0]
    return ids


def ranges_of(ids: Array) -> Array:
    """RANGE records of such numbers."""
    return np.ascontiguousarray(ids).view(RANGE)


def by_owner(
    tables: Iterable[tuple[Sequence[Owner], Array]],
) -> list[tuple[Owner, Array, Array]]:
    """Per owner the different ranges (RANGE) that records name, none of them ABSENT, and how many
    name each (u4). What lives in a shard is nobody's. tables: VALUE records, and their owners."""
    ids: dict[Owner, list[Array]] = {}
    for owners, records in tables:
        named, whose = ids_of(records), records["owner"]
        for number in sorted(set(whose.tolist())):
            if owners[number] != INLINE:
                ids.setdefault(owners[number], []).append(named[whose == number])
    return [
        (owner, *_counted(these[0] if len(these) == 1 else np.concatenate(these)))
        for owner, these in ids.items()
    ]


def _counted(ids: Array) -> tuple[Array, Array]:
    """The different ones (RANGE), and how often each is there. Of one, numpy would sort it."""
    if every(ids == ids[0]):
        return ranges_of(ids[:1]), np.array([len(ids)], U4)
    different, counts = np.unique(ids, return_counts=True)
    return ranges_of(different), counts.astype(U4)


def extents_of(records: Array) -> tuple[Array, Array, Array]:
    """Different ranges of one owner (RANGE), how many records name each (u4), and how many bytes
    they reach into it (u8)."""
    ids, inverse, counts = np.unique(ids_of(records), return_inverse=True, return_counts=True)
    reach = np.zeros(len(ids), np.uint64)
    np.maximum.at(reach, inverse, records["nbytes"] + records["delta"])
    return ranges_of(ids), counts.astype(U4), reach


def far_owners(address: str, owners: Sequence[Owner]) -> list[int]:
    """Those of these owners that are other peers, by their places."""
    return [n for n, owner in enumerate(owners) if owner.peer not in (address, INLINE.peer)]


def pulled(far: Sequence[int], raw: bytes) -> int:
    """Bytes that a peer brings to itself for VALUE records, of which those of these owners are
    elsewhere. Counted as they are pulled: a range once however many rows name it, up to the last
    byte that is read, padded; and a page for every owner that is read from, and for what rides in
    the answer."""
    records, sizes = np.frombuffer(raw, VALUE), []
    for number in far:
        mine = records[records["owner"] == number]
        if len(mine):
            sizes.append(PAGE_BYTES + int(padded(extents_of(mine)[2]).sum()))
    return PAGE_BYTES + sum(sizes) if sizes else 0


class Move:
    """From ranges of one owner to as many of another.

    reach: u8 per range, how many bytes of each there are: what ends behind them stays where it is.
    counts: u4 per range, the records that `carry` has rewritten so far.
    """

    def __init__(self, ranges: Array, new_ranges: Array, reach: Array | None = None) -> None:
        if reach is None:
            reach = np.full(len(ranges), WHOLE, np.uint64)
        lengths = {len(ranges), len(new_ranges), len(reach), len(np.unique(ids_of(ranges)))}
        if len(lengths) != 1:
            raise ProtocolError(
                f"cannot move {len(ranges)} ranges to {len(new_ranges)} new ones: expected one "
                "distinct new range per old range"
            )
        self._order = np.argsort(ids_of(ranges))
        self._from = ids_of(ranges)[self._order]
        self._to = new_ranges[self._order]
        self._reach = reach[self._order]
        self.counts: Array = np.zeros(len(ranges), U4)

    def carry(self, records: Array, old: int, new: int) -> Array:
        """Rewrite VALUE records in place, where the two owners have these numbers; returns those
        that moved, as they were."""
        if not len(self._from):
            return records[:0]
        ids = ids_of(records)
        at = np.minimum(np.searchsorted(self._from, ids), len(self._from) - 1)
        there = records["delta"] + records["nbytes"] <= self._reach[at]
        hit = ((records["owner"] == old) & (self._from[at] == ids) & there).nonzero()[0]
        before: Array = records[hit]
        to = self._to[at[hit]]
        records["range"][hit], records["generation"][hit] = to["range"], to["generation"]
        records["owner"][hit] = new
        np.add.at(self.counts, self._order[at[hit]], U4.type(1))
        return before
