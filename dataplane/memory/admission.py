"""Admission classes: how much of the arena each kind of writer may use.

From the first to be refused: opening new groups, continuing groups, pulls. Work in flight must be
able to finish, or a full arena never empties. Each class has a guaranteed quota. A class may borrow
unused quota of lower classes, never of higher ones. Every class may evict pulled copies. The
classes decide how much a writer gets, and the allocator decides where.
"""

from __future__ import annotations

from enum import IntEnum

from dataplane.errors import ValueTooLarge, sized
from dataplane.memory.extents import page_down, page_up


class Admission(IntEnum):
    """The classes of reservations. A class ranks above another one if it is admitted when the
    other is not."""

    OPEN = 0
    CONTINUE = 1
    PULL = 2


QuotaShares = tuple[float, float, float]
"""The share of an arena that each class is guaranteed."""
DEFAULT_SHARES: QuotaShares = (0.60, 0.25, 0.15)

_PURPOSE = ("new groups", "existing groups", "pulls from other hosts and the spill file")


class Quotas:
    """The quotas of the classes, and the bytes that each class uses, granted or live."""

    def __init__(self, size_bytes: int, shares: QuotaShares = DEFAULT_SHARES) -> None:
        self.size_bytes = size_bytes
        self.guaranteed = tuple(page_down(int(size_bytes * share)) for share in shares)
        self.caps = tuple(
            size_bytes - sum(self.guaranteed[admission + 1 :]) for admission in Admission
        )
        """the most that each class may use: all but the guarantees of higher classes"""
        self.used = [0, 0, 0]

    def __repr__(self) -> str:
        return f"<Quotas used={self.used} caps={list(self.caps)}>"

    def room(self, admission: int) -> int:
        """The free bytes, less the guarantees that higher classes have not used yet."""
        return max(0, self.balance(admission))

    def balance(self, admission: int) -> int:
        """Like `room`, but below 0 if lower classes use guarantees of higher ones."""
        reserved = sum(
            max(0, self.guaranteed[higher] - self.used[higher])
            for higher in range(admission + 1, len(self.used))
        )
        return self.size_bytes - sum(self.used) - reserved

    def charge(self, admission: int, nbytes: int) -> None:
        """Add bytes to a class. Negative: bytes that it no longer uses."""
        self.used[admission] += nbytes
        assert self.used[admission] >= 0, (admission, nbytes)

    def check_unit(self, admission: int, nbytes: int) -> None:
        """Raise ValueTooLarge if one row or one group's part can never get its space."""
        needed, cap = page_up(nbytes), self.caps[admission]
        if needed > cap:
            raise ValueTooLarge(
                f"a single row or group in this call needs {sized(needed)} at once, "
                f"but {_PURPOSE[admission]} may use at most {sized(cap)} of this host's "
                f"{sized(self.size_bytes)} arena: split the group across several put() calls, use "
                "smaller rows, or give the peer a larger arena (--arena, DATAPLANE_ARENA)",
                needed_bytes=needed,
                cap_bytes=cap,
                arena_bytes=self.size_bytes,
                admission=Admission(admission).name.lower(),
            )
