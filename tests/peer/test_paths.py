"""Which transport is chosen, and what is said of it; what a sample's bytes are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataplane.errors import InvalidConfig, TransportMissing
from dataplane.launch.values import AUTO, parse_transport
from dataplane.peer.pull.paths import Paths, Trial, candidates, chosen, pattern
from dataplane.transport.seam import Remote
from dataplane.wire.tables import Owner

FAST, SLOW = Trial(2.0, 80.0), Trial(0.5, 80.0)


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


@pytest.mark.parametrize(
    ("trials", "transport", "why"),
    [
        ({"tcp": SLOW, "nixl": FAST}, "nixl", "nixl 2.00 GB/s, tcp 0.50 GB/s"),
        ({"tcp": FAST, "nixl": SLOW}, "tcp", "slower than tcp"),
        ({"tcp": SLOW, "nixl": Trial(error="no route")}, "tcp", "no route"),
        ({"tcp": SLOW, "nixl": Trial(error="no route"), "nccl": FAST}, "nccl", "nccl 2.00 GB/s"),
        ({"tcp": FAST}, "tcp", "runs no other transport"),
    ],
)
def test_auto_takes_what_works_and_is_faster_and_says_why(
    trials: dict[str, Trial], transport: str, why: str
) -> None:
    path = chosen("tcp", trials)
    assert path.transport == transport and why in path.why


def test_what_is_required_is_used_although_it_is_slower() -> None:
    assert chosen("tcp", {"nixl": SLOW}, required=True).transport == "nixl"


def test_copies_of_one_gpu_are_compared_with_nothing() -> None:
    path = chosen("host arena", {"cuda_ipc": SLOW})
    assert path.transport == "cuda_ipc" and "self-test passed" in path.why


@pytest.fixture
def paths() -> Paths:
    sampling = FakeSampling()
    paths = Paths(sampling, "tcp", "values")  # type: ignore[arg-type]
    paths.use(sampling.engine, ["nixl"])
    return paths


class FakeSampling:
    """A peer that runs shelf, and has no room for trials."""

    engine: Any = SimpleNamespace(transport="nixl")
    mesh: Any = SimpleNamespace(others=SimpleNamespace())
    choice = AUTO

    async def ask(self, address: str, device: bool) -> Any:
        return SimpleNamespace(transport="shelf" if address == "shelf" else "nixl")

    async def tried(self, sampled: Any, *way: Any) -> Trial | None:
        return FAST if sampled.transport == "shelf" else None


@pytest.mark.parametrize(
    ("peer", "why", "settled"),
    [
        ("shelf", "this peer runs nixl, but the other peer runs shelf", True),
        ("full", "one of the two peers has no arena space for the test", False),
    ],
)
async def test_what_cannot_be_tried_is_said(
    paths: Paths, peer: str, why: str, settled: bool
) -> None:
    source = Remote(Owner(peer, 1), "")
    path, _ = await paths.tried(source, source)
    assert (path.transport, path.why, path.settled) == ("tcp", why, settled)


def test_a_sample_is_the_bytes_that_the_protocol_says_and_no_stretch_of_it_is_another() -> None:
    sample = pattern(1234567, 1 << 20)
    for i in (0, 1, 255, 256, 70_000, 1_000_000):
        assert sample[i] == ((1234567 + 167 * i) ^ (i >> 8) ^ (i >> 16)) % 256
    blocks = sample.reshape(-1, 4096)
    assert len(np.unique(blocks, axis=0)) == len(blocks)
