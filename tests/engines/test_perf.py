"""`bench perf` over engines that are installed: what is measured is that engine and no other."""

from __future__ import annotations

import pytest

from dataplane.transport import registry
from tests.perf.transports import Shape, measure
from tests.perf.transports.loops import Loop

SHAPES = (Shape(8, 1 << 20), Shape(128, 16 << 10))


@pytest.fixture(params=["nixl", "ucx"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if why := registry.missing(name):
        pytest.skip(why)
    return name


def test_an_engines_bare_loop_moves_every_byte(engine: str) -> None:
    with Loop(engine, 16 << 20) as loop:
        assert loop.arrived_bytes() == 0
        for shape in SHAPES:
            assert loop.read_s(shape) > 0
            assert loop.arrived_bytes() == shape.nbytes


def test_pulls_over_an_engine_are_measured_beside_its_bare_loop(engine: str) -> None:
    told, _ = measure([engine], 1, lambda done, of: None, SHAPES, arena="128MiB")
    assert set(told[engine]) == {shape.name for shape in SHAPES}, told[engine]
    for measured in told[engine].values():
        assert measured["GBps"] > 0 and measured["ceiling_GBps"] > 0
        assert measured["copies_per_byte"] == 1.0
        assert measured["exchanges_per_batch"] >= 2
