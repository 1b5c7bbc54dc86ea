"""Samplers choose which of the ready rows a fetch gets. Subclass `BaseSampler` to write one.

A sampler has no process of its own. A fetching client recreates it from its stored attributes,
calls it, and stores the attributes for the next fetch; the whole queue runs one fetch at a time.
Attributes may be dicts, lists, tuples, numbers, texts, arrays and generators of random numbers.
"""

from __future__ import annotations

import heapq
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dataplane.integrations.objects import packed_object, unpacked_object

Choice = tuple[list[int], list[int]]
"""The rows to return, and the rows that then count as fetched by the task."""


Fetch = tuple[str, str, Any, Any]
"""Partition, task, dp_rank (None for none) and batch_index."""


class BaseSampler(ABC):
    """The base class of samplers. A subclass implements `sample`.

    `_states[partition][task][dp_rank][batch_index]` is stored between fetches. If it has a result
    for the `sampling_config` of a fetch, the fetch returns that result again, even if too few rows
    are ready.
    """

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> Choice:
        """Choose from the rows that have the fields and that the task has not fetched, in order of
        their numbers. `kwargs` has the fetch's `sampling_config`, `task_name`, `partition_id`, and
        `partition`, whose `get_custom_meta(indexes)` returns the rows' tags. Return ([], []) if
        there are too few rows."""

    def __call__(self, *args: Any, **kwargs: Any) -> Choice:
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Return whether a result for this fetch is stored."""
        config = sampling_config or {}
        of_rank = self._remembered(partition_id, task_name).get(config.get("dp_rank"), {})
        return config.get("dp_rank") is not None and config.get("batch_index") in of_rank

    def clear_cache(self, partition_id: str) -> None:
        """Forget the stored results of a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """Return the stored results of all partitions."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Store what `save_checkpoint` returned."""
        self._states = state["_states"]

    def _remembered(self, partition_id: str, task_name: str) -> dict[Any, Any]:
        found: dict[Any, Any] = self._states.get(partition_id, {}).get(task_name, {})
        return found

    def _remember(self, where: Fetch, what: Any) -> None:
        at = self._states
        for step in where[:-1]:
            at = at.setdefault(step, {})
        at[where[-1]] = what


