"""The sizing formula of docs/run.md on a real peer: its result is enough, clearly less is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dataplane
from dataplane import Partition, Plane
from tests.end_to_end.conftest import Cluster

PAGE = Path(__file__).parents[2] / "docs/run.md"
ARENA = 48 << 20
TOO_SMALL = (
    dataplane.BackPressure,
    dataplane.ClaimTimeout,
    dataplane.DeadlineExceeded,  # a backup still waits for space when the put's deadline comes
)


def arena(new: float, added: float = 0, pulled: float = 0) -> float:
    return max(new / 0.60, (new + added) / 0.85, new + added + pulled)


def test_the_page_has_this_formula_and_an_example_that_follows_from_it() -> None:
    page = PAGE.read_text()
    assert "arena = max(new / 0.60, (new + added) / 0.85, new + added + pulled)" in page
    new = 64 * 58e6 * 2 / 8
    assert f"64 × 58 MB × 2 ÷ 8 = {new / 1e9:.2f} GB" in page
    assert f"0.93 ÷ 0.60 = {arena(new) / 1e9:.1f} GB" in page


class Hosts:
    """Clients of the host whose arena is sized, and of another one that has plenty of room."""

    def __init__(self, sized: Plane, other: Plane, name: str, timeout: float) -> None:
        self.sized, self.other, self.name, self.timeout = sized, other, name, timeout
        self.parts: list[Partition] = []

    def part(self, at: Plane, of: str = "", replicas: int = 1) -> Partition:
        """Declared, or attached to if it is there; all are in `parts`."""
        name, stages = f"{self.name}{of}", {"score": ["x"]}
        self.parts.append(at.partition(name, stages=stages, free="drop", replicas=replicas))
        return self.parts[-1]

    def drop(self) -> None:
        for part in {part.name: part for part in self.parts}.values():
            part.drop()


def videos(hosts: Hosts, share: float) -> None:
    """The example, smaller: the prompts of one host, whose eight responses share a video each.
    share: of the arena that the formula computes for them, the peer has the rest."""
    nbytes = int(share * 0.60 * ARENA) // 16
    assert arena(16 * nbytes) <= share * ARENA
    part = hosts.part(hosts.sized)
    for prompt in range(64 * 2 // 8):
        video = np.full(nbytes, prompt, np.uint8)
        columns = {"x": [video] * 8, "tokens": [[prompt] * 50] * 8}
        part.put(columns, group=prompt, dedup=["x"], timeout=hosts.timeout)


def scores(hosts: Hosts, share: float) -> None:
    """A quarter is put, and a stage adds the rest."""
    nbytes = int(share * 0.85 * ARENA) // (32 * 4)
    assert arena(32 * nbytes, 32 * 3 * nbytes) <= share * ARENA
    filled(hosts, nbytes, 3 * nbytes)


def pulls(hosts: Hosts, share: float) -> None:
    """A third each: rows of this host, what a stage adds to them, and a claim from elsewhere."""
    nbytes = int(share * ARENA) // (32 * 3)
    assert arena(*[32 * nbytes] * 3) <= share * ARENA
    filled(hosts, nbytes, nbytes)
    hosts.part(hosts.other, "-far").put(
        {"x": np.ones((32, nbytes), np.uint8)}, timeout=hosts.timeout
    )
    with hosts.part(hosts.sized, "-far").claim("score", rows=32, timeout=hosts.timeout) as batch:
        assert len(batch) == 32 and batch["x"][31].all()


def copies(hosts: Hosts, share: float) -> None:
    """Second copies of another host's rows count as new ones."""
    nbytes = int(share * 0.60 * ARENA) // 32
    assert arena(32 * nbytes) <= share * ARENA
    part = hosts.part(hosts.other, replicas=2)
    part.put({"x": np.ones((32, nbytes), np.uint8)}, timeout=hosts.timeout)


def filled(hosts: Hosts, new: int, added: int) -> None:
    """32 rows of so many bytes, to each of which a stage adds so many."""
    part = hosts.part(hosts.sized)
    part.put({"x": np.ones((32, new), np.uint8)}, timeout=hosts.timeout)
    with part.claim("score", rows=32) as batch:
        batch.add({"y": np.ones((32, added), np.uint8)}, timeout=hosts.timeout)


def test_an_arena_of_the_computed_size_is_enough_and_clearly_less_is_not(
    cluster: Cluster,
) -> None:
    cluster.start("a", "b", arena=str(ARENA), arenas={"b": str(8 * ARENA)})
    with cluster.connect("a") as sized, cluster.connect("b") as other:
        for work in (videos, scores, pulls, copies):
            enough = Hosts(sized, other, f"{work.__name__}-enough", timeout=30)
            work(enough, 0.95)
            enough.drop()
            less = Hosts(sized, other, f"{work.__name__}-less", timeout=1)
            with pytest.raises(TOO_SMALL):
                work(less, 1.25)
            less.drop()
