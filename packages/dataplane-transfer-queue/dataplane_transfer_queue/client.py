"""TransferQueueClient: rows by number, for any number of threads and event loops.

Every call runs on the caller's thread. Its `async_` twin runs on a thread of the event loop's pool,
so no object here belongs to a loop. The rows themselves say what is ready for a task and what the
task has fetched. One process at a time chooses rows and marks them as fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_transfer_queue.columns import columns_of
from dataplane_transfer_queue.metadata import BatchMeta, KVBatchMeta, equal, twice
from dataplane_transfer_queue.sampler import packed, rebuilt
from dataplane_transfer_queue.store import (
    INDEX_BITS,
    Row,
    StorageKeyNotFoundError,
    Store,
    common_fields,
    schema_told,
)

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self")
_FETCH_S = "TQ_CONTROLLER_GET_METADATA_TIMEOUT"
_LOOK_S = 0.05


class NotEnoughRows(RuntimeError, TimeoutError):
    """Too few rows became ready in time for a fetch."""


def twin(
    call: Callable[Concatenate[Self, P], T],
) -> Callable[Concatenate[Self, P], Coroutine[Any, Any, T]]:
    """Return the same call as a coroutine, for any event loop."""

    @functools.wraps(call)
    async def awaited(self: Self, *args: P.args, **named: P.kwargs) -> T:
        return await asyncio.to_thread(call, self, *args, **named)

    awaited.__name__ = awaited.__qualname__ = f"async_{call.__name__}"
    return cast(Callable[Concatenate[Self, P], Coroutine[Any, Any, T]], awaited)


class _Partition:
    """What a sampler is told of a partition, as its argument `partition`."""

    def __init__(self, name: str, rows: Mapping[int, Row]) -> None:
        self.partition_id = name
        self._rows = rows

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The tags of these rows."""
        return {index: self._rows[index].custom_meta for index in global_indices}


