"""The leases of a store: which rows of which stage somebody holds, since when, by which claim.

A lease names rows by slot and incarnation, so that a slot which was freed and used again is not
taken for the row that was leased. Positions in a lease never change: what is finished is marked.
A hard limit is kept by the holder's peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dataplane.metadata.columns import Array
from dataplane.metadata.stages import Stage

MAX_FINISHED = 16_384
"""Finished leases that are known by number, for whoever asks again because a peer died before it
answered."""


@dataclass(slots=True, eq=False)
class Lease:
    """`left`: which of the rows are not finished yet. claim: the number of the one that was met, by
    which it is answered again; 0: none."""

    number: int
    stage: Stage
    unit: str
    slots: Array
    incarnations: Array
    left: Array
    holder: int
    started: float
    claim: int = 0


class Leases:
    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._held: dict[int, set[int]] = {}
        self._by_claim: dict[int, Lease] = {}
        self._finished: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def add(self, lease: Lease) -> None:
        self._leases[lease.number] = lease
        self._held.setdefault(lease.holder, set()).add(lease.number)
        if lease.claim:
            self._by_claim[lease.claim] = lease

    def get(self, number: int) -> Lease | None:
        return self._leases.get(number)

    def of_claim(self, number: int) -> Lease | None:
        """What a claim was met with, as long as it is not finished."""
        return self._by_claim.get(number)

    def finish(self, lease: Lease) -> None:
        """Its holder is done with all of it."""
        self.end(lease)
        self.remember([lease.number])

    def remember(self, numbers: Iterable[int]) -> None:
        """Leases that were finished; the oldest are forgotten."""
        self._finished.update(dict.fromkeys(numbers))
        while len(self._finished) > MAX_FINISHED:
            del self._finished[next(iter(self._finished))]

    @property
    def finished(self) -> list[int]:
        """Those that are remembered, oldest first."""
        return list(self._finished)

    def was_finished(self, number: int) -> bool:
        return number in self._finished

    def end(self, lease: Lease) -> None:
        del self._leases[lease.number]
        self._by_claim.pop(lease.claim, None)
        held = self._held[lease.holder]
        held.discard(lease.number)
        if not held:
            del self._held[lease.holder]

    def of(self, holder: int) -> list[Lease]:
        """A holder's leases, oldest first."""
        return [self._leases[number] for number in sorted(self._held.get(holder, ()))]
