"""Rows of a checkpoint into Arrow IPC files, and the bytes of their values beside them.

One record batch of each table for each answer of the peer, so nothing grows with the partition.
protocol/checkpoint.md describes the columns. Imports pyarrow, so it is imported late.
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
from dataplane.memory.extents import padded
from dataplane.wire.arrays import Array
from dataplane.wire.checkpoint import SaveDone
from dataplane.wire.limits import NO_GROUP
from dataplane.wire.records import KEY, PLACE, PLACE_ABSENT, PLACE_INLINE, U4, column
from dataplane.wire.tables import Name, Rows, Spec

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
VALUES = pa.schema(
    [
        ("row", pa.uint32()),
        ("field", pa.string()),
        ("leaf", pa.int32()),
        ("dtype", pa.string()),
        ("shape", pa.string()),
        ("offset", pa.uint64()),
        ("nbytes", pa.uint64()),
    ]
)

_VALUE = np.dtype(
    [("row", "<u4"), ("field", "<u4"), ("leaf", "<i4"), ("spec", "<u4"), ("place", "V16")]
)
Records = npt.NDArray[Any]


class PartFiles:
    """The files of one partition, while they are written."""

    def __init__(self, directory: Path, target: Path) -> None:
        self._target = target
        self._files: list[SummedFile] = []
        try:
            with failing(target):
                for name in FILES:
                    self._files.append(SummedFile(directory / name))
                self._tables = [
                    pa.ipc.new_file(file, schema)
                    for file, schema in zip(self._files, (GROUPS, ROWS, VALUES), strict=False)
                ]
        except BaseException:
            self.close()
            raise

    def write(self, saved: SaveDone, arena: Array) -> None:
        """One answer, whose values lie in the arena (uint8), or came with it."""
        with failing(self._target):
            batches = [_groups(saved), _rows(saved), self._values(saved, arena)]
            for table, batch in zip(self._tables, batches, strict=True):
                table.write_batch(batch)

    def finish(self) -> list[FileNote]:
        """All is on the disk; in the order of FILES."""
        with failing(self._target):
            for table in self._tables:
                table.close()
            return [file.finish() for file in self._files]

    def close(self) -> None:
        """Give up: the files are of no use."""
        for file in self._files:
            file.close()

    def _values(self, saved: SaveDone, arena: Array) -> pa.RecordBatch:
        """The table of the values, whose bytes are written: equal places once."""
        records = _records(saved, len(arena))
        _, first, inverse = np.unique(records["place"], return_index=True, return_inverse=True)
        order = np.argsort(first)
        places = records["place"][first[order]].copy().view("<u8").reshape(-1, 2)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        room = padded(places[:, 1])
        starts = self._files[3].nbytes + np.cumsum(room) - room
        self._write_bytes(arena, saved.table.inline, places, room)
        at = rank[inverse]
        names = [c.field for c in saved.table.columns]
        specs = saved.table.specs
        return pa.record_batch(
            [
                pa.array(records["row"]),
                _taken(names, records["field"]),
                pa.array(records["leaf"], mask=records["leaf"] < 0),
                _taken([s.dtype if s.kind == "array" else None for s in specs], records["spec"]),
                _taken([_shape(spec) for spec in specs], records["spec"]),
                pa.array(starts[at].astype(np.uint64)),
                pa.array(places[at, 1]),
            ],
            schema=VALUES,
        )

    def _write_bytes(self, arena: Array, inline: bytes, places: Records, room: Records) -> None:
        """Each stretch of the arena, or of what lies behind it, padded; small ones joined."""
        file, pending, size = self._files[3], [], 0
        memory, behind = memoryview(arena), memoryview(inline)  # type: ignore[arg-type]
        for (offset, nbytes), space in zip(places.tolist(), room.tolist(), strict=True):
            at = offset - len(memory)
            part = memory[offset : offset + nbytes] if at < 0 else behind[at : at + nbytes]
            pending += [part, bytes(space - nbytes)]
            size += space
            if size >= _WRITE_BYTES:
                _write_all(file, pending, size)
                pending, size = [], 0
        _write_all(file, pending, size)


def _write_all(file: SummedFile, parts: list[Any], size: int) -> None:
    if len(parts) == 2:  # one large value: no copy
        for part in parts:
            file.write(part)
    elif size:
        file.write(b"".join(parts))


def _records(saved: SaveDone, arena_bytes: int) -> Records:
    """Every value and leaf of the table, by row, field and leaf; leaf -1: the value itself. What
    came with the answer lies behind the arena."""
    parts = [np.zeros(0, _VALUE)]
    for number, one in enumerate(saved.table.columns):
        values = column(one.values, PLACE)
        rows = np.flatnonzero(values["flags"] & PLACE_ABSENT == 0)
        parts.append(_filled(values[rows], rows, number, np.full(len(rows), -1), arena_bytes))
        if one.leaf_counts:
            counts = column(one.leaf_counts, U4, len(values)).astype(np.int64)
            rows = np.repeat(np.arange(len(values)), counts)
            leaf = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            parts.append(
                _filled(column(one.leaves, PLACE, len(rows)), rows, number, leaf, arena_bytes)
            )
    joined = np.concatenate(parts)
    return joined[np.lexsort((joined["leaf"], joined["field"], joined["row"]))]


def _filled(places: Records, rows: Records, field: int, leaf: Records, arena_bytes: int) -> Records:
    records = np.zeros(len(places), _VALUE)
    records["row"], records["field"], records["leaf"] = rows, field, leaf
    records["spec"] = places["spec"]
    pairs = np.empty((len(places), 2), "<u8")
    pairs[:, 0], pairs[:, 1] = places["offset"], places["nbytes"]
    pairs[places["flags"] & PLACE_INLINE != 0, 0] += np.uint64(arena_bytes)
    records["place"] = pairs.view("V16").ravel()
    return records


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


def _shape(spec: Spec) -> str:
    """A loose one starts with "~"."""
    lengths = ",".join(map(str, spec.shape))
    return "~" + lengths if spec.loose else lengths


def _taken(texts: list[Any], index: Records) -> pa.Array:
    return pa.array(texts, pa.string()).take(pa.array(index))
