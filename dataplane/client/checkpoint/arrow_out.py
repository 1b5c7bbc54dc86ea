"""Write the rows of a checkpoint to Arrow IPC files, and the bytes of their chunks to another file.

Each reply of the peer becomes one record batch per table, so memory does not grow with the
partition. protocol/checkpoint.md describes the columns. Imported on use, because it needs pyarrow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.client.checkpoint.archive import FILES, FileNote, SummedFile, failing
from dataplane.errors import ProtocolError
from dataplane.wire.checkpoint import SaveDone
from dataplane.wire.layouts import aligned
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.records import EXTENT, KEY, U4, column
from dataplane.wire.tables import Name, Rows, Table, Values

Memory = npt.NDArray[np.uint8]
UNKNOWN = 0xFFFF_FFFF
_WRITE_BYTES = 1 << 20
_STAGES = pa.list_(pa.string())

GROUPS = pa.schema(
    [
        ("key", pa.binary(16)),
        ("name", pa.string()),
        ("expected", pa.uint32()),
        ("gone", pa.uint32()),
        ("dropped", pa.uint32()),
        ("closed", pa.bool_()),
        ("split", _STAGES),
    ]
)
ROWS = pa.schema(
    [
        ("key", pa.binary(16)),
        ("name", pa.string()),
        ("group", pa.uint32()),
        ("tags", pa.string()),
        ("acked", _STAGES),
    ]
)
CHUNKS = pa.schema(
    [
        ("rows", pa.uint32()),
        ("layout", pa.binary()),
        ("lengths", pa.binary()),
        ("offset", pa.uint64()),
        ("nbytes", pa.uint64()),
    ]
)
PIECES = pa.schema(
    [
        ("chunk", pa.uint32()),
        ("fields", pa.list_(pa.string())),
        ("base", pa.uint32()),
        ("given", pa.binary()),
        ("first", pa.uint32()),
        ("at", pa.binary()),
    ]
)
TABLES = (GROUPS, ROWS, CHUNKS, PIECES)
"""The schemas, in the order of FILES."""


class PartFiles:
    """The files of one partition that is being written."""

    def __init__(self, directory: Path, target: Path) -> None:
        self._target = target
        self._files: list[SummedFile] = []
        try:
            with failing(target):
                for name in FILES:
                    self._files.append(SummedFile(directory / name))
                self._tables = [
                    pa.ipc.new_file(file, schema)
                    for file, schema in zip(self._files, TABLES, strict=False)
                ]
        except BaseException:
            self.close()
            raise

    def write(self, saved: SaveDone, arena: Memory) -> None:
        """Write one reply of the peer, whose chunks are in the arena (uint8) or in the reply."""
        with failing(self._target):
            chunks = self._chunks(saved.table, arena)
            batches = [_groups(saved), _rows(saved), chunks, _pieces(saved.table.values)]
            for table, batch in zip(self._tables, batches, strict=True):
                table.write_batch(batch)

    def finish(self) -> list[FileNote]:
        """Sync and close all files. Return their sizes and checksums, in the order of FILES."""
        with failing(self._target):
            for table in self._tables:
                table.close()
            return [file.finish() for file in self._files]

    def close(self) -> None:
        """Close the files without syncing them."""
        for file in self._files:
            file.close()

    def _chunks(self, table: Table, arena: Memory) -> pa.RecordBatch:
        """The table of the chunks, whose bytes are written."""
        chunks = table.values.chunks
        layouts = list(map(table.values.layout_of, chunks))
        places = column(table.places, EXTENT, len(chunks)).tolist()
        pending, size = list[Any](), 0
        offsets = []
        for chunk, (at, _) in zip(chunks, places, strict=True):
            offsets.append(self._files[-1].nbytes + size)
            bytes_ = arena[at : at + chunk.nbytes] if chunk.number else chunk.inline
            if len(bytes_) != chunk.nbytes:
                raise ProtocolError(
                    (
                        f"a chunk of {chunk.nbytes} bytes at offset {at} is outside the arena of "
                        f"{len(arena)} bytes"
                        if chunk.number
                        else f"invalid inline chunk: expected {chunk.nbytes} bytes, got "
                        f"{len(bytes_)}"
                    )
                    + ". Install the same dataplane release everywhere"
                )
            space = aligned(chunk.nbytes)
            pending += [bytes_, bytes(space - chunk.nbytes)]
            size += space
            if size >= _WRITE_BYTES:
                _write_all(self._files[-1], pending, size)
                pending, size = [], 0
        _write_all(self._files[-1], pending, size)
        return pa.record_batch(
            [
                pa.array([chunk.rows for chunk in chunks], pa.uint32()),
                pa.array(layouts, pa.binary()),
                pa.array([chunk.inline if chunk.number else b"" for chunk in chunks], pa.binary()),
                pa.array(offsets, pa.uint64()),
                pa.array([chunk.nbytes for chunk in chunks], pa.uint64()),
            ],
            schema=CHUNKS,
        )


def _pieces(values: Values) -> pa.RecordBatch:
    pieces, names = values.pieces, [*values.fields, None]  # -1: a column that is not used
    return pa.record_batch(
        [
            pa.array([piece.chunk for piece in pieces], pa.uint32()),
            pa.array([[names[f] for f in piece.fields] for piece in pieces], PIECES[1].type),
            pa.array([piece.base for piece in pieces], pa.uint32()),
            pa.array([piece.given for piece in pieces], pa.binary()),
            pa.array([piece.first for piece in pieces], pa.uint32()),
            pa.array([piece.at for piece in pieces], pa.binary()),
        ],
        schema=PIECES,
    )


def _write_all(file: SummedFile, parts: list[Any], size: int) -> None:
    if len(parts) == 2:  # one large value: no copy
        for part in parts:
            file.write(part)
    elif size:
        file.write(b"".join(parts))


def _groups(saved: SaveDone) -> pa.RecordBatch:
    rows, told = saved.table.rows, saved.progress
    n = len(rows.group_keys) // KEY.itemsize
    expected = column(told.expected, U4, n)
    return pa.record_batch(
        [
            _keys(rows.group_keys, n),
            _names(rows.group_names, n),
            pa.array(expected, mask=expected == UNKNOWN),
            pa.array(column(told.gone, U4, n)),
            pa.array(column(told.dropped, U4, n)),
            pa.array(np.frombuffer(told.closed, np.bool_, n)),
            _marked(told.split, n),
        ],
        schema=GROUPS,
    )


def _rows(saved: SaveDone) -> pa.RecordBatch:
    rows: Rows = saved.table.rows
    n = len(rows.keys) // KEY.itemsize
    groups = column(rows.group_index, U4, n) if rows.group_index else np.full(n, NO_GROUP, U4)
    return pa.record_batch(
        [
            _keys(rows.keys, n),
            _names(rows.names, n),
            pa.array(groups, mask=groups == NO_GROUP),
            pa.array(_tags(saved, n), pa.string()),
            _marked(saved.progress.acked, n),
        ],
        schema=ROWS,
    )


def _keys(raw: bytes, n: int) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(16), n, [None, pa.py_buffer(raw)])


def _names(names: list[Name] | None, n: int) -> pa.Array:
    """As JSON, so that 7 is not "7"; null where the key was minted and says its own name."""
    if names is None:
        return pa.nulls(n, pa.string())
    texts = [
        None if isinstance(name, str) and name.startswith("~") else msgspec.json.encode(name)
        for name in names
    ]
    return pa.array([text and text.decode() for text in texts], pa.string())


def _tags(saved: SaveDone, n: int) -> list[str | None]:
    """Per row the tags that it has, as a JSON object."""
    found: list[dict[str, Any]] = [{} for _ in range(n)]
    for name, values in saved.table.tags.items():
        raw = saved.progress.tagged.get(name)
        for row in range(n) if raw is None else np.flatnonzero(np.frombuffer(raw, "u1")).tolist():
            found[row][name] = values[row] if len(values) == n else values[0]
    return [json.dumps(tags) if tags else None for tags in found]


def _marked(marks: dict[str, bytes], n: int) -> pa.Array:
    """Per row or group, the stages that are marked."""
    found: list[list[str]] = [[] for _ in range(n)]
    for name, raw in marks.items():
        for at in np.flatnonzero(np.frombuffer(raw, "u1", n)).tolist():
            found[at].append(name)
    return pa.array(found, _STAGES)
