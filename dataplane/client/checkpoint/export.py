"""The rows of a checkpoint as Parquet files, one for each partition, which need no dataplane.

The values are read twice, some rows at a time: first to find the type that each column has in all
rows, then to write them. Memory does not grow with the checkpoint. Imported on use, because it
needs pyarrow.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from msgspec.structs import replace

from dataplane.client.checkpoint.archive import Manifest, failing, file_name, verified
from dataplane.client.checkpoint.records import Memory, RecordReader
from dataplane.client.read import arrow
from dataplane.client.read.column_view import ColumnView
from dataplane.client.read.convert import to_numpy
from dataplane.client.read.table import TableReader
from dataplane.client.write.chunks import NewChunk, room_of
from dataplane.client.write.rows import row_groups, row_name, row_names
from dataplane.errors import CheckpointFailed, FieldUnknown, InvalidValue, ValueCorrupt, few
from dataplane.progress import Bar
from dataplane.wire.checkpoint import Restore
from dataplane.wire.packed import U8
from dataplane.wire.tables import Table

WRITE_BYTES = 32 << 20
"""Bytes of values that are written at once, unless a single row has more."""
_READS = 2
_NAMES = "key", "group"
_MAX_FILE_NAME = 200
_NAMED = 8


@dataclass(frozen=True, slots=True)
class ExportedPartition:
    """The file of one partition, with its numbers of rows and bytes."""

    name: str
    file: str
    rows: int
    bytes: int


def export(
    directory: Path, target: Path, fields: Sequence[str] | None, bar: Bar
) -> list[ExportedPartition]:
    """Write the files to `target`, a new or empty directory that appears when it is complete.

    fields: those to write (default: all). Raises CheckpointFailed, CheckpointCorrupt, FieldUnknown,
    and InvalidValue for values that no Parquet column can hold.
    """
    with _new_directory(target) as partial:
        manifest = verified(directory, bar, _READS)
        parts = [
            _Part(manifest, number, directory / file_name(number), fields, bar)
            for number in range(len(manifest.partitions))
        ]
        for part in parts:
            part.look()
        known = list(dict.fromkeys(name for part in parts for name in part.known))
        if absent := [name for name in fields or [] if name not in known]:
            raise FieldUnknown(
                f"no row of {directory} has the field {absent[0]!r}: choose from "
                f"{few(known, _NAMED)}"
                if known
                else f"no row of {directory} has any field: leave out --field",
                field=absent[0],
            )
        return [part.write(partial, target) for part in parts]


@contextmanager
def _new_directory(target: Path) -> Iterator[Path]:
    """A directory that gets its name when the body ends, and is removed if the body fails."""
    partial = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
    with failing(target, what=""):
        if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
            raise CheckpointFailed(
                f"{target} already exists, and an export never overwrites files: choose another "
                "name",
                path=str(target),
            )
        partial.mkdir(mode=0o777)
    try:
        yield partial
        with failing(target, what=""):
            os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class _Part:
    """One partition, which is read twice."""

    def __init__(
        self,
        manifest: Manifest,
        number: int,
        path: Path,
        chosen: Sequence[str] | None,
        bar: Bar,
    ) -> None:
        self.name = manifest.partitions[number].name
        self._kinds: dict[str, set[object]] = {}
        """the types of the keys and of the groups"""
        self._tag_kinds: dict[str, set[object]] = {}
        self._types: dict[str, pa.DataType] = {}
        """by field"""
        self.known: dict[str, None] = {}
        """all its fields"""
        self._about = {
            "partition": self.name,
            "plane": manifest.plane,
            "checkpoint_written": manifest.written,
        }
        self._path = path
        self._chosen = chosen
        self._bar = bar
        file = quote(self.name, safe=" ")
        if len(file) > _MAX_FILE_NAME:
            file = f"{file[:_MAX_FILE_NAME]}-{number}"
        self._file = f"{file}.parquet"

    def look(self) -> None:
        """Find the type of each column."""
        types = self._types
        for rows in self._rows():
            for kinds, columns in (self._kinds, rows.names), (self._tag_kinds, rows.tags):
                for name, told in columns.items():
                    kinds.setdefault(name, set()).update(map(_kind, told))
            for name, values in rows.fields.items():
                found = self._array(name, values).type
                types[name] = self._common(name, types.get(name, pa.null()), found)

    def write(self, directory: Path, target: Path) -> ExportedPartition:
        """Write the file, after `look`."""
        schema = self._schema()
        count, path = 0, directory / self._file
        with failing(target, what=""), open(path, "xb") as file:
            try:
                with pyarrow.parquet.ParquetWriter(file, schema) as writer:
                    for rows in self._rows():
                        writer.write_table(pa.table(self._columns(rows), schema=schema))
                        count += len(rows.names["key"])
            except pa.ArrowException as exc:
                raise InvalidValue(
                    f"partition {self.name!r}: the rows cannot be written as Parquet: {exc}; "
                    f"{self._instead()}"
                ) from exc
            nbytes = file.tell()
        return ExportedPartition(self.name, self._file, count, nbytes)

    def _rows(self) -> Iterator[_RowsOfPart]:
        with closing(RecordReader(self._path)) as reader:
            for record, chunks, at in reader.records():
                memory = np.empty(room_of(chunks), np.uint8)
                reader.read(at, memory.data)
                yield from _split(self._opened(record, chunks, memory))
                self._bar.advance(len(memory), f"partition {self.name!r}")

    def _opened(self, record: Restore, chunks: list[NewChunk], memory: Memory) -> _RowsOfPart:
        """Return the rows of a record whose chunks are in `memory`."""
        starts = accumulate([one.space for one in chunks], initial=0)
        places = [(at, one.nbytes) for at, one in zip(starts, chunks, strict=False)]
        named = [replace(one, number=1) for one in record.values.chunks]  # they are not inline
        values = replace(record.values, chunks=named)
        table = Table(record.rows, values, places=np.array(places, U8).tobytes())
        opened, name_of = TableReader(table, memory), partial(row_name, record.rows)
        self.known.update(dict.fromkeys(opened.fields))
        names = [name for name in opened.fields if self._chosen is None or name in self._chosen]
        return _RowsOfPart(
            {"key": row_names(record.rows), "group": row_groups(record.rows)},
            record.tags,
            {name: opened.view(name, name_of) for name in names},
        )

    def _schema(self) -> pa.Schema:
        columns = [(name, _type_of(self._kinds.get(name, set()))) for name in _NAMES]
        columns += [(self._shown_field(name), type_) for name, type_ in self._types.items()]
        columns += [(self._shown_tag(tag), _type_of(of)) for tag, of in self._tag_kinds.items()]
        return pa.schema(columns, metadata=self._about)

    def _columns(self, rows: _RowsOfPart) -> list[pa.Array]:
        """Return the columns of these rows, in the order of the schema."""
        count = len(rows.names["key"])
        columns = [_scalars(rows.names[name], self._kinds[name]) for name in _NAMES]
        for name, type_ in self._types.items():
            values = rows.fields.get(name)
            array = pa.nulls(count) if values is None else self._array(name, values)
            try:
                columns.append(array.cast(type_))
            except pa.ArrowException as exc:
                raise self._mixed(name, array.type, type_) from exc
        for tag, kinds in self._tag_kinds.items():
            columns.append(_scalars(rows.tags.get(tag, [None] * count), kinds))
        return columns

    def _array(self, name: str, values: ColumnView) -> pa.Array:
        """Return the values; null where a row has none."""
        absent = values.absent
        try:
            there = to_numpy(values.take(np.flatnonzero(~absent)), view=True)
            array = arrow.from_field(name, there, self._instead(name), tensors=False)
        except (InvalidValue, ValueCorrupt) as exc:
            raise type(exc)(f"partition {self.name!r}, {exc.message}", **exc.details) from exc
        if not absent.any():
            return array
        return array.take(pa.array(np.cumsum(~absent) - 1, mask=absent))

    def _common(self, name: str, one: pa.DataType, other: pa.DataType) -> pa.DataType:
        """Return a type that holds the values of both."""
        if one == other:
            return one
        schemas = [pa.schema([("x", type_)]) for type_ in (one, other)]
        try:
            both = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        except pa.ArrowException as exc:
            raise self._mixed(name, one, other) from exc
        if not (_keeps_texts(one, both) and _keeps_texts(other, both)):
            raise self._mixed(name, one, other)
        return both

    def _mixed(self, name: str, one: pa.DataType, other: pa.DataType) -> InvalidValue:
        return InvalidValue(
            f"partition {self.name!r}, field {name!r}: the values are {one} in some rows and "
            f"{other} in others, but a Parquet column can have only one type; "
            f"{self._instead(name)}",
            field=name,
        )

    def _instead(self, name: str = "") -> str:
        chosen = self.known if self._chosen is None else self._chosen
        others = [f"--field {one}" for one in chosen if one != name]
        what = "the other" if name else "fewer"
        return f"export {what} fields, with {few(others or ['--field NAME'], 2)}"

    def _shown_field(self, name: str) -> str:
        return f"field.{name}" if name in _NAMES else name

    def _shown_tag(self, tag: str) -> str:
        taken = tag in _NAMES or tag in self._types
        return f"tag.{tag}" if taken else tag


@dataclass(slots=True)
class _RowsOfPart:
    """Some rows, with views of their values in memory."""

    names: dict[str, list[Any]]
    tags: dict[str, list[Any]]
    fields: dict[str, ColumnView]

    def part(self, rows: slice) -> _RowsOfPart:
        return _RowsOfPart(
            {name: values[rows] for name, values in self.names.items()},
            {tag: values[rows] for tag, values in self.tags.items()},
            {name: values[rows] for name, values in self.fields.items()},
        )


def _split(rows: _RowsOfPart) -> Iterator[_RowsOfPart]:
    """Yield the rows in parts of at most WRITE_BYTES, or of one row. A value that rows share is
    stored once in a record, but once per row in a Parquet file."""
    half = len(rows.names["key"]) // 2
    if half and sum(values.nbytes for values in rows.fields.values()) > WRITE_BYTES:
        yield from _split(rows.part(slice(0, half)))
        yield from _split(rows.part(slice(half, None)))
    else:
        yield rows


def _kind(value: Any) -> object:
    """Return the type of a key, group or tag. For an int, say which other number types hold it."""
    if type(value) is not int:
        return type(value)
    if abs(value) <= 1 << 53:
        return int
    return "int64" if -(1 << 63) <= value < 1 << 63 else "larger"


def _keeps_texts(one: pa.DataType, both: pa.DataType) -> bool:
    """Whether texts of the first type are texts of the second, and not bytes, which Arrow makes of
    texts and bytes together."""
    if pa.types.is_struct(one):
        return all(_keeps_texts(field.type, both.field(field.name).type) for field in one)
    if pa.types.is_list(one) or pa.types.is_large_list(one):
        return _keeps_texts(one.value_type, both.value_type)
    return not (pa.types.is_string(one) and pa.types.is_binary(both))


_NULL, _INTS, _FLOATS = {type(None)}, {int, "int64"}, {int, float}


def _type_of(kinds: set[object]) -> pa.DataType:
    """The type of a column of keys, groups or a tag."""
    kinds = kinds - _NULL
    if kinds == {bool}:
        return pa.bool_()
    if kinds and kinds <= _INTS:
        return pa.int64()
    return pa.float64() if kinds and kinds <= _FLOATS else pa.string()


def _scalars(values: list[Any], kinds: set[object]) -> pa.Array:
    """Keys, groups or a tag as an array. Mixed types become JSON, which tells 7 from "7"."""
    type_ = _type_of(kinds)
    if type_ == pa.string() and not kinds - _NULL <= {str}:
        values = [None if value is None else json.dumps(value) for value in values]
    return pa.array(values, type_)
