"""TransferQueue in the comparison: its key-value interface over SimpleStorage, as it recommends.

Two storage units a host, TQ_NUM_THREADS at half the cores (its default of 8 threads is several
times slower on a small machine). The writer holds a TensorDict of jagged tensors, its own form.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from bench.compare.batch import FIELDS, RAGGED, Array, Columns
from bench.compare.courier import Courier
from bench.compare.ray_courier import OnRay, nodes_of
from bench.planes import ray_cluster
from bench.planes.base import Service
from bench.planes.transfer_queue import UNITS_A_HOST, environment

_PARTITION = "compare"


class TransferQueue(OnRay):
    """A controller, two storage units a host, and a Ray cluster below them."""

    name = "transfer_queue"
    packages = ("TransferQueue", "ray", "tensordict", "torch")
    two_hosts = (
        "two raylets at two loopback addresses with two storage units each, writer on the first, "
        "reader on the second; bytes go over TCP on one host as well"
    )

    def settings(self) -> dict[str, Any]:
        return {
            "storage_backend": "SimpleStorage",
            "num_data_storage_units": UNITS_A_HOST * self.site.hosts,
            **self.environment(),
        }

    def environment(self) -> dict[str, str]:
        return environment()

    def services(self) -> list[Service]:
        nodes = nodes_of(self.site, UNITS_A_HOST * self.site.hosts)
        return ray_cluster.services(nodes, self.environment())

    @classmethod
    def courier(cls, role: str, address: dict[str, Any]) -> Courier:
        return TransferQueueCourier(address)


class TransferQueueCourier(Courier):
    """A client. Writer and reader count puts alike, so that both know the keys."""

    def __init__(self, address: dict[str, Any]) -> None:
        import transfer_queue

        ray_cluster.attach(address)
        transfer_queue.init()
        self._queue = transfer_queue
        self._numbers = count()
        self._rows = 0
        self._fields: Any = None
        self._got: list[list[str]] = []

    def load(self, columns: Columns) -> None:
        import torch
        from tensordict import TensorDict

        tensors = {}
        for name, values in columns.items():
            rows = [torch.from_numpy(value) for value in values]
            if name in RAGGED and len(rows) > 1:  # one row is dense, as its `kv_put` wants it
                tensors[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            else:
                tensors[name] = torch.stack(rows)
        self._rows = len(columns[FIELDS[0]])
        self._fields = TensorDict(tensors, batch_size=[self._rows])

    def _keys(self) -> list[str]:
        number = next(self._numbers)
        return [f"{number}-{row}" for row in range(self._rows)]

    def put(self) -> None:
        self._queue.kv_batch_put(keys=self._keys(), partition_id=_PARTITION, fields=self._fields)

    def expect(self, rows: int, puts: int) -> None:
        self._rows = rows

    def get(self) -> Any:
        self._got.append(self._keys())
        return self._queue.kv_batch_get(self._got[-1], _PARTITION, list(FIELDS))

    def buffers(self, held: Any) -> Iterator[Array]:
        for name in FIELDS:
            value = held[name]
            yield (value.values() if value.is_nested else value).numpy()

    def rows(self, held: Any) -> Columns:
        return {name: [row.numpy() for row in held[name].unbind()] for name in FIELDS}

    def tensordict(self, held: Any) -> Any:
        return held

    def settle(self, held: Any) -> None:
        """Nothing: to clear is left out, in its favour."""

    def free(self, held: Any) -> None:
        self._queue.kv_clear(self._got.pop(), _PARTITION)

    def forget(self) -> None:
        """The reader clears."""

    def close(self) -> None:
        """Its controller and units are the service's, and end with it."""
