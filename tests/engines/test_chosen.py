"""Peers that run an engine: it carries values, `auto` may choose it, and it opens no door."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import psutil
import pytest

from dataplane.testing import hosts
from dataplane.transport import registry
from dataplane_twin import TwinArray, TwinDevice
from tests.end_to_end.conftest import PLANE, Cluster, cluster

__all__ = ["cluster"]
pytestmark = pytest.mark.skipif(bool(registry.missing("nixl")), reason=registry.missing("nixl"))

MIB = 1 << 20
ENGINE = "nixl"


async def test_no_worker_listens_anywhere_but_where_its_peer_told_it_to() -> None:
    async with hosts(ENGINE) as start:
        a, b = await start("a", 8 * MIB), await start("b", 8 * MIB)
        await b.read(a, a.place(np.array([0]), np.array([8 * MIB])))
        for host in (a, b):
            inet = psutil.Process(host.pid).net_connections(kind="inet")
            doors = {f"{c.laddr.ip}:{c.laddr.port}" for c in inet if c.status == psutil.CONN_LISTEN}
            assert doors == {host.engine.address}
            assert not [c for c in inet if c.status == psutil.CONN_NONE], "a datagram socket"


def test_peers_carry_values_from_device_to_device_over_an_engine(
    run_dir: object, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin's device arenas are host memory to an engine, and nothing else of the way differs:
    the owner's and the reader's workers open them by handle, and no host arena has the values."""
    monkeypatch.setenv("DATAPLANE_TRANSPORT", f"required:{ENGINE}")
    device = TwinDevice()
    cluster.start("a", "b", devices={"a": "twin@0,1:32MiB", "b": "twin:64MiB"})
    with cluster.connect("a") as here, cluster.connect("b") as there:
        arrays = [np.random.default_rng(row).integers(0, 256, MIB, np.uint8) for row in range(8)]
        part = here.partition("p", free="drop")
        part.put({"x": [device.array(one) for one in arrays]}, key=list(range(8)))
        found = there.partition("p").get(keys=list(range(8)))["x"]
        assert all(isinstance(one, TwinArray) for one in found)
        assert all(np.array_equal(one.get(), two) for one, two in zip(found, arrays, strict=True))
        (into,) = there.stats()["devices"]
        (path,) = into["to_others"]["peers"].values()
        assert path["transport"] == ENGINE and path["tried"][ENGINE]["exact"]
        assert into["to_others"]["runs"] == [ENGINE] and into["cached_bytes"] >= 8 * MIB
        assert not any(one["staged_bytes"] for one in here.stats()["devices"])
    device.close()


def test_peers_carry_values_over_an_engine_that_is_required(
    run_dir: object, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_TRANSPORT", f"required:{ENGINE}")
    cluster.start("a", "b")
    values = np.random.default_rng(0).integers(0, 256, (16, MIB), np.uint8)
    with cluster.connect("a") as here, cluster.connect("b") as there:
        part = here.partition("p", stages={"s": ["x"]}, free="acked")
        part.put({"x": values}, key=[f"row-{i:02}" for i in range(16)])
        with there.partition("p").claim("s", rows=16, timeout=60) as batch:
            order = np.argsort(batch.keys)
            assert np.array_equal(batch.numpy("x")[order], values)
        bulk = there.stats()["bulk"]
        assert bulk["bytes_in_over"][ENGINE] >= 16 * MIB
        (path,) = bulk["paths"]["peers"].values()
        assert path["transport"] == ENGINE and path["tried"][ENGINE]["exact"]
    command = [sys.executable, "-m", "dataplane", "probe", "--run", PLANE, "--json"]
    probed = subprocess.run(
        [*command, "--require", ENGINE], capture_output=True, text=True, check=False, timeout=100
    )
    assert probed.returncode == 0, probed.stdout + probed.stderr
    assert not json.loads(probed.stdout)["lacking"]
