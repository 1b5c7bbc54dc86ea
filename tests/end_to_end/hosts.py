"""Peers that the tests of one file share: one alone, and two that are a plane of two hosts."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane
from dataplane import Partition, Plane
from tests.end_to_end.conftest import Cluster, until

_numbers = itertools.count(1)


class Hosts:
    """Two clients, at one peer or at one of two each, and partitions that both have a handle of."""

    def __init__(self, here: Plane, there: Plane) -> None:
        self.here = here
        self.there = there
        self.name = ""

    def partition(self, *stages: Any, **definition: Any) -> tuple[Partition, Partition]:
        """A new partition, as the first client declared and the second attached to it."""
        self.name = f"p{next(_numbers)}"
        return self.here.partition(self.name, *stages, **definition), self.there.partition(
            self.name
        )

    def used_bytes(self) -> int:
        peers = {p.peer: p for p in (self.here, self.there)}.values()
        return sum(p.stats()["arena"]["used_bytes"] for p in peers)

    def drop_everything(self) -> None:
        """What a test leaves behind goes, and every byte with it (but for cached copies)."""
        for name in self.here.partitions():
            self.here.partition(name).drop()
        peers = {p.peer: p for p in (self.here, self.there)}.values()
        for plane in peers:
            with contextlib.suppress(AssertionError):
                until(lambda plane=plane: not held(plane), "everything came back", 5)
            assert not held(plane), f"peer {plane.peer} still holds {held(plane)}"


def held(plane: Plane) -> dict[str, int]:
    """What a peer holds beyond its cache, waits for, or has leased; without what is 0."""
    stats = plane.stats()
    arena = stats["arena"]
    found = {name: arena[name] for name in ("quarantined_bytes", "pinned_bytes")}
    found |= {name: stats[name] for name in ("waiting_claims", "waiting_puts")}
    found["partitions"] = len(stats["partitions"])
    found["used_bytes"] = arena["used_bytes"] - arena["cached_bytes"]
    return {name: amount for name, amount in found.items() if amount}


@contextmanager
def running(
    *names: str, alone: str = "", arena: str = "256MiB", metrics: dict[str, str] | None = None
) -> Iterator[Cluster]:
    """Peers for as long as the body runs: `names` are one plane, `alone` has none beside it."""
    with tempfile.TemporaryDirectory(prefix="dp-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATAPLANE_RUN_DIR", folder)
        cluster = Cluster(Path(folder))
        try:
            if alone:
                cluster.start(alone, arena=arena)
            cluster.start(*names, arena=arena, metrics=metrics)
            yield cluster
        finally:
            cluster.stop()


def warm(plane: Plane) -> None:
    """A client that tests share has begun all that clients begin when they are first used."""
    part = plane.partition(f"warm-{plane.peer}", free="drop")
    part.put({"x": [np.arange(5000)]}, key=["k"])
    assert len(part.get(keys=["k"])["x"][0]) == 5000
    part.drop()


@contextmanager
def one_and_two() -> Iterator[dict[str, Hosts]]:
    """`one`: both clients at one peer. `two`: at one peer each."""
    with running("a", "b", alone="solo") as cluster:
        planes = {name: cluster.connect(name) for name in ("solo", "a", "b")}
        again = cluster.connect("solo")
        for plane in (*planes.values(), again):
            warm(plane)
        yield {"one": Hosts(planes["solo"], again), "two": Hosts(planes["a"], planes["b"])}
        for plane in (*planes.values(), again):
            plane.close()


__all__ = ["Hosts", "dataplane", "one_and_two", "running", "warm"]
