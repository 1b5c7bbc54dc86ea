"""A torch dataset and loader over rows as they become ready for a task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset

from dataplane_transfer_queue.client import TransferQueueClient
from dataplane_transfer_queue.metadata import BatchMeta

Batch = tuple[TensorDict, BatchMeta]
_LOOK_S = 0.1


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """Return the next batch of the task, or None while too few rows are ready."""
    config = sampling_config | {"batch_index": batch_index, "partition_id": partition_id}
    try:
        meta = tq_client.get_meta(
            data_fields=data_fields,
            batch_size=batch_size,
            partition_id=partition_id,
            task_name=task_name,
            sampling_config=config,
        )
    except TimeoutError:
        return None, BatchMeta()
    return (tq_client.get_data(meta) if meta.size else None), meta


def chunk_batch_fn(td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Batch]:
    """Split a batch into pieces of `micro_batch_size` rows. The last piece may be smaller."""
    if not isinstance(td, TensorDict):
        raise TypeError(
            f"a batch must be a TensorDict, not a {type(td).__name__}: return one from "
            "fetch_batch_fn"
        )
    if not isinstance(micro_batch_size, int) or micro_batch_size <= 0:
        raise ValueError(f"micro_batch_size must be at least 1, not {micro_batch_size!r}")
    if not td.batch_size or micro_batch_size > td.batch_size[0]:
        raise ValueError(
            f"micro_batch_size={micro_batch_size} is larger than the batch, whose shape is "
            f"{tuple(td.batch_size)}: pass a smaller one"
        )
    rows = td.batch_size[0]
    parts = {
        name: value.unbind() if isinstance(value, torch.Tensor) and value.is_nested else value
        for name, value in td.items()
    }
    pieces = []
    for start in range(0, rows, micro_batch_size):
        end = min(start + micro_batch_size, rows)
        taken = {
            name: torch.nested.as_nested_tensor(part[start:end], layout=torch.jagged)
            if isinstance(part, tuple | list)
            else part[start:end]
            for name, part in parts.items()
        }
        piece = TensorDict(taken, batch_size=end - start)
        pieces.append((piece, batch_meta.select_samples(range(start, end))))
    return pieces


class StreamingDataset(IterableDataset[Batch]):
    """Micro-batches of a task's rows as they become ready, with their `BatchMeta`.

    - `config`: what `init` returned.
    - `batch_size`: rows per fetch, chosen by the sampler for this `dp_rank`.
    - `micro_batch_size`: rows per micro-batch.
    - `should_check_consumption_status`: end when the task has fetched all rows of the partition.
      Otherwise the dataset never ends.
    - `fetch_batch_fn`, `process_batch_fn`: replace `default_fetch_batch_fn` and `chunk_batch_fn`.

    Workers of a loader attach to the plane by themselves.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Any] | None = None,
        process_batch_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, not {micro_batch_size}")
        if not data_fields:
            raise ValueError("data_fields is empty: name at least one field")
        if dp_rank < 0:
            raise ValueError(f"dp_rank={dp_rank}: expected 0 or more")
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = data_fields
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        self.buffer: list[Batch] = []
        self.batch_index = 0
        self._tq_client: TransferQueueClient | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._tq_client is None:
            self._tq_client = _attached(self.config)
        client = self._tq_client
        while True:
            if self.batch_index < len(self.buffer):
                batch = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self.process_batch_fn(*batch, micro_batch_size=self.micro_batch_size)
                continue
            if self.should_check_consumption_status and client.check_consumption_status(
                self.task_name, self.partition_id
            ):
                return
            data, meta = self.fetch_batch_fn(
                tq_client=client,
                data_fields=self.data_fields,
                batch_size=self.batch_size,
                partition_id=self.partition_id,
                task_name=self.task_name,
                sampling_config=self.sampling_config,
                batch_index=self.batch_index,
            )
            if data is None:
                time.sleep(_LOOK_S)
            else:
                self.buffer.append((data, meta))

    def reset(self) -> None:
        """Return the fetched batches again, from the first."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Continue with another partition, and discard the fetched batches."""
        self.buffer = []
        self.batch_index = 0
        self.partition_id = partition_id


def _attached(config: Any) -> TransferQueueClient:
    from dataplane_transfer_queue import attach

    return attach(config)


def _as_it_is(batch: Batch) -> Batch:
    return batch


class StreamingDataLoader(DataLoader[Batch]):
    """torch's DataLoader over a `StreamingDataset`, which makes the batches."""

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        as_it_is: Any = _as_it_is
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

    @property
    def _streamed(self) -> StreamingDataset:
        assert isinstance(self.dataset, StreamingDataset)
        return self.dataset

    def reset(self) -> None:
        """See `StreamingDataset.reset`."""
        self._streamed.reset()

    def step(self, partition_id: str) -> None:
        """See `StreamingDataset.step`."""
        self._streamed.step(partition_id)

    def get_buffer(self) -> list[Batch]:
        """Return the fetched batches."""
        return self._streamed.buffer
