"""Sets of rows of one block, as the bits of an integer: bit n is row n."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_FEW = 1024
"""Up to this number of rows, numpy's fixed cost would dominate."""


_FIRST = [(1 << count) - 1 for count in range(257)]
"""One object for each set of all rows of a block: millions of blocks share them."""


def all_of(count: int, start: int = 0) -> int:
    """The set of `count` rows from `start` on."""
    bits = _FIRST[count] if count < len(_FIRST) else (1 << count) - 1
    return bits << start if start else bits


def with_all(bits: int, more: int) -> int:
    """The rows of both sets. Without rows in the first, this is the second object itself."""
    return bits | more if bits else more


def rows_of(bits: int) -> Sequence[int]:
    """The rows of a set in order; a range if they are consecutive, as they mostly are."""
    low = (bits & -bits).bit_length() - 1
    run = bits >> low if bits else 0
    if not run & (run + 1):
        return range(low, low + run.bit_length()) if bits else range(0)
    if bits.bit_length() > _FEW:
        raw = np.frombuffer(bytes_of(bits), np.uint8)
        used = raw.nonzero()[0]
        at, digit = np.unpackbits(raw[used], bitorder="little").reshape(-1, 8).nonzero()
        rows: list[int] = (used[at] * 8 + digit).tolist()
        return rows
    return [row for row, digit in enumerate(f"{bits:b}"[::-1]) if digit == "1"]


def bits_of(rows: Iterable[int]) -> int:
    """The set of these rows."""
    if isinstance(rows, range) and rows.step == 1:
        return all_of(len(rows), rows.start)
    bits = 0
    for row in rows:
        bits |= 1 << row
    return bits


def first_of(bits: int, count: int) -> int:
    """The first `count` of these rows."""
    if bits.bit_count() <= count:
        return bits
    return bits_of(rows_of(bits)[:count])


def picked(bits: int, rows: Sequence[int]) -> int:
    """The indices in `rows` of the rows that are in the set."""
    if isinstance(rows, range) and rows.step == 1:
        return bits >> rows.start & all_of(len(rows))
    return bits_of(place for place, row in enumerate(rows) if bits >> row & 1)


def of_mask(mask: Any) -> int:
    """The set of rows where a mask holds."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def bytes_of(bits: int) -> bytes:
    """A set in wire form."""
    return bits.to_bytes(bits.bit_length() + 7 >> 3, "little")


def in_bytes(raw: bytes) -> int:
    """Decode a set from its wire form."""
    return int.from_bytes(raw, "little")
