"""Every decoder, fed with damaged input: it answers with its own error, or not at all.

`make fuzz` does the same with coverage as its guide, for as long as one likes.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))


@st.composite
def damaged(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A seed with some bytes changed, cut out, doubled or put in."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 8)))
        kind = draw(st.sampled_from(["set", "cut", "double", "insert"]))
        if kind == "set":
            data[at:end] = draw(st.binary(min_size=end - at, max_size=end - at))
        elif kind == "cut":
            del data[at:end]
        elif kind == "double":
            data[at:at] = data[at:end]
        else:
            data[at:at] = draw(st.binary(max_size=12))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_answers_damage_with_its_own_error(name: str) -> None:
    seeds = TARGETS[name].seeds()
    for seed in seeds:
        TARGETS[name].run(seed)

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
    @given(damaged(seeds) | st.binary(max_size=200))
    def run(data: bytes) -> None:
        TARGETS[name].run(data)

    run()
