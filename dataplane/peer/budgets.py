"""Who waits because of a budget: of a partition on this host (`host_bytes=`), or of one client
(`--client-bytes`).

Waiters are let in by turns, one line for each partition and each client, so that nobody waits for
another's budget. A wait ends at its deadline with who holds the bytes; one that nothing can end is
raised at once. Full budgets wait before the arena is asked: who waits here holds nothing new.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import BackPressure, ValueTooLarge
from dataplane.memory.extents import padded
from dataplane.peer.host import Entry, Host, call_deadline
from dataplane.peer.room import Units
from dataplane.peer.sessions import Session

WAIT_S = 30.0
"""How long a call without a deadline waits for its own client's views."""


@dataclass(slots=True, eq=False)
class Waiter:
    fits: Callable[[], bool]
    full: Callable[[str], BackPressure]
    let_in: asyncio.Future[None]
    is_writer: bool


class Budgets:
    """client_bytes: None for no limit."""

    def __init__(self, host: Host, client_bytes: int | None = None) -> None:
        self._host = host
        self.client_bytes = client_bytes
        self._lines: dict[tuple[str, int], deque[Waiter]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    # partitions

    def account(self, entry: Entry | None) -> int:
        """Where this host keeps what the partition has used; 0 where nothing bounds it."""
        if entry is None or not entry.definition.host_bytes:
            return 0
        if not entry.account and self._host.entries.get(entry.name) is entry:
            entry.account = self._host.space.budgets.open(entry.definition.host_bytes)
        return entry.account

    def used_bytes(self, entry: Entry) -> int | None:
        """What the partition uses here; None where nothing bounds it."""
        account = self.account(entry)
        return self._host.space.budgets[account].used_bytes if account else None

    def bounds(self, entry: Entry) -> bool:
        """Whether a reservation for this partition may have to wait here."""
        return self.client_bytes is not None or bool(entry.definition.host_bytes)

    async def before_reserving(
        self, session: Session, entry: Entry, units: Units, opens: bool, until: float
    ) -> Units:
        """The first of these units that the budgets have room for; at least one."""
        sizes = [int(padded(unit).sum()) for unit in units]
        fitting = len(units)
        if self.client_bytes is not None and units:
            fitting = await self._within_client(session, sizes, until)
        account = self.account(entry)
        if account and opens and units:
            fitting = await self._within_partition(session, entry, account, sizes[:fitting], until)
        return units[:fitting]

    async def _within_partition(
        self, session: Session, entry: Entry, account: int, sizes: list[int], until: float
    ) -> int:
        now, budget = self._host.now, self._host.space.budgets[account]
        for size in sizes:
            budget.check_unit(size)
        await self._wait(
            ("partition", account),
            lambda: sizes[0] <= budget.left_bytes(now()),
            lambda why: self._partition_full(entry, account, sizes[0], why),
            until,
        )
        fitting = max(1, _fitting(sizes, budget.left_bytes(now())))
        budget.promise(session.id, sum(sizes[:fitting]), now())
        return fitting

    def must_wait(self, entry: Entry, nbytes: int, opens: bool) -> bool:
        """Whether a put of so much has no place in its partition's budget now."""
        account = self.account(entry)
        if not account or not opens:
            return False
        line = self._lines.get(("put", account))
        return bool(line) or not self._host.space.budgets[account].has_room(nbytes)

    async def before_putting(
        self, session: Session, entry: Entry, nbytes: int, opens: bool
    ) -> None:
        """Until the budget has room for what is written already. It was promised room, unless
        that was long ago or the client had an extent left over."""
        account = self.account(entry)
        if not account or not opens:
            return
        budget = self._host.space.budgets[account]
        budget.check_unit(nbytes)
        session.waiting += 1
        try:
            await self._wait(
                ("put", account),
                lambda: budget.has_room(nbytes),
                lambda why: self._partition_full(entry, account, nbytes, why),
                self._deadline(),
            )
        finally:
            session.waiting -= 1

    def put(self, session: Session, account: int, nbytes: int) -> None:
        """So much was put, or will not be: what was promised for it is used."""
        budgets = self._host.space.budgets
        if account in budgets:
            budgets[account].redeem(session.id, nbytes)
        self.look()

    # clients

    async def before_reading(self, session_id: int, nbytes: int) -> None:
        """Until the client holds so little that it may have this in view as well."""
        if self.client_bytes is None:
            return
        self._check_client(nbytes, "one claim or read")
        await self._wait_for_client(session_id, nbytes, self._deadline(), is_writer=False)

    async def _within_client(self, session: Session, sizes: list[int], until: float) -> int:
        assert self.client_bytes is not None
        self._check_client(sizes[0], "one row, or one group's part,")
        await self._wait_for_client(session.id, sizes[0], until, is_writer=True)
        left = self.client_bytes - self._host.space.held_bytes(session.id)
        return max(1, _fitting(sizes, left))

    async def _wait_for_client(
        self, session_id: int, nbytes: int, until: float, *, is_writer: bool
    ) -> None:
        space, limit = self._host.space, self.client_bytes or 0
        await self._wait(
            ("client", session_id),
            lambda: space.held_bytes(session_id) + nbytes <= limit,
            lambda why: self._client_full(session_id, nbytes, why),
            until,
            is_writer=is_writer,
        )

    def _check_client(self, nbytes: int, what: str) -> None:
        if self.client_bytes is not None and nbytes > self.client_bytes:
            raise ValueTooLarge(
                f"{what} has {nbytes} bytes, and a client of peer {self._host.name!r} may hold "
                f"{self.client_bytes} at once (--client-bytes): take fewer rows at once, or give "
                "the peer a larger limit",
                needed_bytes=nbytes,
                cap_bytes=self.client_bytes,
            )

    # waiting

    def look(self) -> None:
        """Bytes came back: let in whom there is room for, each line in its order."""
        for key, line in list(self._lines.items()):
            while line and line[0].fits():
                waiter = line.popleft()
                if not waiter.let_in.done():
                    waiter.let_in.set_result(None)
                    break  # it looks again when it has taken its part
            if not line:
                self._lines.pop(key, None)

    @property
    def producers(self) -> int:
        """Puts that wait here."""
        return sum(waiter.is_writer for line in self._lines.values() for waiter in line)

    def end_in_vain(self) -> None:
        """Nobody is left who could free space: BackPressure for all producers that wait."""
        for waiter in [w for line in self._lines.values() for w in line if w.is_writer]:
            if not waiter.let_in.done():
                why = "nothing here is leased or can be claimed, and every client waits"
                waiter.let_in.set_exception(waiter.full(why))

    async def _wait(
        self,
        key: tuple[str, int],
        fits: Callable[[], bool],
        full: Callable[[str], BackPressure],
        until: float,
        *,
        is_writer: bool = True,
    ) -> None:
        if not self._lines.get(key) and fits():
            return
        wait_s = max(0.0, until - self._host.now())
        waiter = Waiter(fits, full, asyncio.get_running_loop().create_future(), is_writer)
        self._lines.setdefault(key, deque()).append(waiter)
        try:
            async with asyncio.timeout(wait_s):
                await waiter.let_in
        except TimeoutError as exc:
            raise full(f"none came free within {wait_s:.3g} s") from exc
        finally:
            line = self._lines.get(key)
            if line is not None and waiter in line:
                line.remove(waiter)
            asyncio.get_running_loop().call_soon(self.look)  # the next one's turn

    def _deadline(self) -> float:
        return min(call_deadline.get(), self._host.now() + WAIT_S)

    # what is said

    def _partition_full(self, entry: Entry, account: int, nbytes: int, why: str) -> BackPressure:
        host, budget = self._host, self._host.space.budgets[account]
        leases = [
            lease
            for stage in entry.definition.stages
            for lease in entry.store.missing(stage, "rows", now=host.now())["leases"]
        ]
        leased = [
            {"holder": host.labels.get(holder, f"client {holder:x}"), "rows": rows, "age_s": age}
            for holder, rows, age in leases[:8]
        ]
        said = "; ".join(f"{one['holder']} has leased {one['rows']} of them" for one in leased[:3])
        return BackPressure(
            f"partition {entry.name!r} may have {budget.limit_bytes} B on host {host.name!r} "
            f"(host_bytes=) and has {budget.used_bytes}, {nbytes} B more are to open; {why}. "
            f"{len(entry.store)} rows of it are there{'; ' if said else ''}{said}. Consume or drop "
            "rows, or declare a larger budget",
            partition=entry.name,
            needed_bytes=nbytes,
            used_bytes=budget.used_bytes,
            limit_bytes=budget.limit_bytes,
            rows={entry.name: len(entry.store)},
            holders=leased,
        )

    def _client_full(self, session_id: int, nbytes: int, why: str) -> BackPressure:
        host, held = self._host, self._host.space.held_bytes(session_id)
        label = host.labels.get(session_id, f"client {session_id:x}")
        return BackPressure(
            f"{label} holds {held} B of peer {host.name!r} in views and granted room, {nbytes} B "
            f"more are asked for, and it may hold {self.client_bytes} (--client-bytes); {why}. Let "
            "views of earlier batches go, or take fewer rows at once",
            needed_bytes=nbytes,
            limit_bytes=self.client_bytes,
            holders=[{"holder": label, "held_bytes": held}],
        )


def _fitting(sizes: list[int], room_bytes: int) -> int:
    """How many of the first of these fit."""
    return int(np.searchsorted(np.cumsum(sizes), room_bytes, "right"))


def bytes_of(extents: npt.NDArray[Any]) -> int:
    """What EXTENTs that were written will occupy."""
    return int(padded(extents["length"]).sum())
