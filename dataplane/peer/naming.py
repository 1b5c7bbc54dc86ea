"""The directory as its peers keep it, and as others ask there: names enter it and leave it.

Given names are kept at the peer that `Roster.directory_shards` says, a minted key at that of its
own shard, where it has an entry only if its row is elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.metadata.names import is_minted, key_shard, key_shards
from dataplane.peer.host import Caller, Entry, Host
from dataplane.peer.mesh import Mesh
from dataplane.wire.limits import SHARDS
from dataplane.wire.messages import Body, Done
from dataplane.wire.peering import Enter, Entered, Leave
from dataplane.wire.records import KEY, U2, column
from dataplane.wire.tables import Name

AT_ONCE, EXPECTED, DUE = 0, 1, 2
"""`Leave.step`"""


class Naming:
    def __init__(self, host: Host, mesh: Mesh) -> None:
        self.host = host
        self.mesh = mesh
        mesh.handlers |= {Enter: self._enter, Leave: self._leave}

    # kept here

    async def _enter(self, caller: Caller, body: Enter) -> Body:
        await self.host.informed()
        keys = column(body.keys, KEY)
        scope = 2 * body.generation + body.groups  # a group and a row may have one name
        if body.shard is not None and not body.groups:
            self._enter_dropped(body, scope, keys)
        shards = self.host.directory.enter(scope, keys, body.shard)
        return Entered(shards.astype(U2).tobytes())

    def _enter_dropped(self, body: Enter, scope: int, keys: npt.NDArray[Any]) -> None:
        """Minted keys that were dropped before any row had them left tombstones here, where the
        keys say: whoever puts such rows into a group of another peer is led to them."""
        entry = self.host.entries.get(body.partition)
        if entry is None or entry.generation != body.generation:
            return
        own = key_shards(keys)
        here = np.isin(own, self.host.roster.shards_of(self.host.address))
        dropped = here & entry.store.has_dropped(body.keys)
        if dropped.any():
            self.host.directory.enter(scope, keys[dropped], own[dropped])

    def _leave(self, caller: Caller, body: Leave) -> Body:
        directory = self.host.directory
        steps = {EXPECTED: directory.expect_leave, DUE: directory.leave}
        carry_out = steps.get(body.step, directory.remove)
        carry_out(2 * body.generation + body.groups, column(body.keys, KEY))
        return Done()

    # asked for

    async def ask(
        self,
        entry: Entry,
        keys: npt.NDArray[Any],
        minted: npt.NDArray[Any],
        shard: int | None,
        groups: bool,
    ) -> npt.NDArray[Any]:
        """The shards that keys lead to, entered for `shard` where they lead nowhere; None: NOWHERE
        then. One message to each peer that keeps a part of the directory for them."""
        roster = self.host.roster
        primary = roster.primary(self._kept_at(entry, keys, minted))
        shards = np.empty(len(keys), np.uint16)
        for peer in np.unique(primary):
            at = np.flatnonzero(primary == peer)
            body = Enter(entry.name, entry.generation, keys[at].tobytes(), shard, groups)
            reply: Entered = await self.mesh.call(
                roster.members[int(peer)], body, epoch=roster.epoch
            )
            shards[at] = column(reply.shards, U2, len(at))
        return shards

    def _kept_at(
        self, entry: Entry, keys: npt.NDArray[Any], minted: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        """The shards whose peers keep the entries of these keys: a minted key's own, else by the
        name's hash."""
        kept = self.host.roster.directory_shards(entry.name, keys)
        kept[minted] = [key_shard(k.tobytes()) % SHARDS for k in keys[minted]]
        return kept

    async def leave(
        self,
        entry: Entry,
        keys: npt.NDArray[Any],
        minted: npt.NDArray[Any],
        groups: bool,
        step: int = AT_ONCE,
    ) -> None:
        """They leave the directory. Until all who keep them have heard it."""
        shards = self._kept_at(entry, keys, minted)
        primary = self.host.roster.primary(shards)
        for peer in np.unique(primary):
            mine = primary == peer
            body = Leave(entry.name, entry.generation, keys[mine].tobytes(), groups, step)
            # They were looked up at one peer, and move to others one by one if at all.
            at = functools.partial(self.address, int(shards[mine][0]))
            await self.mesh.insist(at, body)

    def address(self, shard: int) -> str:
        return self.host.roster.address(shard)


def known_here(entry: Entry, keys: npt.NDArray[Any], groups: bool) -> npt.NDArray[Any]:
    """Which of these rows, or groups, are in this peer's store."""
    known = entry.store.knows_groups if groups else entry.store.knows_rows
    return known(keys.tobytes())


def minted_among(names: list[Name] | None, n: int) -> npt.NDArray[Any]:
    """Which of n names are minted ones; without names all are."""
    if names is None:
        return np.ones(n, bool)
    return np.fromiter((is_minted(name) for name in names), bool, n)
