"""Which peer has which rows.

Minted keys say their shard. Given names are found in the directory, hashed over the peers, where
the first put of a name enters the shard of its group; two hosts that put one new name at once are
ordered there. What this peer has itself it knows without asking.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import (
    InvalidRows,
    PartitionConflict,
    RowsDropped,
    RowsGone,
    StaleEpoch,
    Unavailable,
)
from dataplane.metadata.names import hash_name, key_shard, key_shards
from dataplane.peer import rows as rowset
from dataplane.peer.host import Entry, Host, call_deadline
from dataplane.peer.mesh import CALL_S, Mesh
from dataplane.peer.naming import DUE, Naming, known_here, minted_among
from dataplane.wire.limits import NO_GROUP, SHARDS
from dataplane.wire.messages import Drop, Read
from dataplane.wire.records import KEY, U4, column
from dataplane.wire.tables import Name, Rows

NOWHERE = 0xFFFF
Index = npt.NDArray[np.intp]
Routed = list[tuple[str, Index]]
"""Peer address, and which of the rows go there."""


class Routing:
    def __init__(self, host: Host, mesh: Mesh, naming: Naming) -> None:
        self.host = host
        self.mesh = mesh
        self.naming = naming

    def is_here(self, entry: Entry, rows: Rows) -> bool:
        """Whether a put of these rows surely concerns this peer alone, without asking any other:
        what is not known here is a minted key of a shard of this peer that leads nowhere else."""
        if self.host.solo:
            return True
        if self.host.untold:
            return False
        if rows.group_keys and not entry.store.knows_groups(rows.group_keys).all():
            return False
        new = column(rows.keys, KEY)[~entry.store.knows_rows(rows.keys)]
        if not len(new):
            return True
        if rows.names is not None:
            return False
        primary = self.host.roster.primary(np.minimum(key_shards(new), SHARDS - 1))
        here = self.host.roster.members.index(self.host.address)
        if (primary != here).any():
            return False
        entered = self.host.directory.enter(2 * entry.generation, new, None)
        return bool((entered == NOWHERE).all())

    async def visit(
        self,
        rows: Rows,
        place: Callable[[Rows], Awaitable[Routed]],
        act: Callable[[str, Index, tuple[int, int]], Awaitable[None]],
    ) -> None:
        """Do something where rows are, once for each; where the roster changes on the way, where
        the others are then. act: takes an address, which of the rows, and the roster's epoch."""
        left = np.arange(rowset.count(rows))
        end = min(self.host.now() + CALL_S, call_deadline.get())
        while len(left):
            roster = self.host.roster
            todo = np.ones(len(left), np.bool_)
            try:
                mine = rows if len(left) == rowset.count(rows) else rowset.take_rows(rows, left)
                parts = await place(mine)
                if self.host.roster is not roster:
                    continue
                for address, index in parts:
                    await act(address, left[index], roster.epoch)
                    todo[index] = False
            except (StaleEpoch, Unavailable):
                if not await self.host.another_roster(roster, end):
                    raise
            left = left[todo]

    def shard(self) -> int:
        """Where this host enters new names. A put keeps to one, also when the roster changes on the
        way: what it entered before must lead where it enters the rest."""
        return int(self.host.roster.mint_shards(self.host.address)[0])

    async def place(self, entry: Entry, shard: int, rows: Rows) -> Routed:
        """Where a put's rows go; new names are entered on the way, for this shard."""
        n = rowset.count(rows)
        if self.host.solo:
            return [(self.host.address, np.arange(n))]
        keys = column(rows.keys, KEY)
        minted = minted_among(rows.names, n)
        shards = np.full(n, NOWHERE, np.uint16)
        grouped = np.zeros(n, bool)
        if rows.group_index:
            group_index = column(rows.group_index, U4, n)
            grouped = group_index != NO_GROUP
            group_keys = column(rows.group_keys, KEY)
            names_minted = minted_among(rows.group_names, len(group_keys))
            of_group = await self._open(entry, shard, group_keys, names_minted, groups=True)
            shards[grouped] = of_group[group_index[grouped]]
            await self._tell_rows(
                entry, rowset.take_rows(rows, np.flatnonzero(grouped)), shards[grouped]
            )
        alone = ~grouped
        if alone.any():
            shards[alone] = await self._open(entry, shard, keys[alone], minted[alone])
        return self._by_peer(shards)

    async def house(self, entry: Entry, rows: Rows) -> str:
        """The peer at which restored rows live: this one, where it has shards. Their names are
        entered for it; PartitionConflict where one of them is in this partition already."""
        roster = self.host.roster
        shard = int(roster.mint_shards(self.host.address)[0])
        if not self.host.solo:
            await self._claim_names(entry, rows.group_keys, rows.group_names, shard, groups=True)
            await self._claim_names(entry, rows.keys, rows.names, shard, groups=False)
        return roster.address(shard)

    async def _claim_names(
        self, entry: Entry, raw: bytes, names: list[Name] | None, shard: int, groups: bool
    ) -> None:
        roster = self.host.roster
        keys = column(raw, KEY)
        minted = minted_among(names, len(keys))
        own = np.array([key_shard(k.tobytes()) for k in keys], np.uint16)
        at_home = roster.primary(np.minimum(own, SHARDS - 1)) == roster.primary(shard)
        asked = np.flatnonzero(~(minted & at_home))
        if not len(asked):
            return
        # Those of rows that were freed just now are in use no more.
        await self.naming.leave(entry, keys[asked], minted[asked], groups, DUE)
        entered = await self.naming.ask(entry, keys[asked], minted[asked], shard, groups)
        others = int((roster.primary(entered) != roster.primary(shard)).sum())
        if others:
            raise PartitionConflict(
                f"{others} names that are to be restored are in partition {entry.name!r} already; "
                "restore where it is not, or drop it first",
                partition=entry.name,
            )

    async def find(self, entry: Entry, rows: Rows, shard: int | None = None) -> Routed:
        """Where rows are, by key alone; an unknown name is looked for here. shard: where unknown
        given names are entered, for a drop, so that a late put is led to its tombstone."""
        n = rowset.count(rows)
        if self.host.solo:
            return [(self.host.address, np.arange(n))]
        keys, minted = column(rows.keys, KEY), minted_among(rows.names, n)
        if shard is None:
            return self._by_peer(await self._look(entry, keys, minted))
        return self._by_peer(await self._open(entry, shard, keys, minted))

    async def find_groups(
        self, entry: Entry, groups: list[Name], shard: int | None = None
    ) -> dict[str, list[Name]]:
        """Peer address → those of the groups that are there. shard: as for `find`."""
        if self.host.solo:
            return {self.host.address: groups}
        keys = np.array([np.void(hash_name(g)) for g in groups], KEY)
        minted = minted_among(groups, len(groups))
        if shard is None:
            shards = await self._look(entry, keys, minted, groups=True)
        else:
            shards = await self._open(entry, shard, keys, minted, groups=True)
        found: dict[str, list[Name]] = {}
        for address, index in self._by_peer(shards):
            found.setdefault(address, []).extend(groups[i] for i in index)
        return found

    def _by_peer(self, shards: npt.NDArray[Any]) -> Routed:
        """Split by the shard's primary; NOWHERE and this peer's own shards are this peer."""
        primary = self.host.roster.primary(np.minimum(shards, SHARDS - 1))
        members = self.host.roster.members
        here = members.index(self.host.address)
        primary = np.where(shards == NOWHERE, here, primary)
        peers = np.unique(primary)
        return [(members[int(p)], np.flatnonzero(primary == p)) for p in peers]

    async def _look(
        self, entry: Entry, keys: npt.NDArray[Any], minted: npt.NDArray[Any], groups: bool = False
    ) -> npt.NDArray[Any]:
        """Shards of keys; NOWHERE for those of this peer's store and for unknown ones."""
        shards = np.full(len(keys), NOWHERE, np.uint16)
        asked = np.flatnonzero(~known_here(entry, keys, groups))
        if len(asked):
            shards[asked] = await self.naming.ask(entry, keys[asked], minted[asked], None, groups)
            unsaid = asked[(shards[asked] == NOWHERE) & minted[asked]]
            shards[unsaid] = [key_shard(keys[i].tobytes()) for i in unsaid]
        return shards

    async def _open(
        self,
        entry: Entry,
        shard: int,
        keys: npt.NDArray[Any],
        minted: npt.NDArray[Any],
        groups: bool = False,
    ) -> npt.NDArray[Any]:
        """Like `_look`, but new given names are entered for this shard."""
        shards = np.full(len(keys), NOWHERE, np.uint16)
        unknown = ~known_here(entry, keys, groups)
        given = np.flatnonzero(unknown & ~minted)
        if len(given):
            shards[given] = await self.naming.ask(entry, keys[given], minted[given], shard, groups)
        own = np.flatnonzero(unknown & minted)
        if len(own):
            shards[own] = await self._look(entry, keys[own], minted[own], groups)
        return shards

    async def _tell_rows(self, entry: Entry, rows: Rows, shards: npt.NDArray[Any]) -> None:
        """Rows follow their group: enter keys whose own shard or entry would lead elsewhere."""
        roster = self.host.roster
        keys = column(rows.keys, KEY)
        minted = minted_among(rows.names, len(keys))
        shards = np.where(shards == NOWHERE, self.shard(), shards)
        own = np.array([key_shard(k.tobytes()) for k in keys], np.uint16)
        stray = ~minted | (roster.primary(np.minimum(own, SHARDS - 1)) != roster.primary(shards))
        moved: list[tuple[Rows, int, int]] = []
        for shard in np.unique(shards[stray]):
            at = np.flatnonzero(stray & (shards == shard))
            while True:
                entered = await self.naming.ask(entry, keys[at], minted[at], int(shard), False)
                elsewhere = roster.primary(entered) != roster.primary(shards[at])
                if not elsewhere.any():
                    break
                there = int(entered[elsewhere][0])
                strays = rowset.take_rows(
                    rows, at[roster.primary(entered) == roster.primary(there)]
                )
                await self._vacate(entry, strays, there)
                moved.append((strays, there, int(shard)))
        for strays, there, shard in moved:
            await self._drop_along(entry, strays, there, shard)

    async def _vacate(self, entry: Entry, rows: Rows, shard: int) -> None:
        """Names lead to a shard that is not their group's. Those that have no rows there are of a
        put that ended in the middle, when the entry of its group went with a peer: they leave the
        directory. RowsDropped, and InvalidRows where all are rows there."""
        names = await self._absent(entry, rows, shard)
        gone = np.array([np.void(hash_name(name)) for name in names], KEY)
        await self.naming.leave(entry, gone, minted_among(names, len(names)), groups=False)

    async def _drop_along(self, entry: Entry, rows: Rows, there: int, shard: int) -> None:
        """Whoever dropped names before they were moved from `there` did so where nobody looks any
        more; whoever does so later finds them moved. RowsDropped, and dropped here as well."""
        refusal = None
        while rowset.count(rows):
            try:
                await self._absent(entry, rows, there)
                break
            except RowsDropped as exc:  # it names some
                refusal = refusal or exc
                told = set(exc.details["keys"])
                dropped = np.array([name in told for name in rowset.names(rows)])
                if not dropped.any():
                    break
            gone, rows = (rowset.take_rows(rows, np.flatnonzero(w)) for w in (dropped, ~dropped))
            body = Drop(entry.name, entry.generation, Rows(gone.keys, gone.names))
            await self.mesh.insist(functools.partial(self.naming.address, shard), body)
        if refusal is not None:
            raise refusal

    async def _absent(self, entry: Entry, rows: Rows, shard: int) -> list[Name]:
        """Which of these are no rows of the peer that a shard is at. RowsDropped, and InvalidRows
        where all are rows there."""
        roster = self.host.roster
        asked = Read(entry.name, entry.generation, rows, None, [])
        address = roster.address(shard)
        try:
            await self.mesh.call(address, asked, epoch=roster.epoch)
        except RowsGone as exc:
            names = exc.details.get("keys", ())
            if dropped := exc.details.get("dropped"):
                raise RowsDropped(
                    f"rows of this put were dropped from partition {entry.name!r}: {dropped}; "
                    "their trajectories are cancelled: put the others without them",
                    keys=dropped,
                    rows=len(dropped),
                ) from exc
            if not names:
                raise
            return list(names)
        raise InvalidRows(
            f"{rowset.count(rows)} keys of this put are rows of another group already; "
            "a row stays in the group that it was first put in"
        )
