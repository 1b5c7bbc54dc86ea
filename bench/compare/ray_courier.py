"""Ray's object store in the comparison: the writer puts columns, the reader gets them by reference.

The best case of the store: packed columns (values and offsets) as numpy arrays, which Ray keeps out
of band and hands out without a copy. The reference itself reaches the reader before the clock runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bench.compare.batch import FIELDS, RAGGED, Array, Columns
from bench.compare.courier import Contender, Courier, Site
from bench.planes import ray_cluster
from bench.planes.base import Service

STORE_BATCHES = 4  # so many of the largest batch fit into a store
SMALLEST_STORE = 256 << 20
_STAGE = "compare"

Packed = tuple[Array, Array]  # values, and where each row ends


class OnRay(Contender):
    """Whatever runs on a Ray cluster, a raylet a host."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._cluster = ""

    def reachable(self, ready: Mapping[str, dict[str, Any]]) -> bool:
        self._cluster = ready.get("ray", {}).get("cluster", "")
        return bool(self._cluster)

    def address(self, host: int) -> dict[str, Any]:
        return {"cluster": self._cluster, "place": nodes_of(self.site).place(host)}


class RayStore(OnRay):
    """A raylet a host, each with a store of its own."""

    name = "ray-store"
    packages = ("ray", "numpy")
    two_hosts = (
        "two raylets at two loopback addresses with an object store each; the object managers copy "
        "over TCP"
    )

    def settings(self) -> dict[str, Any]:
        return {"object_store_bytes": store_bytes(self.site), "raylets": self.site.hosts}

    def services(self) -> list[Service]:
        return ray_cluster.services(nodes_of(self.site))

    @classmethod
    def courier(cls, role: str, address: dict[str, Any]) -> Courier:
        return RayCourier(address)


def store_bytes(site: Site) -> int:
    return max(SMALLEST_STORE, STORE_BATCHES * site.largest)


def nodes_of(site: Site, storage_units: int = 0) -> ray_cluster.Nodes:
    return ray_cluster.Nodes(
        hosts=site.hosts,
        object_store_bytes=store_bytes(site),
        folder=site.folder,
        parent=site.parent,
        storage_units=storage_units,
    )


class RayCourier(Courier):
    """A driver on its host's raylet."""

    def __init__(self, address: dict[str, Any]) -> None:
        self._board = ray_cluster.attach(address)
        self._columns: dict[str, Packed] = {}
        self._mine: list[Any] = []
        self._expected: deque[Any] = deque()

    def load(self, columns: Columns) -> None:
        self._columns = {
            name: (np.concatenate(values), np.cumsum([0, *map(len, values)]))
            for name, values in columns.items()
        }

    def put(self) -> None:
        import ray

        self._mine.append(ray.put(self._columns))
        self._board.offer.remote(_STAGE, [self._mine[-1]])  # sent, not awaited

    def expect(self, rows: int, puts: int) -> None:
        import ray

        self._expected.extend(ray.get(self._board.take.remote(_STAGE, puts)))

    def get(self) -> Any:
        import ray

        return ray.get(self._expected.popleft()[0])

    def buffers(self, held: dict[str, Packed]) -> Iterator[Array]:
        for name in FIELDS:
            yield held[name][0]

    def rows(self, held: dict[str, Packed]) -> Columns:
        return {
            name: [values[a:b] for a, b in zip(ends, ends[1:], strict=False)]
            for name, (values, ends) in held.items()
        }

    def tensordict(self, held: dict[str, Packed]) -> Any:
        """Private tensors, as those of every other plane: what the store hands out is read-only."""
        import torch
        from tensordict import TensorDict

        columns = {}
        for name in FIELDS:
            values, ends = held[name]
            tensor = torch.from_numpy(values.copy())
            if name in RAGGED:
                offsets = torch.from_numpy(ends.copy())
                tensor = torch.nested.nested_tensor_from_jagged(tensor, offsets)
            columns[name] = tensor
        return TensorDict(columns, batch_size=[len(held[RAGGED[0]][1]) - 1])

    def settle(self, held: Any) -> None:
        """Nothing: the values go with the last reference."""

    def free(self, held: Any) -> None:
        """The reader's reference is gone already; the values go with it."""

    def forget(self) -> None:
        self._mine.clear()

    def close(self) -> None:
        import ray

        ray.shutdown()
