"""What reads bytes of others: each decoder as a function of bytes, with inputs to begin from.

A target returns, or raises one of the errors that its decoder promises. Anything else is a bug. The
inputs are the protocol's vectors and files that the library wrote itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import bench.traces.load
from bench.traces import TASKS, generate, parquet
from bench.traces.parquet import TraceError
from dataplane.client.checkpoint import archive
from dataplane.client.checkpoint.records import RecordReader
from dataplane.client.read.chunk_columns import ChunkForm
from dataplane.errors import (
    CheckpointCorrupt,
    CheckpointFailed,
    DataplaneError,
    InvalidCall,
    ProtocolError,
    ValueCorrupt,
)
from dataplane.metadata.tables import where
from dataplane.metadata.tables.bits import all_of
from dataplane.metadata.tables.incoming import values_in
from dataplane.metadata.tables.outgoing import OutgoingValues
from dataplane.metadata.tables.pieces import split
from dataplane.progress import Bar
from dataplane.transport import bulk_frames
from dataplane.wire import frames, journal, layouts, objects, packed, peering
from dataplane.wire.checkpoint import Progress, Restore
from dataplane.wire.tables import INLINE, Chunk, Owner, Piece, Rows, Values

VECTORS = Path(__file__).resolve().parents[2] / "protocol" / "vectors"
SPLIT = 7
"""Streams arrive in pieces: of this many bytes, then the rest."""


@dataclass(frozen=True, slots=True)
class Target:
    """run: one input. seeds: inputs that are in order, and some that are not."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


def _each(decoders: list[Callable[[Any], Any]], data: bytes | memoryview) -> None:
    for decode in decoders:
        with contextlib.suppress(ProtocolError):
            decode(data)


def _local(data: bytes) -> None:
    """A stream at the local door, and what both of its ends decode."""
    reader = frames.FrameReader(1 << 16)
    with contextlib.suppress(ProtocolError):
        for piece in (data[:SPLIT], data[SPLIT:]):
            for body in reader.feed(piece):
                _each([frames.decode_request, frames.decode_reply], body)
    _each([frames.decode_request, frames.decode_reply], data)


_PEERS: list[Callable[[bytes], Any]] = [peering.decode_request, peering.decode_reply]
_BULK: list[Callable[[bytes], Any]] = [
    bulk_frames.decode_join,
    bulk_frames.decode_to_owner,
    bulk_frames.decode_from_owner,
    bulk_frames.decode_to_worker,
    bulk_frames.decode_from_worker,
]


def _objects(data: bytes) -> None:
    with contextlib.suppress(ValueCorrupt):
        objects.decode(data)


def _chunks(data: bytes) -> None:
    """A layout behind its size, and the bytes of a chunk."""
    if len(data) > 1:
        rows, size = data[0], data[1]
        memory = np.frombuffer(data[2 + size :], np.uint8)
        with contextlib.suppress(ValueCorrupt):
            form = ChunkForm(layouts.decode(data[2 : 2 + size]), rows)
            for column in form.columns(memory):
                if column.is_array:
                    list(column.arrays(0, rows))
                elif column.spec.dtype:
                    list(column.scalars(0, rows))
                else:
                    column.cells(0, rows)


_values_decoder = msgspec.msgpack.Decoder(Values)


def _values(data: bytes) -> None:
    """What a shard makes of a message's values, and tells of them again."""
    with contextlib.suppress(DataplaneError, msgspec.DecodeError, UnicodeDecodeError):
        values = _values_decoder.decode(data)
        placed = values_in(values, 9, {}).pieces.parts
        parts = split(placed, [(range(4), range(4), 4), (range(4, 9), range(5), 5)])
        told = OutgoingValues([(one, all_of(one.count) & 0b1101) for one in parts]).on_wire()
        values_in(told, 9, {})


def _columns(data: bytes) -> None:
    dtypes = (packed.EXTENT, packed.U8, packed.U4)
    _each([functools.partial(packed.column, dtype=dtype) for dtype in dtypes], data)


def _filters(data: bytes) -> None:
    """A filter as it arrives: any decoded object."""
    with contextlib.suppress(ValueCorrupt):
        wire = objects.decode(data)
        with contextlib.suppress(InvalidCall, DataplaneError):
            where.checked(wire)


def _manifest(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / archive.MANIFEST).write_bytes(data)
        with contextlib.suppress(CheckpointCorrupt, CheckpointFailed):
            archive.verified(Path(name), Bar("verify"))


