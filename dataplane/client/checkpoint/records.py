"""The file of a partition in a checkpoint: `Restore` messages, each with the bytes of its chunks.

A chunk takes as much space in the file as in an arena, so neighbouring chunks are read in one go.
The file is verified before it is read. A file that contradicts itself raises CheckpointCorrupt.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.client.checkpoint.archive import SummedFile, corrupt, failing
from dataplane.client.write.chunks import NewChunk, room_of
from dataplane.errors import ProtocolError
from dataplane.wire.checkpoint import Restore, SaveDone
from dataplane.wire.layouts import aligned
from dataplane.wire.limits import ALIGNMENT_BYTES
from dataplane.wire.packed import EXTENT, column
from dataplane.wire.tables import Chunk, Values

Memory = npt.NDArray[np.uint8]

_length = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Restore)


def write(
    file: SummedFile, partition: str, saved: SaveDone, closed_groups: int, arena: Memory
) -> None:
    """Append a reply of the peer, whose chunks are in the arena (uint8) or in the reply."""
    table = saved.table
    chunks: list[Chunk] = []
    images: list[Memory | bytes] = []
    places = column(table.places, EXTENT, len(table.values.chunks)).tolist()
    for chunk, (at, _) in zip(table.values.chunks, places, strict=True):
        image = arena[at : at + chunk.nbytes] if chunk.number else chunk.inline
        if len(image) != chunk.nbytes:
            raise ProtocolError(
                (
                    f"a chunk of {chunk.nbytes} bytes at offset {at} is outside the arena of "
                    f"{len(arena)} bytes"
                    if chunk.number
                    else f"invalid inline chunk: expected {chunk.nbytes} bytes, got {len(image)}"
                )
                + ". Install the same dataplane release everywhere"
            )
        lengths = chunk.inline if chunk.number else b""
        chunks.append(Chunk(0, 0, chunk.rows, chunk.nbytes, chunk.layout, lengths))
        images += image, bytes(_space(chunk.nbytes) - chunk.nbytes)
    values = Values(table.values.fields, [], table.values.layouts, chunks, table.values.pieces)
    record = _encoder.encode(
        Restore(partition, 0, table.rows, values, table.tags, saved.progress, closed_groups)
    )
    file.write([_length.pack(len(record)), record, *images])


class RecordReader:
    """The file of one partition of a verified checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with failing(path, reading=True):
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
            self.nbytes = os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def records(self) -> Iterator[tuple[Restore, list[NewChunk], int]]:
        """Yield each record with its chunks, which have no offset yet, and where in the file the
        first of them starts."""
        at = 0
        while at < self.nbytes:
            start = at + _length.size
            (length,) = _length.unpack(self._read(at, start))
            at = start + length
            try:
                record = _decoder.decode(self._read(start, at))
            except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
                raise corrupt(self._path, f"invalid record at byte {start}: {exc}") from exc
            chunks = [
                NewChunk((), one.rows, one.nbytes, _space(one.nbytes), b"")
                for one in record.values.chunks
            ]
            self._check(at + room_of(chunks))
            yield record, chunks, at
            at += room_of(chunks)

    def _read(self, start: int, end: int) -> bytearray:
        self._check(end)
        found = bytearray(end - start)
        self.read(start, memoryview(found))
        return found

    def _check(self, end: int) -> None:
        if end > self.nbytes:
            raise corrupt(
                self._path, f"a record ends at byte {end}, but the file has {self.nbytes} bytes"
            )

    def read(self, at: int, into: memoryview) -> None:
        """Fill `into` with bytes of the file, from offset `at`."""
        rest = into
        with failing(self._path, reading=True):
            while rest:
                count = os.preadv(self._file.fileno(), [rest], at)
                if not count:
                    raise corrupt(self._path, "it was truncated")
                at, rest = at + count, rest[count:]


def _space(nbytes: int) -> int:
    """Return the bytes that a chunk takes in an arena, and in the file."""
    return max(aligned(nbytes), ALIGNMENT_BYTES)
