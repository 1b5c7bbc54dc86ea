"""Two peers, their parts of the directory and their stores, without a network: what names lead to
while rows are put, dropped and freed."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import PartitionConflict, RowsDropped
from dataplane.metadata import store
from dataplane.metadata.directory import Directory
from dataplane.metadata.index import pairs
from dataplane.metadata.journal import JournaledStore
from dataplane.metadata.names import format_minted_many, hash_name, mint_many
from dataplane.metadata.restating import names_for
from dataplane.metadata.roster import Roster
from dataplane.peer import forgetting
from dataplane.peer.changes import Changes
from dataplane.peer.forgetting import Forgetting
from dataplane.peer.host import Caller, Entry
from dataplane.peer.naming import Naming
from dataplane.peer.routing import Routing
from dataplane.wire.messages import Body, Done, Drop, Read
from dataplane.wire.records import U4
from dataplane.wire.tables import Definition, Rows

HERE, THERE = "tcp://10.0.0.1:7101", "tcp://10.0.0.2:7101"
ROSTER = Roster.from_seeds([HERE, THERE])
DEFINITION = Definition({"s": ["tokens"]}, None, None, "acked", 1)
MINTED = mint_many(int(ROSTER.mint_shards(HERE)[0]), 7, 0, 3)
GROUP = Rows(MINTED, None, np.zeros(3, U4).tobytes(), hash_name("g"), ["g"])
"""Rows whose keys say that they are at HERE."""


class Mesh:
    """Carries calls to where they go, at once."""

    def __init__(self, peers: dict[str, Any], address: str) -> None:
        self.handlers: dict[Any, Any] = {}
        self.peers = peers
        self.caller = Caller(address, 1)

    async def call(self, address: str, body: Body, **how: Any) -> Any:
        outcome = self.peers[address].mesh.handlers[type(body)](self.caller, body)
        return outcome if isinstance(outcome, Body) else await outcome

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    async def insist(self, find: Any, body: Body) -> Any:
        return await self.call(find(), body)


class Peer:
    def __init__(self, peers: dict[str, Any], address: str) -> None:
        self.mesh: Any = Mesh(peers, address)
        self.entry = Entry("p", 1, DEFINITION, JournaledStore("p", DEFINITION, 1))
        self.host: Any = SimpleNamespace(
            address=address, roster=ROSTER, solo=False, now=time.monotonic, incarnation=1,
            unanswered={}, directory=Directory(), entries={"p": self.entry}, informed=self._at_once,
        )  # fmt: skip
        self.naming = Naming(self.host, self.mesh)
        self.forgetting = Forgetting(self.host, self.mesh, self.naming)
        self.routing = Routing(self.host, self.mesh, self.naming)
        partitions: Any = SimpleNamespace(entry=self._entry)
        nothing: Any = lambda *args: None  # noqa: E731
        self.changes = Changes(self.host, self.mesh, partitions, self.routing, nothing, nothing)
        self.mesh.handlers[Read] = self._read
        self._ops = itertools.count(1)

    async def _at_once(self) -> None:
        pass

    async def _entry(self, partition: str, generation: int) -> Entry:
        return self.entry

    def _read(self, caller: Caller, body: Read) -> Body:
        self.entry.store.read(body.rows)
        return Done()

    def has(self, rows: Rows) -> list[bool]:
        return self.entry.store.knows_rows(rows.keys).tolist()  # type: ignore[no-any-return]

    def put_here(self, rows: Rows) -> None:
        self.entry.store.put(rows, [], [], [], {})

    async def put(self, rows: Rows) -> None:
        """As a client of this host does."""
        for address, _ in await self.routing.place(self.entry, self.routing.shard(), rows):
            self.mesh.peers[address].put_here(rows)

    async def free(self, rows: Rows) -> None:
        """All stages have acked them."""
        state = self.entry.store.state
        state.remove_rows(state.index.find(pairs(rows.keys)))
        for groups, keys in enumerate(self.entry.store.unnamed()):
            if keys:
                await self.forgetting.forget(self.entry, keys, bool(groups))
        await self.forgetting.forget_strays(self.entry, self.entry.store.freed_rows())

    async def drop(self, rows: Rows) -> None:
        session: Any = SimpleNamespace(id=7)
        request: Any = SimpleNamespace(op=next(self._ops), floor=1)
        await self.changes.drop(session, request, Drop("p", 1, rows))


def two_peers() -> tuple[Peer, Peer]:
    peers: dict[str, Any] = {}
    for address in (HERE, THERE):
        peers[address] = Peer(peers, address)
    return peers[HERE], peers[THERE]


async def a_group_of(peer: Peer) -> None:
    """The group is there, with a row of its own."""
    await peer.put(Rows(hash_name("a"), ["a"], bytes(4), hash_name("g"), ["g"]))


@pytest.mark.parametrize("dropper", [HERE, THERE])
def test_rows_dropped_by_minted_keys_are_refused_wherever_their_group_is(dropper: str) -> None:
    async def story() -> None:
        here, there = two_peers()
        await a_group_of(there)
        dropped = Rows(MINTED[:16], format_minted_many(MINTED[:16]))
        await here.mesh.peers[dropper].drop(dropped)
        with pytest.raises(RowsDropped) as refused:
            await here.put(GROUP)
        assert refused.value.details["keys"] == dropped.names
        assert not any(here.has(GROUP) + there.has(GROUP))

    asyncio.run(story())


def test_a_new_keeper_of_names_hears_of_minted_keys_that_were_dropped_elsewhere() -> None:
    async def story() -> list[bytes]:
        here, there = two_peers()
        await a_group_of(there)
        await here.put(GROUP)
        await here.drop(GROUP)
        assert not any(here.has(GROUP) + there.has(GROUP))
        given = ROSTER.primaries == ROSTER.members.index(HERE)
        told = names_for(there.entry.store, ROSTER, given, THERE)
        return [one.keys for one in told if not one.groups]

    keys = b"".join(asyncio.run(story()))
    entered = {keys[at : at + 16] for at in range(0, len(keys), 16)}
    assert {MINTED[at : at + 16] for at in range(0, 48, 16)} <= entered


NAMED = Rows(hash_name("k") + hash_name("l"), ["k", "l"])


def test_a_put_on_its_way_while_its_rows_are_freed_makes_no_rows_that_nobody_finds() -> None:
    async def story() -> None:
        here, there = two_peers()
        await there.put(NAMED)
        ((led_to, _),) = await here.routing.place(here.entry, here.routing.shard(), NAMED)
        assert led_to == THERE
        await there.free(NAMED)
        there.put_here(NAMED)
        await here.put(NAMED)
        assert (here.has(NAMED), there.has(NAMED)) == ([False] * 2, [True] * 2)

    asyncio.run(story())


@pytest.mark.parametrize("asked_for", [True, False])
def test_names_of_freed_rows_leave_unless_they_were_asked_for_since(
    asked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "STAYS_S", 0.0)

    async def story() -> list[str]:
        here, there = two_peers()
        await there.put(NAMED)
        await there.free(NAMED)
        if asked_for:
            await here.routing.place(here.entry, here.routing.shard(), NAMED)
        await there.forgetting._let_go()
        await here.put(NAMED)
        return [peer.host.address for peer in (here, there) if all(peer.has(NAMED))]

    assert asyncio.run(story()) == [THERE if asked_for else HERE]


def test_rows_of_a_checkpoint_take_the_names_of_freed_ones() -> None:
    async def story() -> None:
        here, there = two_peers()
        await there.put(NAMED)
        with pytest.raises(PartitionConflict):
            await here.routing.house(here.entry, NAMED)
        await there.free(NAMED)
        assert await here.routing.house(here.entry, NAMED) == HERE

    asyncio.run(story())


def test_only_so_many_freed_names_wait_to_be_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "MAX_WAITING", 3)

    async def story() -> None:
        here, there = two_peers()
        one, other = Rows(hash_name("m") + hash_name("n"), ["m", "n"]), NAMED
        for rows in (one, other):
            await there.put(rows)
            await there.free(rows)
        await here.put(one)
        await here.put(other)
        assert (all(here.has(one)), all(there.has(other))) == (True, True)

    asyncio.run(story())


def test_minted_keys_of_rows_in_groups_of_another_host_leave_the_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "DRAINED_BYTES", (0, 0))

    async def story() -> None:
        here, there = two_peers()
        await a_group_of(there)
        names = len(here.host.directory)
        await here.put(GROUP)
        assert len(here.host.directory) == names + 3  # whoever has their keys is led there
        await there.free(GROUP)
        assert len(here.host.directory) == names

    asyncio.run(story())
