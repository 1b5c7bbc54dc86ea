"""Ray's object store without a driver in the middle: references passed from stage to stage.

A group's fields are objects of their own, so that a stage fetches what it reads and no more; an
actor holds the references and says which group is ready for whom. Nothing passes through one
process. With dedup the rows of a group share one array in the object, which Ray stores once;
without it every row's value is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from bench.columns import DEDUP
from bench.machine import memory_bytes
from bench.planes import ray_cluster
from bench.planes.base import (
    Array,
    Batch,
    Columns,
    Endpoint,
    Group,
    Job,
    Moved,
    Plane,
    Service,
    Worker,
)

_SMALLEST_STORE = 80 << 20  # Ray takes no less than 75 MiB
_OWN_SHARE = 0.3  # of a host's memory: what Ray's store takes by itself
_WHOLE = "*"  # the place of all fields together


def store_bytes(job: Job) -> int:
    """Of each node. Under a limit as much as a peer's arena, which has to do with that too; else
    as much as Ray would take on a host that has its share of this machine. What does not fit is
    spilled to disk by Ray."""
    if job.memory_limit_bytes:
        return max(_SMALLEST_STORE, job.arena_bytes)
    return max(int(_OWN_SHARE * memory_bytes()) // job.hosts, job.arena_bytes)


def nodes_of(job: Job, storage_units: int = 0) -> ray_cluster.Nodes:
    """The cluster that a job needs."""
    return ray_cluster.Nodes(
        hosts=job.hosts,
        object_store_bytes=store_bytes(job),
        folder=job.folder,
        parent=job.parent,
        groups=[len(job.of_step(step)) for step in range(job.steps)],
        phases=[list(stages) for stages in job.phases()],
        storage_units=storage_units,
        linked=bool(job.link),
    )


class RayPlane(Plane):
    """The runner's side of whatever runs on a Ray cluster."""

    packages = ("ray",)
    _cluster = ""

    def services(self) -> list[Service]:
        return ray_cluster.services(nodes_of(self.job))

    def reachable(self, ready: Mapping[str, dict[str, Any]]) -> bool:
        self._cluster = ready.get("ray", {}).get("cluster", "")
        return bool(self._cluster)

    def address(self, host: int) -> dict[str, Any]:
        return {"cluster": self._cluster, "place": nodes_of(self.job).place(host)}

    def moved(self, done: Mapping[str, dict[str, Any]]) -> Moved:
        """Every process counts what it copied."""
        told = [msgspec.convert(e["moved"], Moved) for e in done.values() if "moved" in e]
        return Moved(
            copied_in=sum(moved.copied_in for moved in told),
            across=sum(moved.across for moved in told),
            copied_out=sum(moved.copied_out for moved in told),
        )

    def close(self) -> None:
        """The runner holds nothing of it."""


class RayStorePlane(RayPlane):
    """References passed directly."""

    name = "ray-store"
    dedup_variants = (False, True)

    @classmethod
    def attach(cls, worker: Worker) -> Endpoint:
        return StoreEndpoint(worker)


class Fetched(Mapping[str, Sequence[Array]]):
    """A group's columns as they came; rows are made of one each time it is looked at."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = columns

    def __getitem__(self, field: str) -> Sequence[Array]:
        """One array a row."""
        raise NotImplementedError

    def buffers(self, field: str) -> Sequence[Array]:
        """The same values as contiguous arrays, as large as the plane has them."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns.keys())  # a TensorDict iterates over its rows

    def __len__(self) -> int:
        return len(self.columns.keys())


