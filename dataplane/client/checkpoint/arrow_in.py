"""Rows of a checkpoint out of its Arrow IPC files, as the parts of messages.

A record batch is cut at groups into portions that the arena has room for. The files were verified
before; what does not fit together all the same is CheckpointCorrupt. Imported late, as arrow_out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.client.checkpoint.archive import FILES, corrupt, failing
from dataplane.client.checkpoint.arrow_out import GROUPS, ROWS, UNKNOWN, VALUES
from dataplane.memory.extents import padded
from dataplane.metadata.tables.names import format_minted
from dataplane.wire.checkpoint import Progress
from dataplane.wire.limits import ABSENT, NO_GROUP, PACK_BLOCK_BYTES, PACK_LIMIT_BYTES
from dataplane.wire.records import U4, VALUE
from dataplane.wire.tables import Column, Name, Rows, Scalar, Spec

Records = npt.NDArray[Any]


@dataclass(slots=True)
class Portion:
    """Some groups and rows: the parts of a Restore. blocks: (first byte, end) in bytes.bin of each
    range that the records name."""

    rows: Rows
    columns: list[Column]
    specs: list[Spec]
    tags: dict[str, list[Scalar]]
    progress: Progress
    blocks: Records

    @property
    def sizes(self) -> Records:
        sizes: Records = self.blocks[:, 1] - self.blocks[:, 0]
        return sizes


class PartReader:
    """The files of one partition of a verified checkpoint."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with failing(directory):
            self._bytes = open(directory / FILES[3], "rb", buffering=0)  # noqa: SIM115
            self.nbytes = os.fstat(self._bytes.fileno()).st_size
            self._maps = [pa.memory_map(str(directory / name)) for name in FILES[:3]]

    def close(self) -> None:
        self._bytes.close()
        for one in self._maps:
            one.close()

    def portions(self, most_bytes: int) -> Iterator[Portion]:
        """Everything, in portions of about so many bytes of values."""
        try:
            tables = [pa.ipc.open_file(one) for one in self._maps]
            for table, schema, name in zip(tables, (GROUPS, ROWS, VALUES), FILES, strict=False):
                if table.schema != schema or table.num_record_batches != (
                    tables[0].num_record_batches
                ):
                    raise corrupt(
                        self._directory / name,
                        "it does not have the expected columns or number of batches",
                    )
            for number in range(tables[0].num_record_batches):
                groups, rows, values = (table.get_batch(number) for table in tables)
                yield from _Batch(groups, rows, values, self.nbytes).portions(most_bytes)
        except (pa.ArrowException, msgspec.MsgspecError, ValueError, IndexError) as exc:
            raise corrupt(self._directory, f"its files do not match each other: {exc}") from exc

    def read(self, block: Records, into: memoryview) -> None:
        """The bytes of a block."""
        at, rest = int(block[0]), into
        with failing(self._directory):
            while rest:
                count = os.preadv(self._bytes.fileno(), [rest], at)
                if not count:
                    raise corrupt(self._directory / FILES[3], "it was truncated")
                at, rest = at + count, rest[count:]


