"""Second copies of values: which ranges of another peer are named here, and where their copies lie.

Sans-I/O. References are counted as they come and go, so that a copy goes with the last value that
needed it. What has no copy yet, or too short a one, is `missing` until somebody brought it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataplane.errors import ProtocolError
from dataplane.metadata.tables.references import Array, extents_of, ids_of, ranges_of
from dataplane.wire.checkpoint import Restore
from dataplane.wire.journal import Given, Op
from dataplane.wire.limits import ABSENT
from dataplane.wire.messages import Finish, Put
from dataplane.wire.records import RANGE, U8, VALUE, column
from dataplane.wire.tables import INLINE, Owner


@dataclass(slots=True)
class _Copy:
    refs: int = 0
    reach: int = 0
    held: int = 0
    """bytes that the copy has; 0: there is none"""
    local: tuple[int, int] = (0, 0)


class Copies:
    """Of one partition. Local ranges are RANGE records, each held once by whoever brought it."""

    def __init__(self) -> None:
        self._known: dict[Owner, dict[int, _Copy]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def __repr__(self) -> str:
        return f"<Copies of {len(self)} ranges of {len(self._known)} peers>"

    def note(self, owner: Owner, ranges: Array, counts: Array, reach: Array) -> bool:
        """More references to ranges of an owner, `reach` bytes into each. Whether there are copies
        of all of these. Where empty values reach nowhere a byte is copied: what is named has to
        lie somewhere."""
        known, there = self._known.setdefault(owner, {}), True
        columns = (ids_of(ranges).tolist(), counts.tolist(), reach.tolist())
        for id_, count, nbytes in zip(*columns, strict=True):
            copy = known.setdefault(id_, _Copy())
            copy.refs += count
            copy.reach = max(copy.reach, nbytes, 1)
            there &= copy.held >= copy.reach
        return there

    def freed(self, owner: Owner, ranges: Array, counts: Array) -> Array:
        """References went. Returns the local ranges that nobody needs any more."""
        known = self._known.get(owner, {})
        spare = []
        for id_, count in zip(ids_of(ranges).tolist(), counts.tolist(), strict=True):
            copy = known.get(id_)
            if copy is None:
                continue
            copy.refs -= count
            if copy.refs <= 0:
                del known[id_]
                spare += [copy.local] if copy.held else []
        return np.array(spare, RANGE)

    def missing(self, owner: Owner, among: Array | None = None) -> tuple[Array, Array]:
        """(RANGE, u8 how many bytes of each) that have no copy, or too short a one; of all, or of
        those `among` these."""
        known = self._known.get(owner, {})
        asked = known if among is None else dict.fromkeys(ids_of(among).tolist())
        found = [(id_, known[id_]) for id_ in asked if id_ in known]
        short = [(id_, copy) for id_, copy in found if copy.held < copy.reach]
        ranges = ranges_of(np.array([id_ for id_, _ in short], U8))
        return ranges, np.array([copy.reach for _, copy in short], U8)

    def brought(self, owner: Owner, ranges: Array, nbytes: Array, local: Array) -> Array:
        """Copies of these are here. Returns local ranges that nobody needs, old or new."""
        known = self._known.get(owner, {})
        spare = []
        columns = (ids_of(ranges).tolist(), nbytes.tolist(), local.tolist())
        for id_, size, place in zip(*columns, strict=True):
            copy = known.get(id_)
            if copy is None or copy.held >= size:
                spare.append(place)
                continue
            if copy.held:
                spare.append(copy.local)
            copy.held, copy.local = size, place
        return np.array(spare, RANGE)

    def take(self, owner: Owner) -> tuple[Array, Array, Array]:
        """The owner is no more, and is forgotten: see `held`."""
        taken = self.held(owner)
        self._known.pop(owner, None)
        return taken

    def held(self, owner: Owner) -> tuple[Array, Array, Array]:
        """(An owner's ranges, u8 how many bytes of each there is a copy of, those copies.)"""
        held = {id_: c for id_, c in self._known.get(owner, {}).items() if c.held}
        nbytes = np.array([copy.held for copy in held.values()], U8)
        local = np.array([copy.local for copy in held.values()], RANGE)
        return ranges_of(np.array(list(held), U8)), nbytes, local

    def clear(self) -> Array:
        """All local ranges, which nobody needs any more."""
        held = [c.local for known in self._known.values() for c in known.values() if c.held]
        self._known.clear()
        return np.array(held, RANGE)

    @property
    def owners(self) -> list[Owner]:
        return [owner for owner, known in self._known.items() if known]


Named = tuple[Owner, Array, Array, Array]
"""Of an owner: RANGE, how many values name each, and how many bytes of it they reach."""


def named_by(op: Op) -> list[Named]:
    """What an operation writes, or a message asks to."""
    if not isinstance(op, Given | Finish | Restore | Put) or not op.columns:
        return []
    raw = b"".join(part for one in op.columns for part in (one.values, one.leaves))
    records = column(raw, VALUE)
    found = []
    for number in np.unique(records[records["owner"] != ABSENT]["owner"]).tolist():
        if number >= len(op.owners):
            raise ProtocolError(
                f"a value refers to owner {number}, but the record has only {len(op.owners)} owners"
            )
        if op.owners[number] != INLINE:
            mine = records[records["owner"] == number]
            found.append((op.owners[number], *extents_of(mine)))
    return found
