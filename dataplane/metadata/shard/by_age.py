"""Waiting calls in order of age. Finding the oldest takes constant time, and any call can be
added or removed."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Call(Protocol):
    since: float
    """when it was made"""

    @property
    def number(self) -> int: ...


C = TypeVar("C", bound=Call)
Age = tuple[float, int]


class ByAge(Generic[C]):
    """Calls by number. Calls of equal age are in the order in which they were added."""

    def __init__(self) -> None:
        self._calls: dict[int, C] = {}
        self._ages: dict[int, Age] = {}
        self._order: list[tuple[Age, int]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    def __iter__(self) -> Iterator[C]:
        """The oldest first."""
        return (self._calls[number] for _, number in self._order)

    @property
    def oldest(self) -> C:
        return self._calls[self._order[0][1]]

    def get(self, number: int) -> C | None:
        return self._calls.get(number)

    def add(self, call: C) -> None:
        """Add a call, or replace the one of its number: the older of the two ages counts."""
        age = call.since, next(self._arrivals)
        if call.number in self._calls:
            age = min(age, self._ages[call.number])
            call.since = age[0]
            self.remove(call.number)
        self._calls[call.number] = call
        self._ages[call.number] = age
        insort(self._order, (age, call.number))

    def remove(self, number: int) -> C | None:
        """Remove a call."""
        call = self._calls.pop(number, None)
        if call is not None:
            del self._order[self.before(number)]
            del self._ages[number]
        return call

    def before(self, number: int) -> int:
        """How many calls are older than this one."""
        return bisect_left(self._order, (self._ages[number], number))
