"""Read the rows of a checkpoint from its Arrow IPC files, as parts of messages.

A record batch is cut at groups into portions that fit the arena. The files have been verified, and
files that do not match each other raise CheckpointCorrupt. Imported on use, like arrow_out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.client.checkpoint.archive import FILES, corrupt, failing
from dataplane.client.checkpoint.arrow_out import TABLES, UNKNOWN
from dataplane.client.write.chunks import NewChunk, NewPiece, room_of, select
from dataplane.errors import ProtocolError
from dataplane.metadata.tables.bits import in_bytes, rows_of
from dataplane.metadata.tables.names import format_minted
from dataplane.metadata.tables.pieces import UNUSED
from dataplane.wire.checkpoint import Progress
from dataplane.wire.layouts import aligned
from dataplane.wire.limits import (
    ALIGNMENT_BYTES,
    MAX_CHUNKS_PER_MESSAGE,
    MAX_PIECES_PER_MESSAGE,
    NO_GROUP,
)
from dataplane.wire.records import U4, column
from dataplane.wire.tables import Name, Rows, Scalar

Records = npt.NDArray[Any]


@dataclass(slots=True)
class Portion:
    """Some groups and rows, for one Restore message. sources: the offset of each chunk in
    bytes.bin."""

    rows: Rows
    pieces: list[NewPiece]
    tags: dict[str, list[Scalar]]
    progress: Progress
    sources: dict[NewChunk, int]


class PartReader:
    """The files of one partition of a verified checkpoint."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with failing(directory, reading=True):
            self._bytes = open(directory / FILES[-1], "rb", buffering=0)  # noqa: SIM115
            self.nbytes = os.fstat(self._bytes.fileno()).st_size
            self._maps = [pa.memory_map(str(directory / name)) for name in FILES[:-1]]

    def close(self) -> None:
        self._bytes.close()
        for one in self._maps:
            one.close()

    def portions(self, most_bytes: int) -> Iterator[Portion]:
        """Yield all rows, in portions of about `most_bytes` bytes of values."""
        try:
            tables = [pa.ipc.open_file(one) for one in self._maps]
            for table, schema, name in zip(tables, TABLES, FILES, strict=False):
                if table.schema != schema or table.num_record_batches != (
                    tables[0].num_record_batches
                ):
                    raise corrupt(
                        self._directory / name,
                        "it does not have the expected columns or number of batches",
                    )
            for number in range(tables[0].num_record_batches):
                groups, rows, chunks, pieces = (table.get_batch(number) for table in tables)
                batch = _Batch(groups, rows, chunks, pieces, self.nbytes)
                yield from batch.portions(most_bytes)
        except (
            pa.ArrowException,
            msgspec.MsgspecError,
            ProtocolError,
            ValueError,
            IndexError,
        ) as exc:
            raise corrupt(self._directory, f"its files do not match each other: {exc}") from exc

    def read(self, at: int, into: memoryview) -> None:
        """Fill `into` with bytes of the file, from offset `at`."""
        rest = into
        with failing(self._directory, reading=True):
            while rest:
                count = os.preadv(self._bytes.fileno(), [rest], at)
                if not count:
                    raise corrupt(self._directory / FILES[-1], "it was truncated")
                at, rest = at + count, rest[count:]


