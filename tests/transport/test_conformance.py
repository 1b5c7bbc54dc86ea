"""The suite that ships in `dataplane.testing`, for TCP and for transports of another package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dataplane.errors import TransportMissing
from dataplane.testing import TransportConformance, hosts
from dataplane_twin import TwinDevice

THEIRS = Path(__file__).parent / "third_party"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other package is where bulk workers find it."""
    monkeypatch.setenv("PYTHONPATH", f"{THEIRS}:{Path(__file__).parents[2]}", prepend=":")


class TestTcp(TransportConformance):
    transport = "tcp"


class TestOneSided(TransportConformance):
    transport = "shelf"


class TestTwoSided(TransportConformance):
    transport = "post"


class TestDeviceMemory(TransportConformance):
    """`cuda_ipc` over the twin."""

    transport = "cuda_ipc"
    device = TwinDevice


class TestRanks(TransportConformance):
    """`nccl` over the twin, whose ranks are those of NCCL but for the library."""

    transport = "nccl"
    device = TwinDevice


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "no installed package provides"),
        ("ucx", "choose nixl instead"),
        ("stranger", "not a subclass of Transport"),
    ],
)
async def test_a_transport_that_does_not_load_is_said_and_tcp_still_works(
    name: str, why: str
) -> None:
    async with hosts(name) as start:
        a, b = await start("a"), await start("b")
        a.fill()
        assert a.engine.transport == "tcp" and why in a.engine.missing
        copies = a.place(np.array([0]), np.array([4096]))
        with pytest.raises(TransportMissing):
            await b.read(a, copies)
        assert (await b.engine.read(a.remote, copies)).nbytes == 4096
