"""Executes runs one after the other: start a plane's services and the workers, collect events,
check, add up.

A run ends with `ok` only if every row reached a trainer with the content that was put. A worker
that dies, a deadline or the kernel's OOM killer ends it with `error` or `oom` and the last log
lines. The logs of a run that ends with `error` are kept.
"""

from __future__ import annotations

import operator
import os
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from bench import limits, usage
from bench.check import Ledger
from bench.columns import all_fields, group_bytes, rollout_fields
from bench.links import NODE_BITS, Network, NoNamespaces, Traffic
from bench.pace import recorded_seconds
from bench.planes import PLANES
from bench.planes.base import Job, Moved, Service, Worker
from bench.processes import Crew, ProcessDied, run_folder
from bench.usage import Sampler

_MIB = 1 << 20
_ROOMY = 4  # groups that an arena of automatic size holds
_REFUSED_MEMORY = ("MemoryError", "Cannot allocate memory")  # by an rlimit, not by the kernel
_SETTINGS = (
    "plane", "trace", "dedup", "hosts", "trainers", "prompts", "samples", "steps", "staleness",
    "apart", "phased", "seed", "pace", "arena_bytes",
)  # fmt: skip
"""Settings of a job that the report has."""
_TOO_LARGE = "dataplane.errors.ValueTooLarge:"  # a group that the arena can never hold

Said = dict[str, dict[str, Any]]  # by process: its last event
Progress = Callable[[int, int], None]  # rows trained, rows expected


class RunTimeout(RuntimeError):
    """The run did not finish before its deadline."""


def execute(job: Job, progress: Progress) -> dict[str, Any]:
    """Execute one run, and return it as a plain dict for the report."""
    with run_folder() as folder:
        job = prepared(job, folder)
        prompts = job.generate()
        filtered = {prompt.index for prompt in prompts if not job.is_trained(prompt)}
        ledger = Ledger(len(prompts), job.samples, job.stages()["train"], filtered)
        run = _Run(job, ledger, progress)
        if missing := PLANES[job.plane].missing():
            return run.result("not installed", f"missing packages: {', '.join(missing)}")
        try:
            with Network(job.hosts, job.link) if job.link else nullcontext() as run.network:
                run.perform()
            problems = ledger.problems()
            status = "error" if problems else "ok"
        except (limits.NoLimits, NoNamespaces) as exc:
            problems, status = [str(exc)], "not run"
        except limits.MachineFull as exc:
            problems, status = [str(exc)], "disturbed"
        except (ProcessDied, RunTimeout) as exc:
            problems, status = [str(exc)], _outcome(exc)
        except Exception as exc:  # whatever a plane raises in the runner ends this run alone
            problems, status = [f"{type(exc).__name__}: {exc}"], "error"
        if run.killed:
            status, limit = "oom", f"{job.memory_limit_bytes >> 20} MiB"
            told = f"host {run.killed['host']} reached its limit of {limit}, and the kernel killed"
            problems.insert(0, f"{told} a process")
        if status in ("error", "disturbed", "oom"):
            problems += run.endings + ([] if status == "oom" else _kept(folder))
        return run.result(status, "\n".join(problems))


def execute_again(job: Job, progress: Progress, failed: Callable[[str], None]) -> dict[str, Any]:
    """Execute one run, and repeat it once if it fails. failed: called with the first failure."""
    first = execute(job, progress)
    if first["status"] not in ("error", "disturbed"):
        return first
    failed(f"the first attempt ended with {first['status']!r}: {first['error']}")
    before = {name: first[name] for name in ("status", "error", "step_seconds")}
    return execute(job, progress) | {"failed_before": before}


def _kept(folder: Path) -> list[str]:
    """Copy the logs of a run's processes to a lasting folder. Return a sentence that names it."""
    if not (found := sorted(folder.glob("*.log"))):
        return []
    kept = tempfile.mkdtemp(prefix="bench-logs-")
    for log in found:
        shutil.copy(log, kept)
    return [f"the logs of all processes are in {kept}"]


