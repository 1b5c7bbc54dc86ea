"""The two ends of a comparison, on the endpoints with which `bench run` drives the same planes.

The writer only puts, the reader only gets. What is timed is `put`, `get` and, for single rows,
what else belongs to a row's cycle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from bench.planes import PLANES
from bench.planes.base import Endpoint, Worker
from bench.planes.base import Job as _Job
from tests.perf.compare.batch import FIELDS, Array, Columns

NAMES = ("dataplane", "transfer_queue", "ray-store")
TWO_HOSTS = {
    "dataplane": "two peers with an arena each; bytes cross over TCP on loopback",
    "transfer_queue": "two raylets at two loopback addresses with two storage units each, writer "
    "on the first, reader on the second; bytes go over TCP on one host as well",
    "ray-store": "two raylets at two loopback addresses with an object store each; the object "
    "managers copy over TCP",
}
_STEP, _STAGE = 0, "train"
_ARENA_BATCHES = 4  # so many of the largest batch fit into an arena, or a store
_SMALLEST_ARENA = 256 << 20


class Job(_Job, frozen=True, kw_only=True):
    """Groups of `rows` rows with the fields of a batch, from one writer to one reader."""

    rows: int

    @property
    def samples(self) -> int:
        return self.rows

    def stages(self) -> dict[str, list[str]]:
        return {_STAGE: list(FIELDS)}

    def phases(self) -> tuple[tuple[str, ...], ...]:
        return ((_STAGE,),)


def job(plane: str, hosts: int, rows: int, largest: int, folder: str, parent: int) -> Job:
    """largest: bytes of the largest batch."""
    return Job(
        plane=plane,
        trace="math",
        prompts=0,
        steps=0,  # it goes on for as long as it is told to
        seed=0,
        hosts=hosts,
        trainers=1,
        dedup=False,
        arena_bytes=max(_SMALLEST_ARENA, _ARENA_BATCHES * largest),
        folder=folder,
        parent=parent,
        rows=rows,
    )


class End(ABC):
    """One worker's end."""

    @abstractmethod
    def load(self, columns: Columns) -> None:
        """Bring a batch into the form that this plane puts best. Not timed."""

    @abstractmethod
    def put(self) -> None:
        """Put what was loaded; returns when others can get it."""

    def tell(self) -> None:  # noqa: B027  # some planes tell the reader by themselves
        """Tell the reader where it is. Not timed."""

    def expect(self, puts: int) -> None:  # noqa: B027
        """Hear of so many puts. Not timed."""

    @abstractmethod
    def get(self) -> Any:
        """The next batch, oldest first: whatever this plane hands out, its columns in reach."""

    @abstractmethod
    def buffers(self, held: Any) -> Iterator[Array]:
        """What was got as contiguous arrays, as large as the plane has them."""

    @abstractmethod
    def rows(self, held: Any) -> Columns:
        """What was got as one array a row and field, for the check. Not timed."""

    def free(self) -> None:  # noqa: B027
        """The reader is done with the oldest batch that it got. Not timed."""

    def close(self) -> None:  # noqa: B027  # Ray's driver ends with its process
        """Leave the plane in order."""


class Claimed(End):
    """Of a plane that hands out batches: a get also acks the batch before."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._numbers = count()
        self._batches = endpoint.batches(_STEP, _STAGE)
        self._columns: Columns = {}

    def load(self, columns: Columns) -> None:
        self._columns = columns

    def put(self) -> None:
        self._endpoint.put(_STEP, next(self._numbers), self._columns)

    def get(self) -> Any:
        return next(self._batches)

    def buffers(self, held: Any) -> Iterator[Array]:
        """A field has an array for each chunk in which its rows lie one after the other."""
        for name in FIELDS:
            yield from held.column(name).spans()

    def rows(self, held: Any) -> Columns:
        return {name: list(held.column(name)) for name in FIELDS}

    def close(self) -> None:
        assert isinstance(self._batches, Generator)
        self._batches.close()
        self._endpoint.close()


class Placed(End):
    """Of a plane on Ray: its places go from the writer to the reader outside the timed part."""

    fields: Sequence[str] = FIELDS

    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self._numbers = count()
        self._form: Any = None
        self._put: list[tuple[int, dict[str, Any]]] = []
        self._expected: deque[tuple[int, dict[str, Any]]] = deque()
        self._got: deque[int] = deque()

    @abstractmethod
    def form(self, columns: Columns) -> Any:
        """A batch in the form that this plane puts best."""

    @abstractmethod
    def store(self, number: int, form: Any) -> dict[str, Any]:
        """Put it; returns the places of `fields`."""

    @abstractmethod
    def fetch(self, number: int, places: dict[str, Any]) -> Any:
        """Get what was put."""

    def load(self, columns: Columns) -> None:
        self._form = self.form(columns)

    def put(self) -> None:
        number = next(self._numbers)
        self._put.append((number, self.store(number, self._form)))

    def tell(self) -> None:
        for number, places in self._put:
            self.endpoint.announce(_STEP, number, places)
        self._put.clear()

    def expect(self, puts: int) -> None:
        for _ in range(puts):
            number, places = self.endpoint.next(_STEP, _STAGE, self.fields)
            self._expected.append((number, places))

    def get(self) -> Any:
        number, places = self._expected.popleft()
        self._got.append(number)
        return self.fetch(number, places)

    def free(self) -> None:
        self.endpoint.end(_STEP, self._got.popleft())


class Stored(Placed):
    """Ray's store: one object for all fields, the best case of a reader that wants all of them. It
    has of each field the rows end to end, and where each ends: Ray hands those out uncopied."""

    fields = ("*",)

    def form(self, columns: Columns) -> Any:
        return {
            name: (np.concatenate(values), np.cumsum([0, *map(len, values)]))
            for name, values in columns.items()
        }

    def store(self, number: int, form: Any) -> dict[str, Any]:
        import ray

        return {"*": ray.put(form)}

    def fetch(self, number: int, places: dict[str, Any]) -> Any:
        import ray

        return ray.get(places["*"])

    def buffers(self, held: Any) -> Iterator[Array]:
        return (held[name][0] for name in FIELDS)

    def rows(self, held: Any) -> Columns:
        return {name: np.split(held[name][0], held[name][1][1:-1]) for name in FIELDS}


class Queued(Placed):
    """TransferQueue: a TensorDict."""

    def form(self, columns: Columns) -> Any:
        return self.endpoint.form(columns)

    def store(self, number: int, form: Any) -> dict[str, Any]:
        self.endpoint.put_form(_STEP, number, form)
        return dict.fromkeys(FIELDS)

    def fetch(self, number: int, places: dict[str, Any]) -> Any:
        return self.endpoint.fetch(_STEP, number, places)

    def buffers(self, held: Any) -> Iterator[Array]:
        for value in (held[name] for name in FIELDS):
            yield (value.values() if value.is_nested else value).numpy()

    def rows(self, held: Any) -> Columns:
        columns: Columns = self.endpoint.columns(held)
        return columns


_ENDS = {"ray-store": Stored, "transfer_queue": Queued}


def end(worker: Worker) -> End:
    plane = worker.job.plane
    return _ENDS.get(plane, Claimed)(PLANES[plane].endpoint(worker))
