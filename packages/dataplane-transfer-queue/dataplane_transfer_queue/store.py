"""Map TransferQueue's partitions, keys and row numbers to partitions and rows of the plane.

A user's partition is the plane's partition of that name, and keeps its rows until they are cleared.
The key of a row is the user's key, or the row's number if it was put without a key. One more
partition, `REGISTRY`, has a row for each partition (its number, and the number of its next row),
the configuration, and mutexes: a process holds a mutex while it leases the mutex's row. All this
state is in the plane, and none of it in a process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tensordict import TensorDict

import dataplane
from dataplane_transfer_queue.columns import (
    HIDDEN,
    Column,
    kind,
    packed_field,
    tag_read,
    tags_of,
)
from dataplane_transfer_queue.metadata import Schema

T = TypeVar("T")
REGISTRY = "transfer_queue"
INDEX_BITS = 32
"""A global index is the partition's number, followed by this many bits of the row's number."""
_TOKEN = "token"
_NUMBER, _NEXT, _GONE = "number", "next", "gone"
_INDEX = HIDDEN + "index"
_ROW = HIDDEN + "row"
_FIELD = HIDDEN + "field:"
_TASK = HIDDEN + "task:"
_ATTEMPTS = 100
_REMEMBERED = 1 << 20


class StorageKeyNotFoundError(KeyError, ValueError):
    """Some of the requested rows do not exist."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def _still_cleared(name: str) -> dataplane.Unavailable:
    return dataplane.Unavailable(
        f"other processes kept clearing partition {name!r}: repeat the call"
    )


class Row:
    """One row, without its values."""

    __slots__ = ("key", "tags", "told")

    def __init__(self, key: str | int, tags: Mapping[str, Any]) -> None:
        self.key = key
        self.told = {n.removeprefix(_FIELD): v for n, v in tags.items() if n.startswith(_FIELD)}
        self.tags = tags

    @property
    def number(self) -> int | None:
        """The row's number in its partition. A row with a key gets one on first use."""
        found: int | None = self.key if isinstance(self.key, int) else self.tags.get(_INDEX)
        return found

    @property
    def custom_meta(self) -> dict[str, Any]:
        shown = self.tags.items()
        return {name: tag_read(v) for name, v in shown if not name.startswith(HIDDEN)}

    def has(self, fields: Sequence[str]) -> bool:
        return all(field in self.told for field in fields)

    def consumed(self, task: str) -> bool:
        return bool(self.tags.get(_TASK + task))


