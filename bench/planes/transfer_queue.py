"""TransferQueue (PyPI), SimpleStorage: groups put and got by key, as verl's trainer does.

Its controller and storage units are Ray actors, two units a host in turns, as it recommends;
TQ_NUM_THREADS is half the cores. Keys reach the stages through the same actor as in `ray-store`, at
once when a group is complete: in its favour, for its own samplers would have to be polled. Values
that the rows of a group share are stored for every row: it has no dedup.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bench.columns import Array
from bench.planes import ray_cluster
from bench.planes.base import Columns, Service, Worker
from bench.planes.ray_store import RayStorePlane, StoreEndpoint

UNITS_A_HOST = 2


def environment() -> dict[str, str]:
    """Threads of its tensor work: half the cores; its default is 8 whatever the machine."""
    return {"TQ_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))}


class TransferQueueEndpoint(StoreEndpoint):
    def __init__(self, worker: Worker) -> None:
        os.environ |= environment()
        import transfer_queue

        super().__init__(worker)
        transfer_queue.init()
        self._queue = transfer_queue

    def _keys(self, prompt: int) -> list[str]:
        return [f"{prompt}-{sample}" for sample in range(self.job.samples)]

    def form(self, columns: Columns) -> Any:
        """A TensorDict. A single row is dense: of a jagged tensor its put takes twice as long."""
        from tensordict import TensorDict

        tensors = {name: _tensor(values) for name, values in columns.items()}
        return TensorDict(tensors, batch_size=[self.job.samples])

    def store(self, step: int, prompt: int, columns: Columns) -> dict[str, Any]:
        if columns:
            self.put_form(step, prompt, self.form(columns))
        return dict.fromkeys(columns)

    def put_form(self, step: int, prompt: int, fields: Any) -> None:
        self._queue.kv_batch_put(keys=self._keys(prompt), partition_id=f"{step}", fields=fields)

    def fetch(self, step: int, prompt: int, places: dict[str, Any]) -> Any:
        """A TensorDict of dense and jagged tensors."""
        return self._queue.kv_batch_get(self._keys(prompt), f"{step}", list(places))

    def columns(self, fetched: Any) -> dict[str, Sequence[Array]]:
        return {name: [row.numpy() for row in _rows(value)] for name, value in fetched.items()}

    def end(self, step: int, prompt: int, dropped: bool = False) -> None:
        self._queue.kv_clear(self._keys(prompt), f"{step}")
        super().end(step, prompt, dropped)


class TransferQueuePlane(RayStorePlane):
    endpoint = TransferQueueEndpoint
    packages = ("TransferQueue", "ray", "tensordict", "torch")
    can_dedup = False

    def services(self) -> list[Service]:
        return ray_cluster.services(self.job, UNITS_A_HOST * self.job.hosts, environment())


def _tensor(values: Sequence[Array]) -> Any:
    """Rows as one tensor: dense; jagged if only first lengths differ; else strided."""
    import torch

    rows = [torch.from_numpy(value) for value in values]
    shapes = {tuple(row.shape) for row in rows}
    if len(shapes) == 1:
        return torch.stack(rows)
    ragged_first = len({shape[1:] for shape in shapes}) == 1
    return torch.nested.as_nested_tensor(
        rows, layout=torch.jagged if ragged_first else torch.strided
    )


def _rows(column: Any) -> Sequence[Any]:
    rows: Sequence[Any] = column.unbind() if hasattr(column, "is_nested") else column.tolist()
    return rows