def _records(data: bytes) -> None:
    """The file of a partition in a checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "0000"
        path.write_bytes(data)
        reader = RecordReader(path)
        with contextlib.closing(reader), contextlib.suppress(CheckpointCorrupt):
            list(reader.records())


def _trace(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "t"
        path.write_bytes(data)
        with contextlib.suppress(TraceError):
            bench.traces.load.load([path], None if data[:4] == b"PAR1" else "math")


# inputs to begin from


def _vectors(*names: str) -> list[bytes]:
    found = []
    for name in names:
        for vector in json.loads((VECTORS / f"{name}.json").read_text()):
            if "hex" in vector:
                data = bytes.fromhex(vector["hex"])
                found.append(data)
                if name in ("local", "bulk", "worker"):
                    found.append(data[frames.HEADER_BYTES :])
    return found


def _chunk_vectors() -> list[bytes]:
    found = []
    for vector in json.loads((VECTORS / "chunks.json").read_text()):
        layout = bytes.fromhex(vector["layout"])
        sizes = bytes([len(vector["rows"][0]), len(layout)])
        found.append(sizes + layout + bytes.fromhex(vector["hex"]))
    return found


def _some_values() -> list[bytes]:
    chunks = [Chunk(0, 7, 9, 80, 0), Chunk(1, 0, 6, 4, 1, b"1234")]
    pieces = [
        Piece(0, (0, 1), 0, b"\xff\x01"),
        Piece(1, (2,), 1, b"\x05", 3),
        Piece(1, (2, -1), 4, b"\x03", 0, bytes([5, 0, 0, 0, 2, 0, 0, 0])),
    ]
    made = Values(["a", "b", "c"], [Owner("a", 1), INLINE], [b"x", b"y"], chunks, pieces)
    return [msgspec.msgpack.encode(made)]


def _manifests() -> list[bytes]:
    note = archive.PartitionNote(
        "p", {"s": ["x"]}, 8, None, "acked", 1, False, archive.FileNote(0, "")
    )
    made = archive.Manifest(archive.FORMAT, archive.VERSION, "u1", "2026", [note])
    return [made.signed().text(), made.text(), b"{}", b"[]"]


def _some_records() -> list[bytes]:
    values = Values(["a"], [], [b"x"], [Chunk(0, 0, 2, 80, 0)], [Piece(0, (0,), 0, b"\3")])
    made = Restore("p", 0, Rows(bytes(range(32))), values, {"t": [1, None]}, Progress())
    message = msgspec.msgpack.encode(made)
    return [(len(message).to_bytes(4, "little") + message + bytes(128)) * 2]


def _traces() -> list[bytes]:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "t"
        parquet.write(path, "math", 1, generate(TASKS["math"], 2, seed=1, steps=1))
        written = path.read_bytes()
    lines = [
        {"0": [{"input": [3, 4], "output": [5, 6]}]},
        {"prompt": 3, "responses": [4, 5]},
        {"step": 0, "reward_time": 1.5},
    ]
    return [written, *(json.dumps(one).encode() + b"\n" for one in lines)]


TARGETS = {
    "local": Target(_local, lambda: _vectors("local", "refused")),
    "peers": Target(functools.partial(_each, _PEERS), lambda: _vectors("peers", "rosters")),
    "bulk": Target(functools.partial(_each, _BULK), lambda: _vectors("bulk", "worker")),
    "journal": Target(functools.partial(_each, [journal.decode]), lambda: _vectors("journal")),
    "objects": Target(_objects, lambda: _vectors("objects")),
    "chunks": Target(_chunks, _chunk_vectors),
    "values": Target(_values, _some_values),
    "columns": Target(_columns, lambda: [b"", bytes(8), bytes(96)]),
    "filters": Target(_filters, lambda: [objects.encode(w)[0] for w in _FILTERS]),
    "manifest": Target(_manifest, _manifests),
    "records": Target(_records, _some_records),
    "traces": Target(_trace, _traces),
}

_FILTERS: list[Any] = [
    ["ge", "version", 6],
    ["and", ["eq", "a", "b"], ["in", "n", [1, 2, None]]],
    ["not", ["or", ["has", "x"], ["lt", "y", 0.5]]],
]


def seeds(name: str) -> Iterator[bytes]:
    yield from TARGETS[name].seeds()
