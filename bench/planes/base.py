"""The interface between the bench and a plane: what the runner starts, and what a worker holds.

The runner sees a `Plane` (services to start, where workers find them, what they moved); a worker
sees an `Endpoint` (put groups, take batches). Neither side ever sees another plane's types.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from numpy.typing import NDArray

from bench.columns import Choice, group_bytes, rollout_fields, stage_fields
from bench.trace import TASKS, Prompt, Task, generate

Array = NDArray[Any]
Columns = Mapping[str, Sequence[Array]]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run: everything that a service or a worker must know, as JSON."""

    trace: str
    prompts: int
    seed: int
    hosts: int
    trainers: int
    dedup: bool
    columns: Choice
    arena_bytes: int
    folder: str  # of this run: sockets, logs
    parent: int  # the runner's pid; every process dies with it

    @property
    def task(self) -> Task:
        return TASKS[self.trace]

    def generate(self) -> list[Prompt]:
        return generate(self.task, self.prompts, self.seed)

    def stages(self) -> dict[str, list[str]]:
        return stage_fields(self.task, self.columns)

    def largest_group(self) -> Prompt:
        fields = rollout_fields(self.task)
        return max(self.generate(), key=lambda prompt: group_bytes(fields, prompt, self.dedup))


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process. `address` is what the plane says about where its services are."""

    job: Job
    plane: str
    role: str  # rollout, reward or train
    rank: int
    host: int
    address: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"


class Moved(msgspec.Struct, frozen=True):
    """Payload bytes that a plane copied; a copy between hosts counts as `across`, and only so."""

    copied_in: int = 0
    across: int = 0
    copied_out: int = 0

    @property
    def total(self) -> int:
        return self.copied_in + self.across + self.copied_out


@dataclass(frozen=True, slots=True)
class Service:
    """A process that a plane needs. `speaks`: it prints events, the first of them `ready`."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    speaks: bool = False


class Batch(ABC):
    """Rows that a stage holds. Values stay valid until the next batch is asked for."""

    @abstractmethod
    def column(self, field: str) -> Sequence[Array]:
        """One array a row, read-only."""

    @abstractmethod
    def add(self, columns: Columns) -> None:
        """New fields for these rows."""

    def rows(self) -> list[tuple[int, int]]:
        """(prompt, sample) of each row, as the rollout worker wrote them into `uid`."""
        return [(int(uid[0]), int(uid[1])) for uid in self.column("uid")]


class Endpoint(ABC):
    """A worker's end of a plane."""

    @abstractmethod
    def put(self, prompt: int, columns: Columns) -> None:
        """One whole group. The caller may overwrite the arrays afterwards."""

    @abstractmethod
    def finish(self) -> None:
        """This rollout worker has put all its groups."""

    @abstractmethod
    def batches(self, stage: str) -> Iterator[Batch]:
        """Batches of a stage until it is drained; `train` gets one whole group at a time.

        Asking for the next batch says that the last one is done.
        """

    def moved(self) -> Moved:
        """What this end copied, for planes whose services cannot know it."""
        return Moved()

    @abstractmethod
    def close(self) -> None:
        """Leave the plane in order."""


class Plane(ABC):
    """The runner's side of a plane, for one run."""

    name: ClassVar[str]
    dedup_variants: ClassVar[
        tuple[bool, ...]
    ]  # what runs where neither --dedup nor --no-dedup is given

    def __init__(self, job: Job) -> None:
        self.job = job

    @abstractmethod
    def services(self) -> list[Service]: ...

    @abstractmethod
    def reachable(self, ready: Mapping[str, dict[str, Any]]) -> bool:
        """Whether workers can attach now. `ready` holds the ready events of services that speak."""

    @abstractmethod
    def address(self, host: int) -> dict[str, Any]:
        """What a worker on this host needs in order to attach."""

    @abstractmethod
    def moved(self, done: Mapping[str, dict[str, Any]]) -> Moved:
        """What was moved, asked when all workers are done. `done`: every process's last event."""

    @abstractmethod
    def close(self) -> None:
        """Give up what the runner itself holds of this plane."""

    @classmethod
    @abstractmethod
    def attach(cls, worker: Worker) -> Endpoint:
        """Called in the worker process."""
