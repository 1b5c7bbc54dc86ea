"""The one copy of a write: from the caller's memory into chunks, and into the message.

Runs in the client. A small chunk is joined first and copied at once. In a large one each column is
copied at once where its rows are in one array, else value by value; large copies are shared among
threads, see `parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dataplane.client.write.chunks import Chunk, lengths_of, spaces_of
from dataplane.client.write.columns import ValueColumn
from dataplane.client.write.parallel import SHARED_BYTES, Copy, carry_out, populate
from dataplane.memory.mapping import WriteMaps
from dataplane.memory.placement import Stretch
from dataplane.wire.objects import Buffer

JOINED_BYTES = 64 << 10
"""Less than this is joined before it is copied."""
JOINED_VALUE_BYTES = 512
"""So are values that are smaller than this on average."""


def copy_chunks(chunks: Sequence[Chunk], writes: WriteMaps) -> None:
    """Copy these chunks to their places in the arena."""
    spaces = spaces_of(chunks)
    nbytes = sum([length for _, length in spaces])
    populate(writes, spaces, nbytes)
    carry_out(_copies(chunks, spaces, writes), nbytes)


def _copies(
    chunks: Sequence[Chunk], spaces: Sequence[Stretch], writes: WriteMaps
) -> Iterator[Copy]:
    """Small ones are carried out here; large ones are handed over. spaces: as `spaces_of` has
    them."""
    following, base, end = iter(spaces), 0, 0
    for chunk in chunks:
        if not chunk.nbytes:
            continue
        while not base <= chunk.offset < end:
            base, length = next(following)
            space, end = writes.view(base, length), base + length
        at = chunk.offset - base
        memory = space[at : at + chunk.nbytes]
        if chunk.nbytes < JOINED_BYTES or chunk.data is not None:
            memory[:] = np.frombuffer(b"".join(chunk.image()), np.uint8)
            continue
        lengths = lengths_of(chunk.columns, chunk.first, chunk.last)
        memory[: len(lengths)] = np.frombuffer(lengths, np.uint8)
        for column, start in chunk.placed_columns():
            target = memory[start : start + column.bytes_of(chunk.first, chunk.last)]
            rows = column.source[chunk.first : chunk.last]
            if _are_vectors(column) and target.nbytes < SHARED_BYTES * len(rows):
                np.concatenate(rows, out=target.view(rows[0].dtype))
            else:
                yield from _copy(target, column.buffers(chunk.first, chunk.last))


def _are_vectors(column: ValueColumn) -> bool:
    """Whether rows are arrays of one dimension and one dtype, each for itself."""
    is_list = not isinstance(column.source, np.ndarray)
    return is_list and column.spec.kind == "array" and len(column.spec.shape) == 1


def _copy(memory: npt.NDArray[np.uint8], buffers: list[Buffer]) -> Iterator[Copy]:
    """These buffers, one behind the other. Large ones are handed over."""
    if memory.nbytes < JOINED_BYTES or memory.nbytes < JOINED_VALUE_BYTES * len(buffers):
        memory[:] = np.frombuffer(b"".join(buffers), np.uint8)
        return
    at = 0
    target = memoryview(memory)  # type: ignore[arg-type]
    for buffer in buffers:
        source = memoryview(buffer)
        nbytes = source.nbytes
        if nbytes >= SHARED_BYTES:
            yield memory[at : at + nbytes], np.frombuffer(buffer, np.uint8)
        elif nbytes:
            target[at : at + nbytes] = source.cast("B")
        at += nbytes


def is_stored(chunk: Chunk, stored: npt.NDArray[np.uint8]) -> bool:
    """Whether these are the bytes of a deduplicated chunk."""
    at = 0
    for buffer in chunk.image():
        source = np.frombuffer(buffer, np.uint8)
        if not np.array_equal(source, stored[at : at + source.nbytes]):
            return False
        at += source.nbytes
    return True
