"""Names whose rows or groups are gone leave the directory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import StaleEpoch, Unavailable
from dataplane.peer.host import Entry, Host
from dataplane.peer.mesh import RETRY_S
from dataplane.peer.naming import Naming, known_here
from dataplane.wire.records import KEY, column


class Forgetting:
    def __init__(self, host: Host, naming: Naming) -> None:
        self.host = host
        self.naming = naming

    async def forget(self, entry: Entry, raw: bytes, groups: bool) -> None:
        """Rows or groups with these given names are gone: the names leave the directory."""
        keys = column(raw, KEY)
        await self.naming.leave(entry, keys, np.zeros(len(keys), bool), groups)

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

    async def _entered_here(
        self, entry: Entry, keys: npt.NDArray[Any], groups: bool
    ) -> npt.NDArray[np.bool_]:
        """Which of these given names the directory has for a shard of this peer."""
        shards = await self.naming.ask(entry, keys, np.zeros(len(keys), bool), None, groups)
        here: npt.NDArray[np.bool_] = np.isin(shards, self.host.roster.shards_of(self.host.address))
        return here
