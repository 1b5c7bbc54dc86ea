"""Tests here are reported as not run where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import dataplane
from dataplane.errors import DeviceMissing
from dataplane.gpu.cuda import CudaDevice
from tests.end_to_end.conftest import PLANE, Cluster


def _missing() -> str:
    try:
        return "" if CudaDevice.count() else "no GPU here"
    except DeviceMissing as exc:
        return exc.message


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.get_closest_marker("gpu")]
    why = _missing() if here else ""
    for item in here:
        if why:
            item.add_marker(pytest.mark.skip(reason=f"not run: {why}"))


@pytest.fixture(scope="session", autouse=True)
def driver() -> None:
    """What the driver, cupy and torch open at their first use, and keep, is no test's leak."""
    if _missing():
        return
    device = CudaDevice(0)
    device.allocate(1).close()
    device.event().close()
    import cupy

    cupy.arange(1).get()
    torch = pytest.importorskip("torch")
    torch.zeros(1, device="cuda").cpu()


@contextmanager
def two_planes(run_dir: Any) -> Iterator[tuple[dataplane.Plane, dataplane.Plane]]:
    """Clients of two peers, each with an arena on the first GPU."""
    cluster = Cluster(run_dir)
    cluster.start("a", "b", arena="256MiB", devices={"a": "256MiB", "b": "256MiB"})
    try:
        with (
            dataplane.connect("a", run=PLANE, devices="required") as a,
            dataplane.connect("b", run=PLANE, devices="required") as b,
        ):
            yield a, b
    finally:
        cluster.stop()


def bring(a: dataplane.Plane, b: dataplane.Plane, first: int = 0) -> dict[str, Any]:
    """Tensors that are put at one are read at the other as they were; how, as the reader says.
    first: the key of the first one."""
    torch = pytest.importorskip("torch")
    tensors = [torch.randn(1000 + row, 64, device="cuda") for row in range(8)]
    keys = list(range(first, first + 8))
    a.partition("p", free="drop").put({"x": tensors}, key=keys)
    found = b.partition("p").get(keys=keys).torch("x", device="cuda")
    assert all(torch.equal(one, two) for one, two in zip(found, tensors, strict=True))
    return dict(b.stats()["devices"][0]["to_others"])
