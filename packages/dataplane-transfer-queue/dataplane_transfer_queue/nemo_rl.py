"""NeMo-RL's `DataPlaneClient` over a plane (docs/nemo-rl.md). NeMo-RL's trainers, rollout actors
and policy workers put, claim and read samples through it.

    client = DataPlaneClient(cfg, bootstrap=True)     # on the driver; bootstrap=False in workers

Signatures are those of NeMo-RL's `nemo_rl.data_plane.interfaces`. Samples are rows of
`dataplane_transfer_queue`, by key. A task is a stage of the plane, so a claim waits at the shard
instead of polling. This module does not import nemo_rl.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import dataplane
import dataplane_transfer_queue as queue
from dataplane_transfer_queue.columns import columns_of

__all__ = ["DataPlaneClient", "KVBatchMeta"]

_BOUNDARY = "nemo_rl.data_plane.interfaces"
_LENGTH = "input_lengths"


@dataclass
class KVBatchMeta:
    """Ids of samples, with their tags and lengths, but no values. In a process that has imported
    NeMo-RL, calls return NeMo-RL's own class of this name instead."""

    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    @property
    def size(self) -> int:
        return len(self.sample_ids)


class DataPlaneClient:
    """NeMo-RL's data plane interface, for any number of threads. One queue per process.

    - `cfg`: NeMo-RL's `data_plane` section. Only `dedup` is read: names of fields whose equal
      values are stored once, such as media of a group. Sizes and transports of TransferQueue's
      backends are ignored.
    - `bootstrap`: True in the driver, which starts the queue and ends it with `close`. All other
      processes join it; RuntimeError if there is none.
    """

    def __init__(self, cfg: Mapping[str, Any] | None = None, *, bootstrap: bool = True) -> None:
        if bootstrap:
            dedup = list((cfg or {}).get("dedup") or ())
            queue.init({"dataplane": {"dedup": dedup}})
        self._client = queue.joined()
        self._store = self._client._store
        self._closed = self._used = False
        if interfaces := sys.modules.get(_BOUNDARY):
            interfaces.DataPlaneClient.register(type(self))

    # by task

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """Create a partition, or use an existing one.

        Its fields, tasks and size need not be declared: the first value creates a field, and the
        first claim creates a task. NeMo-RL balances groups itself. Texts are stored unchanged.
        """
        self._used = True
        self._store.number_of(partition_id)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """Claim samples that have the fields and that the task has not claimed before, without
        reading values.

        With `blocking`, wait for exactly `batch_size` samples; after `timeout_s` raise
        ClaimTimeout, a TimeoutError, and claim nothing. Otherwise return the samples that are ready
        now; there may be none. `dp_rank` is ignored, as in NeMo-RL.
        """
        self._used = True
        least, timeout = (batch_size, timeout_s) if blocking else (1, 0.0)
        try:
            rows = self._store.claim(
                partition_id, task_name, required_fields, batch_size, least, timeout
            )
        except dataplane.ClaimTimeout:
            if blocking:
                raise
            rows = []
        tags = [row.custom_meta for row in rows]
        lengths = [int(of.get(_LENGTH, 0)) for of in tags]
        return _meta(
            partition_id=partition_id,
            task_name=task_name,
            sample_ids=[str(row.key) for row in rows],
            fields=list(required_fields),
            sequence_lengths=lengths if any(_LENGTH in of for of in tags) else None,
            tags=tags or None,
        )

    def get_data(self, meta: Any, select_fields: list[str] | None = None) -> TensorDict:
        """Read fields of the samples of a meta: `select_fields`, or else the meta's fields. Raises
        ValueError if there are neither."""
        fields = select_fields if select_fields is not None else meta.fields
        if fields is None:
            raise ValueError("no fields to read: pass select_fields, or a meta with fields")
        return self.get_samples(meta.sample_ids, meta.partition_id, list(fields))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """Return whether each task has claimed all present samples; False for a partition without
        samples."""
        self._used = True
        return all(self._store.unclaimed(partition_id, task) == 0 for task in task_names)

    # by key

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Write fields and tags of samples. A new value replaces an old one; tags are merged. The
        fields and tags of a sample become visible together. Values are dense or jagged tensors, and
        objects made of None, numbers, texts, bytes, lists, dicts and arrays."""
        self._used = True
        if fields is not None and fields.batch_size[0] != len(sample_ids):
            raise ValueError(
                f"got {len(sample_ids)} sample ids for fields of {fields.batch_size[0]} rows: "
                "pass one id per row"
            )
        if tags is not None and len(tags) != len(sample_ids):
            raise ValueError(
                f"got {len(sample_ids)} sample ids and {len(tags)} tag dicts: pass one dict per "
                "sample"
            )
        if sample_ids:
            columns = columns_of(fields) if fields is not None else {}
            self._store.put(partition_id, sample_ids, columns, tags)
        return _meta(
            partition_id=partition_id,
            task_name=None,
            sample_ids=list(sample_ids),
            fields=[str(name) for name, _ in fields.items()] if fields is not None else None,
            tags=[dict(of) for of in tags or [{}] * len(sample_ids)],
        )

    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        """Read fields of samples, in this order, as private copies.

        A tensor whose rows have one shape is dense, other tensors are jagged, everything else is a
        stack of objects. Raises StorageKeyNotFoundError, a KeyError, if a sample or one of its
        fields does not exist.
        """
        if not sample_ids:
            return TensorDict({}, batch_size=0)
        self._used = True
        found = self._store.values(partition_id, sample_ids, list(select_fields))
        return TensorDict({name: _dense(of) for name, of in found.items()}, len(sample_ids))

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """Free samples, or the whole partition if `sample_ids` is None, whichever client wrote
        them. Their ids can be used again. Absent samples are skipped; RuntimeWarning if None finds
        nothing."""
        self._used = True
        if sample_ids is not None:
            self._store.clear(partition_id, sample_ids)
        elif self._store.rows(partition_id):
            self._store.clear_partition(partition_id)
        else:
            warnings.warn(
                f"partition {partition_id!r} has no samples to clear", RuntimeWarning, stacklevel=2
            )

    def list_sample_ids(self, partition_id: str) -> list[str]:
        """Return the ids of a partition's samples."""
        return [str(row.key) for row in self._store.rows(partition_id)]

    # the whole of it

    def save_checkpoint(
        self, checkpoint_dir: str | Path, *, metadata: dict[str, Any] | None = None
    ) -> None:
        """Write all partitions, what each task has claimed, and `metadata`, which must be valid
        JSON."""
        queue.save_checkpoint(checkpoint_dir, metadata=metadata)

    def load_checkpoint(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Restore a checkpoint, and return its metadata. Raises RuntimeError if this client has
        been used already, because its rows would be lost."""
        if self._used:
            raise RuntimeError(
                "load_checkpoint must come before every other call of this client: create a "
                "new client, and load the checkpoint first"
            )
        queue.load_checkpoint(checkpoint_dir)
        told: dict[str, Any] = json.loads((Path(checkpoint_dir) / "metadata.json").read_text())
        return dict(told["user_metadata"])

    def close(self) -> None:
        """Leave the queue. The driver's `close` ends it. Repeating the call is a no-op."""
        if not self._closed:
            self._closed = True
            queue.close()


def _meta(**told: Any) -> KVBatchMeta:
    """A meta of NeMo-RL's class where this process has it: its callers slice and join metas."""
    kind: type[KVBatchMeta] = getattr(sys.modules.get(_BOUNDARY), "KVBatchMeta", KVBatchMeta)
    return kind(**told)


def _dense(column: Any) -> Any:
    """NeMo-RL's trainers expect rows of one shape dense, whatever they were put as."""
    if not (isinstance(column, torch.Tensor) and column.is_nested):
        return column
    rows = list(column.unbind())
    return torch.stack(rows) if len({row.shape for row in rows}) == 1 else column