class TransferQueueClient:
    """Rows by number. `dataplane_transfer_queue.get_client()` returns one."""

    def __init__(self, client_id: str, store: Store, polling: bool = False) -> None:
        self.client_id = client_id
        self._store = store
        self._polling = polling

    def initialize_storage_manager(self, manager_type: str, config: Any) -> None:
        """Do nothing: the plane needs no further setup."""

    def close(self) -> None:
        """Disconnect from the plane. Rows stay."""
        self._store.plane.close()

    # rows by number

    def get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Return rows of a partition.

        - `mode` "fetch": rows that have the fields and that the task has not fetched, chosen by the
          sampler. They then count as fetched. Raises NotEnoughRows after
          TQ_CONTROLLER_GET_METADATA_TIMEOUT seconds (1); a queue that polls returns an empty batch
          at once.
        - `mode` "force_fetch": all rows.
        - `mode` "insert": this many new row numbers, for `put`.
        """
        if mode == "insert":
            return self._inserted(partition_id, batch_size, data_fields)
        if mode == "force_fetch":
            rows = self._store.rows(partition_id)
            return self._meta(partition_id, self._in_order(partition_id, rows), data_fields)
        if mode != "fetch":
            raise ValueError(f"mode {mode!r}: expected fetch, force_fetch or insert")
        if task_name is None:
            raise ValueError("a fetch needs a task: pass task_name")
        deadline = time.monotonic() + float(os.environ.get(_FETCH_S, 1))
        config = dict(sampling_config or {})
        while True:
            found = self._fetched(data_fields, batch_size, partition_id, task_name, config)
            if found is not None:
                return found
            if self._polling:
                return BatchMeta.empty()
            if time.monotonic() > deadline:
                raise NotEnoughRows(
                    f"task {task_name!r} asked for {batch_size} rows of {partition_id!r} with "
                    f"{data_fields}, but fewer became ready in time: fetch again, or set "
                    f"{_FETCH_S} to more seconds"
                )
            time.sleep(_LOOK_S)

    def _inserted(self, name: str, count: int, fields: Sequence[str]) -> BatchMeta:
        numbers = self._store.numbers(name, count)
        base = self._store.number_of(name) << INDEX_BITS
        untold = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
        schema = {field: dict(untold) for field in fields}
        return BatchMeta([base + number for number in numbers], [name] * count, schema)

    def _in_order(self, name: str, rows: Sequence[Row]) -> dict[int, Row]:
        if not rows:
            return {}
        told = zip(self._store.numbered(name, rows), rows, strict=True)
        return dict(sorted(told, key=lambda one: one[0]))

    def _fetched(
        self, fields: list[str], count: int, name: str, task: str, config: dict[str, Any]
    ) -> BatchMeta | None:
        """One choice of the sampler; None where it has too few rows to choose from."""
        store = self._store
        with store.alone("sampler"):
            rows = self._in_order(name, store.rows(name))
            ready = [i for i, row in rows.items() if row.has(fields) and not row.consumed(task)]
            told = self._told_of_the_sampler()
            sampler = rebuilt(told)
            if len(ready) < count and not sampler.has_cached_result(name, task, config):
                return None
            known = _Partition(name, rows)
            named = {"task_name": task, "partition_id": name} | config
            chosen, consumed = sampler(ready, count, partition=known, **named)
            if not chosen:
                return None
            if new := [i for i in consumed if i in rows and not rows[i].consumed(task)]:
                store.consume(name, [rows[i].key for i in new], task)
            if not equal(now := packed(sampler), told):
                store.tell("sampler", now)
        if cleared := [i for i in chosen if i not in rows]:
            raise StorageKeyNotFoundError(
                f"{len(cleared)} of the {len(chosen)} rows that the sampler chose are not in "
                f"partition {name!r}, for example {cleared[:3]}: each was cleared or lost with a "
                "peer"
            )
        return self._meta(name, {i: rows[i] for i in chosen}, fields, ready=True)

    def _told_of_the_sampler(self) -> dict[str, Any]:
        """As it was after the last fetch, or as `init` was given it."""
        told: dict[str, Any] = self._store.told("sampler") or self._store.told("config")["sampler"]
        return told

    def _meta(
        self, name: str, rows: Mapping[int, Row], fields: Sequence[str], ready: bool = False
    ) -> BatchMeta:
        here = list(rows.values())
        there = [ready or (bool(fields) and row.has(fields)) for row in here]
        return BatchMeta(
            list(rows),
            [name] * len(rows),
            schema_told(here, fields),
            np.array(there, np.int8),
            custom_meta=[row.custom_meta for row in here],
        )

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Merge the batch's tags into those of its rows."""
        for part in metadata.chunk_by_partition():
            name = part.partition_ids[0]
            keys = self._store.keys_of(name, part.global_indexes)
            places = [place for place, tags in enumerate(part.custom_meta) if tags]
            if places:
                tags = [part.custom_meta[place] for place in places]
                self._store.put(name, [keys[place] for place in places], {}, tags)

    def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Callable[[Any], Any] | None = None,
    ) -> BatchMeta:
        """Write fields of a batch's rows, or of new rows of a partition. The batch's tags are
        merged into the rows'. `data_parser` changes the columns, a plain dict, in place first."""
        if metadata is None:
            if partition_id is None:
                raise ValueError(
                    "pass either partition_id, for new rows, or metadata, for existing rows"
                )
            metadata = self._inserted(partition_id, data.batch_size[0], list(data.keys()))
        if not metadata:
            raise ValueError(
                "this batch is empty: pass a batch with rows, or partition_id to put new rows"
            )
        if data_parser is not None:
            data = parsed(data, data_parser)
        if data.batch_size[0] != metadata.size:
            raise ValueError(
                f"got {data.batch_size[0]} rows of data for a batch of {metadata.size} rows: pass "
                "one row of data per row of the batch"
            )
        columns = columns_of(data)
        places: dict[str, list[int]] = {}
        for place, name in enumerate(metadata.partition_ids):
            places.setdefault(name, []).append(place)
        for name, of in places.items():
            keys = self._store.keys_of(name, [metadata.global_indexes[place] for place in of])
            whole = len(of) == metadata.size
            taken = columns if whole else {n: c.take(of) for n, c in columns.items()}
            tags = [metadata.custom_meta[place] for place in of]
            self._store.put(name, keys, taken, tags)
        return metadata.add_fields(data)

    def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Return the values of the batch's rows and fields. Raises StorageKeyNotFoundError if a row
        does not exist."""
        fields = list(metadata.field_schema)
        if not metadata or not fields:
            return TensorDict({}, batch_size=0)
        names = list(dict.fromkeys(metadata.partition_ids))
        if len(names) == 1:
            keys = self._store.keys_of(names[0], metadata.global_indexes)
            return self._store.values(names[0], keys, fields)
        return self._of_several(metadata, names, fields)

    def _of_several(
        self, metadata: BatchMeta, names: Sequence[str], fields: Sequence[str]
    ) -> TensorDict:
        rows: list[dict[str, Any]] = [{} for _ in range(metadata.size)]
        for name in names:
            places = [i for i, of in enumerate(metadata.partition_ids) if of == name]
            keys = self._store.keys_of(name, [metadata.global_indexes[i] for i in places])
            part = self._store.values(name, keys, fields)
            for field in fields:
                column = part.get(field)
                tensor = isinstance(column, torch.Tensor)
                values = column.unbind() if tensor else column.tolist()
                for place, value in zip(places, values, strict=True):
                    rows[place][field] = value
        packed = {field: joined([row[field] for row in rows]) for field in fields}
        return TensorDict(packed, batch_size=metadata.size)

    def clear_samples(self, metadata: BatchMeta) -> None:
        """Free the batch's rows. Absent rows are skipped."""
        for part in metadata.chunk_by_partition():
            name = part.partition_ids[0]
            self._store.clear(name, self._store.keys_of(name, part.global_indexes))

    def clear_partition(self, partition_id: str) -> None:
        """Free all rows of a partition, and the partition itself."""
        self._store.clear_partition(partition_id)

    # what was done

    def get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the global indexes of the partition's rows, and 1 for each row that the task has
        fetched."""
        rows = self._in_order(partition_id, self._store.rows(partition_id))
        if not rows and partition_id not in self._store.partitions():
            return None, None
        had = [int(row.consumed(task_name)) for row in rows.values()]
        return torch.tensor(list(rows), dtype=torch.long), torch.tensor(had, dtype=torch.int8)

    def get_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the global indexes of the partition's rows, and int8 [rows, fields]: 1 if the row
        has the field. Returns (None, None) for a field that no row has ever had."""
        rows = self._in_order(partition_id, self._store.rows(partition_id))
        known = {field for row in rows.values() for field in row.told}
        if not data_fields or not known.issuperset(data_fields):
            return None, None
        there = [[int(field in row.told) for field in data_fields] for row in rows.values()]
        return torch.tensor(list(rows), dtype=torch.long), torch.tensor(there, dtype=torch.int8)

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Return whether the task has fetched all rows; False for a partition without rows."""
        _, status = self.get_consumption_status(task_name, partition_id)
        return status is not None and status.numel() > 0 and bool((status == 1).all())

    def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Return whether all rows have the fields."""
        _, status = self.get_production_status(data_fields, partition_id)
        return status is not None and bool((status == 1).all())

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Let one task, or all tasks, fetch the rows again. Returns True, even if there are no
        rows."""
        if partition_id not in self._store.partitions():
            return True
        rows = self._store.rows(partition_id)
        for task in self._store.tasks(rows) if task_name is None else {task_name}:
            keys = [row.key for row in rows if row.consumed(task)]
            if keys:
                self._store.consume(partition_id, keys, task, done=False)
        with self._store.alone("sampler"):
            sampler = rebuilt(self._told_of_the_sampler())
            sampler.clear_cache(partition_id)
            self._store.tell("sampler", packed(sampler))
        return True

    def get_partition_list(self) -> list[str]:
        return list(self._store.partitions())

    # rows by key

    def kv_retrieve_meta(
        self, keys: list[str] | str, partition_id: str, create: bool = False
    ) -> BatchMeta:
        """Return a batch of rows by key, with the fields that all of them have. Absent rows are
        left out, or made if `create` is True."""
        keys = [keys] if isinstance(keys, str) else keys
        if not isinstance(keys, list):
            raise TypeError(f"keys must be a str or a list of str, not a {type(keys).__name__}")
        if not keys:
            raise ValueError("keys is empty: pass at least one key")
        if not all(isinstance(key, str) for key in keys):
            raise TypeError(f"keys must be str, not {keys!r:.60}")
        found = self._store.find(partition_id, keys)
        if create and (absent := [k for k, row in zip(keys, found, strict=True) if row is None]):
            self._store.put(partition_id, absent, {}, None)
            found = self._store.find(partition_id, keys)
        rows = [row for row in found if row is not None]
        if not rows:
            return BatchMeta.empty()
        indexes = self._store.numbered(partition_id, rows)
        by_index = dict(zip(indexes, rows, strict=True))
        if len(by_index) < len(rows):
            raise ValueError(f"keys {twice(keys)} occur more than once: give each row its own key")
        return self._meta(partition_id, by_index, common_fields(rows))

    def kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str]:
        """Return the keys of rows by number. RuntimeError for a row without a key."""
        indexes = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        if not isinstance(indexes, list) or not all(isinstance(index, int) for index in indexes):
            raise TypeError(
                f"global_indexes must be an int or a list of ints, not {global_indexes!r:.60}"
            )
        if not indexes:
            raise ValueError("global_indexes is empty: pass at least one")
        keys = self._store.keys_of(partition_id, indexes)
        if without := [i for i, key in zip(indexes, keys, strict=True) if isinstance(key, int)]:
            raise RuntimeError(
                f"{len(without)} of {len(indexes)} rows in partition {partition_id!r} were put "
                f"without a key, for example global_indexes {without[:3]}: ask only for rows that "
                "were put with a key"
            )
        return [str(key) for key in keys]

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the tags of each row that has a key, by partition. All tags of a partition are
        from one moment."""
        names = list(self._store.partitions())
        if partition_id is not None:
            names = [partition_id] if partition_id in names else []
        return {
            name: {str(r.key): r.custom_meta for r in self._store.rows(name) if _has_key(r)}
            for name in names
        }

    def kv_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDict | None,
        tags: Sequence[Mapping[str, Any]] | None,
        data_parser: Callable[[Any], Any] | None = None,
    ) -> KVBatchMeta:
        """Write fields and tags of rows by key; see `kv_batch_put`."""
        if not all(isinstance(key, str) for key in keys):
            raise TypeError(f"keys must be str, not {keys!r:.60}")
        if fields is not None and data_parser is not None:
            fields = parsed(fields, data_parser)
        self._store.put(partition_id, keys, columns_of(fields) if fields is not None else {}, tags)
        rows = self._store.find(partition_id, keys)
        here = [row for row in rows if row is not None]  # others were cleared meanwhile
        return KVBatchMeta(
            keys=keys,
            tags=[row.custom_meta if row is not None else {} for row in rows],
            partition_id=partition_id,
            fields=sorted(common_fields(here)),
        )

    def kv_get(
        self, keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None
    ) -> TensorDict:
        """Return the values of rows by key; see `kv_batch_get`."""
        keys = [keys] if isinstance(keys, str) else list(keys)
        if not keys:
            raise ValueError("keys is empty: pass at least one key")
        wanted = [select_fields] if isinstance(select_fields, str) else select_fields
        if wanted:  # mostly fields that all of them have: those of a meta
            with contextlib.suppress(StorageKeyNotFoundError):
                return self._store.values(partition_id, keys, wanted)
        found = self._store.find(partition_id, keys)
        if absent := [key for key, row in zip(keys, found, strict=True) if row is None]:
            raise StorageKeyNotFoundError(
                f"{len(absent)} of {len(keys)} keys not found in partition {partition_id!r}, for "
                f"example {absent[:3]}: each was never put, or was cleared or lost with a peer"
            )
        fields = common_fields([row for row in found if row is not None])
        if not fields:
            raise ValueError(
                f"the {len(keys)} rows of {partition_id!r} have no field in common: read rows "
                "with different fields in separate calls"
            )
        if wanted is not None:
            fields = [field for field in wanted if field in fields]
        return self._store.values(partition_id, keys, fields)

    def kv_clear(self, keys: list[str] | str, partition_id: str) -> None:
        """Free rows by key. Absent rows are skipped."""
        self._store.clear(partition_id, [keys] if isinstance(keys, str) else keys)

    async_get_meta = twin(get_meta)
    async_set_custom_meta = twin(set_custom_meta)
    async_put = twin(put)
    async_get_data = twin(get_data)
    async_clear_samples = twin(clear_samples)
    async_clear_partition = twin(clear_partition)
    async_get_consumption_status = twin(get_consumption_status)
    async_get_production_status = twin(get_production_status)
    async_check_consumption_status = twin(check_consumption_status)
    async_check_production_status = twin(check_production_status)
    async_reset_consumption = twin(reset_consumption)
    async_get_partition_list = twin(get_partition_list)
    async_kv_retrieve_meta = twin(kv_retrieve_meta)
    async_kv_retrieve_keys = twin(kv_retrieve_keys)
    async_kv_list = twin(kv_list)
    async_kv_put = twin(kv_put)
    async_kv_get = twin(kv_get)
    async_kv_clear = twin(kv_clear)


