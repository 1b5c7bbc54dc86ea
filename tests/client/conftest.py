"""A scripted peer and a client of it for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dataplane import Partition, Plane
from tests.client.scripted_peer import ScriptedPeer


@pytest.fixture
def peer() -> Iterator[ScriptedPeer]:
    scripted = ScriptedPeer()
    yield scripted
    scripted.close()


@pytest.fixture
def plane(peer: ScriptedPeer) -> Iterator[Plane]:
    with Plane(peer.keeper()) as client:
        yield client


@pytest.fixture
def part(plane: Plane) -> Partition:
    return plane.partition("x", stages={"s": ["a"]})
