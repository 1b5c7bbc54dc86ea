"""Ray's object store without a driver in the middle: references passed from stage to stage.

A group's fields are objects of their own, so that a stage fetches what it reads and no more; an
actor holds the references and says which group is ready for whom. Nothing passes through one
process. With dedup the rows of a group share one array in the object, which Ray stores once;
without it every row's value is stored.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from bench.columns import DEDUP, Array
from bench.planes import ray_cluster
from bench.planes.base import Batch, Columns, Endpoint, Group, Moved, Plane, Service, Worker


@dataclass(slots=True)
class Entry:
    """What is known of a group. `seen`: (field, host) that have a copy; `handed`: stages that have
    got it."""

    step: int
    places: dict[str, Any]
    seen: set[tuple[str, int]]
    handed: set[str] = field(default_factory=set)


class Board:
    """The actor through which the stages of a Ray job find each other's output. It holds references
    and names, never values, and waiters wait without polling: the least that such a job needs.

    Which groups are ready for which stage: those that have all fields that it reads.

    groups: of each step; the job ends with the last group. A place says where the values of one
    field of a group are: (bytes, whatever the plane needs).
    """

    def __init__(self, groups: Sequence[int]) -> None:
        self._over = asyncio.Event()
        self._expected = dict(enumerate(groups))  # of a step, dropped ones not counted
        self._unfinished = sum(groups)
        self._handed: Counter[tuple[int, str]] = Counter()
        self._groups: dict[int, Entry] = {}  # by number; the one that changed last is at the end
        self._change = asyncio.Condition()

    async def ready(self) -> None:
        """Answers once the actor lives."""

    async def finished(self) -> None:
        """Answers when the job is over."""
        await self._over.wait()

    async def put(self, step: int, prompt: int, host: int, places: dict[str, Any]) -> None:
        self._groups[prompt] = Entry(step, {}, set())
        await self.add(prompt, host, places)

    async def add(self, prompt: int, host: int, places: dict[str, Any]) -> None:
        """Fields that a stage has added to a group."""
        group = self._groups[prompt] = self._groups.pop(prompt)
        group.places |= places
        group.seen |= {(name, host) for name in places}
        await self._wake()

    async def end(self, prompt: int, dropped: bool) -> None:
        """No stage gets this group any more: it was trained, or dropped."""
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
        self, step: int, stage: str, fields: list[str], host: int
    ) -> tuple[int, dict[str, Any], int] | None:
        """A group for a stage: prompt, places, and the bytes that its host has not seen yet.

        None once all groups of the step were handed out to the stage.
        """

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
        places = {name: group.places[name] for name in fields}
        new = {(name, host) for name in fields} - group.seen
        group.seen |= new
        return prompt, places, sum(places[name][0] for name, _ in new)


class StoreEndpoint(Endpoint):
    """A driver on its host's raylet. Its groups are found through the board, and their values are
    in Ray's store unless a subclass keeps them elsewhere.

    `bench compare` does the steps of a put and of a batch one by one, and times some of them.
    """

    def __init__(self, worker: Worker) -> None:
        self.job = worker.job
        self._host = worker.host
        self._ray, self._board = ray_cluster.attach(worker.address)
        self._copied = 0

    def put(self, step: int, prompt: int, columns: Columns) -> None:
        self.announce(step, prompt, self.store(step, prompt, columns))

    def announce(self, step: int, prompt: int, places: dict[str, Any]) -> None:
        """Say where the fields of a group are, so that stages get it."""
        self._ray.get(self._board.put.remote(step, prompt, self._host, places))

    def batches(self, step: int, stage: str) -> Iterator[Batch]:
        fields = self.job.stages()[stage]
        while taken := self.next(step, stage, fields):
            prompt, places, unseen = taken
            group = Group(self.columns(self.fetch(step, prompt, places, unseen)))
            del taken, places
            yield group
            if group.dropped or stage == "train":
                self.end(step, prompt, group.dropped)
            else:
                added = self.store(step, prompt, group.added)
                self._ray.get(self._board.add.remote(prompt, self._host, added))
            del group

    def next(
        self, step: int, stage: str, fields: Sequence[str]
    ) -> tuple[int, dict[str, Any], int] | None:
        """The next group of a stage, as the board says it; None once the stage has had all."""
        asked = self._board.next.remote(step, stage, list(fields), self._host)
        found: tuple[int, dict[str, Any], int] | None = self._ray.get(asked)
        return found

    def end(self, step: int, prompt: int, dropped: bool = False) -> None:
        """Discard a group that was trained or dropped. Objects go with the board's references."""
        self._ray.get(self._board.end.remote(prompt, dropped))

    def store(self, step: int, prompt: int, columns: Columns) -> dict[str, Any]:
        """Put a group's fields; returns their places."""
        places = {}
        for name, values in columns.items():
            form, nbytes = shareable(values, self.job.dedup and name in DEDUP)
            places[name] = (nbytes, [self._ray.put(form)])
            self._copied += nbytes
        return places

    def fetch(self, step: int, prompt: int, places: dict[str, Any], unseen: int) -> Any:
        """A group's fields as the plane hands them out. `unseen`: bytes that no process of this
        host has fetched or put."""
        self._copied += unseen
        found = self._ray.get([places[name][1][0] for name in places])
        return dict(zip(places, found, strict=True))

    def columns(self, fetched: Any) -> dict[str, Sequence[Array]]:
        """The same as one array per row and field."""
        return dict(fetched)

    def moved(self) -> Moved:
        return Moved(self._copied)

    def close(self) -> None:
        """What a process has put goes with it: it stays until the job is over."""
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

    def moved(self, done: Mapping[str, dict[str, Any]]) -> Moved:
        """Every process counts what it copied."""
        return Moved(sum(event["moved"]["nbytes"] for event in done.values() if "moved" in event))


def shareable(values: Sequence[Array], dedup: bool) -> tuple[list[Array], int]:
    """A column as Ray is to store it, and its bytes there.

    Pickle knows an object again, so an array that stands in several rows is stored once; views of
    it are others.
    """
    if dedup:
        distinct = {id(value): value.nbytes for value in values}
        return list(values), sum(distinct.values())
    return [value.view() for value in values], sum(value.nbytes for value in values)
