"""Tests here are reported as not run where there is no GPU."""

from __future__ import annotations

import pytest

from dataplane.errors import DeviceMissing
from dataplane.memory.device_cuda import CudaDevice


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
