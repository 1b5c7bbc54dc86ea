"""The one copy of a put: values into the arena, where the layout and the peer's grant say.

Runs in the client. Rows that lie at a regular distance are copied in one operation, small values
are joined first; only values of at least 4 KiB are copied one by one. Large copies are yielded, for
`parallel.carry_out`; those below are done where they are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.client.write.parallel import SHARED_BYTES, Copy, carry_out
from dataplane.client.write.parcel import Ints, Parcel, Strand
from dataplane.client.write.values import Buffer
from dataplane.wire.limits import ALIGNMENT_BYTES, INLINE_ALIGNMENT_BYTES, PACK_LIMIT_BYTES

Bytes = npt.NDArray[np.uint8]
Write = Callable[[int, int], Bytes]

_FEW = 4
_PADDING = [bytes(length) for length in range(ALIGNMENT_BYTES + 1)]


def fill(parcel: Parcel, offsets: npt.NDArray[np.uint64], write: Write) -> None:
    """Copy the parcel's values into the arena.

    offsets: where each of `parcel.sizes` starts, as `place` said. write(offset, length): that
    stretch of the arena as a writable uint8 array; it is asked for stretches of adjacent ranges.
    """
    if len(offsets):
        carry_out(_copies(parcel, offsets.astype(np.int64), write), parcel.nbytes)


def inline_of(parcel: Parcel) -> bytes:
    """What goes with the message that commits the parcel."""
    size = parcel.inline_bytes
    if not size:
        return b""
    image = np.zeros(size, np.uint8)
    for strand in parcel.inline_strands():
        targets = strand.records["range"].astype(np.int64)
        carry_out(_copy_to(image, strand, targets, INLINE_ALIGNMENT_BYTES), 0)
    return image.tobytes()


def _copies(parcel: Parcel, starts: Ints, write: Write) -> Iterator[Copy]:
    ends = starts + -(-parcel.sizes.astype(np.int64) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    breaks = (np.flatnonzero(starts[1:] != ends[:-1]) + 1).tolist() if len(starts) > 1 else []
    if not breaks:
        window = write(int(starts[0]), int(ends[-1] - starts[0]))
        for strand in parcel.strands():
            yield from _copy(window, strand, starts - starts[0])
        return
    strands = list(parcel.strands())
    for first, last in zip([0, *breaks], [*breaks, len(starts)], strict=True):
        window = write(int(starts[first]), int(ends[last - 1] - starts[first]))
        for strand in strands:
            yield from _copy(window, _within(strand, first, last), starts - starts[first])


def _within(strand: Strand, first: int, last: int) -> Strand:
    """Those values that lie in the ranges `first` to `last`."""
    ranges = strand.records["range"]
    chosen = np.flatnonzero((ranges >= first) & (ranges < last))
    at = chosen if strand.at is None else strand.at[chosen]
    return Strand(strand.source, strand.first, at, strand.records[chosen])


def _copy(window: Bytes, strand: Strand, starts: Ints) -> Iterable[Copy]:
    records = strand.records
    if not len(records):
        return ()
    targets = starts[records["range"]] + records["delta"]
    return _copy_to(window, strand, targets, ALIGNMENT_BYTES)


def _copy_to(window: Bytes, strand: Strand, targets: Ints, alignment: int) -> Iterable[Copy]:
    """alignment: of the values, which are padded to it."""
    records, count = strand.records, len(strand.records)
    source = _chosen(strand)
    if isinstance(source, np.ndarray) and count > _FEW:
        return _copy_rows(window, source, targets)
    if count <= _FEW:
        return _copy_each(window, source, targets, records["nbytes"])
    sizes = records["nbytes"].astype(np.int64)
    return _copy_items(window, list(source), targets, sizes, alignment)


def _chosen(strand: Strand) -> Bytes | list[Buffer]:
    source, first, at = strand.source, strand.first, strand.at
    if at is None:
        return source[first : first + len(strand.records)]
    if isinstance(source, np.ndarray) and source.shape[1] < PACK_LIMIT_BYTES:
        return source[first + at]
    return [source[index] for index in (first + at).tolist()]


def _copy_rows(window: Bytes, rows: Bytes, targets: Ints) -> Iterator[Copy]:
    """Rows of equal length, in as few operations as their places are regular."""
    steps = targets[1:] - targets[:-1]
    if (steps == steps[0]).all():
        yield from _copy_regular(window, rows, int(targets[0]), int(steps[0]))
        return
    step = int(steps.min())
    bounds = [0, *(np.flatnonzero(steps != step) + 1).tolist(), len(rows)]
    for first, last in zip(bounds, bounds[1:], strict=False):
        yield from _copy_regular(window, rows[first:last], int(targets[first]), step)


def _copy_regular(window: Bytes, rows: Bytes, start: int, step: int) -> Iterable[Copy]:
    count, length = rows.shape
    target: npt.NDArray[Any]
    if step == length:
        target, source = window[start : start + rows.size], rows.reshape(-1)
    elif length:
        # words instead of bytes: numpy copies rows of few items by item
        word = next(size for size in (8, 4, 2, 1) if length % size == 0)
        dtype = f"u{word}"
        target = np.ndarray((count, length // word), dtype, window, start, (step, word))
        source = rows.view(dtype)
    else:
        return ()
    if rows.size >= SHARED_BYTES:
        return ((target, source),)
    target[...] = source
    return ()


def _copy_items(
    window: Bytes, items: list[Buffer], targets: Ints, sizes: Ints, alignment: int
) -> Iterator[Copy]:
    """Values of any length: large ones by themselves, runs of small ones joined."""
    large = sizes >= PACK_LIMIT_BYTES
    if large.any():
        at = np.flatnonzero(large)
        yield from _copy_each(
            window, [items[index] for index in at.tolist()], targets[at], sizes[at]
        )
        at = np.flatnonzero(~large)
        items, targets, sizes = [items[index] for index in at.tolist()], targets[at], sizes[at]
    if not items:
        return
    rooms = -(-sizes // alignment) * alignment
    if alignment == ALIGNMENT_BYTES:
        rooms = np.maximum(rooms, alignment)
    padding = map(_PADDING.__getitem__, (rooms - sizes).tolist())
    parts = list(chain.from_iterable(zip(items, padding, strict=True)))
    ends = targets + rooms
    bounds = [0, *(np.flatnonzero(targets[1:] != ends[:-1]) + 1).tolist(), len(items)]
    for first, last in zip(bounds, bounds[1:], strict=False):
        joined = b"".join(parts[2 * first : 2 * last])
        start = int(targets[first])
        window[start : start + len(joined)] = np.frombuffer(joined, np.uint8)


def _copy_each(
    window: Bytes, items: Iterable[Buffer], targets: Ints, sizes: npt.NDArray[Any]
) -> Iterator[Copy]:
    for item, start, size in zip(items, targets.tolist(), sizes.tolist(), strict=True):
        if size >= SHARED_BYTES:
            yield window[start : start + size], np.frombuffer(item, np.uint8)
        elif size:
            window[start : start + size] = np.frombuffer(item, np.uint8)
