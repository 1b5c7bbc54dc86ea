"""Names whose rows or groups are gone leave the directory.

In two steps, because a put that was led to a row before it was freed makes it anew where it was: if
the name had left meanwhile, another put could give it to a second row elsewhere. Between the steps
lies longer than any put is under way; a name that was asked for, or is here again, stays.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import StaleEpoch, Unavailable
from dataplane.metadata.names import key_shards
from dataplane.peer.host import Entry, Host
from dataplane.peer.mesh import CALL_S, RETRY_S, Mesh
from dataplane.peer.naming import DUE, EXPECTED, Naming, known_here
from dataplane.wire.limits import SHARDS
from dataplane.wire.records import KEY, column

STAYS_S = 2 * CALL_S
"""From one step to the other: longer than a put is under way after its look."""
MAX_WAITING = 65_536
"""Names that wait for the second step; the first of more than that take it at once."""


@dataclass(frozen=True, slots=True)
class _Freed:
    partition: str
    generation: int
    groups: bool
    minted: bool
    keys: npt.NDArray[Any]
    due: float


class Forgetting:
    def __init__(self, host: Host, mesh: Mesh, naming: Naming) -> None:
        self.host = host
        self.mesh = mesh
        self.naming = naming
        self._waiting: deque[_Freed] = deque()
        self._count = 0
        self._task: asyncio.Task[object] | None = None

    async def forget(self, entry: Entry, raw: bytes, groups: bool) -> None:
        """Rows or groups with these given names were freed."""
        await self._expect_leave(entry, column(raw, KEY), groups, False)

    async def forget_strays(self, entry: Entry, raw: bytes) -> None:
        """Rows with these keys were freed. Minted ones whose own shard is elsewhere had entries."""
        keys, roster = column(raw, KEY), self.host.roster
        own = key_shards(keys)
        elsewhere = roster.primary(np.minimum(own, SHARDS - 1)) != roster.members.index(
            self.host.address
        )
        strays = keys[(own < SHARDS) & elsewhere]
        if len(strays):
            await self._expect_leave(entry, strays, False, True)

    async def _expect_leave(
        self, entry: Entry, keys: npt.NDArray[Any], groups: bool, minted: bool
    ) -> None:
        if self.host.entries.get(entry.name) is not entry:
            return  # dropped, and the whole directory of it
        await self.naming.leave(entry, keys, np.full(len(keys), minted), groups, EXPECTED)
        due = self.host.now() + STAYS_S
        self._waiting.append(_Freed(entry.name, entry.generation, groups, minted, keys, due))
        self._count += len(keys)
        while self._count > MAX_WAITING:
            await self._let_go_first()
        if self._task is None or self._task.done():
            self._task = self.mesh.spawn(self._let_go())

    async def _let_go(self) -> None:
        """The second step, for as long as any wait for it."""
        while self._waiting:
            early_s = self._waiting[0].due - self.host.now()
            if early_s > 0:
                await asyncio.sleep(early_s)
            else:
                await self._let_go_first()

    async def _let_go_first(self) -> None:
        freed = self._waiting.popleft()
        self._count -= len(freed.keys)
        entry = self.host.entries.get(freed.partition)
        # Whoever took this peer's shards over knows what is there again.
        serves = len(self.host.roster.shards_of(self.host.address))
        if entry is None or entry.generation != freed.generation or not serves:
            return
        keys = freed.keys[~known_here(entry, freed.keys, freed.groups)]
        if len(keys):
            minted = np.full(len(keys), freed.minted)
            await self.naming.leave(entry, keys, minted, freed.groups, DUE)

    async def forget_dropped(self, entry: Entry, raw: bytes) -> None:
        """Tombstones with these keys were pushed out: entries that lead here, to nothing, leave the
        directory. A tombstone says no more whether it is of a row or a group."""
        keys = column(raw, KEY)
        for groups in (False, True):
            while self.host.entries.get(entry.name) is entry:
                roster = self.host.roster
                try:
                    here = await self._entered_here(entry, keys, groups)
                except (StaleEpoch, Unavailable):
                    await self.host.another_roster(roster, self.host.now() + RETRY_S)
                    continue
                gone = keys[here & ~known_here(entry, keys, groups)]
                await self.naming.leave(entry, gone, np.zeros(len(gone), bool), groups)
                break
        await self.forget_strays(entry, raw)

    async def _entered_here(
        self, entry: Entry, keys: npt.NDArray[Any], groups: bool
    ) -> npt.NDArray[np.bool_]:
        """Which of these given names the directory has for a shard of this peer."""
        shards = await self.naming.ask(entry, keys, np.zeros(len(keys), bool), None, groups)
        here: npt.NDArray[np.bool_] = np.isin(shards, self.host.roster.shards_of(self.host.address))
        return here