class _Batch:
    """One record batch of each table."""

    def __init__(self, groups: Any, rows: Any, chunks: Any, pieces: Any, nbytes: int) -> None:
        self.n, self.n_groups = rows.num_rows, groups.num_rows
        self.groups, self.rows = groups, rows
        self.group = rows["group"].fill_null(NO_GROUP).to_numpy(zero_copy_only=False).astype(U4)
        grouped = self.group[self.group != NO_GROUP]
        if not (self.group[1:] >= self.group[:-1]).all():  # NO_GROUP is the largest
            raise ValueError("the rows are not sorted by group")
        if len(grouped) and (number := grouped[-1]) >= self.n_groups:
            raise ValueError(
                f"a row has group number {number}, but its batch has {self.n_groups} groups"
            )
        self.sources: dict[NewChunk, int] = {}
        for one in chunks.to_pylist():
            space = aligned(one["nbytes"]) or ALIGNMENT_BYTES
            chunk = NewChunk((), one["rows"], one["nbytes"], space, one["layout"])
            chunk.beside = one["lengths"] or b""
            if one["offset"] + chunk.nbytes > nbytes:
                raise ValueError(
                    f"a chunk ends at byte {one['offset'] + chunk.nbytes}, but the file has "
                    f"{nbytes} bytes of chunks"
                )
            self.sources[chunk] = one["offset"]
        every = list(self.sources)
        self.pieces = [self._piece(one, every) for one in pieces.to_pylist()]

    def _piece(self, one: dict[str, Any], chunks: list[NewChunk]) -> NewPiece:
        if one["chunk"] >= len(chunks):
            raise ValueError(
                f"a piece refers to chunk {one['chunk']}, but its batch has only "
                f"{len(chunks)} chunks"
            )
        given = in_bytes(one["given"])
        if not given or one["base"] + given.bit_length() > self.n:
            raise ValueError(
                f"a piece has rows from {one['base']} on, but not all of them are among the "
                f"{self.n} rows of its batch"
            )
        rows = rows_of(given << one["base"])
        fields = tuple([UNUSED if field is None else field for field in one["fields"]])
        at = column(one["at"], U4, len(rows)).tolist() if one["at"] else None
        return NewPiece(chunks[one["chunk"]], fields, rows, one["first"], at)

    def portions(self, most_bytes: int) -> Iterator[Portion]:
        """Each of groups, or rows without one, whose chunks take about so many bytes."""
        counts = np.bincount(self.group[self.group != NO_GROUP], minlength=self.n_groups)
        single = self.n - int(counts.sum())
        ends = [0, *np.cumsum(np.concatenate([counts, np.ones(single, np.int64)])).tolist()]
        unit_of = np.repeat(np.arange(len(ends) - 1), np.diff(ends)).tolist()
        used: list[list[NewChunk]] = [[] for _ in ends[1:]]
        for piece in self.pieces:
            for unit in range(unit_of[piece.rows[0]], unit_of[piece.rows[-1]] + 1):
                used[unit].append(piece.chunk)
        bounds, nbytes, pieces, here = [0], 0, 0, set[NewChunk]()
        for unit, chunks in enumerate(used):
            new = {*chunks} - here
            more = room_of(new)
            too_many = len(here) + len(new) > MAX_CHUNKS_PER_MESSAGE
            too_many = too_many or pieces + len(chunks) > MAX_PIECES_PER_MESSAGE
            if unit > bounds[-1] and (too_many or nbytes + more > most_bytes):
                bounds.append(unit)
                here, nbytes, pieces, new = set(), 0, 0, {*chunks}
                more = room_of(new)
            here |= new
            nbytes += more
            pieces += len(chunks)
        for first, last in pairwise([*bounds, len(used)]):
            groups = slice(min(first, self.n_groups), min(last, self.n_groups))
            yield self._portion(slice(ends[first], ends[last]), groups)

    def _portion(self, rows: slice, groups: slice) -> Portion:
        here = [p for p in self.pieces if p.rows[0] < rows.stop and p.rows[-1] >= rows.start]
        tags, tagged = _tags(self.rows["tags"].to_pylist()[rows], rows.stop - rows.start)
        return Portion(
            self._rows(rows, groups),
            select(here, range(rows.start, rows.stop)),
            tags,
            self._progress(rows, groups, tagged),
            self.sources,
        )

    def _rows(self, rows: slice, groups: slice) -> Rows:
        keys, names = _identity(self.rows, rows)
        group_keys, group_names = _identity(self.groups, groups)
        found = Rows(keys, names)
        if group_keys:
            group = self.group[rows]
            index = np.where(group == NO_GROUP, NO_GROUP, group - U4.type(groups.start))
            found.group_index = index.astype(U4).tobytes()
            found.group_keys, found.group_names = group_keys, group_names
        return found

    def _progress(self, rows: slice, groups: slice, tagged: dict[str, bytes]) -> Progress:
        expected = self.groups["expected"].fill_null(UNKNOWN)
        closed = self.groups["closed"].to_numpy(zero_copy_only=False)
        return Progress(
            _numbers(expected)[groups].astype(U4).tobytes(),
            _numbers(self.groups["gone"])[groups].astype(U4).tobytes(),
            _numbers(self.groups["dropped"])[groups].astype(U4).tobytes(),
            closed[groups].astype("u1").tobytes(),
            _marks(self.rows["acked"].to_pylist()[rows]),
            _marks(self.groups["split"].to_pylist()[groups]),
            tagged,
        )


def _numbers(array: Any) -> Records:
    numbers: Records = array.to_numpy(zero_copy_only=False)
    return numbers


def _identity(table: Any, here: slice) -> tuple[bytes, list[Name] | None]:
    """The KEY column and the names; None where all are minted."""
    keys: list[Any] = table["key"].to_pylist()[here]
    texts: list[str | None] = table["name"].to_pylist()[here]
    if None in keys:
        raise ValueError(f"entry {keys.index(None)} of the 'key' column is null")
    raw = b"".join(keys)
    if not any(text is not None for text in texts):
        return raw, None
    names = [
        format_minted(key) if text is None else msgspec.json.decode(text, type=Name)
        for key, text in zip(keys, texts, strict=True)
    ]
    return raw, names


def _tags(texts: list[str | None], n: int) -> tuple[dict[str, list[Scalar]], dict[str, bytes]]:
    """Columns of tags, and which rows have those that not all have."""
    rows: list[dict[str, Scalar]] = [json.loads(text) if text else {} for text in texts]
    names = dict.fromkeys(name for tags in rows for name in tags)
    columns = {name: [tags.get(name) for tags in rows] for name in names}
    tagged = {}
    for name in names:
        present = np.array([name in tags for tags in rows], np.bool_)
        if not present.all():
            tagged[name] = present.astype("u1").tobytes()
    return columns, tagged


def _marks(stages: list[list[str]]) -> dict[str, bytes]:
    """Per stage, a byte a row or group."""
    names = dict.fromkeys(name for some in stages for name in some)
    return {
        name: np.array([name in some for some in stages], np.bool_).astype("u1").tobytes()
        for name in names
    }
