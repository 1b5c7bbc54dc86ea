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
