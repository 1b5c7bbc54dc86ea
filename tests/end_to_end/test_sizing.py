"""The sizing formula of docs/run.md on a real peer: its result is enough, clearly less is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import dataplane
from dataplane import Partition
from tests.end_to_end.conftest import Cluster

PAGE = Path(__file__).parents[2] / "docs/run.md"
ARENA = 48 << 20


def arena(new: float, added: float = 0, pulled: float = 0) -> float:
    return max(new / 0.60, (new + added) / 0.85, new + added + pulled)


def test_the_page_has_this_formula_and_an_example_that_follows_from_it() -> None:
    page = PAGE.read_text()
    assert "arena = max(new / 0.60, (new + added) / 0.85, new + added + pulled)" in page
    new = 64 * 58e6 * 2 / 8
    assert f"64 × 58 MB × 2 ÷ 8 = {new / 1e9:.2f} GB" in page
    assert f"0.93 ÷ 0.60 = {arena(new) / 1e9:.1f} GB" in page


def videos(part: Partition, share: float) -> None:
    """The example, smaller: the prompts of one host, whose eight responses share a video each.
    share: of the arena that the formula computes for them, the peer has the rest."""
    nbytes = int(share * 0.60 * ARENA) // 16
    assert arena(16 * nbytes) <= share * ARENA
    for prompt in range(64 * 2 // 8):
        video = np.full(nbytes, prompt, np.uint8)
        columns = {"video": [video] * 8, "tokens": [[prompt] * 50] * 8}
        part.put(columns, group=prompt, dedup=["video"], timeout=3)


def scores(part: Partition, share: float) -> None:
    """A quarter is put, and a stage adds the rest."""
    nbytes = int(share * 0.85 * ARENA) // (32 * 4)
    assert arena(32 * nbytes, 32 * 3 * nbytes) <= share * ARENA
    part.put({"x": np.ones((32, nbytes), np.uint8)}, timeout=3)
    with part.claim("score", rows=32) as batch:
        batch.add({"y": np.ones((32, 3 * nbytes), np.uint8)}, timeout=3)


@pytest.mark.parametrize("work", [videos, scores])
def test_an_arena_of_the_computed_size_is_enough_and_clearly_less_is_not(
    cluster: Cluster, work: Callable[[Partition, float], None]
) -> None:
    cluster.start("a", arena=str(ARENA))
    with cluster.connect("a") as plane:
        work(plane.partition("computed", stages={"score": ["x"]}, free="drop"), 0.95)
        plane.partition("computed").drop()
        with pytest.raises(dataplane.BackPressure):
            work(plane.partition("less", stages={"score": ["x"]}, free="drop"), 1.25)
