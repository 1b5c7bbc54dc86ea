"""The one copy of a write: from the caller's memory into chunks, and into the message.

Runs in the client. A small chunk is joined first and copied at once. In a large one each column is
copied at once where its rows are in one array, else value by value; large copies are shared among
threads, see `parallel`. Padding is written too, so that equal chunks have equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dataplane.client.write.chunks import NewChunk, spaces_of
from dataplane.client.write.parallel import SHARED_BYTES, Copy, carry_out, populate
from dataplane.memory.extents import Extent
from dataplane.memory.mapping import ByteArray, WriteMaps
from dataplane.wire.objects import Buffer

JOINED_BYTES = 64 << 10
"""Less than this is joined before it is copied."""
JOINED_VALUE_BYTES = 512
"""So are values that are smaller than this on average."""


def copy_chunks(chunks: Sequence[NewChunk], writes: WriteMaps) -> None:
    """Copy these chunks to their places in the arena."""
    spaces = spaces_of(chunks)
    nbytes = sum([length for _, length in spaces])
    populate(writes, spaces, nbytes)
    carry_out(_copies(chunks, spaces, writes), nbytes)


def _copies(
    chunks: Sequence[NewChunk], spaces: Sequence[Extent], writes: WriteMaps
) -> Iterator[Copy]:
    """Small ones are carried out here; large ones are handed over. spaces: as `spaces_of` has
    them."""
    following = iter(chunks)
    for base, length in spaces:
        space = memoryview(writes.view(base, length))  # type: ignore[arg-type]
        at = 0
        while at < length:
            chunk = next(following)
            nbytes = chunk.nbytes
            if nbytes < JOINED_BYTES or chunk.data is not None:
                space[at : at + nbytes] = b"".join(chunk.image())
            else:
                yield from _copy_columns(space[at : at + nbytes], chunk)
            at += chunk.space


def _copy_columns(memory: memoryview, chunk: NewChunk) -> Iterator[Copy]:
    written = len(chunk.head)
    memory[:written] = chunk.head
    for column, start in chunk.places():
        end = start + column.nbytes
        memory[written:start] = bytes(start - written)
        written = end
        rows, spec = column.source, column.spec
        is_vectors = spec.kind == "array" and len(spec.shape) == 1 and type(rows) is list
        if is_vectors and column.nbytes < SHARED_BYTES * column.count:
            np.concatenate(rows, out=np.frombuffer(memory[start:end], rows[0].dtype))
        else:
            yield from _copy(memory[start:end], column.buffers())


def _copy(memory: memoryview, buffers: list[Buffer]) -> Iterator[Copy]:
    """These buffers, one behind the other. Large ones are handed over."""
    if memory.nbytes < JOINED_BYTES or memory.nbytes < JOINED_VALUE_BYTES * len(buffers):
        memory[:] = b"".join(buffers)
        return
    at = 0
    for buffer in buffers:
        source = memoryview(buffer)
        nbytes = source.nbytes
        if nbytes >= SHARED_BYTES:
            target = np.frombuffer(memory[at : at + nbytes], np.uint8)
            yield target, np.frombuffer(buffer, np.uint8)
        elif nbytes:
            memory[at : at + nbytes] = source.cast("B")
        at += nbytes


def is_stored(chunk: NewChunk, stored: ByteArray) -> bool:
    """Whether these are the bytes of a deduplicated chunk."""
    at = 0
    for buffer in chunk.image():
        source = np.frombuffer(buffer, np.uint8)
        if not np.array_equal(source, stored[at : at + source.nbytes]):
            return False
        at += source.nbytes
    return True
