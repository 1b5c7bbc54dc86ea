"""TransferQueue's API over a plane: `import dataplane_transfer_queue as tq`.

Signatures and correct behaviour are those of TransferQueue 0.1.11 from PyPI; docs/verl.md and
this package's README list the differences. For code that you cannot edit, install
`dataplane-as-transfer-queue`, which provides the same as the module `transfer_queue`. There is no
controller and no storage process: each host's peer holds rows.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import NonTensorStack, TensorDict

import dataplane
from dataplane.launch import discovery
from dataplane_transfer_queue import sampler as samplers
from dataplane_transfer_queue.client import NotEnoughRows, TransferQueueClient
from dataplane_transfer_queue.metadata import BatchMeta, KVBatchMeta, twice
from dataplane_transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from dataplane_transfer_queue.store import StorageKeyNotFoundError, Store
from dataplane_transfer_queue.streaming import StreamingDataLoader, StreamingDataset

__all__ = [
    "BaseSampler",
    "BatchMeta",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "NotEnoughRows",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "attach",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]

__version__ = "0.1.11"
"""Part of the public interface: callers compare it with TransferQueue's version."""

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

_DEFAULTS = {
    "metrics": {"enabled": False, "port": 0, "endpoint": None},
    "controller": {"sampler": "SequentialSampler", "polling_mode": False, "zmq_info": None},
    "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"total_storage_size": None}},
    # Ours: `dedup` names fields whose equal values are stored once, besides objects with arrays.
    "dataplane": {"run": None, "dedup": []},
}


class _Here:
    """This process's client, and whether it began the queue. A forked child begins without."""

    def __init__(self) -> None:
        self.peers: Any = None
        self.forget()

    def forget(self) -> None:
        self.of_parent = self.peers
        """Kept alive: if a forked child released it, Ray would end the actor of the parent."""
        self.lock = threading.RLock()
        self.client: TransferQueueClient | None = None
        self.store: Store | None = None
        self.began = False
        self.peers = None
        self.metrics: Any = None


_here = _Here()
os.register_at_fork(after_in_child=_here.forget)


def init(conf: DictConfig | dict[str, Any] | None = None) -> DictConfig | dict[str, Any] | None:
    """Start a queue, or join the queue of this job. When joining, `conf` is ignored, and the
    queue's own configuration is returned.

    - `conf`: TransferQueue's configuration. `controller.sampler` (a name, class or instance) and
      `controller.polling_mode` are used. Settings of TransferQueue's processes are accepted and
      ignored.

    `init` finds the plane as `dataplane.connect()` does; under Ray, by the job. On a Ray cluster of
    several nodes the first call, in any process, starts a peer on each node. Returns the whole
    configuration.
    """
    with _here.lock:
        store = _store(conf)
        made: Any = OmegaConf.create({}, flags={"allow_objects": True})
        made = OmegaConf.merge(made, OmegaConf.create(_DEFAULTS), conf or {})
        made.dataplane.run = store.plane.name
        told = {
            "sampler": samplers.packed(_sampler_of(made.controller.sampler)),
            "polling": bool(made.controller.polling_mode),
            "dedup": list(made.dataplane.dedup or ()),
        }
        first = store.first("config", told)
        _here.began = _here.began or first
        _client(store)
        if not first:
            return conf
        if made.metrics.enabled:
            _here.metrics = _serve(store, int(made.metrics.port))
            made.metrics.endpoint = _here.metrics.endpoint
            store.tell("metrics", _here.metrics.endpoint)
        whole: DictConfig = made
        return whole


def attach(config: Any = None) -> TransferQueueClient:
    """Return a separate client, for a process that has what `init` returned or that belongs to the
    same job. The configuration may differ or be left out."""
    ours = (config or {}).get("dataplane") or {}
    store = Store(dataplane.connect(run=ours.get("run")))
    told = store.told("config")
    if told is None:
        store.plane.close()
        raise RuntimeError("no process has started a queue in this plane: call init() first")
    store.dedup.update(told["dedup"])
    return TransferQueueClient(f"{os.getpid()}", store, bool(told["polling"]))


