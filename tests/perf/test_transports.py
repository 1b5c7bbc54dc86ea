"""`bench perf`'s transports: pulls beside bare loops, counted, and nothing left out silently."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.transport import registry
from tests.perf.transports import TRANSPORTS, Shape, measure
from tests.perf.transports.loops import Loop, LoopFailed
from tests.perf.transports.pulls import Counted, Pulls, WrongTransport, _outside_arenas
from tests.perf.transports.told import figures

MIB = 1 << 20
SMALL = Shape(8, MIB)


def figure(**changes: float) -> dict[str, float]:
    keys = ("GBps", "ceiling_GBps", "of_ceiling", "copies_per_byte", "exchanges_per_batch")
    return dict.fromkeys(keys, 1.0) | changes


def test_pulls_over_tcp_are_timed_beside_a_socket_and_counted() -> None:
    told, samples = measure(["tcp"], 2, lambda done, of: None, [SMALL], arena="128MiB")
    assert set(told["tcp"]) == {"8x1MiB"}
    measured = told["tcp"]["8x1MiB"]
    assert set(measured) == set(figure())
    assert measured["GBps"] > 0 and measured["ceiling_GBps"] > 0
    assert measured["copies_per_byte"] == 1.0  # from arena to arena, and views of that
    assert measured["exchanges_per_batch"] >= 2  # at least a grant and a bulk request
    assert {name: len(taken) for name, taken in samples.items()} == {
        "tcp/8x1MiB/loop_s": 2,
        "tcp/8x1MiB/pull_s": 2,
    }


def test_what_is_not_installed_is_reported_as_not_run_with_the_reason() -> None:
    absent = [name for name in TRANSPORTS if registry.missing(name)]
    if not absent:
        pytest.skip("every engine is installed here")
    told, samples = measure(absent, 1, lambda done, of: None, [SMALL])
    assert list(told) == absent and not samples
    for name in absent:
        assert told[name]["status"] == "not run"
        assert "pip install" in told[name]["error"]


def test_a_bare_loop_moves_every_byte() -> None:
    with Loop("tcp", 2 * SMALL.nbytes) as loop:
        assert loop.arrived_bytes() == 0
        assert loop.read_s(SMALL) > 0
        assert loop.arrived_bytes() == SMALL.nbytes


def test_a_bare_loop_that_cannot_start_says_why() -> None:
    if not registry.missing("nixl"):
        pytest.skip("nixl is installed here")
    with pytest.raises(LoopFailed, match="nixl cannot be imported"):
        Loop("nixl", MIB)


def test_bytes_that_came_over_another_transport_are_no_figure_of_this_one() -> None:
    pulls = object.__new__(Pulls)
    before = Counted({"tcp": 10, "nixl": 5}, 0, 0)
    assert pulls.check_transport("nixl", before, Counted({"tcp": 10, "nixl": 25}, 0, 0)) == 20
    for after in ({"tcp": 11, "nixl": 25}, {"tcp": 30, "nixl": 5}, {"tcp": 10, "nixl": 5}):
        with pytest.raises(WrongTransport, match="over nixl"):
            pulls.check_transport("nixl", before, Counted(after, 0, 0))


def test_a_value_outside_an_arena_counts_as_copied() -> None:
    assert _outside_arenas([np.zeros(100, np.uint8), np.zeros(3, np.uint64)]) == 124


def test_figures_are_medians_of_neighbours_and_counts_a_batch() -> None:
    taken = {"loop_s": [1.0, 1.0, 3.0], "pull_s": [2.0, 4.0, 4.0]}
    before, after = Counted({}, 100, 7), Counted({}, 115, 10)
    told = figures(Shape(1000, 10**6 // 1000), taken, 6 * 10**6, before, after)
    assert told == figure(
        GBps=0.001 / 4, ceiling_GBps=0.001, of_ceiling=0.5, copies_per_byte=2.0,
        exchanges_per_batch=6.0,
    )  # fmt: skip
