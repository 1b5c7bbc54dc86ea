"""Peers that the tests of one file share: one alone, and two that are a plane of two hosts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import dataplane
from dataplane import Partition, Plane
from tests.end_to_end.conftest import drop_everything, held, running

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
        drop_everything(self.here, self.there)


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


__all__ = ["Hosts", "dataplane", "held", "one_and_two", "running", "warm"]
