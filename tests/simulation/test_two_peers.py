"""The keeper of the roster and one other peer: their link fails, and then the keeper's host."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest

from dataplane.errors import ClaimTimeout
from dataplane.wire import messages as m
from dataplane.wire.tables import Definition, Values
from tests.simulation.cluster import Cluster
from tests.simulation.ledger import Ledger
from tests.simulation.line import Client
from tests.simulation.loop import VirtualLoop
from tests.simulation.roles import Producer, Role, keys_of
from tests.simulation.script import played

GROUP_ROWS = 4
FIRST_GROUPS = 5
GOES_ON_S = 5.0
IN_SYNC_S = 10.0


class _Inline(Producer):
    """All that it puts is in the shard and its copy."""

    async def write(self, field: str, keys: list[bytes], nbytes: int, known: bool) -> Values:
        return self.inline(field, keys, nbytes)


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


@dataclass
class _Plane:
    """A producer and a trainer at the keeper's host, on a partition whose shard is there."""

    cluster: Cluster

    async def begin(self) -> None:
        for place in self.cluster.places:
            self.cluster.start(place)
        await asyncio.sleep(4.0)
        self.keeper, self.other = self.cluster.places
        definition = Definition({"train": ["x"]}, GROUP_ROWS)
        self.ledger = Ledger(_partition(self.cluster, 0), definition, [])
        self.producer, self.trainer = self.role(_Inline, 0), self.role(_Trainer, 0)
        self.producer.sizes = (40,)
        work = _keep_on(self.producer, self.trainer)
        self.works = self.cluster.loop.start_on(self.producer.client.machine, work)
        await asyncio.sleep(3.0)

    def role(self, kind: type[Role], place: int) -> Any:
        client = Client(self.cluster, self.cluster.places[place], kind.__name__)
        return kind(client, self.ledger, random.Random(kind.__name__))

    def put(self) -> set[bytes]:
        """Keys of the rows whose put was acknowledged."""
        return {row.key for group in self.ledger.groups if group.acked for row in group.rows}

    async def the_keepers_host_dies(self) -> None:
        """What was acknowledged before is there when it is back."""
        self.cluster.crash(self.keeper, at_once=False)
        assert not self.works.done(), self.works
        self.works.cancel()
        put = self.put()
        assert len(put) >= FIRST_GROUPS * GROUP_ROWS and self.trainer.acked
        await asyncio.sleep(0.5)
        self.cluster.network.heal()
        self.cluster.start(self.keeper)
        await asyncio.sleep(10.0)
        reader = self.role(_Trainer, 1)
        left = set[bytes]()
        while True:
            try:
                left |= await reader._patiently(lambda: reader.claimed(ack=False))
            except ClaimTimeout:
                break
        assert not left & self.trainer.acked, "what was acked is handed out again"
        assert put - self.trainer.acked <= left, "what was put is gone, and nobody says so"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # tasks cancelled before they began
@pytest.mark.parametrize("cut_s", [0.5, 3.0, 5.0, 8.0])
def test_what_the_keeper_acknowledged_while_its_link_was_cut_outlives_its_host(
    cut_s: float,
) -> None:
    """It left its backup behind after 2 s, and nobody else knew that: the backup went on with an
    older copy."""
    plane = _Plane(Cluster(VirtualLoop(), random.Random(2), 2))

    async def script() -> None:
        await plane.begin()
        plane.cluster.network.cut(plane.keeper.machine, plane.other.machine)
        await asyncio.sleep(cut_s)
        await plane.the_keepers_host_dies()

    played(plane.cluster, script)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("forbidden_s", [0.5, 30.0])
def test_a_keeper_that_cannot_connect_to_its_backup_goes_on_without_it(forbidden_s: float) -> None:
    """The backup's life signs arrived, so it was never lost, and each put at the keeper waited."""
    plane = _Plane(Cluster(VirtualLoop(), random.Random(2), 2))

    async def script() -> None:
        await plane.begin()
        plane.cluster.network.forbid(plane.keeper.machine, plane.other.machine)
        await asyncio.sleep(forbidden_s)
        before = plane.put()
        await asyncio.sleep(GOES_ON_S)
        assert plane.put() > before, "the keeper waits for its backup"
        plane.cluster.network.heal()
        await asyncio.sleep(IN_SYNC_S)
        await plane.the_keepers_host_dies()

    played(plane.cluster, script)
