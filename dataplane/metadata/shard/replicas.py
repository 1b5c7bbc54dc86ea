"""Replicas of values: which chunks of other peers the rows use, and where their local copies are.

Sans-I/O. References are counted, so a copy is freed with the last row that needs it. A chunk
without a copy is `missing` until one is created.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dataplane.metadata.tables.incoming import check_owners
from dataplane.wire.checkpoint import Restore
from dataplane.wire.journal import Given, LogRecord
from dataplane.wire.messages import Finish, Put
from dataplane.wire.packed import U8, Array
from dataplane.wire.tables import INLINE, Chunk, Owner


@dataclass(slots=True)
class _Copy:
    nbytes: int
    refs: int = 0
    local: int | None = None


class Replicas:
    """The replicas of one partition. Local chunks have one reference each."""

    def __init__(self) -> None:
        self._known: dict[Owner, dict[int, _Copy]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def __repr__(self) -> str:
        return f"<Replicas of {len(self)} chunks of {len(self._known)} peers>"

    def note(self, owner: Owner, chunks: Array, nbytes: Array) -> bool:
        """Add a reference to each of these chunks of an owner, with these sizes (u8). Return
        whether all have copies. An empty chunk gets a copy of one byte, because a
        copy needs an extent."""
        known, there = self._known.setdefault(owner, {}), True
        for id_, size in zip(chunks.tolist(), nbytes.tolist(), strict=True):
            copy = known.setdefault(id_, _Copy(max(size, 1)))
            copy.refs += 1
            there &= copy.local is not None
        return there

    def freed(self, owner: Owner, chunks: Array, counts: Array) -> Array:
        """Remove references. Return the local chunks that are no longer needed."""
        known = self._known.get(owner, {})
        spare = []
        for id_, count in zip(chunks.tolist(), counts.tolist(), strict=True):
            copy = known.get(id_)
            if copy is None:
                continue
            copy.refs -= count
            if copy.refs <= 0:
                del known[id_]
                spare.append(copy.local)
        return _numbers(spare)

    def missing(self, owner: Owner, among: Array | None = None) -> tuple[Array, Array]:
        """Return numbers and sizes (u8) of the chunks without a copy. among: only these chunks."""
        known = self._known.get(owner, {})
        asked = known if among is None else dict.fromkeys(among.tolist())
        found = {id_: known[id_] for id_ in asked if id_ in known and known[id_].local is None}
        return _numbers(found), np.array([copy.nbytes for copy in found.values()], U8)

    def brought(self, owner: Owner, chunks: Array, local: Array) -> Array:
        """Add copies. Return those that are not needed."""
        known = self._known.get(owner, {})
        spare = []
        for id_, place in zip(chunks.tolist(), local.tolist(), strict=True):
            copy = known.get(id_)
            if copy is None or copy.local is not None:
                spare.append(place)
            else:
                copy.local = place
        return _numbers(spare)

    def take(self, owner: Owner) -> tuple[Array, Array]:
        """Forget an owner that is gone. Return its chunks, and the copies of them here."""
        held = self._held(owner)
        self._known.pop(owner, None)
        return _numbers(held), _numbers(copy.local for copy in held.values())

    def held(self, owner: Owner) -> tuple[Array, Array]:
        """The copies of an owner's chunks, and their sizes (u8)."""
        held = self._held(owner).values()
        return _numbers(copy.local for copy in held), np.array([copy.nbytes for copy in held], U8)

    def _held(self, owner: Owner) -> dict[int, _Copy]:
        known = self._known.get(owner, {})
        return {id_: copy for id_, copy in known.items() if copy.local is not None}

    def clear(self) -> Array:
        """Remove and return all local chunks."""
        local = [copy.local for known in self._known.values() for copy in known.values()]
        self._known.clear()
        return _numbers(local)

    @property
    def owners(self) -> list[Owner]:
        return [owner for owner, known in self._known.items() if known]


def _numbers(found: Iterable[int | None]) -> Array:
    return np.array([one for one in found if one is not None], U8)


Named = tuple[Owner, Array, Array]
"""Chunks of an owner: their numbers and sizes, u8 each."""


def named_by(record: LogRecord) -> list[Named]:
    """The chunks that a record or a message names. It holds one reference to each."""
    if not isinstance(record, Given | Finish | Restore | Put):
        return []
    check_owners(record.values)
    by_owner: dict[Owner, list[Chunk]] = {}
    for chunk in record.values.chunks:
        by_owner.setdefault(record.values.owners[chunk.owner], []).append(chunk)
    by_owner.pop(INLINE, None)
    return [
        (
            owner,
            _numbers(chunk.number for chunk in chunks),
            np.array([chunk.nbytes for chunk in chunks], U8),
        )
        for owner, chunks in by_owner.items()
    ]
