"""Values that lie in the arena, or go inline, and wait for the message that commits them.

Their records point into two columns of that message: the ranges that were written, then those that
are shared with earlier values; those of inline values, whose owner is 1, into its bytes. Joining
keeps the records right. Pure columns, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client.write.parcel import Cells, Parcel
from dataplane.wire.limits import INLINE_ALIGNMENT_BYTES
from dataplane.wire.records import DIGEST, EXTENT, RANGE, U4, VALUE, column
from dataplane.wire.tables import Column, Spec

Records = npt.NDArray[Any]
_FEW_SPECS = 64
_NO_EXTENTS, _NO_RANGES = np.zeros(0, EXTENT), np.zeros(0, RANGE)
_NO_DIGESTS, _NO_INDEX = np.zeros(0, DIGEST), np.zeros(0, U4)
Index = npt.NDArray[np.intp]


def _shift(records: Records, ranges: Records, specs: int, inline: int) -> Records:
    if not len(records):
        return records
    shifted = records.copy()
    mine = records["owner"] == 1
    if len(ranges):
        shifted["range"][~mine] = ranges[records["range"][~mine]]
    if inline:
        shifted["range"][mine] += U4.type(inline)
    shifted["spec"] += np.uint32(specs)
    return shifted


def _respecified(records: Records, specs: Records) -> Records:
    changed = records.copy()
    changed["spec"] = specs[records["spec"]]
    return changed


class Written(msgspec.Struct, frozen=True, eq=False):
    """Columns of some rows and where their bytes lie. `ranges`: EXTENT, `shared`: RANGE records.

    inline: the bytes of those that are to live in the shard, each padded to 8."""

    columns: list[Column]
    specs: list[Spec]
    ranges: Records = _NO_EXTENTS
    shared: Records = _NO_RANGES
    pin: int = 0
    digests: Records = _NO_DIGESTS
    digest_index: Records = _NO_INDEX
    inline: bytes = b""

    @property
    def nbytes(self) -> int:
        """What was written into the arena."""
        return int(np.add.reduce(self.ranges["length"])) if len(self.ranges) else 0

    @property
    def copied_bytes(self) -> int:
        """What was copied, into the arena or the message: not what is shared with other values."""
        return self.nbytes + len(self.inline)

    @property
    def fields(self) -> list[str]:
        return [c.field for c in self.columns]

    @property
    def cells(self) -> list[Cells]:
        """The columns, to be looked into."""
        return [
            Cells(
                c.field,
                column(c.values, VALUE),
                column(c.leaf_counts, U4) if c.leaf_counts else None,
                column(c.leaves, VALUE),
            )
            for c in self.columns
        ]

    def take(self, rows: Index) -> tuple[Written, Records]:
        """Only these rows; and the written ranges that no value of theirs uses (EXTENT)."""
        cells = [c.take(rows) for c in self.cells]
        used = np.unique(np.concatenate([_ranges(r) for c in cells for r in (c.values, c.leaves)]))
        own = used[used < len(self.ranges)]
        shared = used[used >= len(self.ranges)]
        renumber = np.zeros(len(self.ranges) + len(self.shared), U4)
        renumber[used] = np.arange(len(used), dtype=U4)
        kept = np.isin(self.digest_index, own)
        inline = _Inline()

        def move(records: Records) -> Records:
            moved = _shift(records, renumber, 0, 0)
            inline.add(moved, records["owner"] == 1, lambda at, n: self.inline[at : at + n])
            return moved

        return msgspec.structs.replace(
            self,
            columns=[c.mapped(move).wire() for c in cells],
            ranges=self.ranges[own],
            shared=self.shared[shared - len(self.ranges)],
            digests=self.digests[kept],
            digest_index=renumber[self.digest_index[kept]],
            inline=inline.joined,
        ), np.delete(self.ranges, own)

    def divide(
        self, rows: Index, read: Callable[[int, int], Records]
    ) -> tuple[Written, Written, bool]:
        """Of these rows, and of the others. What lies in a range that both have values in goes with
        the first as a copy, inline, since a range is named by one message only; then it is to be
        `landed`. read: bytes of the arena."""
        n = len(self.cells[0].values)
        others = np.setdiff1d(np.arange(n, dtype=np.intp), rows)
        (first, _), (second, _) = self.take(rows), self.take(others)
        both = np.isin(first.ranges["offset"], second.ranges["offset"])
        if not both.any():
            return first, second, False
        inline, offsets = _Inline(first.inline), first.ranges["offset"].astype(np.int64)
        stays = ~both
        numbers = np.append(np.cumsum(stays) - stays, stays.sum() + np.arange(len(first.shared)))
        renumber: Records = numbers.astype(U4)
        copied = np.append(both, np.zeros(len(first.shared), bool))

        def move(records: Records) -> Records:
            mine = (records["owner"] == 0) & copied[np.minimum(records["range"], len(copied) - 1)]
            moved = records.copy()
            where = offsets[np.minimum(records["range"], len(offsets) - 1)] + records["delta"]
            moved["range"][mine] = 0
            moved = _shift(moved, renumber, 0, 0)
            moved["owner"][mine], moved["delta"][mine] = 1, 0
            inline.place(moved, mine, where, lambda at, n: read(at, n).tobytes())
            return moved

        columns = [c.mapped(move).wire() for c in first.cells]
        return (
            msgspec.structs.replace(
                first, columns=columns, ranges=first.ranges[stays], inline=inline.joined
            ),
            second,
            True,
        )


class _Inline:
    """Inline bytes that are put together anew."""

    def __init__(self, before: bytes = b"") -> None:
        self._parts, self._size = [before], len(before)

    @property
    def joined(self) -> bytes:
        return b"".join(self._parts)

    def add(self, records: Records, mine: Records, read: Callable[[int, int], bytes]) -> None:
        """Those of these records, which say where they start until now."""
        self.place(records, mine, records["range"].astype(np.int64), read)

    def place(
        self, records: Records, mine: Records, where: Records, read: Callable[[int, int], bytes]
    ) -> None:
        """As `add`, of values that start at `where`."""
        starts = []
        for at, nbytes in zip(where[mine].tolist(), records["nbytes"][mine].tolist(), strict=True):
            starts.append(self._size)
            part = read(at, nbytes) if nbytes else b""
            self._parts += (part, bytes(-nbytes % INLINE_ALIGNMENT_BYTES))
            self._size += nbytes + -nbytes % INLINE_ALIGNMENT_BYTES
        records["range"][mine] = starts


def _ranges(records: Records) -> Records:
    found: Records = records["range"][records["owner"] == 0]
    return found


def beside(parts: list[Written]) -> Written:
    """Different fields of the same rows in one message."""
    if len(parts) == 1:
        return parts[0]
    columns: list[Column] = []
    specs: list[Spec] = []
    inline = 0
    for part, renumber in zip(parts, _renumberings(parts), strict=True):
        shift = partial(_shift, ranges=renumber, specs=len(specs), inline=inline)
        columns += [c.mapped(shift).wire() for c in part.cells]
        specs += part.specs
        inline += len(part.inline)
    return _joined(parts, columns, specs)


def written_of(
    parcel: Parcel,
    ranges: Records,
    shared: Records | None = None,
    pin: int = 0,
    inline: bytes = b"",
) -> Written:
    """A parcel in the arena as the parts of a message, with no more specs than it uses."""
    cells, specs = parcel.cells, parcel.specs
    if len(specs) > _FEW_SPECS:
        used = np.unique(np.concatenate([r["spec"] for c in cells for r in (c.values, c.leaves)]))
        renumber = np.zeros(len(specs), U4)
        renumber[used] = np.arange(len(used), dtype=U4)
        cells = [c.mapped(partial(_respecified, specs=renumber)) for c in cells]
        specs = [specs[i] for i in used.tolist()]
    shared = _NO_RANGES if shared is None else shared
    columns = [c.wire() for c in cells]
    return Written(
        columns, specs, ranges, shared, pin, parcel.digests, parcel.digest_ranges, inline
    )


def _renumberings(parts: list[Written]) -> list[Records]:
    """Per part, the index in the joined message of each of its ranges, own and shared."""
    own, shared = 0, sum(len(p.ranges) for p in parts)
    result = []
    for part in parts:
        here = np.arange(own, own + len(part.ranges), dtype=U4)
        there = np.arange(shared, shared + len(part.shared), dtype=U4)
        result.append(np.concatenate([here, there]))
        own += len(part.ranges)
        shared += len(part.shared)
    return result


def _joined(parts: list[Written], columns: list[Column], specs: list[Spec]) -> Written:
    offsets = np.cumsum([0] + [len(p.ranges) for p in parts[:-1]])
    indexes = [p.digest_index + np.uint32(o) for p, o in zip(parts, offsets.tolist(), strict=True)]
    return Written(
        columns,
        specs,
        np.concatenate([p.ranges for p in parts]),
        np.concatenate([p.shared for p in parts]),
        max(p.pin for p in parts),
        np.concatenate([p.digests for p in parts]),
        np.concatenate(indexes).astype(U4),
        b"".join(p.inline for p in parts),
    )
