"""A device of the test process, and a client of a peer that has one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dataplane
from dataplane_twin import TwinDevice
from tests.end_to_end.conftest import Cluster


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    device = TwinDevice()
    yield device
    device.close()


@pytest.fixture
def plane(cluster: Cluster) -> Iterator[dataplane.Plane]:
    """A client of a peer with 32 MiB on a device."""
    cluster.start("a", arena="64MiB", devices={"a": "twin:32MiB"})
    with cluster.connect("a") as connected:
        yield connected
