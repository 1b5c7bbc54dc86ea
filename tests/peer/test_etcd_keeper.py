"""Who gets the authority's key, against an etcd that is a dict, where no lease ends by itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bench.peers import free_addresses
from dataplane.errors import Unavailable
from dataplane.metadata.roster.roster import Roster
from dataplane.peer.membership.authority import EtcdKeeper
from dataplane.peer.peer import Peer
from dataplane.peer.tasks import Tasks, Threads
from dataplane.transport.etcd import EtcdValue
from dataplane.wire.tables import Owner

AUTHORITY_LEASE = 7


class Dict:
    """As much of `transport.etcd.Etcd` as a keeper needs."""

    def __init__(self, key: str, authority: str, faster: str = "") -> None:
        self.kept = {key: EtcdValue(authority.encode(), 1, AUTHORITY_LEASE)}
        self.leases = AUTHORITY_LEASE
        self.faster = faster
        """who takes a key before whoever asks here for it"""

    async def get(self, key: str) -> EtcdValue | None:
        return self.kept.get(key)

    async def grant(self, ttl_s: int) -> int:
        self.leases += 1
        return self.leases

    async def put_if(self, key: str, value: bytes, created: Any, changed: Any, lease: int) -> int:
        if key not in self.kept and self.faster:
            self.kept[key] = EtcdValue(self.faster.encode(), 2, lease + 1)
        if key in self.kept:
            return 0
        self.kept[key] = EtcdValue(value, 2, lease)
        return 2

    async def revoke(self, lease: int) -> None:
        self.kept = {key: kept for key, kept in self.kept.items() if kept.lease != lease}


@pytest.mark.parametrize("ended", [True, False], ids=["its process has ended", "that is not known"])
async def test_the_office_of_a_process_that_has_ended_is_taken_at_once(ended: bool) -> None:
    here, there = free_addresses(2)
    opened = asyncio.Event()

    class KeeperRole:
        is_open = False

        async def open(self, roster: Roster, ask: bool) -> None:
            opened.set()

    roster = Roster.from_seeds([here, there])
    host: Any = SimpleNamespace(
        address=here, plane="p", founding=(1, 1), roster=roster, now=asyncio.get_running_loop().time
    )
    keeper = EtcdKeeper(host, ["127.0.0.1:1"], lambda address: ended and address == there)
    await keeper.etcd.close()
    role: Any = KeeperRole()
    etcd: Any = Dict(keeper._authority_key, there)
    keeper.etcd = etcd
    await keeper._look(role, host.now())
    assert (keeper.address() == here, keeper.sure(), opened.is_set()) == (ended, ended, ended)


async def test_who_comes_second_for_the_office_asks_the_first_from_then_on() -> None:
    here, there, faster = free_addresses(3)
    host: Any = SimpleNamespace(
        address=here, plane="p", founding=(1, 1), now=asyncio.get_running_loop().time
    )
    keeper = EtcdKeeper(host, ["127.0.0.1:1"], lambda address: address == there)
    await keeper.etcd.close()
    etcd: Any = Dict(keeper._authority_key, there, faster)
    keeper.etcd = etcd
    role: Any = SimpleNamespace()
    await keeper._look(role, host.now())
    assert (keeper.address(), keeper.sure()) == (faster, False)


async def test_an_authority_that_is_no_member_any_more_is_asked_no_more() -> None:
    here, there = free_addresses(2)
    host: Any = SimpleNamespace(
        address=here, plane="p", founding=(1, 1), now=asyncio.get_running_loop().time
    )
    keeper = EtcdKeeper(host, ["127.0.0.1:1"], lambda address: False)
    await keeper.etcd.close()
    etcd: Any = Dict(keeper._authority_key, there)
    keeper.etcd = etcd
    role: Any = SimpleNamespace()
    await keeper._look(role, host.now())
    assert keeper.address() == there
    keeper.gone(Owner(there, 1))
    with pytest.raises(Unavailable):
        keeper.address()


async def test_a_peer_that_ends_as_it_asks_etcd_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is asked of a session that is closed is no failure of etcd's."""
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()  # until it hangs up
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    now = asyncio.get_running_loop().time
    host: Any = SimpleNamespace(address="a", plane="p", founding=(1, 1), now=now)
    keeper = EtcdKeeper(host, [f"127.0.0.1:{port}", f"localhost:{port}"], lambda address: False)
    tasks = Tasks()
    role: Any = SimpleNamespace(is_open=False)
    tasks.spawn(keeper.run(role))
    await asyncio.wait_for(asked.wait(), 10)

    async def close(why: object = None, witnessed: bool = False) -> None: ...

    part, arena = SimpleNamespace(close=close), SimpleNamespace(close=lambda: None)
    pools = SimpleNamespace(stop=close, free=lambda: None)
    peer: Any = SimpleNamespace(
        door=part, mesh=tasks, keeper=keeper, pools=pools, pulls=part, spilling=None,
        _is_missed=lambda: False,
        host=SimpleNamespace(arena=arena, threads=Threads()),
    )  # fmt: skip
    await Peer.close(peer)
    await asyncio.sleep(0)
    assert not caplog.records
    server.close()
    await server.wait_closed()
