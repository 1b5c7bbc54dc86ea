"""`bench perf --only gpu` over the twin: only the driver's own calls are left untried."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cli import main
from dataplane_twin import TwinDevice
from tests.perf import gpu

MIB = 1 << 20


class Twin:
    """Host memory; its copies are numpy's."""

    kind = "twin:"

    def __init__(self) -> None:
        self.device = TwinDevice()
        self._random = np.random.default_rng(0)
        self.made: list[np.ndarray] = []
        self.found: list[np.ndarray] = []

    def array(self, nbytes: int) -> Any:
        self.made.append(self._random.integers(0, 255, nbytes, np.uint8))
        return self.device.array(self.made[-1])

    def tensor(self, batch: Any, field: str) -> Any:
        tensor = batch.torch(field)
        self.found.append(tensor.numpy())
        return tensor

    def device_copy_s(self, nbytes: int) -> float:
        source, target = np.ones((2, nbytes), np.uint8)
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    pinned_copy_s = device_copy_s


def test_every_figure_of_a_gpu_is_measured_beside_its_ceiling() -> None:
    twin, ticks = Twin(), []
    told = gpu.measure(twin, 1, lambda done, of: ticks.append((done, of)), nbytes=MIB)
    twin.device.close()
    assert ticks == [(1, 2), (2, 2)]
    for name in ("put", "get", "to_gpu", "other_peer"):
        assert told[name]["GBps"] > 0 and told[name]["of_ceiling"] > 0
    assert set(told["ceiling"]) == {"device_copy_GBps", "pinned_copy_GBps"}
    assert all(told["claim_ms"][name] > 0 for name in ("small", "large", "host", "view"))
    (path,) = told["between_peers"]["peers"].values()
    assert path["transport"] == "cuda_ipc" and path["tried"]["cuda_ipc"]["exact"]
    assert told["between_peers"]["staged_bytes"] == 0
    rows = told["rows"]
    large = [made.tobytes() for made in twin.made if made.nbytes == MIB]
    for nth in range(2):
        made = sorted(large[nth * rows : (nth + 1) * rows])
        for found in (twin.found[3 * nth], twin.found[3 * nth + 2]):
            assert sorted(row.tobytes() for row in found) == made


def test_what_brings_values_to_another_peers_device_is_measured_or_said_to_be_missing() -> None:
    twin, ticks = Twin(), []
    told = gpu.ways.measure(twin, 1, lambda done, of: ticks.append((done, of)), MIB, ("cuda_ipc",))
    twin.device.close()
    assert ticks == [(1, 1)]
    assert told["cuda_ipc"]["GBps"] > 0 and told["cuda_ipc"]["tried"]["exact"]
    none = gpu.ways.measure(twin, 1, lambda done, of: None, MIB, ("post",))
    assert none["post"]["status"] == "not run" and "no installed package" in none["post"]["error"]


def test_without_a_gpu_the_report_says_that_it_was_not_run(tmp_path: Path) -> None:
    if not gpu.missing():
        pytest.skip("there is a GPU here")
    path = tmp_path / "perf.json"
    assert main(["perf", "--only", "gpu", "--json", str(path)]) == 0
    told = json.loads(path.read_text())["gpu"]
    assert told["status"] == "not run" and told["error"]
