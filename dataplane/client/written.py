"""Values that lie in the arena, or ride, and wait for the message that commits them.

Their records point into two columns of that message: the ranges that were written, then those that
are shared with earlier values. Joining keeps the records right. Pure columns, no I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.client.parcel import Parcel
from dataplane.memory.extents import padded
from dataplane.wire.limits import CARRIED
from dataplane.wire.records import DIGEST, EXTENT, RANGE, U4, VALUE
from dataplane.wire.tables import Column, Spec

Records = npt.NDArray[Any]
_FEW_SPECS = 64
_NO_RANGES = np.zeros(0, RANGE)
Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Cells:
    """One field of the rows: VALUE records, and those of array leaves where rows have any."""

    field: str
    values: Records
    leaf_counts: Records | None = None
    leaves: Records = dataclasses.field(default_factory=lambda: np.zeros(0, VALUE))

    def wire(self) -> Column:
        counts = b"" if self.leaf_counts is None else self.leaf_counts.tobytes()
        return Column(self.field, self.values.tobytes(), counts, self.leaves.tobytes())

    def shifted(self, ranges: Records, specs: int) -> Cells:
        """The same cells where ranges are renumbered and specs come behind `specs` others."""
        return Cells(
            self.field,
            _shift(self.values, ranges, specs),
            self.leaf_counts,
            _shift(self.leaves, ranges, specs),
        )

    def respecified(self, specs: Records) -> Cells:
        """The same cells where specs are renumbered."""
        values, leaves = self.values.copy(), self.leaves.copy()
        values["spec"], leaves["spec"] = specs[values["spec"]], specs[leaves["spec"]]
        return Cells(self.field, values, self.leaf_counts, leaves)

    def take(self, rows: Index) -> Cells:
        """Only the cells of these rows."""
        if self.leaf_counts is None:
            return Cells(self.field, self.values[rows])
        counts = self.leaf_counts
        starts = np.cumsum(counts) - counts
        # Leaves of the taken rows, in the order of the rows.
        taken = [np.arange(starts[r], starts[r] + counts[r]) for r in rows.tolist()]
        at = np.concatenate(taken) if taken else np.zeros(0, np.intp)
        return Cells(self.field, self.values[rows], counts[rows], self.leaves[at.astype(np.intp)])


def _shift(records: Records, ranges: Records, specs: int) -> Records:
    if not len(records):
        return records
    shifted = records.copy()
    if len(ranges):
        shifted["range"] = ranges[records["range"]]
    shifted["spec"] += np.uint32(specs)
    return shifted


@dataclass(frozen=True, slots=True)
class Written:
    """Cells of some rows and where their bytes lie. `ranges`: EXTENT, `shared`: RANGE records.

    carried: the bytes of those ranges whose offset is CARRIED, in order, each padded to 64."""

    cells: list[Cells]
    specs: list[Spec]
    ranges: Records = dataclasses.field(default_factory=lambda: np.zeros(0, EXTENT))
    shared: Records = dataclasses.field(default_factory=lambda: np.zeros(0, RANGE))
    pin: int = 0
    digests: Records = dataclasses.field(default_factory=lambda: np.zeros(0, DIGEST))
    digest_index: Records = dataclasses.field(default_factory=lambda: np.zeros(0, U4))
    carried: bytes = b""

    @property
    def extents(self) -> Records:
        """Those of `ranges` that are in the arena."""
        return self.ranges[self.ranges["offset"] != CARRIED] if self.carried else self.ranges

    @property
    def nbytes(self) -> int:
        """What was written into the arena."""
        return int(self.extents["length"].sum())

    @property
    def copied_bytes(self) -> int:
        """What was copied, into the arena or the message: not what is shared with other values."""
        return int(self.ranges["length"].sum())

    @property
    def fields(self) -> list[str]:
        return [c.field for c in self.cells]

    def columns(self) -> list[Column]:
        return [c.wire() for c in self.cells]

    def take(self, rows: Index) -> tuple[Written, Records]:
        """Only these rows; and the written ranges that no value of theirs uses (EXTENT)."""
        cells = [c.take(rows) for c in self.cells]
        used = np.unique(np.concatenate([r["range"] for c in cells for r in (c.values, c.leaves)]))
        own = used[used < len(self.ranges)]
        shared = used[used >= len(self.ranges)]
        renumber = np.zeros(len(self.ranges) + len(self.shared), U4)
        renumber[used] = np.arange(len(used), dtype=U4)
        unused = np.delete(self.ranges, own)
        if self.carried:
            unused = unused[unused["offset"] != CARRIED]
        kept = np.isin(self.digest_index, own)
        return replace(
            self,
            cells=[c.shifted(renumber, 0) for c in cells],
            ranges=self.ranges[own],
            shared=self.shared[shared - len(self.ranges)],
            digests=self.digests[kept],
            digest_index=renumber[self.digest_index[kept]],
            carried=b"".join(part for index, part in self.riding() if index in own),
        ), unused

    def divide(self, rows: Index, read: Callable[[int, int], Records]) -> tuple[Written, Written]:
        """Of these rows, and of the others. What both have values in goes with the first as a copy,
        which rides, since a range is named by one message only. read: bytes of the arena."""
        n = len(self.cells[0].values)
        others = np.setdiff1d(np.arange(n, dtype=np.intp), rows)
        (first, _), (second, _) = self.take(rows), self.take(others)
        both = np.isin(first.ranges["offset"], second.ranges["offset"])
        both &= first.ranges["offset"] != CARRIED
        if not both.any():
            return first, second
        own = dict(first.riding())
        parts, ranges = [], first.ranges.copy()
        for index, (offset, length) in enumerate(first.ranges.tolist()):
            if both[index]:
                part = read(offset, length).tobytes()
                own[index] = part + bytes(
                    int(padded(first.ranges["length"][index : index + 1])[0]) - length
                )
            parts.append(own.get(index, b""))
        ranges["offset"][both] = CARRIED
        return replace(first, ranges=ranges, carried=b"".join(parts)), second

    def riding(self) -> Iterator[tuple[int, bytes]]:
        """Which of `ranges` ride, and their bytes, padded."""
        at = 0
        for index in np.flatnonzero(self.ranges["offset"] == CARRIED).tolist():
            end = at + int(padded(self.ranges["length"][index : index + 1])[0])
            yield index, self.carried[at:end]
            at = end


def beside(parts: list[Written]) -> Written:
    """Different fields of the same rows in one message."""
    if len(parts) == 1:
        return parts[0]
    cells: list[Cells] = []
    specs: list[Spec] = []
    for part, renumber in zip(parts, _renumberings(parts), strict=True):
        cells += [c.shifted(renumber, len(specs)) for c in part.cells]
        specs += part.specs
    return _joined(parts, cells, specs)


def written_of(
    parcel: Parcel, ranges: Records, shared: Records | None = None, pin: int = 0
) -> Written:
    """A parcel in the arena as the parts of a message, with no more specs than it uses."""
    cells = [Cells(*c) for c in parcel.cells]
    specs = parcel.specs
    if len(specs) > _FEW_SPECS:
        used = np.unique(np.concatenate([r["spec"] for c in cells for r in (c.values, c.leaves)]))
        renumber = np.zeros(len(specs), U4)
        renumber[used] = np.arange(len(used), dtype=U4)
        cells = [c.respecified(renumber) for c in cells]
        specs = [specs[i] for i in used.tolist()]
    shared = _NO_RANGES if shared is None else shared
    return Written(cells, specs, ranges, shared, pin, parcel.digests, parcel.digest_ranges)


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


def _joined(parts: list[Written], cells: list[Cells], specs: list[Spec]) -> Written:
    offsets = np.cumsum([0] + [len(p.ranges) for p in parts[:-1]])
    indexes = [p.digest_index + np.uint32(o) for p, o in zip(parts, offsets.tolist(), strict=True)]
    return Written(
        cells,
        specs,
        np.concatenate([p.ranges for p in parts]),
        np.concatenate([p.shared for p in parts]),
        max(p.pin for p in parts),
        np.concatenate([p.digests for p in parts]),
        np.concatenate(indexes).astype(U4),
        b"".join(p.carried for p in parts),
    )
