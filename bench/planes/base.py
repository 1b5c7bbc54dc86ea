"""The interface between the bench and a plane. The runner uses a `Plane` (services to start, their
addresses, moved bytes), a worker an `Endpoint` (put rows, take batches).

Prompts are numbered through all steps of a run, and rows meet only rows of the same step. The
stages `reward` and `reference` add fields to whole groups; `train` gets a group that has both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from bench.columns import Array, stage_fields
from bench.links import address
from bench.machine import version
from bench.traces import TASKS, Prompt, Task, generate
from bench.traces.sample import StageReplay

Columns = Mapping[str, Sequence[Array]]
_REWARD_ROWS = 64  # most rows that a reward worker claims at once


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its settings, and everything that a service or a worker must know, as JSON."""

    plane: str
    trace: str
    dedup: bool = True
    prompts: int = 16
    seed: int = 0
    hosts: int = 2
    trainers: int = 2
    steps: int = 1
    staleness: int = 0  # steps that rollout may be ahead of the trainers' last finished one
    pace: float = 0.0  # recorded seconds that pass in one; 0: none are waited for
    apart: bool = False  # rollout on the first half of the hosts, all other stages on the others
    phased: bool = False  # stages begin a step when rollout has finished it
    trace_files: tuple[str, ...] = ()  # without them the trace is generated
    recorded: tuple[StageReplay, ...] = ()  # the stages of a recorded job, on all of `hosts`
    arena_bytes: int = 0  # 0: as large as the job needs
    memory_limit_bytes: int = 0  # of each host; 0: none
    timeout_s: float = 240.0
    link: str | None = None  # rate of each host's own link and way; None: hosts meet on loopback
    folder: str = ""  # of this run: sockets, logs
    parent: int = 0  # the runner's pid; every process dies with it

    @property
    def task(self) -> Task:
        return TASKS[self.trace]

    @property
    def samples(self) -> int:
        return len(self.generate()[0].samples)

    def generate(self) -> Sequence[Prompt]:
        """The prompts of all steps, in order: number i of them has index i."""
        return _prompts(self.trace, self.trace_files, self.prompts, self.seed, self.steps)

    @property
    def is_recorded(self) -> bool:
        """Whether the prompts are those of a recorded job, with the times of its stages."""
        return self.generate()[0].times is not None

    def of_step(self, step: int) -> list[Prompt]:
        return [prompt for prompt in self.generate() if prompt.step == step]

    def is_trained(self, prompt: Prompt) -> bool:
        """Whether a group reaches the trainers, or the reward stage filters it out."""
        return self.task.survive is None or prompt.survives

    def phases(self) -> tuple[tuple[str, ...], ...]:
        """Sets of stages that can work at the same time, in order. If rewards filter groups, the
        reference model gets only the groups that are kept."""
        reference = ("reference",) if self.has_reference else ()
        if self.task.survive is None:
            return (("reward", *reference), ("train",))
        return (("reward",), reference, ("train",)) if reference else (("reward",), ("train",))

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model. A recorded job may have none."""
        return not self.recorded or any(one.role == "reference" for one in self.recorded)

    def groups_per_claim(self, stage: str) -> tuple[int, int]:
        """The least and the most groups that a worker of this stage claims at once. A reward worker
        accepts a single group, because a full batch may not fit into the arena."""
        for one in self.recorded:
            if one.role == stage:
                return one.least, one.most
        return 1, max(1, _REWARD_ROWS // self.samples) if stage == "reward" else 1

    def crowd(self) -> dict[str, int]:
        crowd = {"rollout": self.hosts} | dict.fromkeys(self.stages(), self.hosts)
        crowd |= {one.role: one.workers for one in self.recorded}
        return crowd | {"train": self.trainers}

    def host_of(self, role: str, rank: int) -> int:
        """The host of a worker. With `apart`, the first half of the hosts roll out."""
        half = self.hosts // 2
        if not self.apart:
            return rank % self.hosts
        return rank % half if role == "rollout" else half + rank % (self.hosts - half)

    def address_of(self, host: int) -> str:
        return address(host) if self.link else "127.0.0.1"

    def stages(self) -> dict[str, list[str]]:
        return stage_fields(self.task, self.has_reference)


@cache
def _prompts(
    trace: str, trace_files: tuple[str, ...], prompts: int, seed: int, steps: int
) -> tuple[Prompt, ...]:
    if not trace_files:
        return tuple(generate(TASKS[trace], prompts, seed, steps))
    from bench.traces import load  # costs an import that generated traces need not pay

    return tuple(load.of_run(list(map(Path, trace_files)), trace, seed, steps, prompts))


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process. `address` locates the services of the plane."""

    job: Job
    role: str  # rollout, reward, reference or train
    rank: int
    host: int
    address: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"