class Store:
    """One process's view of the queue. Any number of threads may share it."""

    def __init__(self, plane: dataplane.Plane, dedup: Sequence[str] = ()) -> None:
        self.plane = plane
        self.dedup = set(dedup)
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Attach to the registry, and discard what this process knows of the plane."""
        stages = {"alone": [_TOKEN]}
        # Two copies, because a sampler's state must survive the host of the process that fetched.
        self._registry = self.plane.partition(REGISTRY, stages=stages, free="drop", replicas=2)
        with self._lock:
            self._known: dict[str, tuple[int, dataplane.Partition]] = {}
            self._keys: dict[int, str] = {}

    def end(self) -> None:
        """Free all rows of all partitions, and the registry."""
        for name in self.partitions():
            self.clear_partition(name)
        self._registry.drop()

    # the registry

    def _in_registry(self, call: Callable[[dataplane.Partition], T]) -> T:
        """Carry out a call there, also where another process loaded a checkpoint in its place."""
        try:
            return call(self._registry)
        except dataplane.PartitionGone:
            self._registry = self.plane.partition(REGISTRY)  # waits until it is there again
            return call(self._registry)

    def told(self, name: str) -> Any:
        """Return the object that was stored under a name, or None."""
        try:
            found = self._in_registry(lambda part: part.get([name], ["object"]))
            return found["object"][0]["value"]
        except (dataplane.RowsGone, dataplane.FieldUnknown):
            return None

    def tell(self, name: str, value: Any) -> None:
        """Store an object under a name, for all processes."""
        self._in_registry(
            lambda part: part.put({"object": [{"value": value}]}, key=[name], replace=True)
        )

    def first(self, name: str, value: Any) -> bool:
        """Store an object under a name, unless the name is taken. Return whether it was stored."""
        with self.alone("registry"):
            if self.told(name) is not None:
                return False
            self.tell(name, value)
            return True

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Hold a mutex: one process and thread at a time runs the body."""
        key = f"token:{name}"
        with contextlib.suppress(dataplane.FieldExists):  # everybody's but the first one's
            self._in_registry(lambda part: part.put({_TOKEN: [0]}, key=[key], tags={"name": [key]}))
        held = self._in_registry(
            lambda part: part.claim("alone", rows=1, where=dataplane.tag("name") == key)
        )
        try:
            yield
        finally:
            held.release()

    def _entry(self, key: str) -> dict[str, Any] | None:
        try:
            rows = self._in_registry(lambda part: part.get([key], ()))
        except dataplane.RowsGone:
            return None
        return {name: values[0] for name, values in rows.tags.items()}

    def _change(self, key: str, tag: str, value: Any, expect: Any = None) -> None:
        expected = {tag: expect} if expect is not None else None
        self._in_registry(lambda part: part.tag([key], {tag: [value]}, expect=expected))

    def partitions(self) -> dict[str, int]:
        """Return the partitions' numbers by name, oldest first."""
        rows = self._in_registry(lambda part: part.rows(where=dataplane.tag(_NUMBER).exists()))
        tags: dict[str, list[Any]] = dict(rows.tags)
        told = zip(rows.keys, tags.get(_NUMBER, ()), tags.get(_GONE, ()), strict=True)
        found = sorted((n, str(key)) for key, n, gone in told if n is not None and not gone)
        return {key.removeprefix("partition:"): number for number, key in found}

    def _partition(self, name: str, create: bool = False) -> tuple[int, dataplane.Partition] | None:
        """Its number and itself; None where nobody has put into it."""
        with self._lock:
            if found := self._known.get(name):
                return found
        if not isinstance(name, str):
            raise TypeError(f"the name of a partition must be a str, not {name!r:.60}")
        if name == REGISTRY or not name or name.startswith(HIDDEN):
            raise ValueError(
                f"{name!r} cannot be the name of a partition: expected a non-empty name other "
                f"than {REGISTRY!r} that does not start with {HIDDEN!r}"
            )
        for _ in range(_ATTEMPTS):
            entry = self._entry(f"partition:{name}")
            if entry is None or entry[_GONE]:
                if not create:
                    return None
                entry = self._registered(name)
            part = self._attached(name)
            # Another process may have cleared it since the entry was read.
            now = self._entry(f"partition:{name}")
            if now is not None and not now[_GONE]:
                with self._lock:
                    return self._known.setdefault(name, (entry[_NUMBER], part))
        raise _still_cleared(name)

    def _attached(self, name: str) -> dataplane.Partition:
        """The plane's partition, created if it does not exist."""
        try:
            return self.plane.partition(name, free="drop")
        except dataplane.PartitionConflict:
            part = self.plane.partition(name)  # restored: what had claimed is declared now
            if any(stage["fields"] for stage in part.stats()["stages"].values()):
                raise  # somebody's who uses the plane itself
            return part

    def _registered(self, name: str) -> dict[str, Any]:
        key = f"partition:{name}"
        with self.alone("registry"):
            entry = self._entry(key)
            if entry is None:
                rows = self._in_registry(
                    lambda part: part.rows(where=dataplane.tag(_NUMBER).exists())
                )
                entry = {_NUMBER: len(rows), _NEXT: 0, _GONE: False}
                tags = {tag: [value] for tag, value in entry.items()}
                self._in_registry(
                    lambda part: part.put({"object": [{"value": name}]}, key=[key], tags=tags)
                )
            elif entry[_GONE]:
                self._drop(name)  # a process may have ended between the mark and its drop
                entry |= {_GONE: False}
                self._change(key, _GONE, False)
        return entry

    def number_of(self, name: str) -> int:
        """Return the partition's number. Creates the partition if it does not exist."""
        found = self._partition(name, create=True)
        assert found is not None
        return found[0]

    def numbers(self, name: str, count: int) -> list[int]:
        """Return this many new, consecutive row numbers of a partition."""
        key = f"partition:{name}"
        self._partition(name, create=True)
        for _ in range(_ATTEMPTS):
            entry = self._entry(key)
            assert entry is not None  # rows of the registry are never dropped
            start = int(entry[_NEXT])
            try:
                self._change(key, _NEXT, start + count, expect=start)
            except dataplane.TagConflict:
                continue
            return list(range(start, start + count))
        raise dataplane.Unavailable(
            f"other processes kept reserving row numbers of partition {name!r} before this call "
            "could: repeat the call"
        )

    # rows

    def _on(self, name: str, call: Callable[[dataplane.Partition], T], create: bool = False) -> T:
        """Carry out a call on a partition, again where it was cleared meanwhile.
        StorageKeyNotFoundError where nobody has put into it."""
        for _ in range(_ATTEMPTS):
            found = self._partition(name, create)
            if found is None:
                raise StorageKeyNotFoundError(
                    f"partition {name!r} does not exist: put rows into it first"
                )
            try:
                return call(found[1])
            except (dataplane.PartitionGone, dataplane.PartitionUndefined):
                with self._lock:
                    self._known.pop(name, None)
        raise _still_cleared(name)

    def rows(self, name: str) -> list[Row]:
        """Return all rows of a partition as of one moment. A partition that does not exist is
        empty."""
        try:
            found = self._on(name, lambda part: part.rows())
        except StorageKeyNotFoundError:
            return []
        return _rows(found)

    def find(self, name: str, keys: Sequence[str | int]) -> list[Row | None]:
        """Return these rows, with None for each row that does not exist."""
        asked = list(dict.fromkeys(keys))
        try:
            found = _rows(self._on(name, lambda part: part.get(asked, ())))
        except StorageKeyNotFoundError:
            found = []
        except dataplane.RowsGone as exc:
            found = [] if exc.details["rows"] == len(asked) else self.rows(name)
        by_key = {row.key: row for row in found}
        return [by_key.get(key) for key in keys]

    def put(
        self,
        name: str,
        keys: Sequence[str | int],
        columns: Mapping[str, Column],
        tags: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Write fields and tags of rows. A new value replaces an old one; tags are merged.

        Rows with the same tag names are written together, in the given order.
        """
        if clash := [field for field in columns if field.startswith(HIDDEN)]:
            raise ValueError(
                f"the field name {clash[0]!r} starts with {HIDDEN!r}, which is reserved: choose "
                "another name"
            )
        plain = [tags_of(row) for row in tags] if tags is not None else [{}] * len(keys)
        alike: dict[tuple[str, ...], list[int]] = {}
        for place, row in enumerate(plain):
            alike.setdefault(tuple(row), []).append(place)
        for names, places in alike.items():
            whole = len(places) == len(keys)
            taken = columns if whole else {n: c.take(places) for n, c in columns.items()}
            given = {tag: [plain[place][tag] for place in places] for tag in names}
            given |= {_FIELD + field: list(column.told) for field, column in taken.items()}
            self._put(name, [keys[place] for place in places], taken, given)

    def _put(
        self,
        name: str,
        keys: list[str | int],
        columns: Mapping[str, Column],
        tags: dict[str, list[Any]],
    ) -> None:
        values = {field: column.entries for field, column in columns.items()}
        dedup = [f for f, column in columns.items() if column.dedup or f in self.dedup]
        values = values or {_ROW: [0] * len(keys)}

        def write(part: dataplane.Partition) -> None:
            part.put(values, key=keys, tags=tags, dedup=dedup, replace=True, reuse=True)

        self._on(name, write, create=True)

    def values(self, name: str, keys: Sequence[str | int], fields: Sequence[str]) -> TensorDict:
        """Return the rows' values. Raises StorageKeyNotFoundError if a row, or a field of a row,
        does not exist."""
        if not keys or not fields:
            return TensorDict({}, batch_size=0 if not fields else len(keys))
        try:
            found = self._on(name, lambda part: part.get(keys, fields))
        except dataplane.RowsGone as exc:
            raise StorageKeyNotFoundError(
                f"{exc.details['rows']} of {len(keys)} rows not found in partition {name!r}, for "
                f"example {exc.details['keys'][:3]}: each was never put, or was cleared or lost "
                "with a peer"
            ) from exc
        except dataplane.FieldUnknown as exc:
            raise StorageKeyNotFoundError(
                f"no row of partition {name!r} has any of the requested fields: {exc}"
            ) from exc
        packed: dict[str, Any] = {}
        for field in fields:
            told = found.tags.get(_FIELD + field, [None] * len(keys))
            if None in told:
                lacks = found.keys[told.index(None)]
                raise StorageKeyNotFoundError(
                    f"row {lacks!r} of partition {name!r} has no field {field!r}: read it without "
                    "this field"
                )
            packed[field] = packed_field(found, field, [str(one) for one in told])
        return TensorDict(packed, batch_size=len(keys))

    def clear(self, name: str, keys: Sequence[str | int]) -> None:
        """Free rows and their bytes. Absent rows are skipped."""
        here = [row.key for row in self.find(name, keys) if row is not None]
        with contextlib.suppress(StorageKeyNotFoundError):  # all of it was cleared meanwhile
            if here:
                self._on(name, lambda part: part.drop(keys=here))

    def clear_partition(self, name: str) -> None:
        """Free all rows of a partition. The partition keeps its number."""
        if self._partition(name) is None:
            return
        # Marked before it is dropped. A process that puts rows after the drop then finds the mark
        # and removes it first, so that all processes find its rows.
        with self.alone("registry"):
            self._change(f"partition:{name}", _GONE, True)
            self._drop(name)
        with self._lock:
            self._known.pop(name, None)

    def _drop(self, name: str) -> None:
        """Drop the plane's partition. The caller holds the registry's mutex."""
        with contextlib.suppress(dataplane.PartitionGone):
            self._attached(name).drop()

    # numbers

    def numbered(self, name: str, rows: Sequence[Row]) -> list[int]:
        """Return the global indexes of existing rows. A row without a number gets one."""
        found = self._partition(name)
        assert found is not None
        number, part = found
        while without := [row for row in rows if row.number is None]:
            keys = [row.key for row in without]
            tags = {_INDEX: self.numbers(name, len(keys))}
            # Where another process was faster with some of them, its numbers hold.
            with contextlib.suppress(dataplane.TagConflict, dataplane.RowsGone):
                part.tag(keys, tags, expect={_INDEX: None})
            for row, now in zip(without, self.find(name, keys), strict=True):
                if now is None:
                    raise StorageKeyNotFoundError(
                        f"row {row.key!r} of partition {name!r} was cleared or lost with a peer "
                        "during "
                        "this call: list the rows again"
                    )
                row.tags = now.tags
        base = number << INDEX_BITS
        indexes = [base + int(row.number or 0) for row in rows]
        pairs = zip(indexes, rows, strict=True)
        self._remember({index: row.key for index, row in pairs if isinstance(row.key, str)})
        return indexes

    def _remember(self, keys: Mapping[int, str]) -> None:
        with self._lock:
            if len(self._keys) > _REMEMBERED:
                self._keys = {}
            self._keys.update(keys)

    def keys_of(self, name: str, indexes: Sequence[int]) -> list[str | int]:
        """Return the keys of rows by number. For a row without a key, return its number."""
        mask = (1 << INDEX_BITS) - 1
        with self._lock:  # others may forget them all meanwhile
            keys = {index: self._keys[index] for index in indexes if index in self._keys}
        unknown = [index for index in indexes if index not in keys]
        if unknown:
            # A range, because a filter with one part per row has a limit. It may find more rows.
            numbers = [index & mask for index in unknown]
            tag = dataplane.tag(_INDEX)
            wanted = (tag >= min(numbers)) & (tag <= max(numbers))
            try:
                rows = _rows(self._on(name, lambda part: part.rows(where=wanted)))
            except StorageKeyNotFoundError:
                return [index & mask for index in indexes]
            named = {row.number: row.key for row in rows if isinstance(row.key, str)}
            found = {index: named[index & mask] for index in unknown if index & mask in named}
            self._remember(found)
            keys |= found
        return [keys.get(index, index & mask) for index in indexes]

    def consume(self, name: str, keys: Sequence[str | int], task: str, done: bool = True) -> None:
        """Mark rows as fetched, or as not fetched, by a task."""
        tags = {_TASK + task: [done] * len(keys)}
        self._on(name, lambda part: part.tag(keys, tags))

    # rows that a stage of the plane takes, instead of tags that say who had what

    def claim(
        self,
        name: str,
        task: str,
        fields: Sequence[str],
        count: int,
        least: int,
        timeout: float | None,
    ) -> list[Row]:
        """Claim rows that have the fields and that the task has not claimed, without reading
        values. Waits until `least` rows are ready, or raises ClaimTimeout."""
        where: dataplane.Where | None = None
        for field in fields:
            there = dataplane.tag(_FIELD + field).exists()
            where = there if where is None else where & there

        def claimed(part: dataplane.Partition) -> list[Row]:
            batch = part.claim(task, rows=count, min=least, where=where, fields=(), timeout=timeout)
            with batch:
                return _rows(batch)

        return self._on(name, claimed, create=True)

    def unclaimed(self, name: str, task: str) -> int | None:
        """Return the number of rows that the task has not claimed, with any fields. Returns None if
        there is no such task, or no rows."""
        try:
            stats = self._on(name, lambda part: part.stats())
        except StorageKeyNotFoundError:
            return None
        stage = stats["stages"].get(task)
        return None if stage is None or not stats["rows"] else int(stage["ready_rows"])

    def tasks(self, rows: Sequence[Row]) -> set[str]:
        return {
            tag.removeprefix(_TASK) for row in rows for tag in row.tags if tag.startswith(_TASK)
        }


def _rows(found: dataplane.Rows | dataplane.Batch) -> list[Row]:
    columns = list(found.tags.items())
    return [
        Row(key, {name: column[i] for name, column in columns if column[i] is not None})
        for i, key in enumerate(found.keys)
    ]


def common_fields(rows: Sequence[Row]) -> list[str]:
    """Return the fields that all rows have, in the order of the first row."""
    if not rows:
        return []
    return [field for field in rows[0].told if all(field in row.told for row in rows)]


def schema_told(rows: Sequence[Row], fields: Sequence[str]) -> Schema:
    """Return the schema that the rows' hidden tags describe."""
    schema: Schema = {}
    for field in fields:
        kinds = [kind(str(row.told[field])) for row in rows if field in row.told]
        if not kinds:
            continue
        dtype = kinds[0][0]
        shapes = [shape or (1,) if shape is not None else None for _, shape, _ in kinds]
        nested = dtype is not None and (any(k[2] for k in kinds) or len(set(shapes)) > 1)
        told: dict[str, Any] = {"dtype": dtype, "shape": None if nested else shapes[0]}
        told |= {"is_nested": nested, "is_non_tensor": dtype is None}
        if nested and len(kinds) == len(rows):
            told["per_sample_shapes"] = shapes
        schema[field] = told
    return schema
