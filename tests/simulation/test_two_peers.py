"""The keeper of the roster and one other peer: their link fails, and then the keeper's host."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import pytest

from dataplane.errors import ClaimTimeout
from dataplane.wire import messages as m
from dataplane.wire.tables import Column, Definition
from tests.simulation.cluster import Cluster
from tests.simulation.ledger import Ledger
from tests.simulation.line import Client
from tests.simulation.loop import VirtualLoop
from tests.simulation.roles import Producer, Role, keys_of

GROUP_ROWS = 4
FIRST_GROUPS = 5
MAX_STEPS = 400_000


class _Inline(Producer):
    """All that it puts is in the shard and its copy."""

    async def write(
        self, field: str, keys: list[bytes], nbytes: int, known: bool
    ) -> tuple[Column, bytes, bytes]:
        return self._inline(field, keys, nbytes)


class _Trainer(Role):
    """Claims a group and acks it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.acked: set[bytes] = set()

    async def once(self) -> None:
        keys = await self.claimed(ack=True)
        self.acked |= keys

    async def claimed(self, ack: bool) -> set[bytes]:
        """ClaimTimeout where no group is ready."""
        want = m.Want("groups", 1, 1)
        body = m.Claim(self.partition, self.generation, "train", want, ["x"], timeout_ms=100)
        got = await self.client.call(body, m.Claimed, 5.0)
        if ack:
            await self.client.call(m.Finish(got.lease, "ack"), m.PutDone, 5.0)
        return set(keys_of(got.table))


def _partition(cluster: Cluster, place: int) -> str:
    """One whose shard is at this peer."""
    peer = cluster.places[place].peer
    assert peer is not None
    home = peer.host.roster.home
    return next(n for n in (f"p{i}" for i in range(1000)) if home(n) == peer.host.address)


async def _keep_on(producer: Any, trainer: Any) -> None:
    """Puts group after group and trains on them, until an error that no repetition mends."""
    for number in range(1_000):
        group = producer._group(number, given=False)
        producer.ledger.opened(group)
        await producer._patiently(lambda one=group: producer._put_all([one]))
        if number % 3 == 2:
            await trainer._patiently(trainer.once)
        await asyncio.sleep(0.2)


async def _script(cluster: Cluster, cut_s: float) -> None:
    for place in cluster.places:
        cluster.start(place)
    await asyncio.sleep(4.0)
    keeper, other = cluster.places
    ledger = Ledger(_partition(cluster, 0), Definition({"train": ["x"]}, GROUP_ROWS), [])
    producer = _role(cluster, ledger, _Inline, 0)
    producer.sizes = (40,)
    trainer = _role(cluster, ledger, _Trainer, 0)
    works = cluster.loop.start_on(producer.client.machine, _keep_on(producer, trainer))
    await asyncio.sleep(3.0)
    cluster.network.cut(keeper.machine, other.machine)
    await asyncio.sleep(cut_s)
    cluster.crash(keeper, at_once=False)
    assert not works.done(), works
    works.cancel()
    put = {row.key for group in ledger.groups if group.acked for row in group.rows}
    assert len(put) >= FIRST_GROUPS * GROUP_ROWS and trainer.acked
    await asyncio.sleep(0.5)
    cluster.network.heal()
    cluster.start(keeper)
    await asyncio.sleep(10.0)
    reader = _role(cluster, ledger, _Trainer, 1)
    left = set[bytes]()
    while True:
        try:
            left |= await reader._patiently(lambda: reader.claimed(ack=False))
        except ClaimTimeout:
            break
    assert not left & trainer.acked, "what was acked is handed out again"
    assert put - trainer.acked <= left, "what was put is gone, and nobody says so"


def _role(cluster: Cluster, ledger: Ledger, kind: type[Role], place: int) -> Any:
    client = Client(cluster, cluster.places[place], kind.__name__)
    return kind(client, ledger, random.Random(kind.__name__))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # tasks cancelled before they began
@pytest.mark.parametrize("cut_s", [0.5, 3.0, 5.0, 8.0])
def test_what_the_keeper_acknowledged_while_its_link_was_cut_outlives_its_host(
    cut_s: float,
) -> None:
    """It left its backup behind after 2 s, and nobody else knew that: the backup went on with an
    older copy."""
    loop = VirtualLoop()
    cluster = Cluster(loop, random.Random(2), 2)
    gc.disable()
    try:
        with cluster.installed():
            told = loop.start_on(loop.world, _script(cluster, cut_s))
            while not told.done() and loop.steps < MAX_STEPS:
                assert loop.step()
            told.result()
            loop.end()
    finally:
        gc.enable()
        cluster.close()
