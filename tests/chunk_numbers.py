"""Chunk numbers from indexes and generations, and back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataplane.memory.extents import Numbers
from dataplane.wire.packed import U8


def chunk_numbers(pairs: Iterable[tuple[int, int]]) -> Numbers:
    """Return the numbers of chunks with these indexes and generations."""
    return np.array([generation << 32 | index for index, generation in pairs], U8)


def indexes(chunks: Numbers) -> list[int]:
    """Return the index of each chunk at its owner."""
    return [number & 0xFFFF_FFFF for number in chunks.tolist()]
