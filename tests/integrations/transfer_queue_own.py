"""A plugin of pytest for TransferQueue's own tests on the module that takes its place.

They look at their controller, an actor, to see what a call did. Here is an actor of that name, that
sees it through the surface. `python -m pytest -p transfer_queue_own TESTS`.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq

NAME = {"name": "TransferQueueController", "namespace": "transfer_queue"}


class Controller:
    """What the tests ask theirs."""

    def __init__(self) -> None:
        tq.init()
        self.client = tq.get_client()

    def get_config(self) -> None:
        """Of a `StreamingDataset`, which finds the job's queue without."""

    def list_partitions(self) -> list[str]:
        partitions: list[str] = self.client.get_partition_list()
        return partitions

    def clear_partition(self, name: str) -> None:
        self.client.clear_partition(name)

    def get_partition_snapshot(self, name: str) -> Any:
        store = self.client._store
        rows = self.client._in_order(name, store.rows(name))
        fields = list(dict.fromkeys(field for row in rows.values() for field in row.told))
        status = {i: [int(field in row.told) for field in fields] for i, row in rows.items()}
        return SimpleNamespace(
            keys_mapping={row.key: i for i, row in rows.items() if isinstance(row.key, str)},
            global_indexes=set(rows),
            custom_meta={i: row.custom_meta for i, row in rows.items()},
            field_name_mapping={field: place for place, field in enumerate(fields)},
            production_status=ByIndex(status),
        )


class ByIndex:
    """`status[global_index, field]`, as their table of all rows has it."""

    def __init__(self, rows: dict[int, list[int]]) -> None:
        self.rows = rows

    def __getitem__(self, place: tuple[int, int]) -> torch.Tensor:
        return torch.tensor(self.rows[place[0]][place[1]])


_init, _close = tq.init, tq.close


def init(conf: Any = None) -> Any:
    made = _init(conf)
    with contextlib.suppress(ValueError):  # somebody's test has one already
        options = ray.remote(num_cpus=0)(Controller).options(lifetime="detached", **NAME)
        ray.get(options.remote().list_partitions.remote())
    return made


def close() -> None:
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(**NAME))
    _close()


tq.init, tq.close = init, close