def _store(conf: Any) -> Store:
    if _here.store is None:
        if len(discovery.ray_nodes() or ()) > 1:  # each of which needs a peer
            from dataplane.integrations import ray as on_ray

            _here.peers = on_ray.started()
        _here.store = Store(dataplane.connect())
    return _here.store


def _client(store: Store) -> TransferQueueClient:
    if _here.client is None:
        told = store.told("config")
        store.dedup.update(told["dedup"])
        _here.client = TransferQueueClient(f"{os.getpid()}", store, bool(told["polling"]))
    return _here.client


def _sampler_of(given: Any) -> BaseSampler:
    made = getattr(samplers, given, None) if isinstance(given, str) else given
    if isinstance(made, type):
        made = made()
    if not isinstance(made, BaseSampler):
        raise ValueError(
            f"controller.sampler must be the name, class or instance of a sampler, not {given!r}"
        )
    return made


def _serve(store: Store, port: int) -> Any:
    """Serve metrics of the whole queue from this process."""
    try:
        from dataplane_transfer_queue.metrics import Server
    except ImportError as exc:
        raise RuntimeError(
            f"metrics.enabled needs the package {exc.name}: install it with pip install "
            "'dataplane-rl[metrics]', or set metrics.enabled to false"
        ) from exc
    return Server(store, port)


def close() -> None:
    """Leave the queue. In the process that started the queue, end it and free all rows."""
    with _here.lock:
        store, began, peers, metrics = _here.store, _here.began, _here.peers, _here.metrics
        _here.store, _here.client, _here.began, _here.metrics = None, None, False, None
        if metrics is not None:
            metrics.close()
        if began:  # others keep it: peers that this process was first to ask for are the job's
            _here.peers = None
        if store is None:
            return
        try:
            if began:
                store.end()
        finally:
            store.plane.close()
            if began and peers is not None:
                peers.stop()


def get_client() -> TransferQueueClient:
    """Return this process's client. Raises RuntimeError before `init`."""
    if _here.client is None:
        raise RuntimeError("this process has not joined a queue: call init() first")
    return _here.client


def joined() -> TransferQueueClient:
    """Return this process's client, and join the job's queue if needed. Raises RuntimeError if
    there is no queue."""
    with _here.lock:
        if _here.client is None:
            store = _store(None)
            if store.told("config") is None:
                _here.store = None
                store.plane.close()
                raise RuntimeError(
                    "no process has started a queue in this plane: call init() first"
                )
            _client(store)
        return get_client()


def get_metrics_endpoint() -> str | None:
    """Return the `host:port` at which the process that started the queue serves metrics to
    Prometheus; None unless `metrics.enabled` was set."""
    found: str | None = joined()._store.told("metrics")
    return found


def _twin(call: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    @functools.wraps(call)
    async def awaited(*args: P.args, **named: P.kwargs) -> T:
        return await asyncio.to_thread(call, *args, **named)

    awaited.__name__ = awaited.__qualname__ = f"async_{call.__name__}"
    return awaited


def kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: Callable[[Any], Any] | None = None,
) -> KVBatchMeta:
    """Write one row: fields (values of a dict have no batch dimension) and tags. Tags are merged
    into existing ones. Returns the row's tags and all its fields. Raises ValueError for nested
    tensors."""
    if isinstance(fields, dict):
        columns: dict[str, Any] = {}
        for name, value in fields.items():
            if not isinstance(value, torch.Tensor):
                columns[name] = NonTensorStack(value)
            elif value.is_nested:
                raise ValueError(f"field {name!r} is nested: to put several rows, use kv_batch_put")
            else:
                columns[name] = value.unsqueeze(0)
        fields = TensorDict(columns, batch_size=1)
    elif fields is not None and not isinstance(fields, TensorDict):
        raise ValueError(f"fields must be a dict or a TensorDict, not a {type(fields).__name__}")
    return kv_batch_put(
        [key], partition_id, fields, [tag] if tag is not None else None, data_parser
    )


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: Callable[[Any], Any] | None = None,
) -> KVBatchMeta:
    """Write rows: a TensorDict [n], and one dict of tags per row. Tags are merged into existing
    ones.

    A new value replaces an old one. The fields and tags of a row become visible together. Returns
    the rows' tags and the fields that all of them have. `data_parser` changes the columns first.
    """
    if isinstance(keys, str):
        raise TypeError(f"keys must be a list of str, not {keys!r:.60}: to put one row, use kv_put")
    if not len(keys):
        raise ValueError("keys is empty: pass at least one key")
    if fields is None and tags is None:
        raise ValueError("the call has neither fields nor tags: pass at least one of them")
    if fields is not None and fields.batch_size[0] != len(keys):
        raise ValueError(
            f"got {len(keys)} keys for fields of {fields.batch_size[0]} rows: pass one key per row"
        )
    if tags is not None and len(tags) != len(keys):
        raise ValueError(
            f"got {len(keys)} keys and {len(tags)} tag dicts: pass one tag dict per key"
        )
    if len(set(keys)) < len(keys):
        raise ValueError(f"keys {twice(keys)} occur more than once: give each row its own key")
    return joined().kv_put(list(keys), partition_id, fields, tags, data_parser)


def kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
) -> TensorDict:
    """Read the selected fields of rows, in this order. Default: the fields that all rows have.

    Scalars are dense, other tensors are jagged, and everything else is a stack of objects. All are
    private copies. Raises StorageKeyNotFoundError (a ValueError) for absent keys.
    """
    return joined().kv_get(keys, partition_id, select_fields)


def kv_batch_get_by_meta(
    meta: KVBatchMeta, select_fields: list[str] | str | None = None
) -> TensorDict:
    """Read all or some fields of a batch's rows."""
    if meta.partition_id is None:
        raise ValueError("this batch has no partition: set its partition_id")
    selected = [select_fields] if isinstance(select_fields, str) else select_fields
    if selected is not None and (odd := [f for f in selected if f not in (meta.fields or ())]):
        raise ValueError(
            f"select_fields {odd} not found in this batch: expected some of {meta.fields}"
        )
    fields = meta.fields if selected is None else selected
    return kv_batch_get(meta.keys, meta.partition_id, fields)


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the tags of each row by key, for one partition or all. A partition that does not exist
    is empty."""
    return joined().kv_list(partition_id)


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Free rows. Absent rows are skipped, and the keys can be used again."""
    joined().kv_clear(keys, partition_id)


async_kv_put = _twin(kv_put)
async_kv_batch_put = _twin(kv_batch_put)
async_kv_batch_get = _twin(kv_batch_get)
async_kv_batch_get_by_meta = _twin(kv_batch_get_by_meta)
async_kv_list = _twin(kv_list)
async_kv_clear = _twin(kv_clear)


# checkpoints

_METADATA, _ROWS = "metadata.json", "rows"


def save_checkpoint(
    checkpoint_dir: str | Path,
    *,
    include_storage: bool = True,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Write the queue to a directory. An older checkpoint there is replaced once the new one is
    complete.

    `include_storage` is ignored: rows are always written, because the plane keeps them in memory.
    """
    store = joined()._store
    target = Path(checkpoint_dir)
    new, old = (target.with_name(f"{target.name}.{mark}") for mark in ("tmp", "old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        store.plane.checkpoint(new / _ROWS)
        told = {"storage_saved": True, "user_metadata": metadata or {}}
        (new / _METADATA).write_text(json.dumps(told, indent=2))
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not target.exists():
            old.rename(target)
        raise


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Restore the queue from a directory. Rows that exist now are freed.

    Raises FileNotFoundError if the directory is not a checkpoint.
    """
    store = joined()._store
    target = Path(checkpoint_dir)
    old = target.with_name(f"{target.name}.old")
    if not target.exists() and old.exists():  # a save was cut off between its two renames
        old.rename(target)
    if not (target / _METADATA).exists():
        raise FileNotFoundError(
            f"{target} is not a checkpoint of a queue, because it has no {_METADATA}: pass a "
            "directory "
            "that save_checkpoint wrote"
        )
    store.end()
    store.plane.restore(target / _ROWS)
    store.begin()
    if _here.metrics is not None:  # the checkpoint has the address of another process
        store.tell("metrics", _here.metrics.endpoint)