def _has_key(row: Row) -> bool:
    return isinstance(row.key, str)


def joined(values: list[Any]) -> torch.Tensor | NonTensorStack:
    """Join the rows of a field into one column, as `packed_field` does."""
    if not all(isinstance(value, torch.Tensor) for value in values):
        return NonTensorStack(*values)
    if all(value.dim() == 0 for value in values):
        return torch.stack(values)
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def parsed(fields: TensorDict, parser: Callable[[Any], Any]) -> TensorDict:
    """Return the fields after a parser has changed them. The parser gets a plain dict of columns,
    with nested tensors and objects as lists, and changes it in place. ValueError if it adds or
    removes fields."""
    columns: dict[str, Any] = {}
    for name, value in fields.items():
        plain = isinstance(value, torch.Tensor) and not value.is_nested
        nested = isinstance(value, torch.Tensor) and value.is_nested
        columns[name] = value if plain else list(value.unbind()) if nested else value.tolist()
    rows = fields.batch_size[0]
    before = set(columns)
    parser(columns)
    if set(columns) != before:
        raise ValueError(
            f"the parser added or removed the fields {sorted(before ^ set(columns))}: expected "
            "the fields that it was given"
        )
    made: dict[str, Any] = {}
    for name, value in columns.items():
        if len(value) != rows:
            raise ValueError(
                f"the parser returned {len(value)} values of field {name!r}: expected {rows}, one "
                "per row"
            )
        made[name] = joined(value) if isinstance(value, list) else value
    return TensorDict(made, batch_size=rows)
