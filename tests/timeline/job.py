"""Steps of a small RL job on real peers and processes, slowed down in one known way.

`python -m tests.timeline.job [CASE…]` plays the cases, one after the other, and prints what
`dataplane why` says of each.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

import dataplane
from bench.processes import die_with, run_folder
from dataplane.timeline.causes import HEALTHY, Cause
from dataplane.timeline.step import Step
from dataplane.timeline.why import Why, explain
from dataplane.wire.events import Kind
from tests.chaos.hosts import Hosts
from tests.chaos.network import FAIR, Weather
from tests.cluster import Cluster, environment
from tests.perf.children import spawned

HOSTS = "abc"
STAGES = {"reward": ["x"], "train": ["x", "reward"]}
GONE_ON_S = 2.5
"""A step that cannot end is asked about after so long."""
SOUND_S = 1.0
"""What a step of a plain `Job` takes on an idle machine."""
MOST_STRETCHED = 10.0
END_S = 60.0


@dataclass(frozen=True)
class Job:
    """One step: each host has a rollout worker, which makes `groups` groups of `rows` rows, and a
    reward worker. Host a has the trainer, which takes `batch` groups at a time."""

    groups: int = 4
    rows: int = 2
    row_bytes: int = 4_096
    batch: int = 3
    generate_s: float = 0.15
    reward_s: float = 0.05
    train_s: float = 0.05
    rewarders: str = HOSTS
    """hosts that have a reward worker"""
    slow: dict[str, float] = field(default_factory=dict)
    """how many times longer reward takes on a host"""
    longest: float = 1.0
    """how many times longer the last group of the last host takes"""
    held_s: float = 0.0
    """how long host c's reward worker holds its first batch"""
    places: int = 0
    """the groups of one version that `admit` lets rollout have in progress; 0: no `admit`"""
    sealed: bool = True
    version: int = 1
    """the tag of the rows that the trainer wants; rollout makes rows with tag 1"""
    bytes_per_s: float = 0.0
    """what host b's link carries; 0: no limit"""
    frozen_s: float = 0.0
    """host b's peer does not run for so long"""
    backed_up: bool = False
    """host b's peer holds the backup of the step's partition"""
    full_s: float = 0.0
    """rows of an earlier step fill host b's arena for so long"""
    goes_on: bool = False
    """it does not end by itself"""
    stretched: float = 1.0
    """by how much all its times were stretched"""

    def stretch(self, times: float) -> Job:
        """Return the same step with all times so much longer. On a busy machine what is planted
        must last longer than what the machine itself takes."""
        names = ("generate_s", "reward_s", "train_s", "held_s", "frozen_s", "full_s")
        longer = {name: getattr(self, name) * times for name in names}
        return replace(self, **longer, bytes_per_s=self.bytes_per_s / times, stretched=times)


@dataclass(frozen=True)
class Case:
    """A step to which something is done, and what its sentence should name: these causes, in these
    words. None: nothing is wrong."""

    job: Job
    causes: tuple[Cause, ...] = ()
    words: tuple[str, ...] = ()

    def is_named(self, found: Why) -> bool:
        told = found.shares[:2]
        if not self.causes:
            return all(one.cause in HEALTHY for one in told if one.seconds >= 0.2 * found.idle_s)
        named = found.cause in self.causes and {one.cause for one in told} >= set(self.causes)
        return named and all(words in found.sentence for words in self.words)


