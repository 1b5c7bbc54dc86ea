"""How many bytes of this arena a partition's values may take: budgets, and what they have used.

Runs in the peer, under `space`, without I/O. A budget bounds what opens: what continues a group
that is there, and what is added to its rows, counts but is let in, or a full partition never
empties. A promise stands between a reservation and the put that uses it, and ends by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dataplane.errors import ValueTooLarge
from dataplane.memory.extents import Bytes

PROMISE_S = 10.0
"""A writer that reserved and has not put by then is not waited for: its put waits itself."""


@dataclass(slots=True)
class Budget:
    """The account of one partition in one generation."""

    limit_bytes: int
    used_bytes: int = 0
    closed: bool = False
    _promised: dict[int, tuple[int, float]] = field(default_factory=dict)

    def left_bytes(self, now: float) -> int:
        """What may still be promised."""
        for holder in [h for h, (_, until) in self._promised.items() if until <= now]:
            del self._promised[holder]
        promised = sum(nbytes for nbytes, _ in self._promised.values())
        return max(0, self.limit_bytes - self.used_bytes - promised)

    def has_room(self, nbytes: int) -> bool:
        """Whether so much may open now, whatever was promised to others."""
        return self.used_bytes + nbytes <= self.limit_bytes

    def promise(self, holder: int, nbytes: int, now: float) -> None:
        before, _ = self._promised.get(holder, (0, now))
        self._promised[holder] = before + nbytes, now + PROMISE_S

    def redeem(self, holder: int, nbytes: int) -> None:
        """The holder put so much, or will not."""
        promised, until = self._promised.pop(holder, (0, 0.0))
        if promised > nbytes:
            self._promised[holder] = promised - nbytes, until

    def check_unit(self, nbytes: int) -> None:
        """ValueTooLarge where one row or one group's part is more than all of it."""
        if nbytes > self.limit_bytes:
            raise ValueTooLarge(
                f"one row, or one group's part, has {nbytes} bytes, and its partition may have "
                f"{self.limit_bytes} on one host: declare it with a larger host_bytes=, or put "
                "less at once",
                needed_bytes=nbytes,
                cap_bytes=self.limit_bytes,
            )


class Budgets:
    """Budgets by account, a number that is never used again; 0 is no account."""

    def __init__(self) -> None:
        self._accounts: dict[int, Budget] = {}
        self._last = 0

    def __repr__(self) -> str:
        used = {number: f"{b.used_bytes}/{b.limit_bytes}" for number, b in self._accounts.items()}
        return f"<Budgets {used}>"

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, account: int) -> bool:
        return account in self._accounts

    def __getitem__(self, account: int) -> Budget:
        return self._accounts[account]

    def open(self, limit_bytes: int) -> int:
        """A new account."""
        self._last += 1
        self._accounts[self._last] = Budget(limit_bytes)
        return self._last

    def close(self, account: int) -> None:
        """Its partition is gone; the account goes with its last range."""
        budget = self._accounts.get(account)
        if budget is not None:
            budget.closed = True
            self._forget(account, budget)

    def charge(self, account: int, nbytes: int) -> int:
        """The account that new ranges count for: 0 where its partition has gone meanwhile."""
        if account not in self._accounts:
            return 0
        self._accounts[account].used_bytes += nbytes
        return account

    def discharge(self, accounts: npt.NDArray[np.uint32], lengths: Bytes) -> None:
        """Ranges that were charged to these accounts left the arena."""
        if not self._accounts or not np.count_nonzero(accounts):
            return
        for account in np.unique(accounts[accounts > 0]).tolist():
            budget = self._accounts[account]
            budget.used_bytes -= int(lengths[accounts == account].sum())
            assert budget.used_bytes >= 0, budget
            self._forget(account, budget)

    def _forget(self, account: int, budget: Budget) -> None:
        if budget.closed and not budget.used_bytes:
            del self._accounts[account]
