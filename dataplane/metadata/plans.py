"""Which rank of a trainer takes which rows, in which order: a pure function.

Ranks that meet in collectives hang unless each takes as many steps as the others. So all of them
are laid out at once, from the rows of the plan in their order with a weight each, and from what was
asked for. Nothing here knows of leases or tensors.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

PADDING = -1
"""The position of a row that is none: it keeps ranks in step and must count for nothing."""

Rows = list[int]
Mini = list[Rows]
"""A mini-batch: the rows of each of its micro-batches."""
_Way = list[tuple[float, list[int]]]
"""Parts with their sums, the heaviest first."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What all ranks of a plan agree on.

    minibatches: optimiser steps an epoch. budget: the most that the weights of a micro-batch come
    to, a single heavier row apart; None: one micro-batch a mini-batch. remainder: "pad" fills the
    last places with `PADDING`, "drop" leaves rows out, those that `seed` picks.
    """

    ranks: int
    minibatches: int = 1
    budget: float | None = None
    epochs: int = 1
    seed: int = 0
    remainder: Literal["pad", "drop"] = "pad"


def lay_out(
    shape: Shape, units: Sequence[Rows], weights: npt.NDArray[np.float64]
) -> list[list[list[Mini]]]:
    """Per rank, epoch and mini-batch the rows of each micro-batch.

    units: rows that stay together, each its own or a whole group; weights: f8[rows]. Each rank gets
    as many units as any other, of sums as equal as differencing makes them, and as many mini- and
    micro-batches. Ranks keep their rows in all epochs, so that each fetches its own once; every
    epoch shuffles them anew.
    """
    random = np.random.default_rng(shape.seed)
    every = shape.ranks * shape.minibatches
    kept = [list(unit) for unit in units]
    if over := len(kept) % every:
        if shape.remainder == "drop":
            left_out = set(random.permutation(len(kept))[:over].tolist())
            kept = [unit for at, unit in enumerate(kept) if at not in left_out]
        else:
            kept += [[PADDING] for _ in range(every - over)]
    heavy = [_weight(unit, weights) for unit in kept]
    shares = even_parts(heavy, shape.ranks)
    plans: list[list[list[Mini]]] = [[] for _ in range(shape.ranks)]
    for _ in range(shape.epochs):
        shuffled = [[share[i] for i in random.permutation(len(share))] for share in shares]
        minis = [_split(share, shape.minibatches) for share in shuffled]
        laid = []
        for at in range(shape.minibatches):
            of_ranks = [[kept[unit] for unit in mini[at]] for mini in minis]
            laid.append(_micros(of_ranks, shape.budget, weights))
        for rank, plan in enumerate(plans):
            plan.append([mini[rank] for mini in laid])
    return plans


def _split(share: list[int], parts: int) -> list[list[int]]:
    each = len(share) // parts
    return [share[at * each : (at + 1) * each] for at in range(parts)]


def _weight(rows: Rows, weights: npt.NDArray[np.float64]) -> float:
    return float(sum(weights[row] for row in rows if row != PADDING))


def _micros(
    minis: list[list[Rows]], budget: float | None, weights: npt.NDArray[np.float64]
) -> list[Mini]:
    """One mini-batch of all ranks: as many micro-batches at each, none heavier than the budget
    unless it is one row."""
    rows = [[row for unit in units for row in unit] for units in minis]
    if budget is None:
        return [[of] for of in rows]
    of_rank = [[_weight([row], weights) for row in of] for of in rows]
    count = max(1, *(int(np.ceil(sum(heavy) / budget)) for heavy in of_rank))
    while True:
        packed = [parts(heavy, count) for heavy in of_rank]
        fits = all(
            len(part) < 2 or sum(heavy[at] for at in part) <= budget
            for heavy, made in zip(of_rank, packed, strict=True)
            for part in made
        )
        if fits:
            break
        count += 1
    return [
        [[of[at] for at in sorted(part)] or [PADDING] for part in made]
        for of, made in zip(rows, packed, strict=True)
    ]


def even_parts(weights: Sequence[float], count: int) -> list[list[int]]:
    """`count` parts of as many weights each, of nearly equal sums: the heaviest first, each to the
    lightest part that is not full (Graham, 1969). Where parts must be of one size this comes out
    more even than differencing: 16 rows for each of 16 ranks within 1 %, against 10. The number of
    weights is a multiple of count.
    """
    size = len(weights) // count
    made: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0.0, part) for part in range(count)]
    for at in sorted(range(len(weights)), key=lambda at: -weights[at]):
        total, part = lightest[0]
        made[part].append(at)
        if len(made[part]) < size:
            heapq.heapreplace(lightest, (total + weights[at], part))
        else:
            heapq.heappop(lightest)
    return made


def parts(weights: Sequence[float], count: int) -> list[list[int]]:
    """`count` parts of any size, some perhaps empty, of nearly equal sums: Karmarkar and Karp's
    differencing (1982). The two most unequal ways to part what they hold are merged, the heaviest
    part of one with the lightest of the other, until one is left."""
    begun: list[_Way] = [
        [(weight, [at]), *((0.0, []) for _ in range(count - 1))]
        for at, weight in enumerate(weights)
    ]
    ties = itertools.count()
    heap = [(way[-1][0] - way[0][0], next(ties), way) for way in begun]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [
            (heavy + light, rows + more)
            for (heavy, rows), (light, more) in zip(one, reversed(other), strict=True)
        ]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(ties), merged))
    return [rows for _, rows in heap[0][2]] if heap else [[] for _ in range(count)]
