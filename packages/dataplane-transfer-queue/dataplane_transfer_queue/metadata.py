"""References to rows that processes send each other: `KVBatchMeta` (by key) and `BatchMeta` (by
number).

Both are plain picklable classes without a connection. A `BatchMeta` has, for each row, its number,
its partition, whether its fields exist, and its tags; for each field, its dtype and shapes.

Some errors keep TransferQueue's own words, because its tests, and perhaps its users, look for them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Schema = dict[str, dict[str, Any]]
"""For each field: `dtype`, `shape` of a row, `is_nested`, `is_non_tensor`; for a nested field also
`per_sample_shapes`, one per row."""


def schema_of(columns: Mapping[str, Any], rows: int) -> Schema:
    """Return the schema of the columns of a TensorDict. Raises ValueError if the columns differ in
    their number of rows."""
    return {name: _described(name, column, rows) for name, column in columns.items()}


def _described(name: str, column: Any, rows: int) -> dict[str, Any]:
    tensor = isinstance(column, torch.Tensor)
    nested = tensor and column.is_nested
    entries = column.unbind() if nested else column
    if len(entries) != rows:
        raise ValueError(
            f"field {name!r} has {len(entries)} rows in a batch of {rows}: pass one entry per row"
        )
    found: dict[str, Any] = {"dtype": None, "shape": None}
    if tensor:
        # A row of a vector counts as a vector of one, as TransferQueue has it.
        shape = entries[0].shape if rows else torch.Size()
        found = {"dtype": column.dtype, "shape": shape or torch.Size([1])}
    found |= {"is_nested": nested, "is_non_tensor": not tensor}
    if nested:
        found["per_sample_shapes"] = [tuple(entry.shape) for entry in entries]
    return found


def _portions(rows: int, chunks: int) -> Iterator[range]:
    """Exactly so many ranges, of lengths that differ by one at most, the longer first."""
    length, longer = divmod(rows, chunks)
    start = 0
    for number in range(chunks):
        end = start + length + (number < longer)
        yield range(start, end)
        start = end


def equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, including arrays inside them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def _joined_info(infos: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """All keys of all; ValueError names one that two of them have with different values."""
    joined: dict[str, Any] = {}
    for info in infos:
        for key, value in (info or {}).items():
            if key in joined and not equal(joined[key], value):
                raise ValueError(
                    f"extra_info {key!r} has conflicting values in the batches to concatenate: "
                    f"{joined[key]!r:.80} and {value!r:.80}. Use one value in all batches"
                )
            joined[key] = value
    return joined


def twice(names: Sequence[Any]) -> list[Any]:
    """Return up to three of the names that occur more than once, for a message."""
    return sorted({name for name in names if names.count(name) > 1}, key=str)[:3]


class SampleView:
    """One row of a `BatchMeta`, read-only."""

    __slots__ = ("_of", "_row")

    def __init__(self, of: BatchMeta, row: int) -> None:
        self._of = of
        self._row = row

    @property
    def global_index(self) -> int:
        return self._of.global_indexes[self._row]

    @property
    def partition_id(self) -> str:
        return self._of.partition_ids[self._row]

    @property
    def production_status(self) -> int:
        return int(self._of.production_status[self._row])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        return MappingProxyType(self._of.custom_meta[self._row])

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """The row's fields, each with the row's own `shape`."""
        found = {}
        for name, told in self._of.field_schema.items():
            own = {key: value for key, value in told.items() if key != "per_sample_shapes"}
            if told.get("per_sample_shapes") is not None:
                own["shape"] = told["per_sample_shapes"][self._row]
            found[name] = MappingProxyType(own)
        return MappingProxyType(found)

    def __repr__(self) -> str:
        return (
            f"<row {self.global_index} of {self.partition_id!r}, "
            f"{'ready' if self.production_status else 'not ready'}: {', '.join(self.fields)}>"
        )


class _Samples(Sequence[SampleView]):
    __slots__ = ("_of",)

    def __init__(self, of: BatchMeta) -> None:
        self._of = of

    def __len__(self) -> int:
        return self._of.size

    def __getitem__(self, row: Any) -> Any:
        return SampleView(self._of, range(self._of.size)[row])


class BatchMeta:
    """Rows by number.

    - `global_indexes`, `partition_ids`: one per row.
    - `field_schema`: see `Schema`.
    - `production_status`: int8 [n], 1 for a row whose fields exist.
    - `extra_info`: belongs to the batch.
    - `custom_meta`: tags of each row.

    Without arguments the batch is empty.
    """

    def __init__(
        self,
        global_indexes: Sequence[int] = (),
        partition_ids: Sequence[str] = (),
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: npt.ArrayLike | None = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        _custom_backend_meta: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        rows = len(global_indexes)
        ready = np.zeros(rows) if production_status is None else np.asarray(production_status)
        tags = custom_meta or [{}] * rows
        told = {"partition_ids": partition_ids, "production_status": ready, "custom_meta": tags}
        for name, given in told.items():
            if len(given) != rows:
                raise ValueError(
                    f"{name} has {len(given)} entries for {rows} rows: pass one per row"
                )
        schema = {name: dict(meta) for name, meta in (field_schema or {}).items()}
        for name, meta in schema.items():
            shapes = meta.get("per_sample_shapes")
            if shapes is not None and len(shapes) != rows:
                raise ValueError(
                    f"field {name!r} has {len(shapes)} shapes for {rows} rows: pass one per row"
                )
        self.global_indexes = list(global_indexes)
        self.partition_ids = list(partition_ids)
        self.field_schema: Schema = schema
        self.production_status = ready.astype(np.int8)
        self.extra_info = dict(extra_info or {})
        self.custom_meta = [dict(row) for row in tags]

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
        return cls(extra_info=extra_info)

    # what it is

    @property
    def size(self) -> int:
        return len(self.global_indexes)

    def __len__(self) -> int:
        return self.size

    @property
    def field_names(self) -> list[str]:
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether all fields of all rows exist; False for an empty batch."""
        return self.size > 0 and bool((self.production_status == 1).all())

    @property
    def samples(self) -> Sequence[SampleView]:
        return _Samples(self)

    def get_dtypes(self, field_name: str) -> list[Any]:
        """Return the field's dtype, once per row. KeyError for an unknown field."""
        return [self.field_schema[field_name].get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """Return the field's shape in each row. KeyError for an unknown field."""
        told = self.field_schema[field_name]
        shapes = told.get("per_sample_shapes")
        return [told.get("shape")] * self.size if shapes is None else list(shapes)

    # extra_info

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        """Return a deep copy of the batch's `extra_info`."""
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Remove a key, and return its value, or None if there was none."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        return key in self.extra_info

    # tags

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """Return a deep copy of the rows' tags, one dict per row."""
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]] | None) -> None:
        """Merge one dict into each row's tags, in this process only. `set_custom_meta` stores
        them."""
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise ValueError(
                f"custom_meta has {len(custom_meta)} entries for {self.size} rows: pass one per row"
            )
        for own, new in zip(self.custom_meta, custom_meta, strict=True):
            own.update(new)

    def clear_custom_meta(self) -> None:
        self.custom_meta = [{} for _ in self.global_indexes]

    # other batches of it

    def add_fields(self, tensor_dict: Any, set_all_ready: bool = True) -> BatchMeta:
        """Add the fields of a TensorDict, as existing fields, to this batch."""
        rows = tensor_dict.batch_size[0]
        if rows == 0:
            return self
        if rows != self.size:
            raise ValueError(
                f"got fields of {rows} rows for a batch of {self.size} rows: pass one entry per row"
            )
        self.field_schema.update(schema_of(dict(tensor_dict.items()), rows))
        if set_all_ready:
            self.production_status = np.ones(self.size, np.int8)  # what Ray brought is read-only
        return self

    def copy(self) -> BatchMeta:
        return copy.deepcopy(self)

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """Return the rows at these positions."""
        if any(not 0 <= place < self.size for place in sample_indices):
            raise ValueError(f"sample_indices must be from 0 to {self.size - 1} in this batch")
        picked = self.copy()
        picked._take(list(sample_indices))
        return picked

    def select_fields(self, field_names: Sequence[str]) -> BatchMeta:
        """Return a batch with these fields; unknown ones are left out."""
        picked = self.copy()
        here = picked.field_schema
        picked.field_schema = {name: here[name] for name in field_names if name in here}
        return picked

    def reorder(self, indices: Sequence[int]) -> None:
        """Put the rows of this batch in this order."""
        if sorted(indices) != list(range(self.size)):
            raise ValueError(f"indices must list each of the {self.size} rows exactly once")
        self._take(list(indices))

    def _take(self, places: list[int]) -> None:
        self.global_indexes = [self.global_indexes[place] for place in places]
        self.partition_ids = [self.partition_ids[place] for place in places]
        self.production_status = self.production_status[places]
        self.custom_meta = [dict(self.custom_meta[place]) for place in places]
        for told in self.field_schema.values():
            if (shapes := told.get("per_sample_shapes")) is not None:
                told["per_sample_shapes"] = [shapes[place] for place in places]

    def __getitem__(self, item: Any) -> BatchMeta:
        if isinstance(item, slice):
            return self.select_samples(range(self.size)[item])
        if isinstance(item, int | np.integer):
            return self.select_samples([range(self.size)[int(item)]])
        raise TypeError(f"a batch index must be an int or a slice, not a {type(item).__name__}")

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Split into exactly this many batches. If there are fewer rows, some batches are empty."""
        return [self.select_samples(portion) for portion in _portions(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """Split into one batch per partition, in the order of their first rows."""
        places: dict[str, list[int]] = {}
        for place, partition in enumerate(self.partition_ids):
            places.setdefault(partition, []).append(place)
        return [self.select_samples(of) for of in places.values()]

    def union(self, other: BatchMeta) -> BatchMeta:
        """Return a batch with the fields of both. If both have a field, the other batch's is used.
        A row is ready if it is ready in both."""
        if not other or not self.size:
            return (other if other and not self.size else self).copy()
        for name in ("global_indexes", "partition_ids"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"{name} do not match: a union needs the same rows in the same order"
                )
        joined = self.copy()
        joined.field_schema |= copy.deepcopy(other.field_schema)
        joined.production_status = self.production_status & other.production_status
        joined.extra_info |= copy.deepcopy(other.extra_info)
        joined.update_custom_meta(copy.deepcopy(other.custom_meta))
        return joined

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """Join the rows of several batches. ValueError if fields, dtypes or extra_info differ;
        empty batches are skipped."""
        parts = [part for part in data if part is not None and part.size]
        if not parts:
            return cls.empty()
        first = parts[0]
        for part in parts[1:] if validate else ():
            if part.field_names != first.field_names:
                odd = set(part.field_names) ^ set(first.field_names)
                raise ValueError(
                    f"some batches lack the fields {sorted(odd)}: expected the same fields in all "
                    "batches"
                )
            for name in first.field_names:
                dtypes = {str(p.field_schema[name].get("dtype")) for p in (first, part)}
                if len(dtypes) > 1:
                    raise ValueError(
                        f"field {name!r} has dtype {' in some batches and '.join(sorted(dtypes))} "
                        "in others: expected one dtype"
                    )
        return cls(
            [index for part in parts for index in part.global_indexes],
            [partition for part in parts for partition in part.partition_ids],
            {name: _joined_schema(name, parts) for name in first.field_schema},
            np.concatenate([part.production_status for part in parts]),
            _joined_info([part.extra_info for part in parts]),
            [tags for part in parts for tags in part.custom_meta],
        )

    def __repr__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, "
            f"is_ready={self.is_ready}, global_indexes={self.global_indexes}, "
            f"extra_info={self.extra_info})"
        )


def _joined_schema(name: str, parts: Sequence[BatchMeta]) -> dict[str, Any]:
    told = [part.field_schema.get(name, {}) for part in parts]
    joined = {key: told[0].get(key) for key in ("dtype", "shape", "is_non_tensor")}
    joined["is_nested"] = any(one.get("is_nested") for one in told)
    if joined["is_nested"]:
        joined["shape"] = None
        shapes = [part.get_shapes(name) if name in part.field_schema else [] for part in parts]
        joined["per_sample_shapes"] = [shape for part in shapes for shape in part]
    return joined


@dataclass
class KVBatchMeta:
    """Rows by key, with their tags. `fields` are those that all rows have."""

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(
                f"keys and tags must have same length, not {len(self.keys)} and {len(self.tags)}: "
                "pass one tag dict per key"
            )
        if len(set(self.keys)) < len(self.keys):
            raise ValueError(f"Got duplicated keys: {twice(self.keys)}; list each key once")
        if self.fields is not None and len(set(self.fields)) < len(self.fields):
            raise ValueError(f"Got duplicated fields: {twice(self.fields)}; list each field once")
        self.tags = copy.deepcopy(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return (
            f"KVBatchMeta(size={self.size}, field_names={self.fields}, "
            f"extra_info={self.extra_info})"
        )

    def _of(self, places: Sequence[int]) -> KVBatchMeta:
        keys = [self.keys[place] for place in places]
        tags = [self.tags[place] for place in places]
        return KVBatchMeta(keys, tags, self.partition_id, self.fields, self.extra_info)

    def select_keys(self, keys_to_select: Sequence[str]) -> KVBatchMeta:
        """Return these rows. RuntimeError for an absent key."""
        places = {key: place for place, key in enumerate(self.keys)}
        if absent := [key for key in keys_to_select if key not in places]:
            raise RuntimeError(
                f"keys {absent} not found in current batch: select only keys of this batch"
            )
        if len(set(keys_to_select)) < len(keys_to_select):
            raise ValueError(
                f"Contain duplicate keys: {twice(keys_to_select)}; select each key once"
            )
        return self._of([places[key] for key in keys_to_select])

    def reorder(self, indexes: Sequence[int]) -> None:
        """Put the rows of this batch in this order."""
        if len(indexes) != self.size:
            raise ValueError(
                f"the number of indexes, {len(indexes)}, does not match the {self.size} rows: list "
                "each "
                "row once"
            )
        if len(set(indexes)) < self.size:
            raise ValueError(f"Contain duplicate indexes: {twice(indexes)}; list each row once")
        if sorted(indexes) != list(range(self.size)):
            raise ValueError(
                f"indexes must be from 0 to {self.size - 1} in this batch, not {max(indexes)}"
            )
        self.keys = [self.keys[place] for place in indexes]
        self.tags = [self.tags[place] for place in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Split into exactly this many batches. If there are fewer rows, some batches are empty."""
        return [self._of(portion) for portion in _portions(self.size, chunks)]

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Join the rows of several batches. ValueError if fields, partitions or extra_info differ;
        empty batches are skipped."""
        parts = [part for part in data if part is not None and part.size]
        if not parts:
            return cls()
        first = parts[0]
        for part in parts[1:]:
            if part.fields is not None and set(part.fields) != set(first.fields or ()):
                raise ValueError(
                    "Field names do not match: batches with different fields cannot be concatenated"
                )
            if part.partition_id != first.partition_id:
                raise ValueError(
                    "Partition do not match: batches of different partitions cannot be concatenated"
                )
        return cls(
            [key for part in parts for key in part.keys],
            [tags for part in parts for tags in part.tags],
            first.partition_id,
            first.fields,
            _joined_info([part.extra_info for part in parts]) or None,
        )
