"""Links of one peer fail for a while or are slow: what waits for them goes on."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any, Literal
from unittest import mock

import pytest

from dataplane.peer.shards import log_sender
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


def _began(seed: int, peers: int, replicas: Literal[1, 2] = 1) -> tuple[Cluster, Ledger, list[str]]:
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
            reply: m.Claimed = await consumer.client.call(body, m.Claimed, 5.0)
            return reply

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
    peers: int, at: int, replicas: Literal[1, 2]
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
    peers: int, at: int, replicas: Literal[1, 2], stays_slow: bool
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
        stream = primary.peer.log_sender._stream
        groups = [producer._group(number, given=False) for number in range(1, 1 + MANY)]
        for group in groups:
            ledger.opened(group)
        with mock.patch.object(log_sender, "LEAST_BYTES_S", record_bytes):
            cluster.network.byte_s = takes_s / record_bytes
            began = cluster.loop.now
            await producer._patiently(lambda: producer._put_all(groups))
            assert OVERDUE_S + 1.0 < cluster.loop.now - began < takes_s / 2
            if not stays_slow:
                cluster.network.byte_s = 0.0
            await asyncio.sleep(5 * takes_s if stays_slow else takes_s)
        assert primary.peer.host.roster.backup_of(primary.address)[1]
        assert primary.peer.log_sender._stream == stream, "the backup got everything again"

    played(cluster, script)
    assert not wrong


class _SlowLink:
    """Puts of MANY groups over a link on which their record takes `takes_s`. The primary accepts
    one second more than OVERDUE_S."""

    takes_s = 5.0
    record_bytes = MANY * GROUP_ROWS * INLINE_ROW_BYTES

    def __init__(self, cluster: Cluster, ledger: Ledger, primary: Place) -> None:
        self.cluster, self.ledger, self.primary = cluster, ledger, primary
        self.producer = _role(cluster, ledger, _Inline, primary)
        self.producer.sizes = (INLINE_ROW_BYTES,)
        self.numbers = itertools.count(1)

    def is_in_sync(self) -> bool:
        assert self.primary.peer is not None
        return self.primary.peer.host.roster.backup_of(self.primary.address)[1]

    async def put(self, many: int = MANY) -> float:
        """Put groups. Return how long that took."""
        groups = [self.producer._group(next(self.numbers), given=False) for _ in range(many)]
        for group in groups:
            self.ledger.opened(group)
        began = self.cluster.loop.now
        await self.producer._patiently(lambda: self.producer._put_all(groups))
        return self.cluster.loop.now - began

    async def becomes(self, in_sync: bool) -> float:
        """Wait until the backup is in sync, or is not. Return how long that took."""
        began = self.cluster.loop.now
        async with asyncio.timeout(2 * log_sender.MOST_REST_S):
            while self.is_in_sync() != in_sync:
                await asyncio.sleep(0.5)
        return self.cluster.loop.now - began

    def __enter__(self) -> None:
        self._patch = mock.patch.object(log_sender, "LEAST_BYTES_S", self.record_bytes)
        self._patch.start()
        self.cluster.network.byte_s = self.takes_s / self.record_bytes

    def __exit__(self, *_: object) -> None:
        self._patch.stop()
        self.cluster.network.byte_s = 0.0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("peers", "at"), [(2, 0), (2, 1), (4, 1)])
def test_a_backup_behind_a_link_that_stays_slow_rejoins_ever_later(peers: int, at: int) -> None:
    """It rejoined as soon as it had everything, so each load stopped all calls for seconds."""
    cluster, ledger, wrong = _began(4, peers)
    rests_s, forget_s = [10.0, 20.0, 40.0, 60.0, 60.0], 100.0

    async def script() -> None:
        _, primary, _ = await _started(cluster, ledger, at)
        link = _SlowLink(cluster, ledger, primary)
        await link.put(1)

        async def removed() -> float:
            """Return for how long the backup is not in sync then."""
            with link:
                assert await link.put() > OVERDUE_S
                assert not link.is_in_sync()
                return await link.becomes(in_sync=True)

        assert await removed() < 2 * link.takes_s
        for rest_s in rests_s:
            assert rest_s - 2.0 < await removed() < rest_s + 1.0
        await asyncio.sleep(forget_s)
        assert await removed() < 2 * link.takes_s

    with mock.patch.multiple(log_sender, MOST_REST_S=rests_s[-1], FORGET_S=forget_s):
        played(cluster, script)
    assert not wrong


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("peers", "at"), [(2, 0), (2, 1), (4, 1)])
def test_a_record_that_is_late_before_the_roster_lists_the_backup_frees_calls(
    peers: int, at: int
) -> None:
    """The backup had everything but a record that nobody waited for, so replies waited for it. The
    next record was late, but no roster followed, because the old one did not list the backup."""
    cluster, ledger, wrong = _began(4, peers)

    async def script() -> None:
        _, primary, _ = await _started(cluster, ledger, at)
        link = _SlowLink(cluster, ledger, primary)
        await link.put(1)
        with link:
            assert primary.peer is not None
            progress = primary.peer.host.progress
            await link.put()
            confirmed = progress.confirmed
            await link.put()
            while progress.confirmed == confirmed:
                await asyncio.sleep(0.1)
            await link.put(1)  # while the second record is in flight
            epoch = primary.peer.host.roster.epoch
            async with asyncio.timeout(3 * link.takes_s):
                while not progress.required:
                    await asyncio.sleep(0.1)
            cluster.network.byte_s *= 4 * MANY
            assert OVERDUE_S < await link.put(1) < 2 * OVERDUE_S
            assert primary.peer.host.roster.epoch == epoch

    with mock.patch.object(
        log_sender, "QUIET_S", 60.0
    ):  # records that nobody waits for are not sent
        played(cluster, script)
    assert not wrong


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_late_record_frees_no_call_while_the_keeper_may_list_the_backup() -> None:
    """The keeper heard that the backup had everything, and was cut off before the primary had its
    roster. If the primary had died then, the backup would have been promoted."""
    cluster, ledger, wrong = _began(4, 4)

    async def script() -> None:
        keeper, primary, _ = await _started(cluster, ledger)
        link = _SlowLink(cluster, ledger, primary)
        await link.put(1)
        with link:
            await link.put()
            assert primary.peer is not None
            progress = primary.peer.host.progress
            async with asyncio.timeout(3 * link.takes_s):
                while not progress.required:
                    await asyncio.sleep(0.001)
            assert not link.is_in_sync()
            cluster.network.cut(primary.machine, keeper.machine)
            cluster.network.byte_s *= 4
            putting = asyncio.create_task(link.put())
            await asyncio.sleep(3 * OVERDUE_S)
            assert not link.is_in_sync() and progress.required
            cluster.network.heal()
            async with asyncio.timeout(4 * OVERDUE_S):
                await putting

    played(cluster, script)
    assert not wrong


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_peer_that_leaves_waits_for_no_backup_that_stays_out_of_sync() -> None:
    cluster, ledger, wrong = _began(4, 4)

    async def script() -> None:
        _, primary, _ = await _started(cluster, ledger)
        link = _SlowLink(cluster, ledger, primary)
        await link.put(1)
        for _ in range(4):
            with link:
                await link.put()
                await link.becomes(in_sync=False)
            await link.becomes(in_sync=True)
        with link:
            await link.put()
            await link.becomes(in_sync=False)
        assert primary.leave is not None
        primary.leave.set()
        async with asyncio.timeout(20.0):
            while primary.peer is not None:
                await asyncio.sleep(0.5)

    played(cluster, script)
    assert not wrong