class Moved(msgspec.Struct, frozen=True):
    """Payload bytes that arrived at each host from others, and that left it, if they are known."""

    pulled: list[int] = []
    sent: list[int] = []


@dataclass(frozen=True, slots=True)
class Service:
    """A process of a plane on a host. `speaks`: it prints events, the first of them `ready`."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    speaks: bool = False
    host: int = 0


class Batch(ABC):
    """The rows of a stage. Values are valid until the next batch is requested."""

    @abstractmethod
    def column(self, field: str) -> Sequence[Array]:
        """One read-only array per row."""

    @abstractmethod
    def add(self, columns: Columns) -> None:
        """Add new fields to these rows, once."""

    @abstractmethod
    def drop(self, prompts: Collection[int]) -> None:
        """Free these groups, so that no other stage gets them. The batch keeps the others."""

    def rows(self) -> list[tuple[int, int]]:
        """(prompt, sample) of each row, as the rollout worker wrote them into `uid`."""
        return [(int(uid[0]), int(uid[1])) for uid in self.column("uid")]


class Group(Batch):
    """A batch of one group in memory. The plane reports later what the stage added or dropped."""

    def __init__(self, columns: Mapping[str, Sequence[Array]]) -> None:
        self.added: dict[str, Sequence[Array]] = {}
        self.dropped = False
        self._columns = columns

    def column(self, field: str) -> Sequence[Array]:
        return self._columns[field]

    def add(self, columns: Columns) -> None:
        self.added.update(columns)

    def drop(self, prompts: Collection[int]) -> None:
        self.dropped = True  # it is the only group of this batch


class Endpoint(ABC):
    """A worker's connection to a plane."""

    @abstractmethod
    def __init__(self, worker: Worker) -> None:
        """Attach this worker. Called in its process."""

    @abstractmethod
    def put(self, step: int, prompt: int, columns: Columns) -> None:
        """Put one whole group. The caller may overwrite the arrays afterwards."""

    def finish(self, step: int) -> None:  # noqa: B027  # many planes know it by themselves
        """Note that this rollout worker has put all its groups of the step."""

    @abstractmethod
    def batches(self, step: int, stage: str) -> Iterator[Batch]:
        """Batches of a stage until the step has no more: whole groups, for `train` one at a
        time. Requesting the next batch finishes the last one."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect from the plane."""


class Plane(ABC):
    """The runner's side of a plane, for one run."""

    endpoint: ClassVar[type[Endpoint]]  # by which a worker's process attaches
    packages: ClassVar[tuple[str, ...]] = ()  # optional ones, without which it cannot run
    can_dedup: ClassVar[bool] = True

    def __init__(self, job: Job) -> None:
        self.job = job

    @classmethod
    def missing(cls) -> list[str]:
        """Its packages that are not installed."""
        return [package for package in cls.packages if version(package) is None]

    @abstractmethod
    def services(self) -> list[Service]: ...

    @abstractmethod
    def reachable(self, ready: Mapping[str, Any]) -> bool:
        """Whether workers can attach. `ready`: by name, the ready events of services that speak."""

    @abstractmethod
    def address(self, host: int, ready: Mapping[str, Any]) -> dict[str, Any]:
        """What a worker on this host needs to attach."""

    def rolled(self, step: int) -> None:  # noqa: B027  # many planes need not know it
        """Note that all rollout workers have finished the step, so it gets no further rows."""

    def moved(self, done: Mapping[str, dict[str, Any]]) -> Moved:
        """The moved bytes, after all workers have finished. `done`: every process's last event."""
        return Moved()

    def close(self) -> None:  # noqa: B027  # for many planes it holds nothing
        """Release what the runner itself holds of this plane."""