def prepared(job: Job, folder: Path) -> Job:
    """The job for its processes, with its part of the trace files in `folder`."""
    if job.trace_files:
        from bench.traces import parquet

        path = folder / "trace.parquet"
        parquet.write(path, job.trace, job.seed, job.generate())
        job = replace(job, trace_files=(str(path),))
    return replace(
        job, folder=str(folder), parent=os.getpid(), arena_bytes=job.arena_bytes or _arena(job)
    )


def _arena(job: Job) -> int:
    if job.memory_limit_bytes:  # what a peer takes by itself
        return job.memory_limit_bytes // 4
    fields = rollout_fields(job.task)
    largest = max(group_bytes(fields, prompt, job.dedup) for prompt in job.generate())
    groups = _ROOMY + sum(one.most * one.workers for one in job.recorded if one.role != "train")
    return max(256 * _MIB, -(-groups * largest // (64 * _MIB)) * 64 * _MIB)


def _outcome(exc: Exception) -> str:
    if not isinstance(exc, ProcessDied):
        return "error"
    if any(refusal in exc.log for refusal in _REFUSED_MEMORY):
        return "oom"
    return "refused" if _TOO_LARGE in exc.log else "error"


class _Run:
    """The state of one run, so that even a failed run reports its results so far."""

    def __init__(self, job: Job, ledger: Ledger, progress: Progress) -> None:
        self._job = job
        self._ledger = ledger
        self._deadline = time.monotonic() + job.timeout_s
        self._progress = progress
        self._ready: Said = {}
        self._done: Said = {}
        self._opened = time.monotonic()  # the curve's zero where the workers never started
        self._started: float | None = None
        self._ended: float | None = None
        self._sampler = Sampler(dict)
        self._sampled_before_s = 0.0
        self._cgroups: list[limits.HostCgroup] = []
        self.network: Network | None = None
        self._traffic: Traffic | None = None
        # For the report, if the run ended.
        self._moved = Moved()
        self._cpu_seconds: dict[str, float] = {}  # of services, the runner, everybody
        self._cpu_counted_s = 0.0
        self.killed: dict[str, Any] | None = None
        self.endings: list[str] = []  # of processes, before the runner ended the others
        self._rollouts_done: Counter[int] = Counter()  # by step
        self._step_starts: dict[int, float] = {}  # of the first rollout worker
        self._trained: dict[int, list[float]] = defaultdict(list)  # when each trainer finished
        self._step_ends: list[float] = []

    def perform(self) -> None:
        """The whole run, under the limits that the job asks for."""
        job, crew = self._job, Crew(Path(self._job.folder))
        self._plane = PLANES[job.plane](job)
        with limits.host_cgroups(job.hosts, job.memory_limit_bytes) as self._cgroups:
            self._sampler = Sampler(crew.pids, self._cgroups if job.memory_limit_bytes else ())
            with crew, self._sampler:
                self._perform(crew)

    def _perform(self, crew: Crew) -> None:
        try:
            for service in self._plane.services():
                self._start(crew, service)
            self._listen(crew, "the plane to start", lambda: self._plane.reachable(self._ready))
            workers = self._workers(crew)
            self._sampler.sample()  # a run may be over before the sampler looks again
            before, busy = self._cpu_of_services(crew), usage.machine_seconds()
            counted_from = time.monotonic()
            self._sampled_before_s = self._sampler.sampling_seconds
            with Traffic(self.network) if self.network else nullcontext() as self._traffic:
                self._started = time.monotonic()
                for worker in workers:
                    crew.tell(worker, f"policy 0 {self._started}")
                self._listen(crew, "the workers to finish", lambda: self._done.keys() >= workers)
            self._ended = max(self._done[worker]["end"] for worker in workers)
            self._cpu_seconds = usage.between(before, self._cpu_of_services(crew))
            self._cpu_seconds["machine"] = usage.machine_seconds() - busy
            self._cpu_counted_s = time.monotonic() - counted_from
            speaking = {name for name, one in crew.members.items() if one.speaks}
            self._listen(crew, "the plane to finish", lambda: self._done.keys() >= speaking)
            self._moved = self._plane.moved(self._done)
            limits.check(self._cgroups)
        except Exception as exc:
            self.endings = crew.endings(any(group.kills() for group in self._cgroups))
            if not isinstance(exc, ProcessDied | RunTimeout):  # these have the ends of logs
                self.endings += crew.account().splitlines()
            self.killed = self._killed()
            if not self.killed:  # a kill below the limit explains the other errors
                limits.check(self._cgroups)
            raise
        finally:
            self._ended = self._ended or time.monotonic()
            self._plane.close()

    def _cpu_of_services(self, crew: Crew) -> dict[str, float]:
        """Processor seconds so far of services that do not count their own, and of the runner."""
        pids = {name: pid for name, pid in crew.pids().items() if not crew.members[name].speaks}
        return usage.cpu_seconds(pids) | {"runner": time.process_time()}

    def _killed(self) -> dict[str, Any] | None:
        """The host at whose limit the kernel killed a process, if any, and when."""
        for host, group in enumerate(self._cgroups):
            if group.kills() and group.met_limit():
                at = time.monotonic() - (self._started or self._opened)
                return {"host": host, "seconds": at}
        return None

    def _start(self, crew: Crew, service: Service) -> None:
        argv = self.network.wrap(service.host, service.argv) if self.network else service.argv
        argv = self._cgroups[service.host].wrap(argv) if self._cgroups else argv
        crew.start(service.name, argv, service.env, service.speaks)

    def _workers(self, crew: Crew) -> set[str]:
        job = self._job
        workers = [
            Worker(
                job=job,
                role=role,
                rank=rank,
                host=job.host_of(role, rank),
                address=self._plane.address(job.host_of(role, rank), self._ready),
            )
            for role, count in job.crowd().items()
            for rank in range(count)
        ]
        for worker in workers:
            spec = msgspec.json.encode(worker).decode()
            argv = [sys.executable, "-m", "bench.flow", spec]
            self._start(crew, Service(worker.name, argv, speaks=True, host=worker.host))
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
                    case "rolling":
                        at = event["at"] - (self._started or 0.0)
                        self._step_starts.setdefault(int(event["step"]), at)
                    case "rolled":
                        self._rolled(crew, int(event["step"]))
                    case "stepped":
                        self._stepped(crew, event)
                    case _:
                        self._ledger.record(event)
            limits.check(self._cgroups)
            self._progress(self._ledger.trained_rows, self._ledger.expected_rows)
            if time.monotonic() > self._deadline:
                trained = f"{self._ledger.trained_rows} of {self._ledger.expected_rows} rows"
                raise RunTimeout(
                    f"the run timed out while waiting for {awaited}; {trained} were trained on"
                    + crew.account()
                )

    def _rolled(self, crew: Crew, step: int) -> None:
        """Note that a rollout worker has finished a step. After the last one, the step gets no more
        rows."""
        self._rollouts_done[step] += 1
        if self._rollouts_done[step] == self._job.hosts:
            self._plane.rolled(step)
            for name in crew.members if self._job.phased else ():
                if name.partition("-")[0] in self._job.stages():
                    crew.tell(name, f"rolled {step}")

    def _stepped(self, crew: Crew, event: dict[str, Any]) -> None:
        """Note that a trainer has finished a step. The last one releases the next policy."""
        step = int(event["step"])
        self._trained[step].append(event["at"])
        if len(self._trained[step]) == self._job.trainers:
            ended = max(self._trained[step])
            self._step_ends.append(ended - (self._started or 0.0))
            for rank in range(self._job.hosts):
                crew.tell(f"rollout-{rank}", f"policy {step + 1} {ended}")

    def result(self, status: str, error: str) -> dict[str, Any]:
        job, sampler = self._job, self._sampler
        seconds = (self._ended - self._started) if self._ended and self._started else None
        return {
            **{name: getattr(job, name) for name in _SETTINGS},
            "status": status,
            "error": error,
            "rows": self._ledger.trained_rows,
            "rows_expected": self._ledger.expected_rows,
            "rows_filtered": self._ledger.filtered_rows,
            "bytes_unique": self._unique_bytes(),
            "pulled_bytes": self._moved.pulled,
            "cpu_seconds": self._cpu_seconds,
            "cpu_counted_seconds": self._cpu_counted_s,
            "seconds": seconds,
            # Since the end of the previous step. The first is cold.
            "step_seconds": list(map(operator.sub, self._step_ends, [0.0, *self._step_ends])),
            "link": self.network.rate if self.network else None,
            "busiest_link": self._traffic.busiest() if self._traffic else None,
            "recorded_step_seconds": recorded_seconds(job) / job.steps,
            "full_step": self._full_step(),
            "step_starts": [at for _, at in sorted(self._step_starts.items())],
            "step_ends": self._step_ends,
            "peak_memory_bytes": sampler.peak_bytes,
            "peak_host_bytes": sampler.peak_host_bytes,
            "memory_limit_bytes": job.memory_limit_bytes or None,
            "memory_curve": sampler.curve(self._started or self._opened),
            "killed": self.killed,
            "workers": {
                name: {"cpu_seconds": event.get("cpu_seconds", {})}
                for name, event in self._done.items()
            },
            "latency_ms": latency(self._done),
            "bench_seconds": own_cost(
                self._done, sampler.sampling_seconds - self._sampled_before_s
            ),
        }

    def _full_step(self) -> dict[str, Any] | None:
        """Computed for a step with all prompts of the task on usual nodes: the time of the busiest
        link's bytes, and the recorded time. Without links, the plane's own count of bytes is used;
        None if it has none."""
        job = self._job
        ways = [*self._moved.pulled, *self._moved.sent]
        if self._traffic:
            link = self._traffic.busiest()
            ways = [link["received_bytes"], link["sent_bytes"]]
        if not ways or not self._step_ends:
            return None
        nbytes = max(ways) / len(self._step_ends)
        full = replace(job, prompts=job.task.prompts, steps=1, trace_files=())
        return {
            "prompts": job.task.prompts,
            "recorded_seconds": recorded_seconds(full),
            "link_bits_per_second": NODE_BITS,
            "link_seconds": nbytes * job.task.prompts / job.prompts * 8 / NODE_BITS,
        }

    def _unique_bytes(self) -> int:
        """The bytes of the trained groups, with each shared value once."""
        train = self._job.stages()["train"]
        fields = tuple(f for f in all_fields(self._job.task) if f.name in train)
        trained = filter(self._job.is_trained, self._job.generate())
        return sum(group_bytes(fields, prompt, dedup=True) for prompt in trained)


def latency(done: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By role and activity: the durations of single activities, over all workers of the role."""
    spans: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for worker, event in done.items():
        for activity, taken in event.get("spans_ms", {}).items():
            spans[worker.partition("-")[0]][activity] += taken
    told: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for role, activities in spans.items():
        for activity, taken in activities.items():
            p50, p90, p99, most = np.percentile(taken, (50, 90, 99, 100)).tolist()
            marks = {"p50": p50, "p90": p90, "p99": p99, "max": most, "times": len(taken)}
            told[role][activity] = marks
    return dict(told)


def own_cost(done: Mapping[str, Mapping[str, Any]], memory_sampling_s: float) -> dict[str, float]:
    """Processor seconds of the bench's own work in the timed part, summed over the workers."""
    spent = [event.get("cpu_seconds", {}) for event in done.values()]
    own = ("generate", "digest", "check")
    cost = {name: sum((each.get(name, 0.0) for each in spent), 0.0) for name in own}
    return cost | {"memory_sampling": memory_sampling_s}
