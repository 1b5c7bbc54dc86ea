"""Play a script of a test on a simulated cluster, to its end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.simulation.cluster import Cluster

MAX_STEPS = 600_000
T = TypeVar("T")


def played(cluster: Cluster, script: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What the script returns, or raises. InvalidStateError if it takes more than MAX_STEPS. The
    cluster is of no use any more."""
    loop = cluster.loop
    gc.disable()
    try:
        with cluster.installed():
            told = loop.start_on(loop.world, script())
            while not told.done() and loop.steps < MAX_STEPS:
                assert loop.step()
            result: T = told.result()
            loop.end()
    finally:
        gc.enable()
        cluster.close()
    return result
