"""The peers that are damaged: three to five of one plane, with a cluster token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.cluster import Cluster, running

PLANE = "faults"
KEEPER, OTHER, VICTIM = NAMES = ("a", "b", "c")
ARENA = "128MiB"


@contextmanager
def peers(names: Sequence[str] = NAMES, roster: str = "") -> Iterator[Cluster]:
    """With every backup in sync. The first peer keeps the roster, or etcd does: `roster`."""
    options = ("--roster", roster) if roster else ()
    with running(names, PLANE, ARENA, *options, token=True) as cluster:
        yield cluster
