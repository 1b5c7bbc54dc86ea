"""Assign the rows of a plan to ranks, mini-batches and micro-batches. Pure and deterministic.

Ranks that meet in collectives hang unless all of them take the same number of steps. So every
process computes the layout of all ranks from the shard's data about the rows, and then takes its
own part. This module does not know leases or tensors.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dataplane.errors import InvalidRows, counted
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.packed import U4, column
from dataplane.wire.tables import PlanRows, Shape

Rows = list[int]
"""Positions in the plan. A negative number is padding: it repeats the row ~number, and the caller
must ignore its result."""
_Part = tuple[float, list[int]]
_F8 = np.dtype("<f8")

GREEDY_FROM = 64
"""With at least this many parts, `parts` is greedy: differencing takes time proportional to rows
times parts, and is hardly more even."""


class Layout:
    """The layout of a plan: the rows of every rank, mini-batch and micro-batch.

    Every rank has the same number of units (rows, or whole groups), with nearly equal sums, and
    keeps them in all epochs. Every epoch shuffles them again and cuts them into mini-batches. The
    units of each rank are sorted by weight, and all ranks shuffle in the same way. So the units of
    one step have about the same weight on all ranks. A mini-batch gets units from heavy to light,
    so mini-batches are also even, and padding, which is lightest, is spread over all of them.

    Every rank cuts a mini-batch into the same number of micro-batches with nearly equal sums. No
    micro-batch exceeds the budget, unless it is a single row. Raises InvalidRows if
    remainder="drop" leaves no rows.
    """

    def __init__(self, shape: Shape, plan_rows: PlanRows) -> None:
        self.shape = shape
        weights = {
            tag: column(raw, _F8, plan_rows.rows).tolist() for tag, raw in plan_rows.weights.items()
        }
        even = [1.0] * plan_rows.rows
        self._costs = weights.get(shape.budget_tag or "", even)
        self._weights = weights.get(shape.balance or "", even)
        units = _units(plan_rows)
        every = shape.ranks * shape.minibatches
        if over := len(units) % every:
            if shape.remainder == "drop":
                left_out = set(_shuffled(len(units), shape.seed)[:over])
                units = [unit for at, unit in enumerate(units) if at not in left_out]
                if not units:
                    raise InvalidRows(
                        "remainder='drop' leaves no rows: the stage has only "
                        f"{counted(over, shape.unit[:-1])}, fewer than ranks={shape.ranks} × "
                        f"minibatches={shape.minibatches}. Pass a smaller minibatches=, or "
                        "remainder='pad'",
                        units=over,
                    )
            else:
                units += [[self._padding(plan_rows.rows)]] * (every - over)
        self._light = self._padding(plan_rows.rows)
        self._units = units
        self._shares = even_parts([self._weight(unit) for unit in units], shape.ranks)
        self._shuffle: tuple[int, list[int]] = -1, []
        """the order of an epoch; replaced as a whole, because several threads use it"""

    def _padding(self, rows: int) -> int:
        """Return the cheapest row as padding."""
        return ~min(range(rows), key=self._costs.__getitem__)

    def mini(self, rank: int, epoch: int, number: int) -> list[Rows]:
        """Return the rows of each micro-batch of a mini-batch."""
        if self.shape.budget_tag is None:
            return [self._rows(rank, epoch, number)]
        budget = self.shape.budget
        every = [self._rows(one, epoch, number) for one in range(self.shape.ranks)]
        fits = [packed(self._costs_of(rows), budget) for rows in every]
        count = max(map(len, fits))
        rows = every[rank]
        costs = self._costs_of(rows)
        made = parts(costs, count)
        if any(len(part) > 1 and math.fsum(costs[at] for at in part) > budget for part in made):
            made = [*fits[rank], *([] for _ in range(count - len(fits[rank])))]
        return [[rows[at] for at in sorted(part)] or [self._light] for part in made]

    def _rows(self, rank: int, epoch: int, number: int) -> Rows:
        """Return the rows of a rank's mini-batch."""
        share = self._shares[rank]
        each = len(share) // self.shape.minibatches
        taken = self._order(epoch)[number * each : (number + 1) * each]
        return [row for at in taken for row in self._units[share[at]]]

    def _order(self, epoch: int) -> list[int]:
        """Return the order in which an epoch visits the units of each rank."""
        known, order = self._shuffle
        if known != epoch:
            size, minis = len(self._shares[0]), self.shape.minibatches
            drawn = _drawn(size, self.shape.seed, epoch).reshape(-1, minis)
            places = np.argsort(drawn, axis=1, kind="stable") + np.arange(0, size, minis)[:, None]
            order = places.T.reshape(-1).tolist()
            self._shuffle = epoch, order
        return order

    def _weight(self, rows: Rows) -> float:
        return math.fsum(self._weights[row] for row in rows if row >= 0)

    def _costs_of(self, rows: Rows) -> list[float]:
        """Return the costs of rows. Padding costs as much as the row that it repeats."""
        return [self._costs[row if row >= 0 else ~row] for row in rows]


