"""Attaching to a partition that a plane had: the error says so, and not that nobody declared it."""

from __future__ import annotations

import asyncio
import random

import pytest

from dataplane.errors import PartitionUndefined
from dataplane.wire import messages as m
from dataplane.wire.tables import Definition
from tests.simulation.cluster import Cluster
from tests.simulation.line import Client
from tests.simulation.loop import VirtualLoop
from tests.simulation.script import played

LOST_S = 30.0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # tasks cancelled before they began
def test_a_partition_whose_hosts_died_was_there_before() -> None:
    cluster = Cluster(VirtualLoop(), random.Random(5), 3)

    async def script() -> str:
        for place in cluster.places:
            cluster.start(place)
        await asyncio.sleep(4.0)
        asks, primary, backup = cluster.places
        assert asks.peer is not None
        roster = asks.peer.host.roster
        assert roster.backup_of(primary.address) == (backup.address, True)
        names = (f"p{number}" for number in range(100))
        name = next(one for one in names if roster.home(one) == primary.address)
        client = Client(cluster, asks, "attaches")
        await client.connect()
        await client.call(m.Define(name, Definition({"s": ["x"]})), m.Defined, 5.0)
        cluster.crash(primary, at_once=True)
        cluster.crash(backup, at_once=True)
        await asyncio.sleep(LOST_S)
        with pytest.raises(PartitionUndefined) as caught:
            await client.call(m.Define(name, None, 500), m.Defined, 5.0)
        return caught.value.message.replace(repr(name), "NAME")

    told = played(cluster, script)
    assert told.startswith("partition NAME was not found: it existed in run ")
    assert told.endswith(
        " before, but was dropped or lost: declare it again with plane.partition(NAME, stages={…})"
    )
