"""The specs and owners of a store, each kept once and numbered.

Records that come in carry the numbers of their message; they are rewritten to the store's. Records
that go out are rewritten to the numbers of a table that holds only what they use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.errors import LimitExceeded
from dataplane.memory.extents import every, some
from dataplane.metadata.tables.columns import Array
from dataplane.metadata.tables.small_values import HERE, Arriving
from dataplane.wire.limits import ABSENT
from dataplane.wire.tables import INLINE, Owner, Spec

_COMPACT_ABOVE = 4_096


@dataclass(frozen=True, slots=True)
class Numbers:
    """The store's numbers of one message's specs and owners. arriving: where its small values go,
    if it has some; each record that is renumbered is a reference to one."""

    specs: list[int]
    owners: list[int]
    arriving: Arriving | None = None

    def applied_to_one(self, record: tuple[int, ...]) -> tuple[int, ...]:
        """One record that is not ABSENT, as a tuple."""
        range_, generation, nbytes, spec, delta, owner = record
        if self.owners[owner] == HERE and self.arriving is not None:
            range_, generation = self.arriving.enter_one(range_)
        return range_, generation, nbytes, self.specs[spec], delta, self.owners[owner]

    def applied(self, records: Array) -> Array:
        """A copy of VALUE records under the store's numbers; ABSENT stays."""
        result = records.copy()
        # absent records may carry any spec, so the index is bounded before it is used
        if len(self.specs) == 1:
            result["spec"] = self.specs[0]
        elif len(self.specs):
            result["spec"] = np.array(self.specs).take(records["spec"], mode="clip")
        if len(self.owners):
            owner = np.array(self.owners).take(records["owner"], mode="clip")
            result["owner"] = np.where(records["owner"] == ABSENT, ABSENT, owner)
        if self.arriving is not None:
            here = result["owner"] == HERE
            if every(here):
                self.arriving.enter(result)
            elif some(here):
                mine = result[here]
                self.arriving.enter(mine)
                result[here] = mine
        return result


class SpecsAndOwners:
    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self.owners: list[Owner] = [INLINE]
        self._spec_numbers: dict[Spec, int] = {}
        self._owner_numbers: dict[Owner, int] = {INLINE: HERE}
        self._compact_above = _COMPACT_ABOVE

    @property
    def crowded(self) -> bool:
        """Whether `compact` is due: shapes of long-gone rows must not pile up."""
        return len(self.specs) > self._compact_above

    def owner_number(self, owner: Owner) -> int | None:
        return self._owner_numbers.get(owner)

    def intern(
        self, specs: Sequence[Spec], owners: Sequence[Owner], arriving: Arriving | None = None
    ) -> Numbers:
        for spec in specs:
            if spec not in self._spec_numbers:
                self._spec_numbers[spec] = len(self.specs)
                self.specs.append(spec)
        for owner in owners:
            if owner not in self._owner_numbers:
                if len(self.owners) >= ABSENT:
                    raise LimitExceeded("too many peers have held values of this partition")
                self._owner_numbers[owner] = len(self.owners)
                self.owners.append(owner)
        return Numbers(
            [self._spec_numbers[spec] for spec in specs],
            [self._owner_numbers[owner] for owner in owners],
            arriving,
        )

    def outgoing(self, records: Array) -> tuple[list[Spec], list[Owner]]:
        """Renumber records in place to the specs and owners that they use, which are returned."""
        specs = self._used([records["spec"]], len(self.specs))
        owners = self._used([records["owner"]], len(self.owners))
        spec_map = np.zeros(len(self.specs) + 1, np.uint32)
        spec_map[specs] = np.arange(len(specs))
        owner_map = np.full(len(self.owners) + 1, ABSENT, np.uint16)
        owner_map[owners] = np.arange(len(owners))
        records["spec"] = spec_map.take(records["spec"], mode="clip")
        records["owner"] = owner_map.take(records["owner"], mode="clip")
        return [self.specs[i] for i in specs.tolist()], [self.owners[i] for i in owners.tolist()]

    def compact(self, stores: Sequence[Array]) -> None:
        """Forget specs that no record of these columns names, and renumber those records."""
        kept = self._used([records["spec"] for records in stores], len(self.specs))
        numbers = np.zeros(len(self.specs), np.uint32)
        numbers[kept] = np.arange(len(kept))
        for records in stores:
            records["spec"] = numbers[records["spec"]]
        self.specs = [self.specs[i] for i in kept.tolist()]
        self._spec_numbers = {spec: number for number, spec in enumerate(self.specs)}
        self._compact_above = max(_COMPACT_ABOVE, 2 * len(self.specs))

    @staticmethod
    def _used(columns: Sequence[Array], count: int) -> Array:
        """The numbers below `count` that occur; larger ones (ABSENT) are none."""
        used = np.zeros(count + 1, np.bool_)
        for numbers in columns:
            used[np.minimum(numbers, count)] = True
        return used[:count].nonzero()[0]