def _units(plan_rows: PlanRows) -> list[Rows]:
    if not plan_rows.groups:
        return [[row] for row in range(plan_rows.rows)]
    units: dict[int, Rows] = {}
    for row, group in enumerate(column(plan_rows.groups, U4, plan_rows.rows).tolist()):
        units.setdefault(~row if group == NO_GROUP else group, []).append(row)
    return list(units.values())


def _shuffled(count: int, *seed: int) -> list[int]:
    order: list[int] = np.argsort(_drawn(count, *seed), kind="stable").tolist()
    return order


def _drawn(count: int, *seed: int) -> npt.NDArray[np.uint64]:
    """Return numbers that depend only on the seed. NumPy guarantees stable streams for bit
    generators, but not for permutations."""
    drawn: npt.NDArray[np.uint64] = np.random.PCG64(seed).random_raw(count)
    return drawn


def even_parts(weights: Sequence[float], count: int) -> list[list[int]]:
    """Split weights into `count` parts of equal length and nearly equal sums, heaviest first.

    Each weight, from the heaviest, goes to the lightest part that is not full (Graham, 1969). For
    parts of equal length, this is more even than differencing: within 1 % instead of 10 % for 16
    rows on each of 16 ranks. The number of weights must be a multiple of `count`.
    """
    return _by_turns(weights, count, len(weights) // count)


def packed(weights: Sequence[float], most: float) -> list[list[int]]:
    """Pack weights into few parts with sums up to `most`. A heavier weight is alone in its part.
    Best fit decreasing: each weight, from the heaviest, goes where the least space is left."""
    made: list[list[int]] = []
    room: list[tuple[float, int]] = []  # ascending
    for at in sorted(range(len(weights)), key=lambda at: -weights[at]):
        found = bisect.bisect_left(room, (weights[at], -1))
        if found == len(room):
            bisect.insort(room, (most - weights[at], len(made)))
            made.append([at])
            continue
        left, part = room.pop(found)
        made[part].append(at)
        bisect.insort(room, (left - weights[at], part))
    return made


def parts(weights: Sequence[float], count: int) -> list[list[int]]:
    """Split weights into `count` parts of any length, with nearly equal sums. Parts may be empty.

    Uses the differencing of Karmarkar and Karp (1982): it merges the two most uneven partial
    solutions, the heaviest part of one with the lightest of the other, until one is left. With many
    parts, each weight, from the heaviest, goes to the lightest part.
    """
    if count >= GREEDY_FROM:
        return _by_turns(weights, count)
    ties = itertools.count()
    heap: list[tuple[float, int, list[_Part]]] = [
        (-weight if count > 1 else 0.0, next(ties), [(weight, [at])])
        for at, weight in enumerate(weights)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = _merged(heapq.heappop(heap)[2], heapq.heappop(heap)[2], count)
        lightest = merged[-1][0] if len(merged) == count else 0.0
        heapq.heappush(heap, (lightest - merged[0][0], next(ties), merged))
    made = [rows for _, rows in heap[0][2]] if heap else []
    return [*made, *([] for _ in range(count - len(made)))]


def _by_turns(weights: Sequence[float], count: int, size: float = math.inf) -> list[list[int]]:
    """Each weight, from the heaviest, goes to the lightest part that has fewer than `size`."""
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


def _merged(one: list[_Part], other: list[_Part], count: int) -> list[_Part]:
    """Merge two partial solutions, which are sorted from heavy to light and have no empty parts."""
    shared = max(0, len(one) + len(other) - count)
    apart = len(one) - shared
    heavy, light = one[apart:], other[len(other) - shared :]
    both = [
        (weight + more, rows + others)
        for (weight, rows), (more, others) in zip(heavy, reversed(light), strict=True)
    ]
    merged = one[:apart] + both + other[: len(other) - shared]
    merged.sort(key=lambda part: -part[0])
    return merged
