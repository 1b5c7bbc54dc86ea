"""One plane's process tree: its services, a writer and a reader, and what they are told to do.

Trees run one after the other, so that none works beside another's idle processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.planes import PLANES
from bench.processes import Crew, run_folder
from bench.usage import between, cpu_seconds
from tests.perf.compare.ends import Job, job
from tests.perf.compare.worker import Command, Hire

FORMS = ("handle", "read")
WRITER, READER = "rollout", "train"
"""As roles of `bench run`."""
SINGLE = "1 row"
SINGLE_BYTES = 4096
_START_S = 150.0
_REPLY_S = 240.0


class CompareTimeout(RuntimeError):
    """A process of a tree did not answer in time."""


class WrongContent(RuntimeError):
    """What the reader got is not what the writer put."""


@dataclass(slots=True)
class Figure:
    """One operation of one plane: its samples, and what processor time all of them took."""

    nbytes: int  # of one operation
    seconds: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def add(self, seconds: list[float], cpu_s: dict[str, float]) -> None:
        self.seconds += seconds
        for name, spent in cpu_s.items():
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + spent


Figures = dict[tuple[str, str], Figure]  # (batch, operation)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done in a tree: batches by name, and how often."""

    batches: dict[str, int]  # name → bytes
    rows: int
    repeats: int
    singles: int
    seed: int = 0


class Tree:
    """A running tree."""

    def __init__(self, job: Job, crew: Crew) -> None:
        self._job = job
        self._plane = PLANES[job.plane](job)
        self._crew = crew
        self._ready: dict[str, dict[str, Any]] = {}
        self._replies: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def start(self) -> None:
        for service in self._plane.services():
            self._crew.start(service.name, service.argv, service.env, service.speaks)
        self._listen("the services", lambda: self._plane.reachable(self._ready), _START_S)
        for role, host in ((WRITER, 0), (READER, self._job.hosts - 1)):
            address = self._plane.address(host, self._ready)
            hire = Hire(job=self._job, role=role, rank=0, host=host, address=address)
            told = msgspec.json.encode(hire).decode()
            self._crew.start(role, [sys.executable, "-m", "tests.perf.compare.worker", told])
        hired = {WRITER, READER}
        self._listen("its workers", lambda: self._ready.keys() >= hired, _START_S)

    def _listen(self, awaited: str, reached: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not reached():
            for name, event in self._crew.events():
                if event["event"] == "ready":
                    self._ready[name] = event
                else:
                    self._replies[name].append(event)
            if time.monotonic() > deadline:
                tails = "".join(f"\n{m.name}:\n{m.tail()}" for m in self._crew.members.values())
                raise CompareTimeout(f"no answer from {awaited} within {within_s:.0f} s{tails}")

    def ask(self, role: str, do: str, **details: Any) -> dict[str, Any]:
        """One command, and its answer."""
        command = Command(do=do, **details)
        self._crew.tell(role, msgspec.json.encode(command).decode())
        self._listen(f"the {role} about {do}", lambda: bool(self._replies[role]), _REPLY_S)
        return self._replies[role].pop(0)

    def measured(self, figure: Figure, role: str, do: str, **details: Any) -> None:
        before = cpu_seconds(self._crew.pids())
        said = self.ask(role, do, **details)
        figure.add(said["seconds"], between(before, cpu_seconds(self._crew.pids())))

    def leave(self) -> None:
        for role in (READER, WRITER):
            self._crew.tell(role, msgspec.json.encode(Command(do="leave")).decode())
        left = lambda: all(self._crew.members[r].done for r in (READER, WRITER))  # noqa: E731
        self._listen("its workers at the end", left, _START_S)

    def close(self) -> None:
        self._plane.close()


@contextmanager
def standing(name: str, hosts: int, rows: int, largest: int) -> Iterator[Tree]:
    """A tree that has started; ended, whatever happens."""
    with run_folder() as folder:
        told = job(name, hosts, rows, largest, str(folder), os.getpid())
        with Crew(folder) as crew:
            tree = Tree(told, crew)
            try:
                tree.start()
                yield tree
                tree.leave()
            finally:
                tree.close()


def run(name: str, hosts: int, plan: Plan) -> Figures:
    """Every figure of the plan, once through: batches in one new tree, single rows in another."""
    figures: Figures = {}
    with standing(name, hosts, plan.rows, max(plan.batches.values())) as tree:
        for size, nbytes in plan.batches.items():
            _batch(tree, plan, size, nbytes, figures)
    if plan.singles:
        with standing(name, hosts, 1, SINGLE_BYTES) as tree:
            _singles(tree, plan, figures)
    return figures


def _batch(tree: Tree, plan: Plan, size: str, nbytes: int, figures: Figures) -> None:
    written = tree.ask(WRITER, "load", nbytes=nbytes, seed=plan.seed)
    for operation in ("floor", "put", *FORMS):
        figures[size, operation] = Figure(written["nbytes"])
    for nth in range(plan.repeats + 1):
        if nth:
            tree.measured(figures[size, "floor"], READER, "floor", nbytes=written["nbytes"])
        for form in FORMS:
            warm = nth > 0  # the first pass makes connections, imports and pages
            kept = {f: figures[size, f] if warm else Figure(0) for f in ("put", form)}
            tree.measured(kept["put"], WRITER, "put")
            tree.ask(READER, "expect")
            tree.measured(kept[form], READER, "get", form=form)
            if not warm:
                _check(tree, size, written["digest"])
            tree.ask(READER, "free")


def _check(tree: Tree, name: str, put: str) -> None:
    if (got := tree.ask(READER, "check")["digest"]) != put:
        raise WrongContent(f"{name}: {got} was read where {put} was put")


def _singles(tree: Tree, plan: Plan, figures: Figures) -> None:
    written = tree.ask(WRITER, "load", nbytes=SINGLE_BYTES, seed=plan.seed)
    for operation in ("put", "cycle"):
        figures[SINGLE, operation] = Figure(written["nbytes"])
    for nth in range(plan.repeats + 1):
        times = {"times": plan.singles if nth else max(1, plan.singles // 10)}
        kept = {o: figures[SINGLE, o] if nth else Figure(0) for o in ("put", "cycle")}
        tree.measured(kept["put"], WRITER, "put", **times)
        tree.ask(READER, "expect", **times)
        tree.measured(kept["cycle"], READER, "get", form="read", **times)
        if not nth:
            _check(tree, SINGLE, written["digest"])
        tree.ask(READER, "free")
