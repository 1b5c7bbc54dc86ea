"""`bench perf` over engines that are installed: what is measured is that engine and no other."""

from __future__ import annotations

import pytest

from dataplane.transport import registry
from tests.perf.transports import Shape, measure
from tests.perf.transports.loops import Loop

SHAPES = (Shape(8, 1 << 20), Shape(128, 16 << 10))


pytestmark = pytest.mark.skipif(bool(registry.missing("nixl")), reason=registry.missing("nixl"))


def test_nixls_bare_loop_moves_every_byte() -> None:
    with Loop("nixl", 16 << 20) as loop:
        assert loop.arrived_bytes() == 0
        for shape in SHAPES:
            assert loop.read_s(shape) > 0
            assert loop.arrived_bytes() == shape.nbytes


def test_pulls_over_nixl_are_measured_beside_its_bare_loop() -> None:
    told, _ = measure(["nixl"], 1, lambda done, of: None, SHAPES, arena="128MiB")
    assert set(told["nixl"]) == {shape.name for shape in SHAPES}, told["nixl"]
    for measured in told["nixl"].values():
        assert measured["GBps"] > 0 and measured["ceiling_GBps"] > 0
        assert measured["copies_per_byte"] == 1.0
        assert measured["exchanges_per_batch"] >= 2
