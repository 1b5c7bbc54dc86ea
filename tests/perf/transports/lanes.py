"""The transports one after another, each with peers of its own and beside its engine's bare loop.

A transport that cannot be measured is reported as not run, with the reason, and nothing stands in
for it: peers are told that it is required, and every byte is counted by what it came over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dataplane.transport import registry
from tests.cluster import Failed, clients
from tests.perf.transports.loops import Loop, LoopFailed
from tests.perf.transports.pulls import Pulls, WrongTransport
from tests.perf.transports.shapes import SHAPES, Shape
from tests.perf.transports.told import figures

TRANSPORTS = ("tcp", "nixl")
ARENA = "2304MiB"
"""Of each peer: room for two of the largest batches."""
BLOCK_BYTES = 256 << 20

Samples = dict[str, list[float]]
Told = dict[str, dict[str, Any]]


class NotRun(RuntimeError):
    """A transport cannot be measured here; the message says why."""


_NOT_RUN = (NotRun, LoopFailed, Failed, WrongTransport)


def measure(
    names: Sequence[str],
    rounds: int,
    tick: Callable[[int, int], None],
    shapes: Sequence[Shape] = SHAPES,
    arena: str = ARENA,
) -> tuple[Told, Samples]:
    """The report's `transports`, and the seconds that it was made of.

    tick(done, all): after each shape. arena: of each of the two peers.
    """
    told: Told = {}
    samples: Samples = defaultdict(list)
    largest = max(shape.nbytes for shape in shapes)
    block = np.random.default_rng(0).integers(0, 255, min(largest, BLOCK_BYTES), np.uint8)
    for nth, name in enumerate(names):
        try:
            if why := registry.missing(name):
                raise NotRun(why)
            told[name] = {}
            lane = _measured(name, rounds, block, shapes, arena, samples)
            for at, shape in enumerate(lane):
                told[name] |= shape
                tick(nth * len(shapes) + at + 1, len(names) * len(shapes))
        except _NOT_RUN as exc:
            told[name] = {"status": "not run", "error": str(exc)}
            tick((nth + 1) * len(shapes), len(names) * len(shapes))
    return told, samples


def _measured(
    name: str,
    rounds: int,
    block: np.ndarray,
    shapes: Sequence[Shape],
    arena: str,
    samples: Samples,
) -> Iterator[dict[str, dict[str, float]]]:
    """One shape after another: its figures by its name."""
    largest = max(shape.nbytes for shape in shapes)
    transport = ("--transport", f"required:{name}")
    with Loop(name, largest) as loop, clients("ab", arena, *transport) as (owner, reader):
        for shape in shapes:
            pulls = Pulls(owner, reader, shape, block)
            pulls.warm()
            loop.read_s(shape)
            before = pulls.counted()
            taken: Samples = {"loop_s": [], "pull_s": []}
            for _ in range(rounds):
                taken["loop_s"].append(loop.read_s(shape))
                taken["pull_s"].append(pulls.pull_s())
            after = pulls.counted()
            moved = pulls.check_transport(name, before, after)
            yield {shape.name: figures(shape, taken, moved + pulls.copied_bytes, before, after)}
            for kind, values in taken.items():
                samples[f"{name}/{shape.name}/{kind}"] = values
