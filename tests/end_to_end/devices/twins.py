"""Values on twins of devices in host memory: making them, and looking where they are."""

from __future__ import annotations

from typing import Any

import numpy as np

import dataplane
from dataplane_twin import TwinArray, TwinDevice
from tests.end_to_end.conftest import until

MIB = 1 << 20
HOLDING = """
    import os
    import signal
    import numpy as np
    import dataplane
    from dataplane_twin import TwinDevice

    device = TwinDevice()
    plane = dataplane.connect("a")
    part = plane.partition("p")
"""


def values(count: int, nbytes: int = 20_000, first: int = 0) -> list[np.ndarray]:
    """Different arrays of about so many bytes."""
    return [
        np.arange(nbytes // 4 + row, dtype=np.float32) + row for row in range(first, first + count)
    ]


def given(device: TwinDevice, arrays: list[np.ndarray], stream: int = 0) -> list[TwinArray]:
    return [device.array(array, stream) for array in arrays]


def on_device(plane: dataplane.Plane) -> dict[str, Any]:
    (figures,) = plane.stats()["devices"]
    return dict(figures)


def all_free(plane: dataplane.Plane) -> None:
    until(
        lambda: on_device(plane)["free_bytes"] == on_device(plane)["size_bytes"],
        "all of the device arena is free",
    )


def same(found: Any, arrays: list[np.ndarray]) -> bool:
    pairs = list(zip(found, arrays, strict=True))
    plain = [(one.get() if isinstance(one, TwinArray) else one, two) for one, two in pairs]
    return all((a.dtype, a.tobytes()) == (b.dtype, b.tobytes()) for a, b in plain)
