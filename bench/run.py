"""One run after the other: start a plane's services and the workers, listen, check, add up.

A run ends `ok` only when every row reached a trainer with the content that was put; a worker that
dies, a deadline or the kernel's OOM killer end it with `error` or `oom` and the last log lines.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.check import Ledger
from bench.columns import DEDUP, SCORES, Choice, group_bytes, rollout_fields
from bench.memory import Sampler, oom_kills
from bench.planes import PLANES, Plane
from bench.planes.base import Job, Moved, Worker
from bench.processes import Crew, ProcessDied
from bench.trace import TASKS

_MIB = 1 << 20
_ROOMY = 4  # groups that an arena of automatic size holds
_REFUSED_MEMORY = ("MemoryError", "Cannot allocate memory")  # by an rlimit, not by the kernel

Said = dict[str, dict[str, Any]]
Progress = Callable[[int, int], None]  # rows trained, rows expected


class RunTimeout(RuntimeError):
    """The run was not over at its deadline."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says. `dedup` None: each plane as it is, see `dedup_variants`."""

    trace: str
    planes: tuple[str, ...]
    hosts: int = 2
    prompts: int = 16
    seed: int = 0
    trainers: int = 2
    dedup: bool | None = None
    columns: Choice = "needed"
    arena_bytes: int | None = None
    timeout_s: float = 240.0


def variants(settings: Settings) -> list[tuple[str, bool]]:
    """The runs that the settings ask for: (plane, dedup)."""
    media = any(field.name in DEDUP for field in rollout_fields(TASKS[settings.trace]))
    runs = []
    for name in settings.planes:
        ways = PLANES[name].dedup_variants if media else PLANES[name].dedup_variants[:1]
        ways = ways if settings.dedup is None else (settings.dedup,)
        runs += [(name, dedup) for dedup in ways]
    return runs


