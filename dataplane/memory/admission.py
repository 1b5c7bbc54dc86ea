"""Admission classes: how much of the arena each kind of writer may take.

Opening new groups comes before continuing ones, and that before pulls, in the order in which they
may be refused: what is in flight must be able to end, or a full arena never empties. Each class
has a guaranteed share; what nobody uses of the lower ones' may be borrowed, a higher one's never.
"""

from __future__ import annotations

from enum import IntEnum

from dataplane.errors import ValueTooLarge
from dataplane.memory.extents import page_down, page_up


class Admission(IntEnum):
    """Who asks for space; a higher class is admitted when a lower one is not any more."""

    OPEN = 0
    CONTINUE = 1
    PULL = 2


DEFAULT_SHARES = (0.60, 0.25, 0.15)

_PURPOSE = ("opening new groups", "continuing groups", "pulls from other hosts and the spill file")


class Shares:
    """Bytes in use per class (granted and live), against the class's room."""

    def __init__(
        self, size_bytes: int, shares: tuple[float, float, float] = DEFAULT_SHARES
    ) -> None:
        self.size_bytes = size_bytes
        self.guaranteed = tuple(page_down(int(size_bytes * share)) for share in shares)
        self.caps = tuple(
            size_bytes - sum(self.guaranteed[admission + 1 :]) for admission in Admission
        )
        """The most that one class may ever use: all but what higher ones are guaranteed."""
        self.used = [0, 0, 0]

    def __repr__(self) -> str:
        return f"<Shares used={self.used} caps={list(self.caps)}>"

    def room(self, admission: int) -> int:
        """What is free, less what higher classes have not yet used of their guarantees."""
        return max(0, self.balance(admission))

    def balance(self, admission: int) -> int:
        """`room`, below 0 where higher classes' guarantees are lent out."""
        reserved = sum(
            max(0, self.guaranteed[higher] - self.used[higher])
            for higher in range(admission + 1, len(self.used))
        )
        return self.size_bytes - sum(self.used) - reserved

    def charge(self, admission: int, nbytes: int) -> None:
        self.used[admission] += nbytes

    def discharge(self, admission: int, nbytes: int) -> None:
        self.used[admission] -= nbytes
        assert self.used[admission] >= 0, (admission, nbytes)

    def check_unit(self, admission: int, nbytes: int) -> None:
        """ValueTooLarge where one row or one group's part can never get its space."""
        needed, cap = page_up(nbytes), self.caps[admission]
        if needed > cap:
            raise ValueTooLarge(
                f"one row, or one group's part, needs {needed} bytes at once; {_PURPOSE[admission]}"
                f" may use {cap} of this host's arena of {self.size_bytes}: make the arena larger"
                " (--arena, DATAPLANE_ARENA) or put less at once",
                needed_bytes=needed,
                cap_bytes=cap,
                arena_bytes=self.size_bytes,
                admission=Admission(admission).name.lower(),
            )
