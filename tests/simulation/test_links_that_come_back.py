"""Links of one peer fail for a while or are slow: what waits for them goes on."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from unittest import mock

import pytest

from dataplane.peer.shards import appends
from dataplane.peer.shards.confirming import OVERDUE_S
from dataplane.wire import messages as m
from dataplane.wire.limits import INLINE_ROW_BYTES
from dataplane.wire.tables import Definition, Values
from tests.simulation.cluster import Cluster, Place
from tests.simulation.ledger import Ledger
from tests.simulation.line import Client
from tests.simulation.loop import VirtualLoop
from tests.simulation.roles import Producer, Role
from tests.simulation.script import played

GROUP_ROWS = 4
GOES_ON_S = 4.0
MANY = 16
"""Groups of one put."""


def _began(seed: int, peers: int, replicas: int = 1) -> tuple[Cluster, Ledger, list[str]]:
    wrong = list[str]()
    definition = Definition({"train": ["x"]}, GROUP_ROWS, free="acked", replicas=replicas)
    return Cluster(VirtualLoop(), random.Random(seed), peers), Ledger("", definition, wrong), wrong


async def _started(cluster: Cluster, ledger: Ledger, at: int = 1) -> tuple[Place, Place, Place]:
    """The keeper, the primary of the ledger's partition, and its backup, where it has another. at:
    which place is the primary."""
    for place in cluster.places:
        cluster.start(place)
    await asyncio.sleep(4.0)
    keeper, primary = cluster.places[0], cluster.places[at]
    assert primary.peer is not None
    roster = primary.peer.host.roster
    names = (f"p{number}" for number in range(1_000))
    ledger.partition = next(one for one in names if roster.home(one) == primary.address)
    address, in_sync = roster.backup_of(primary.address)
    assert in_sync
    return keeper, primary, next(one for one in cluster.places if one.address == address)


def _role(cluster: Cluster, ledger: Ledger, kind: type[Role], place: Place) -> Any:
    return kind(Client(cluster, place, kind.__name__), ledger, random.Random(kind.__name__))


async def _puts(producer: Any, number: int) -> None:
    group = producer._group(number, given=False)
    producer.ledger.opened(group)
    await producer._patiently(lambda: producer._put_all([group]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # tasks cancelled before they began
@pytest.mark.parametrize("cut_s", [2.5, 8.0])
def test_a_primary_that_reached_neither_its_backup_nor_the_keeper_goes_on_when_it_does(
    cut_s: float,
) -> None:
    cluster, ledger, wrong = _began(3, 4)

    async def script() -> None:
        keeper, primary, backup = await _started(cluster, ledger)
        producer = _role(cluster, ledger, Producer, cluster.places[3])
        producer.sizes = (40,)
        await _puts(producer, 0)
        for other in (keeper, backup):
            cluster.network.cut(primary.machine, other.machine)
        await asyncio.sleep(cut_s)
        cluster.network.heal()
        async with asyncio.timeout(GOES_ON_S):
            await _puts(producer, 1)

    played(cluster, script)
    assert not wrong


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_owner_that_was_cut_off_for_long_hears_of_what_was_freed_meanwhile() -> None:
    """The keeper reaches both, so nobody is lost."""
    cluster, ledger, wrong = _began(5, 5)

    async def script() -> None:
        _, primary, backup = await _started(cluster, ledger)
        owner = next(p for p in cluster.places[2:] if p is not backup)
        producer = _role(cluster, ledger, Producer, owner)
        consumer = _role(cluster, ledger, Role, primary)
        producer.sizes = (5_000,)  # in the arena, not in the shard
        await _puts(producer, 0)
        assert owner.peer is not None
        life, space = owner.peer, owner.peer.host.space
        want = m.Want("groups", 1, 1)

        async def claimed() -> m.Claimed:
            body = m.Claim(consumer.partition, consumer.generation, "train", want, ["x"])
            return await consumer.client.call(body, m.Claimed, 5.0)

        lease = (await consumer._patiently(claimed)).lease
        cluster.network.cut(primary.machine, owner.machine)
        await consumer.client.call(m.Finish(lease, "ack"), m.PutDone, 5.0)
        await asyncio.sleep(35.0)
        assert owner.peer is life and space.stats()["used_bytes"]
        cluster.network.heal()
        await asyncio.sleep(GOES_ON_S)
        assert owner.peer is life and not space.stats()["used_bytes"]

    played(cluster, script)
    assert not wrong


class _Inline(Producer):
    """All that it puts is in the shard and its copy."""

    async def write(self, field: str, keys: list[bytes], nbytes: int, known: bool) -> Values:
        return self.inline(field, keys, nbytes)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("peers", "at"), [(2, 0), (2, 1), (4, 1)])
def test_a_record_that_takes_long_to_reach_the_backup_leaves_it_in_sync(
    peers: int, at: int, replicas: int
) -> None:
    """The primary asked the backup on the same stream whether it still serves. The reply came
    after the record, so the backup was removed from the in-sync set, and the new roster refused
    the puts that had waited for it."""
    cluster, ledger, wrong = _began(4, peers, replicas)

    async def script() -> None:
        _, primary, _ = await _started(cluster, ledger, at)
        producer = _role(cluster, ledger, _Inline, primary)
        producer.sizes = (INLINE_ROW_BYTES,)
        await _puts(producer, 0)
        assert primary.peer is not None
        epoch = primary.peer.host.roster.epoch
        cluster.network.byte_s = 1.5 * OVERDUE_S / (GROUP_ROWS * INLINE_ROW_BYTES)
        began = cluster.loop.now
        await _puts(producer, 1)
        assert cluster.loop.now - began > OVERDUE_S, "the link was not slow"
        await asyncio.sleep(GOES_ON_S)  # a new roster takes as long
        assert primary.peer.host.roster.epoch == epoch
        assert not producer.told, "a call was refused"

    played(cluster, script)
    assert not wrong


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("stays_slow", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("peers", "at"), [(2, 0), (2, 1), (4, 1)])
def test_a_record_that_takes_too_long_goes_on_without_the_backup(
    peers: int, at: int, replicas: int, stays_slow: bool
) -> None:
    """The backup confirms all the while that it takes over nothing. stays_slow: each attempt timed
    out before the record arrived, and its successor arrived later still."""
    cluster, ledger, wrong = _began(4, peers, replicas)
    record_bytes, takes_s = MANY * GROUP_ROWS * INLINE_ROW_BYTES, 20.0

    async def script() -> None:
        _, primary, _ = await _started(cluster, ledger, at)
        producer = _role(cluster, ledger, _Inline, primary)
        producer.sizes = (INLINE_ROW_BYTES,)
        await _puts(producer, 0)
        assert primary.peer is not None
        stream = primary.peer.shipping._stream
        groups = [producer._group(number, given=False) for number in range(1, 1 + MANY)]
        for group in groups:
            ledger.opened(group)
        with mock.patch.object(appends, "LEAST_BYTES_S", record_bytes):
            cluster.network.byte_s = takes_s / record_bytes
            began = cluster.loop.now
            await producer._patiently(lambda: producer._put_all(groups))
            assert OVERDUE_S + 1.0 < cluster.loop.now - began < takes_s / 2
            if not stays_slow:
                cluster.network.byte_s = 0.0
            await asyncio.sleep(5 * takes_s if stays_slow else takes_s)
        assert primary.peer.host.roster.backup_of(primary.address)[1]
        assert primary.peer.shipping._stream == stream, "the backup got everything again"

    played(cluster, script)
    assert not wrong
