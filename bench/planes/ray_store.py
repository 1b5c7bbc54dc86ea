"""Ray's object store without a driver in the middle: references passed from stage to stage.

Each field of a group is one object, so that a stage fetches only what it reads. An actor holds the
references and hands out ready groups. Nothing passes through one process. With dedup the rows of a
group share one array in the object, which Ray stores once; without it every row's value is stored.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from bench.columns import DEDUP, Array
from bench.planes import ray_cluster
from bench.planes.base import Batch, Columns, Endpoint, Group, Plane, Service, Worker


@dataclass(slots=True)
class Entry:
    """A group on the board. `handed`: stages that have received it."""

    step: int
    places: dict[str, Any]
    handed: set[str] = field(default_factory=set)


class Board:
    """The actor through which the stages of a Ray job find each other's output. It has references
    and names, never values, and waiters do not poll. groups: of each step; the job ends with the
    last. A place is what the plane needs to find one field of a group."""

    def __init__(self, groups: Sequence[int]) -> None:
        self._over = asyncio.Event()
        self._expected = dict(enumerate(groups))  # groups by step, without dropped ones
        self._unfinished = sum(groups)
        self._handed: Counter[tuple[int, str]] = Counter()
        self._groups: dict[int, Entry] = {}  # by number, the most recently changed last
        self._change = asyncio.Condition()

    async def ready(self) -> None:
        """Return once the actor runs."""

    async def finished(self) -> None:
        """Return when the job is over."""
        await self._over.wait()

    async def put(self, step: int, prompt: int, places: dict[str, Any]) -> None:
        self._groups[prompt] = Entry(step, {})
        await self.add(prompt, places)

    async def add(self, prompt: int, places: dict[str, Any]) -> None:
        """Add the places of fields that a stage has added to a group."""
        group = self._groups[prompt] = self._groups.pop(prompt)
        group.places |= places
        await self._wake()

    async def end(self, prompt: int, dropped: bool) -> None:
        """Remove a group that was trained or dropped."""
        group = self._groups.pop(prompt)
        if dropped:
            self._expected[group.step] -= 1
            self._handed.subtract((group.step, stage) for stage in group.handed)
        self._unfinished -= 1
        if not self._unfinished:
            self._over.set()
        await self._wake()

    async def _wake(self) -> None:
        async with self._change:
            self._change.notify_all()

    async def next(
        self, step: int, stage: str, fields: list[str]
    ) -> tuple[int, dict[str, Any]] | None:
        """Return a group for a stage, and its places; None once the stage has received all of the
        step."""

        def first() -> int | None:
            for prompt, group in self._groups.items():
                is_new = group.step == step and stage not in group.handed
                if is_new and group.places.keys() >= set(fields):
                    return prompt
            return None

        async with self._change:
            await self._change.wait_for(
                lambda: first() is not None or self._handed[step, stage] >= self._expected[step]
            )
            if (prompt := first()) is None:
                return None
            group = self._groups[prompt]
            group.handed.add(stage)
            self._handed[step, stage] += 1
            self._change.notify_all()  # it may have been the last
        return prompt, {name: group.places[name] for name in fields}


class StoreEndpoint(Endpoint):
    """A driver on its host's raylet. The board finds its groups; Ray's store has the values."""

    def __init__(self, worker: Worker) -> None:
        self.job = worker.job
        self._ray, self._board = ray_cluster.attach(worker.address)

    def put(self, step: int, prompt: int, columns: Columns) -> None:
        self.announce(step, prompt, self.store(step, prompt, columns))

    def announce(self, step: int, prompt: int, places: dict[str, Any]) -> None:
        """Say where the fields of a group are, so that stages get it."""
        self._ray.get(self._board.put.remote(step, prompt, places))

    def batches(self, step: int, stage: str) -> Iterator[Batch]:
        fields = self.job.stages()[stage]
        while taken := self.next(step, stage, fields):
            prompt, places = taken
            group = Group(self.columns(self.fetch(step, prompt, places)))
            del taken, places
            yield group
            if group.dropped or stage == "train":
                self.end(step, prompt, group.dropped)
            else:
                added = self.store(step, prompt, group.added)
                self._ray.get(self._board.add.remote(prompt, added))
            del group

    def next(
        self, step: int, stage: str, fields: Sequence[str]
    ) -> tuple[int, dict[str, Any]] | None:
        """The next group of a stage, as the board says it; None once the stage has had all."""
        asked = self._board.next.remote(step, stage, list(fields))
        found: tuple[int, dict[str, Any]] | None = self._ray.get(asked)
        return found

    def end(self, step: int, prompt: int, dropped: bool = False) -> None:
        """Discard a group that was trained or dropped. Objects go with the board's references."""
        self._ray.get(self._board.end.remote(prompt, dropped))

    def store(self, step: int, prompt: int, columns: Columns) -> dict[str, Any]:
        """Put a group's fields; returns their places."""
        dedup = DEDUP if self.job.dedup else ()
        return {
            name: self._ray.put(shareable(values, name in dedup))
            for name, values in columns.items()
        }

    def fetch(self, step: int, prompt: int, places: dict[str, Any]) -> Any:
        """A group's fields as the plane hands them out."""
        return dict(zip(places, self._ray.get(list(places.values())), strict=True))

    def columns(self, fetched: Any) -> dict[str, Sequence[Array]]:
        """The same as one array per row and field."""
        return dict(fetched)

    def close(self) -> None:
        """Wait until the job is over, because objects end with the process that put them."""
        self._ray.get(self._board.finished.remote())
        self._ray.shutdown()


class RayStorePlane(Plane):
    endpoint: ClassVar[type[Endpoint]] = StoreEndpoint
    packages: ClassVar[tuple[str, ...]] = ("ray",)

    def services(self) -> list[Service]:
        return ray_cluster.services(self.job)

    def reachable(self, ready: Mapping[str, Any]) -> bool:
        return "ray" in ready

    def address(self, host: int, ready: Mapping[str, Any]) -> dict[str, Any]:
        return {"cluster": ready["ray"]["cluster"], "place": ray_cluster.place(self.job, host)}


def shareable(values: Sequence[Array], dedup: bool) -> list[Array]:
    """A column as Ray stores it. Pickle stores a shared array once, but each view separately."""
    return list(values) if dedup else [value.view() for value in values]