def execute(settings: Settings, name: str, dedup: bool, progress: Progress) -> dict[str, Any]:
    """One run of one plane, as a plain dict for the report."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        job = _job(settings, dedup, folder)
        ledger = Ledger(job.prompts, job.task.samples, job.stages()["train"])
        run = _Run(job, PLANES[name](job), ledger, time.monotonic() + settings.timeout_s, progress)
        kills = oom_kills()
        try:
            run.perform()
            problems = ledger.problems()
            status = "error" if problems else "ok"
        except (ProcessDied, RunTimeout) as exc:
            problems = [str(exc)]
            status = "oom" if _ran_out_of_memory(exc, kills) else "error"
        except Exception as exc:  # whatever a plane raises in the runner ends this run alone
            problems, status = [f"{type(exc).__name__}: {exc}"], "error"
        return run.result(name, status, "\n".join(problems))


def _job(settings: Settings, dedup: bool, folder: str) -> Job:
    task = TASKS[settings.trace]
    job = Job(
        trace=settings.trace,
        prompts=settings.prompts,
        seed=settings.seed,
        hosts=settings.hosts,
        trainers=settings.trainers,
        dedup=dedup,
        columns=settings.columns,
        arena_bytes=settings.arena_bytes or 0,
        folder=folder,
        parent=os.getpid(),
    )
    if settings.arena_bytes:
        return job
    largest = group_bytes(rollout_fields(task), job.largest_group(), dedup)
    arena = max(256 * _MIB, -(-_ROOMY * largest // (64 * _MIB)) * 64 * _MIB)
    return msgspec.structs.replace(job, arena_bytes=arena)


def _ran_out_of_memory(exc: Exception, kills_before: int) -> bool:
    if not isinstance(exc, ProcessDied):
        return False
    killed = exc.returncode == -9 and oom_kills() > kills_before
    return killed or any(refusal in exc.log for refusal in _REFUSED_MEMORY)


class _Run:
    """The state of one run, kept so that a failed one still reports what is known."""

    def __init__(
        self, job: Job, plane: Plane, ledger: Ledger, deadline: float, progress: Progress
    ) -> None:
        self._job = job
        self._plane = plane
        self._ledger = ledger
        self._deadline = deadline
        self._progress = progress
        self._ready: Said = {}
        self._done: Said = {}
        self._started: float | None = None
        self._ended: float | None = None
        self._moved = Moved()
        self._sampler: Sampler | None = None

    def perform(self) -> None:
        crew = Crew(Path(self._job.folder))
        self._sampler = Sampler(crew.pids)
        with crew, self._sampler:
            try:
                self._services(crew)
                workers = self._workers(crew)
                self._started = time.monotonic()
                for worker in workers:
                    crew.tell(worker)
                self._listen(crew, "the workers to finish", lambda: self._done.keys() >= workers)
                self._ended = max(self._done[worker]["end"] for worker in workers)
                speaking = {s.name for s in self._plane.services() if s.speaks}
                self._listen(crew, "the plane to finish", lambda: self._done.keys() >= speaking)
                self._moved = self._plane.moved(self._done)
            finally:
                self._ended = self._ended or time.monotonic()
                self._plane.close()

    def _services(self, crew: Crew) -> None:
        for service in self._plane.services():
            crew.start(service.name, service.argv, service.env, service.speaks)
        self._listen(crew, "the plane to start", lambda: self._plane.reachable(self._ready))

    def _workers(self, crew: Crew) -> set[str]:
        job = self._job
        crowd = (("rollout", job.hosts), ("reward", job.hosts), ("train", job.trainers))
        workers = [
            Worker(
                job=job,
                plane=self._plane.name,
                role=role,
                rank=rank,
                host=rank % job.hosts,
                address=self._plane.address(rank % job.hosts),
            )
            for role, count in crowd
            for rank in range(count)
        ]
        for worker in workers:
            spec = msgspec.json.encode(worker).decode()
            crew.start(worker.name, [sys.executable, "-m", "bench.worker", spec])
        names = {worker.name for worker in workers}
        self._listen(crew, "the workers to attach", lambda: self._ready.keys() >= names)
        return names

    def _listen(self, crew: Crew, awaited: str, reached: Callable[[], bool]) -> None:
        while not reached():
            for name, event in crew.events():
                match event["event"]:
                    case "ready":
                        self._ready[name] = event
                    case "done":
                        self._done[name] = event
                    case _:
                        self._ledger.record(event)
            self._progress(self._ledger.trained_rows, self._ledger.expected_rows)
            if time.monotonic() > self._deadline:
                trained = f"{self._ledger.trained_rows} of {self._ledger.expected_rows} rows"
                raise RunTimeout(
                    f"at its deadline the run still waited for {awaited}; {trained} were trained"
                    + "".join(f"\n{m.name}:\n{m.tail()}" for m in crew.members.values() if m.tail())
                )

    def result(self, plane: str, status: str, error: str) -> dict[str, Any]:
        job, sampler = self._job, self._sampler
        assert sampler is not None
        seconds = (self._ended - self._started) if self._ended and self._started else None
        return {
            "plane": plane,
            "trace": job.trace,
            "status": status,
            "error": error,
            "rows": self._ledger.trained_rows,
            "rows_expected": self._ledger.expected_rows,
            "bytes_unique": sum(self._unique_bytes()),
            "bytes_moved": self._moved.total,
            "moved": msgspec.to_builtins(self._moved),
            "seconds": seconds,
            "peak_memory_bytes": sampler.peak_bytes,
            "peak_total_bytes": sampler.peak_total_bytes,
            "dedup": job.dedup,
            "columns": job.columns,
            "hosts": job.hosts,
            "trainers": job.trainers,
            "prompts": job.prompts,
            "samples": job.task.samples,
            "seed": job.seed,
            "arena_bytes": job.arena_bytes,
            "workers": {name: self._worker_times(event) for name, event in self._done.items()},
            "bench_seconds": self._own_cost(),
            "memory_samples": sampler.samples,
        }

    def _unique_bytes(self) -> Iterator[int]:
        fields = (*rollout_fields(self._job.task), *SCORES)
        return (group_bytes(fields, prompt, dedup=True) for prompt in self._job.generate())

    def _worker_times(self, event: dict[str, Any]) -> dict[str, Any]:
        start = self._started or 0.0
        return {
            "seconds": event.get("seconds", {}),
            "span": [event[name] - start for name in ("start", "end") if name in event],
        }

    def _own_cost(self) -> dict[str, float]:
        """CPU-bound work of the bench itself inside the timed part, summed over the workers."""
        cost = {"generate": 0.0, "digest": 0.0, "check": 0.0}
        for event in self._done.values():
            for name in cost:
                cost[name] += event.get("seconds", {}).get(name, 0.0)
        cost["memory_sampling"] = self._sampler.sampling_seconds if self._sampler else 0.0
        return cost
