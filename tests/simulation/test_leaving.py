"""All peers of a plane are told to end at nearly the same time, as where a job ends."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.simulation.cluster import Cluster, Place
from tests.simulation.loop import VirtualLoop
from tests.simulation.script import played

SEEDS = 40
ENDS_S = 10.0
"""Longer than it takes to see one after the other that has ended; less than a leaver waits for the
keeper of the roster (`leaving.FATE_S`)."""


def _takes_s(seed: int) -> float:
    """Until the last of them has ended."""
    rng, loop = random.Random(seed), VirtualLoop()
    cluster = Cluster(loop, random.Random(rng.random()), rng.choice((3, 4, 4, 5)))
    if rng.random() < 0.5:
        cluster.network.delay_s = rng.choice((0.002, 0.01, 0.03))
    within_s, keeper_dies = rng.choice((0.0, 0.005, 0.05, 0.5, 2.0)), rng.random() < 0.3

    async def end(place: Place) -> None:
        await asyncio.sleep(rng.uniform(0, within_s))
        if keeper_dies and place is cluster.places[0]:
            cluster.crash(place, at_once=True)
            return
        assert place.leave is not None
        place.leave.set()
        while place.peer is not None:
            await asyncio.sleep(0.05)

    async def script() -> float:
        for place in cluster.places:
            cluster.start(place)
        await asyncio.sleep(4.0 + rng.random())
        began = loop.now
        await asyncio.gather(*map(end, cluster.places))
        return loop.now - began

    return played(cluster, script)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # tasks cancelled before they began
def test_where_all_are_told_to_end_none_waits_long_for_another() -> None:
    assert {seed: s for seed in range(SEEDS) if (s := _takes_s(seed)) > ENDS_S} == {}
