"""Which transport is chosen, and what is said of it; what a sample's bytes are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import InvalidConfig, TransportMissing
from dataplane.launch.values import AUTO, parse_transport
from dataplane.peer.pull.paths import Paths, Trial, candidates, pattern
from dataplane.transport.seam import Remote
from dataplane.wire.tables import Owner

WORKS, FAILS = Trial(2.0, 80.0), Trial(error="no route")


@pytest.mark.parametrize("text", ["auto", "off", "off:nixl,shelf", "required:nixl"])
def test_a_choice_of_transport_is_shown_as_it_was_made(text: str) -> None:
    assert str(parse_transport(text)) == text


@pytest.mark.parametrize("text", ["", "nixl", "required:", "off:", "required:a,b", "auto:nixl"])
def test_what_chooses_nothing_is_refused_with_the_forms_that_do(text: str) -> None:
    with pytest.raises(InvalidConfig, match="use auto, off, required:NAME"):
        parse_transport(text)


def test_required_tcp_and_off_are_tcp_alone() -> None:
    for text in ("off", "required:tcp"):
        assert candidates(parse_transport(text)) == ["tcp"]


def test_a_required_transport_that_is_not_there_says_what_is_missing_before_anything_starts() -> (
    None
):
    with pytest.raises(TransportMissing, match="no installed package provides"):
        candidates(parse_transport("required:carrier-pigeon"))
    assert candidates(AUTO)[-1] == "tcp"


class FakeSampling:
    """Results of transport tests, by transport. None: the peer has no space for the test."""

    engine: Any = SimpleNamespace(transport="nixl")
    mesh: Any = SimpleNamespace(others=SimpleNamespace())
    choice = AUTO

    def __init__(self, found: dict[str, Trial | None]) -> None:
        self.found = found
        self.rounds: dict[str, int] = {}

    async def ask(self, address: str, device: bool) -> Any:
        return SimpleNamespace(transport=address)

    async def tried(
        self, sampled: Any, engine: Any, source: Any, name: str, number: int, rounds: int
    ) -> Trial | None:
        self.rounds[name] = rounds
        return self.found[name]


def paths_of(sampling: FakeSampling, *runs: str, plain: str = "tcp") -> Paths:
    paths = Paths(sampling, plain, "values")  # type: ignore[arg-type]
    paths.use(sampling.engine, list(runs))
    return paths


@pytest.mark.parametrize(
    ("found", "transport", "why"),
    [
        ({"nixl": WORKS}, "nixl", "self-test passed"),
        ({"nixl": FAILS}, "tcp", "nixl does not work: no route"),
        ({"nixl": None}, "tcp", "one of the two peers has no arena space for the test"),
    ],
)
async def test_a_transport_that_both_peers_run_is_used_if_its_content_is_right(
    found: dict[str, Trial | None], transport: str, why: str
) -> None:
    sampling = FakeSampling(found)
    path = await paths_of(sampling, "nixl").tried(Remote(Owner("nixl", 1), ""))
    assert (path.transport, path.why) == (transport, why)
    assert sampling.rounds == {"nixl": 1}, "a check costs more than one round, or TCP's time"


async def test_a_peer_that_runs_another_transport_is_read_over_tcp() -> None:
    paths = paths_of(FakeSampling({}), "nixl")
    path = await paths.tried(Remote(Owner("shelf", 1), ""))
    assert path.transport == "tcp"
    assert path.why == "this peer runs nixl, but the other peer runs shelf"


async def test_between_pools_the_first_transport_that_works_is_used() -> None:
    sampling = FakeSampling({"cuda_ipc": FAILS, "nixl": WORKS, "nccl": WORKS})
    paths = paths_of(sampling, "cuda_ipc", "nixl", "nccl", plain="host arena")
    path = await paths.tried(Remote(Owner("a", 1), ""), number=1)
    assert path.transport == "nixl" and set(path.trials) == {"cuda_ipc", "nixl"}


async def test_a_probe_measures_every_transport_and_tcp() -> None:
    sampling = FakeSampling({"nixl": WORKS, "tcp": WORKS})
    path = await paths_of(sampling, "nixl").tried(Remote(Owner("nixl", 1), ""), measures=True)
    assert path.transport == "nixl" and sampling.rounds == {"nixl": 3, "tcp": 3}


def test_a_sample_is_the_bytes_that_the_protocol_says_and_no_stretch_of_it_is_another() -> None:
    sample = pattern(1234567, 1 << 20)
    for i in (0, 1, 255, 256, 70_000, 1_000_000):
        assert sample[i] == ((1234567 + 167 * i) ^ (i >> 8) ^ (i >> 16)) % 256
    blocks = sample.reshape(-1, 4096)
    assert len(np.unique(blocks, axis=0)) == len(blocks)
