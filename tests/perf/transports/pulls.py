"""Batches pulled from one peer to another over one transport, timed and counted."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.perf.transports.shapes import Shape

STAGE, FIELD = "s", "x"
CLAIM_S = 60.0
MARK_BYTES = 16
"""Of random bytes: no two rows begin alike."""


class WrongTransport(RuntimeError):
    """Values came over another transport than the one that is measured."""


class WrongBytes(RuntimeError):
    """What arrived is not what was put."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Since the start of both peers. Of the reading one: bytes that its bulk workers wrote into
    its arena, by transport. Of both: requests to each other. Of the owner: bulk requests."""

    bytes_over: dict[str, int]
    requests: int
    bulk_requests: int


class Pulls:
    """A client at the owner's peer that puts, and one at the reader's that claims."""

    def __init__(self, owner: Any, reader: Any, shape: Shape, block: np.ndarray) -> None:
        self._owner, self._reader = owner, reader
        self._shape = shape
        self._values = _values(block, shape)
        name = f"pull-{shape.name}"
        self._put = owner.partition(name, stages={STAGE: [FIELD]})
        self._claimed = reader.partition(name, stages={STAGE: [FIELD]})
        self.copied_bytes = 0
        """by the reader's client on the way from the arena into a user's hands"""

    def warm(self) -> None:
        """Pulls until the reader's room for copies was used once, and compares every byte."""
        touched = -1
        while (now := self._reader.stats()["arena"]["touched_bytes"]) > touched:
            touched = now
            self.pull_s(compare=True)
            self.pull_s()
        self.copied_bytes = 0

    def pull_s(self, compare: bool = False) -> float:
        """Seconds until a batch of another host's values is claimed, with its bytes here."""
        self._put.put({FIELD: self._values})
        began = time.perf_counter()
        batch = self._claimed.claim(STAGE, rows=self._shape.rows, timeout=CLAIM_S)
        took = time.perf_counter() - began
        values = batch[FIELD]
        self.copied_bytes += _outside_arenas(values)
        if compare:
            self._compare(batch)
        batch.ack()
        return took

    def counted(self) -> Counted:
        owner, reader = self._owner.stats(), self._reader.stats()
        return Counted(
            reader["bulk"]["bytes_in_over"],
            (_messages(owner) + _messages(reader)) // 2,
            owner["bulk"]["pins_served"],
        )

    def check_transport(self, name: str, before: Counted, after: Counted) -> int:
        """Bytes that came since, all of them over `name`; WrongTransport says over what else."""
        moved = {
            over: nbytes - before.bytes_over.get(over, 0)
            for over, nbytes in after.bytes_over.items()
        }
        others = {over: nbytes for over, nbytes in moved.items() if nbytes and over != name}
        if others or not moved.get(name):
            raise WrongTransport(f"values should come over {name}, and came over {others or moved}")
        return moved[name]

    def _compare(self, batch: Any) -> None:
        """Rows come in any order; how each begins tells which one it is."""
        put = {value[:MARK_BYTES].tobytes(): value for value in self._values}
        for value in batch[FIELD]:
            if not np.array_equal(value, put.pop(value[:MARK_BYTES].tobytes(), None)):
                raise WrongBytes(f"a row of {self._shape.name} arrived altered")


def _values(block: np.ndarray, shape: Shape) -> Any:
    """Rows of a block of random bytes: one array where it has enough of them, else a list of rows
    that overlap."""
    if shape.nbytes <= block.nbytes:
        return block[: shape.nbytes].reshape(shape.rows, shape.value_bytes)
    apart = (block.nbytes - shape.value_bytes) // shape.rows
    starts = range(0, shape.rows * apart, apart)
    return [block[start : start + shape.value_bytes] for start in starts]


def _messages(stats: dict[str, Any]) -> int:
    """That a peer sent to others, but for those that gather these very figures."""
    between = stats["messages"]["between"]
    return sum(n for kind, n in between.items() if kind not in ("Stats", "StatsDone"))


def _outside_arenas(values: Iterable[np.ndarray]) -> int:
    """Bytes of values that do not lie in a mapped arena: they were copied."""
    arenas = _arenas()
    copied = 0
    for value in values:
        address = value.ctypes.data
        if not any(first <= address < last for first, last in arenas):
            copied += value.nbytes
    return copied


def _arenas() -> list[tuple[int, int]]:
    """Where this process maps memfds of peers."""
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps if "/memfd:" in line]
    spans = [line[0].split("-") for line in lines]
    return [(int(first, 16), int(last, 16)) for first, last in spans]