class SequentialSampler(BaseSampler):
    """Choose the oldest rows, each once."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> Choice:
        taken = ready_indexes[:batch_size]
        return taken, list(taken)


class RankAwareSampler(BaseSampler):
    """Choose the oldest rows, and the same rows for all ranks that pass the same dp_rank and
    batch_index."""

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int = 0,
        batch_index: int = 0,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        if dp_rank < 0:
            raise ValueError(f"dp_rank must be greater than or equal to 0, not {dp_rank}")
        taken = self._remembered(partition_id, task_name).get(dp_rank, {}).get(batch_index)
        if taken is None:
            if len(ready_indexes) < batch_size:
                return [], []
            taken = ready_indexes[:batch_size]
            self._remember((partition_id, task_name, dp_rank, batch_index), taken)
        return taken, list(taken)


class GRPOGroupNSampler(BaseSampler):
    """Choose whole groups: rows n·k to n·k + n - 1 of a partition belong to one prompt.

    A row's group is its number divided by n, so a group never mixes the last rows of one prompt
    with the first rows of the next.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt must be positive, not {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        fetch = (partition_id, task_name, kwargs.get("dp_rank"), kwargs.get("batch_index"))
        return self._once(fetch, lambda: self._groups(ready_indexes, batch_size))

    def _once(self, where: Fetch, choose: Callable[[], list[int]]) -> Choice:
        """What this fetch was given before, else what `choose` gives, remembered unless that is
        nothing, or the fetch is of no rank."""
        partition_id, task_name, rank, number = where
        known = self._remembered(partition_id, task_name).get(rank, {})
        if number not in known:
            taken = choose()
            if not taken or rank is None:
                return taken, list(taken)
            self._remember(where, (taken, list(taken)))
            return taken, list(taken)
        taken, consumed = known[number]
        return list(taken), list(consumed)

    def _groups(self, ready: Sequence[int], rows: int) -> list[int]:
        n = self.n_samples_per_prompt
        if rows % n:
            raise ValueError(f"batch_size {rows} must be a multiple of n_samples_per_prompt {n}")
        groups: dict[tuple[int, int], list[int]] = {}
        for index in sorted(ready):
            partition, number = index >> 32, index & 0xFFFF_FFFF
            groups.setdefault((partition, number // n), []).append(index)
        whole = [group for group in groups.values() if len(group) == n][: rows // n]
        return [i for group in whole for i in group] if len(whole) == rows // n else []


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Choose whole groups for all ranks at once. Every rank gets the same number of groups, with
    nearly equal sums of the tag `total_lengths`. `batch_size` is the batch size of one rank."""

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size <= 0:
            raise ValueError(f"dp_size must be positive, not {dp_size}")
        self.dp_size = dp_size

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        rank, number = kwargs.get("dp_rank") or 0, kwargs.get("batch_index") or 0

        def for_all_ranks() -> list[int]:
            if number in self._remembered(partition_id, task_name).get(0, {}):
                return []  # of a rank that is none
            rows = self._groups(ready_indexes, batch_size * self.dp_size)
            portions = self._balanced(rows, kwargs.get("partition")) if rows else []
            for of, taken in enumerate(portions):
                self._remember((partition_id, task_name, of, number), (taken, list(taken)))
            return portions[rank] if rank < len(portions) else []

        return self._once((partition_id, task_name, rank, number), for_all_ranks)

    def _balanced(self, rows: list[int], partition: Any) -> list[list[int]]:
        n = self.n_samples_per_prompt
        groups = [rows[at : at + n] for at in range(0, len(rows), n)]
        tags = partition.get_custom_meta(rows) if partition is not None else {}
        weights = [sum(tags.get(i, {}).get("total_lengths", 1) for i in group) for group in groups]
        equal = len(groups) % self.dp_size == 0
        portions = get_seqlen_balanced_partitions(weights, self.dp_size, equal)
        return [[i for at in portion for i in groups[at]] for portion in portions]


class NoPartition(ValueError, AssertionError):
    """The weights cannot be split into this many lists. Also an AssertionError, as in
    TransferQueue."""


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Split weights into lists with nearly equal sums, by the largest differencing method
    (Karmarkar and Karp 1982). Returns the indices in each list. `equal_size`: all lists have the
    same length. Raises NoPartition, a ValueError, for fewer weights than lists, or if `equal_size`
    is impossible.

    >>> get_seqlen_balanced_partitions([8, 7, 6, 5], 2, True)
    [[0, 3], [1, 2]]
    """
    weights, parts = seqlen_list, k_partitions
    if len(weights) < parts:
        raise NoPartition(
            f"{len(weights)} weights cannot be split into {parts} lists: pass at least one weight "
            "per "
            "list"
        )
    if equal_size and len(weights) % parts:
        raise NoPartition(
            f"{len(weights)} weights cannot be split into {parts} lists of equal length: pass a "
            f"multiple of {parts} weights"
        )
    order = sorted(range(len(weights)), key=lambda at: (weights[at], at))
    # A partial solution: so many (sum, places), heaviest first. Those that differ most are joined
    # heaviest with lightest, until one is left.
    if equal_size:
        starts = [order[at : at + parts] for at in range(0, len(order), parts)]
    else:
        starts = [[at] for at in order]
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []

    def push(sums: list[tuple[float, list[int]]], number: int) -> None:
        sums = sorted(sums, key=lambda one: (-one[0], one[1]))
        heapq.heappush(heap, (sums[-1][0] - sums[0][0], number, sums))

    for number, start in enumerate(starts):
        single: list[tuple[float, list[int]]] = [(weights[at], [at]) for at in start]
        push(single + [(0, [])] * (parts - len(single)), number)
    number = len(starts)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = zip(one, reversed(other), strict=True)
        push([(a + b, places + more) for (a, places), (b, more) in merged], number)
        number += 1
    return sorted(sorted(places) for _, places in heap[0][2])


def packed(sampler: BaseSampler) -> dict[str, Any]:
    """Return the data from which `rebuilt` recreates the sampler in another process."""
    kind = type(sampler)
    told = {name: packed_object(value, _packed) for name, value in vars(sampler).items()}
    return {"module": kind.__module__, "class": kind.__qualname__, "attributes": told}


def rebuilt(told: dict[str, Any]) -> BaseSampler:
    """Recreate a sampler. Raises TypeError if its class is not a sampler that this process has
    imported: data from other processes may name a class, but never loads code."""
    kind: Any = sys.modules.get(told["module"])
    for name in told["class"].split("."):
        kind = getattr(kind, name, None)
    if not (isinstance(kind, type) and issubclass(kind, BaseSampler)):
        raise TypeError(
            f"{told['module']}.{told['class']} is not a sampler that this process has "
            "imported: import its module in every process"
        )
    made = kind.__new__(kind)
    attributes = told["attributes"].items()
    vars(made).update((name, unpacked_object(value, _unpacked)) for name, value in attributes)
    return made


_LUCK = "\0luck"


def _packed(value: Any) -> Any:
    """A source of random numbers as the plane takes it; any other value as it is."""
    if isinstance(value, np.random.RandomState):
        return {_LUCK: value.get_state(legacy=False)}
    if isinstance(value, np.random.Generator):
        return {_LUCK: value.bit_generator.state, "generator": True}
    if isinstance(value, random.Random):
        return {_LUCK: value.getstate()}
    return value


def _unpacked(value: dict[str, Any]) -> Any:
    if _LUCK not in value:
        return value
    state = value[_LUCK]
    if isinstance(state, tuple):
        made: Any = random.Random()
        made.setstate(state)
        return made
    if "generator" not in value:
        made = np.random.RandomState()
        made.set_state(state)
        return made
    kinds = {kind.__name__: kind for kind in np.random.BitGenerator.__subclasses__()}
    made = np.random.Generator(kinds[state["bit_generator"]]())
    made.bit_generator.state = state
    return made
