"""What a client holds on devices, over a driver that fails: no GPU takes part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.errors import DeviceMissing
from dataplane.gpu.client.pools import OpenPools
from dataplane.gpu.registry import AUTO


def test_what_a_device_that_fails_may_still_read_stays_held_and_is_asked_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(timeout_s: float) -> bool:
        raise DeviceMissing("an illegal memory access")

    driver = SimpleNamespace(finish=failing)
    pool: Any = SimpleNamespace(opened=SimpleNamespace(device=driver))
    devices = OpenPools(AUTO)
    devices.pools.append(pool)
    devices.ends([7])
    assert devices.finished() == [] == devices.finished() and devices.ending
    assert caplog.text.count("an illegal memory access") == 1
    driver.finish = lambda timeout_s: True
    assert devices.finished() == [([7], ())] and not devices.ending