class BoardEndpoint(Endpoint):
    """A worker whose groups are found through the board; subclasses know where values are.

    `bench compare` stores, fetches and discards without the board's groups: it only measures bytes.
    """

    def __init__(self, worker: Worker) -> None:
        self.job = worker.job
        self._host = worker.host
        self._board = ray_cluster.attach(worker.address)

    def put(self, step: int, prompt: int, columns: Columns) -> None:
        import ray

        places = self.store(step, prompt, columns)
        ray.get(self._board.put.remote(step, prompt, self._host, places))

    def finish(self, step: int) -> None:
        """The board knows how many groups a step has."""

    def batches(self, step: int, stage: str) -> Iterator[Batch]:
        import ray

        fields = self.job.stages()[stage]
        while taken := ray.get(self._board.next.remote(step, stage, fields, self._host)):
            prompt, places, unseen = taken
            group = Group(prompt, dict(self.fetch(step, prompt, places, unseen)))
            del taken, places
            yield group
            added = {} if group.dropped else self.store(step, prompt, group.added)
            if group.dropped or stage == "train":
                self.discard(step, prompt)
            if group.dropped:
                ray.get(self._board.drop.remote(prompt))
            else:
                ray.get(self._board.add.remote(stage, prompt, self._host, added))
            del group

    def offer(self, places: Sequence[dict[str, Any]]) -> None:
        """Offer places of rows on the board, where a consumer takes them."""
        import ray

        ray.get([self._board.offer.remote(one) for one in places])

    def take(self, puts: int) -> list[dict[str, Any]]:
        """The oldest places that nobody has taken; waits until there are as many."""
        import ray

        found: list[dict[str, Any]] = ray.get(self._board.take.remote(puts))
        return found

    def form(self, columns: Columns) -> Any:
        """Columns in the form that this plane puts best. `compare` makes it beforehand."""
        raise NotImplementedError

    def store(self, step: int, prompt: int, columns: Any) -> dict[str, Any]:
        """Put a group's fields, as columns or in their best form; returns their places."""
        raise NotImplementedError

    def fetch(
        self, step: int, prompt: int, places: dict[str, Any], unseen: int
    ) -> Mapping[str, Sequence[Array]]:
        """A group's fields. `unseen`: bytes that no process of this host has fetched or put."""
        raise NotImplementedError

    def discard(self, step: int, prompt: int) -> None:
        """The group was trained or dropped."""
        raise NotImplementedError

    def close(self) -> None:
        """What a process has put goes with it: it stays until the job is over."""
        import ray

        ray.get(self._board.finished.remote())
        ray.shutdown()


class Packed(Fetched):
    """Of each field the rows end to end, and where each ends: what Ray hands out uncopied."""

    def __getitem__(self, field: str) -> Sequence[Array]:
        values, ends = self.columns[field]
        return [values[a:b] for a, b in zip(ends, ends[1:], strict=False)]

    def buffers(self, field: str) -> Sequence[Array]:
        return [self.columns[field][0]]


class StoreEndpoint(BoardEndpoint):
    """A driver on its host's raylet."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._copied_in = 0
        self._across = 0

    def form(self, columns: Columns) -> Packed:
        """One object for all fields: the best case of a reader that wants all of them."""
        ends = {name: np.cumsum([0, *map(len, values)]) for name, values in columns.items()}
        return Packed({name: (np.concatenate(columns[name]), ends[name]) for name in columns})

    def store(self, step: int, prompt: int, columns: Any) -> dict[str, Any]:
        import ray

        if isinstance(columns, Packed):
            return {_WHOLE: (0, [ray.put(columns)])}
        places = {}
        for name, values in columns.items():
            form, nbytes = shareable(values, self.job.dedup and name in DEDUP)
            places[name] = (nbytes, [ray.put(form)])
            self._copied_in += nbytes
        return places

    def fetch(
        self, step: int, prompt: int, places: dict[str, Any], unseen: int
    ) -> Mapping[str, Sequence[Array]]:
        import ray

        self._across += unseen
        if _WHOLE in places:
            whole: Packed = ray.get(places[_WHOLE][1][0])
            return whole
        found = ray.get([places[name][1][0] for name in places])
        return dict(zip(places, found, strict=True))

    def discard(self, step: int, prompt: int) -> None:
        """Objects go with the board's references."""

    def moved(self) -> Moved:
        return Moved(copied_in=self._copied_in, across=self._across)


def shareable(values: Sequence[Array], dedup: bool) -> tuple[list[Array], int]:
    """A column as Ray is to store it, and its bytes there.

    Pickle knows an object again, so an array that stands in several rows is stored once; views of
    it are others.
    """
    if dedup:
        distinct = {id(value): value.nbytes for value in values}
        return list(values), sum(distinct.values())
    return [value.view() for value in values], sum(value.nbytes for value in values)