class _Batch:
    """One record batch of each table."""

    def __init__(self, groups: Any, rows: Any, values: Any, nbytes: int) -> None:
        self.n, self.n_groups = rows.num_rows, groups.num_rows
        self.groups, self.rows = groups, rows
        self.group = rows["group"].fill_null(NO_GROUP).to_numpy(zero_copy_only=False).astype(U4)
        self.row = _numbers(values["row"])
        self.leaf = values["leaf"].fill_null(-1).to_numpy(zero_copy_only=False)
        self.offset, self.nbytes = _numbers(values["offset"]), _numbers(values["nbytes"])
        self.fields, self.field = _coded(values["field"])
        self.specs, self.spec = _specs(values)
        ends = self.offset + self.nbytes
        if not (self.row[1:] >= self.row[:-1]).all():
            raise ValueError("the values are not sorted by row")
        if len(ends) and (end := ends.max()) > nbytes:
            raise ValueError(
                f"a value ends at byte {end}, but the file has {nbytes} bytes of values"
            )
        if len(self.row) and (row := self.row[-1]) >= self.n:
            raise ValueError(f"a value has row number {row}, but its batch has {self.n} rows")
        grouped = self.group[self.group != NO_GROUP]
        if not (self.group[1:] >= self.group[:-1]).all():  # NO_GROUP is the largest
            raise ValueError("the rows are not sorted by group")
        if len(grouped) and (number := grouped[-1]) >= self.n_groups:
            raise ValueError(
                f"a row has group number {number}, but its batch has {self.n_groups} groups"
            )

    def portions(self, most_bytes: int) -> Iterator[Portion]:
        counts = np.bincount(self.group[self.group != NO_GROUP], minlength=self.n_groups)
        single = self.n - int(counts.sum())
        row_ends = np.cumsum(np.concatenate([counts, np.ones(single, np.int64)]))
        sizes = padded(self.nbytes).astype(np.int64)
        by_row = np.concatenate([[0], np.cumsum(np.bincount(self.row, sizes, self.n))])
        bytes_ends = by_row[row_ends]
        unit, start = 0, 0
        while unit < len(row_ends):
            done = bytes_ends[unit - 1] if unit else 0
            upto = int(np.searchsorted(bytes_ends, done + most_bytes, "right"))
            upto = max(unit + 1, upto)
            stop = int(row_ends[upto - 1])
            here = slice(min(unit, self.n_groups), min(upto, self.n_groups))
            yield self._portion(slice(start, stop), here)
            unit, start = upto, stop

    def _portion(self, rows: slice, groups: slice) -> Portion:
        first, last = np.searchsorted(self.row, [rows.start, rows.stop])
        here = slice(int(first), int(last))
        records, blocks = self._laid(here, rows.start)
        n = rows.stop - rows.start
        row, leaf, field = self.row[here] - rows.start, self.leaf[here], self.field[here]
        columns = []
        for number in np.unique(field).tolist():
            own = field == number
            values = np.zeros(n, VALUE)
            values["owner"] = ABSENT
            head, inside = own & (leaf < 0), own & (leaf >= 0)
            values[row[head]] = records[head]
            counts = np.bincount(row[inside], minlength=n).astype(U4)
            columns.append(
                Column(
                    self.fields[number],
                    values.tobytes(),
                    counts.tobytes() if inside.any() else b"",
                    records[inside].tobytes(),
                )
            )
        tags, tagged = _tags(self.rows["tags"].to_pylist()[rows], n)
        return Portion(
            self._rows(rows, groups),
            columns,
            self.specs,
            tags,
            self._progress(rows, groups, tagged),
            blocks,
        )

    def _laid(self, here: slice, start: int) -> tuple[Records, Records]:
        """VALUE records of some values, and the blocks that they lie in: a small value shares one
        with its neighbours of the same group, or row, so that they go together."""
        offset, nbytes = self.offset[here], self.nbytes[here]
        pairs = np.stack([offset, nbytes], axis=1).view("V16").ravel()
        _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
        group = self.group[self.row[here]].astype(np.int64)
        unit = np.where(group == NO_GROUP, NO_GROUP + 1 + self.row[here].astype(np.int64), group)
        order = np.lexsort((nbytes[first], offset[first]))
        block_of, delta = np.zeros(len(first), U4), np.zeros(len(first), np.uint16)
        blocks: list[list[int]] = []
        open_unit = -1
        chosen = first[order]
        columns = (offset[chosen], nbytes[chosen], unit[chosen])
        for at, (begin, size, of) in zip(
            order.tolist(), zip(*(c.tolist() for c in columns), strict=True), strict=True
        ):
            end, small = begin + size, size < PACK_LIMIT_BYTES
            joins = small and of == open_unit and end - blocks[-1][0] <= PACK_BLOCK_BYTES
            if joins:
                blocks[-1][1] = max(end, blocks[-1][1])
            else:
                blocks.append([begin, end])
                open_unit = of if small else -1
            block_of[at], delta[at] = len(blocks) - 1, begin - blocks[-1][0]
        records = np.zeros(len(offset), VALUE)
        records["range"], records["delta"] = block_of[inverse], delta[inverse]
        records["nbytes"], records["spec"] = nbytes, self.spec[here]
        return records, np.array(blocks, np.int64).reshape(-1, 2)

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


def _coded(array: Any) -> tuple[list[Any], Records]:
    """The different texts, and per entry which it is."""
    coded = array.dictionary_encode(null_encoding="encode")
    return coded.dictionary.to_pylist(), _numbers(coded.indices).astype(np.int64)


def _shape(text: str) -> tuple[bool, tuple[int, ...]]:
    lengths = text.removeprefix("~")
    return lengths != text, tuple(map(int, lengths.split(","))) if lengths else ()


def _specs(values: Any) -> tuple[list[Spec], Records]:
    dtypes, dtype = _coded(values["dtype"])
    shapes, shape = _coded(values["shape"])
    both, spec = np.unique(dtype * max(1, len(shapes)) + shape, return_inverse=True)
    found = []
    for code in both.tolist():
        name, text = dtypes[code // len(shapes)], shapes[code % len(shapes)]
        loose, lengths = _shape(text)
        found.append(Spec("object" if name is None else "array", name or "", lengths, loose))
    return found, spec


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