THROTTLED: dict[str, Any] = {"row_bytes": 128 << 10, "bytes_per_s": 1e6}
SLOW_REWARD, SLOW_LINK = "reward on host c ran at", "came from b to a"
CASES = {
    "slow reward host": Case(
        Job(slow={"c": 10.0}, groups=6, batch=18, generate_s=0.1),
        (Cause.SLOW_WORKER,),
        (SLOW_REWARD,),
    ),
    "throttled link": Case(Job(**THROTTLED), (Cause.SLOW_LINK,), (SLOW_LINK,)),
    "unacked batch": Case(
        Job(held_s=6.0, goes_on=True), (Cause.UNACKED_LEASE,), ("holds 1 group of stage reward",)
    ),
    "batch acked late": Case(
        Job(held_s=2.5), (Cause.UNACKED_LEASE,), ("acked 1 group of stage reward only after",)
    ),
    "full arena": Case(
        Job(row_bytes=128 << 10, full_s=2.5), (Cause.FULL_ARENA,), ("in the arena of b",)
    ),
    "missing seal": Case(Job(batch=5, sealed=False, goes_on=True), (Cause.NOT_SEALED,)),
    # So many groups that a few which a busy machine delays make no slow host of their median.
    "skewed lengths": Case(
        Job(groups=8, longest=20.0, batch=24), (Cause.STRAGGLER,), ("group 'c7'",)
    ),
    "starved peer": Case(Job(frozen_s=2.0), (Cause.STARVED_PEER,), ("peer b",)),
    "starved backup": Case(
        Job(frozen_s=1.5, backed_up=True),
        (Cause.STARVED_PEER,),
        ("peer b",),
    ),
    "admit too tight": Case(Job(places=1, batch=1, generate_s=0.3), (Cause.ADMIT,)),
    "filter that excludes everything": Case(
        Job(version=2, sealed=False, goes_on=True), (Cause.FILTER,)
    ),
    "too few reward workers": Case(
        Job(rewarders="b", reward_s=0.2, generate_s=0.05), (Cause.TOO_FEW_WORKERS,)
    ),
    "no reward worker": Case(
        Job(rewarders="", goes_on=True),
        (Cause.TOO_FEW_WORKERS,),
        ("no worker had claimed from it",),
    ),
    "too few reward workers, throttled link": Case(
        Job(rewarders="c", reward_s=0.15, generate_s=0.05, **THROTTLED),
        (Cause.TOO_FEW_WORKERS, Cause.SLOW_LINK),
    ),
    "skewed lengths, throttled link": Case(
        Job(longest=10.0, **THROTTLED), (Cause.STRAGGLER, Cause.SLOW_LINK)
    ),
    "bound by rollout": Case(Job(generate_s=0.3)),
    "bound by the trainer": Case(Job(generate_s=0.02, train_s=0.4)),
    "one batch": Case(Job(batch=12)),
    "values of 128 KiB": Case(Job(row_bytes=128 << 10)),
    "admit that lets all work": Case(Job(places=6)),
    "reward as slow as rollout": Case(Job(reward_s=0.12)),
}


# workers


def _work(pipe: Connection, host: str, run: str, parent: int) -> None:
    """Work as told, one part after another, until told None."""
    die_with(parent)
    roles = {"rollout": _roll_out, "reward": _reward, "train": _train}
    with dataplane.connect(host, run=run) as plane:
        pipe.send("ready")
        while (told := pipe.recv()) is not None:
            role, step, job = told
            with contextlib.suppress(dataplane.PartitionGone, dataplane.LeaseExpired):
                roles[role](plane.partition(step), host, job)
            pipe.send("done")


def _roll_out(part: dataplane.Partition, host: str, job: Job) -> None:
    rng = np.random.default_rng()
    for nth in range(job.groups):
        admission = part.admit(1, per_version=job.places, max_lag=0) if job.places else None
        with admission or contextlib.nullcontext():
            is_last = host == HOSTS[-1] and nth == job.groups - 1
            time.sleep(job.generate_s * (job.longest if is_last else 1.0))
            rows = [rng.integers(0, 255, job.row_bytes, np.uint8) for _ in range(job.rows)]
            part.put({"x": rows}, group=f"{host}{nth}", tags={"version": [1] * job.rows})


def _reward(part: dataplane.Partition, host: str, job: Job) -> None:
    for nth, batch in enumerate(part.stream("reward", groups=1)):
        held_s = job.held_s if host == "c" and not nth else 0.0
        time.sleep(held_s or job.reward_s * job.slow.get(host, 1.0))
        batch.add(reward=np.zeros(len(batch)))


def _train(part: dataplane.Partition, host: str, job: Job) -> None:
    where = dataplane.tag("version") == job.version
    with contextlib.suppress(dataplane.StreamEnd):
        for version in itertools.count(1):
            with part.claim("train", groups=job.batch, where=where) as batch:
                time.sleep(job.train_s)
                batch.ack()
            part.advance(version)


# the plane


