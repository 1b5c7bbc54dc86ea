"""Cutting a column of copies into slices with a limit on bytes and pieces.

Slices are ranges of the byte stream that all copies form one after another, so a large copy is
cut and small ones travel together. All of it works on columns: nothing here loops over copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataplane.transport.bulk_frames import PIECE
from dataplane.transport.seam import Records


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """A slice. copies: COPY records. index: for each, its index in the whole column."""

    index: npt.NDArray[np.int64]
    copies: Records
    nbytes: int


def cut(copies: Records, max_bytes: int, max_items: int) -> Iterator[Slice]:
    """Cut `copies` into slices of at most `max_bytes` and `max_items`, in order."""
    nbytes = copies["nbytes"].astype(np.int64)
    ends = np.cumsum(nbytes)
    if 0 < len(copies) <= max_items and ends[-1] <= max_bytes:
        # the common case
        yield Slice(np.arange(len(copies)), copies, int(ends[-1]))
        return
    starts = ends - nbytes
    first = starts // max_bytes
    last = np.where(nbytes > 0, (ends - 1) // max_bytes, first)
    parts = last - first + 1
    index = np.repeat(np.arange(len(copies)), parts)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)
    slot = first[index] + nth
    begin = np.maximum(starts[index], slot * max_bytes)
    end = np.minimum(ends[index], (slot + 1) * max_bytes)
    pieces = copies[index]
    pieces["start"] += (begin - starts[index]).astype(np.uint64)
    pieces["dest"] += (begin - starts[index]).astype(np.uint64)
    pieces["nbytes"] = end - begin
    bounds = np.flatnonzero(np.diff(slot)) + 1
    for low, high in zip([0, *bounds.tolist()], [*bounds.tolist(), len(index)], strict=True):
        for start in range(low, high, max_items):
            stop = min(start + max_items, high)
            yield Slice(
                index[start:stop], pieces[start:stop], int(pieces["nbytes"][start:stop].sum())
            )


def pieces_of(copies: Records) -> Records:
    """The PIECE records to request from the owner."""
    chosen = np.empty(len(copies), PIECE)
    for name in PIECE.names or ():
        chosen[name] = copies[name]
    return chosen