class Plane:
    """Peers with their workers, on which steps are played."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.planes = {host: cluster.connect(host) for host in HOSTS}
        self.workers: dict[tuple[str, str], tuple[BaseProcess, Connection]] = {}
        roles = [("train", "a"), *itertools.product(("rollout", "reward"), HOSTS)]
        for role, host in roles:
            self.workers[role, host] = spawned(_work, host, cluster.run)
        for _, pipe in self.workers.values():
            assert pipe.poll(END_S) and pipe.recv() == "ready"
        self._numbers = itertools.count(1)

    def close(self) -> None:
        for process, pipe in self.workers.values():
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(5)
            process.kill()
            process.join()
            pipe.close()
        for plane in self.planes.values():
            plane.close()

    def stretch(self) -> float:
        """Return how many times longer a step takes now than on an idle machine, at least 1."""
        return min(MOST_STRETCHED, max(1.0, self.play(Job()).seconds / SOUND_S))

    def play(self, job: Job) -> Why:
        """A step, and what the events say of it."""
        plane = self.planes["a"]
        name = self._backed_up_by("b") if job.backed_up else f"step-{next(self._numbers)}"
        part = plane.partition(
            name,
            stages=STAGES,
            group_size=job.rows,
            groups=job.groups * len(HOSTS) if job.sealed else None,
        )
        with contextlib.ExitStack() as stack:
            for hindrance in (self._full, self._slow_link, self._frozen):
                stack.enter_context(hindrance(job))
            busy = []
            for (role, host), (_, pipe) in self.workers.items():
                if role != "reward" or host in job.rewarders:
                    pipe.send((role, name, job))
                    busy.append(pipe)
            if not job.goes_on:
                self._await(busy, job)
                return explain(Step(plane.events(), name))
            rollouts = [self.workers["rollout", host][1] for host in HOSTS]
            self._await(rollouts, job)
            time.sleep(GONE_ON_S * job.stretched)
            found = explain(Step(plane.events(), name))
            part.drop()
            self._await([pipe for pipe in busy if pipe not in rollouts], job)
            return found

    def _backed_up_by(self, peer: str) -> str:
        """Return a name for a partition whose backup this peer holds."""
        plane = self.planes["a"]
        for number in self._numbers:
            name = f"step-{number}"
            part = plane.partition(name, stages=STAGES)
            part.put({"x": [0]})
            part.drop()
            events = plane.events()
            served_by = Step(events, name).served_by
            backups = {e.peer: e.by for e in events if e.kind is Kind.BACKUP and e.going_on}
            if backups.get(served_by) == peer:
                return name
        raise AssertionError("the names came to an end")

    def _await(self, pipes: list[Connection], job: Job) -> None:
        for pipe in pipes:
            assert pipe.poll(END_S * job.stretched), "a worker does not end"
            assert pipe.recv() == "done"

    @contextlib.contextmanager
    def _full(self, job: Job) -> Iterator[None]:
        """Rows of an earlier step that somebody works on."""
        if not job.full_s:
            yield
            return
        rows = 0
        variables = {"DATAPLANE_RUN_DIR": str(self.cluster.run_dir), "DATAPLANE_TOKEN_FILE": ""}
        with environment(**variables), self.cluster.connect("b") as plane:
            part = plane.partition(f"earlier-{next(self._numbers)}", stages={"s": ["x"]})
            for nbytes in (1 << 20, 1 << 16):
                with contextlib.suppress(dataplane.BackPressure):
                    while True:
                        part.put({"x": np.zeros((1, nbytes), np.uint8)}, timeout=0.5)
                        rows += 1
            held = [part.claim("s", rows=rows)]
            timer = threading.Timer(job.full_s, lambda: held.pop().ack())
            timer.start()
            yield
            timer.join()
            part.drop()

    @contextlib.contextmanager
    def _slow_link(self, job: Job) -> Iterator[None]:
        if not job.bytes_per_s:
            yield
            return
        assert isinstance(self.cluster, Hosts)
        address = self.cluster.address("b")
        self.cluster.switch.set(address, Weather(bytes_per_s=job.bytes_per_s))
        yield
        self.cluster.switch.set(address, FAIR)

    @contextlib.contextmanager
    def _frozen(self, job: Job) -> Iterator[None]:
        if not job.frozen_s:
            yield
            return
        timers = [
            threading.Timer(0.3, self.cluster.freeze, ["b"]),
            threading.Timer(0.3 + job.frozen_s, self.cluster.wake, ["b"]),
        ]
        for timer in timers:
            timer.start()
        yield
        for timer in timers:
            timer.join()


@contextlib.contextmanager
def running(links: bool = False) -> Iterator[Plane]:
    """links: hosts have links of their own, which can be throttled. PermissionError where they
    cannot have."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(run_folder())
        variables = {"DATAPLANE_RUN_DIR": str(folder), "DATAPLANE_TOKEN_FILE": ""}
        stack.enter_context(environment(**variables))
        cluster: Cluster
        if links:
            cluster = Hosts(folder)
            stack.callback(cluster.switch.close)
        else:
            cluster = Cluster(folder, arena="64MiB", leash=True)
        stack.callback(cluster.end)
        cluster.start_all(*HOSTS)
        plane = Plane(cluster)
        stack.callback(plane.close)
        plane.play(Job())  # which connects, imports and allocates
        yield plane


def main(names: list[str]) -> int:
    """Print a line a case; how many were not named right."""
    wrong = 0
    with running(links=True) as plane:
        for name in names or CASES:
            case = CASES[name]
            found = plane.play(case.job.stretch(plane.stretch()))
            is_named = case.is_named(found)
            wrong += not is_named
            print(f"| {name} | {found.sentence} | {'yes' if is_named else 'NO'} |", flush=True)
            for share in found.shares if not is_named else ():
                print("   ", share, flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
