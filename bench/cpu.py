"""Processor time of a process tree, by kind of process: the cost of a plane besides the elapsed
time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

_NATIVE = ("raylet", "gcs_server")  # Ray's own programs; its actors call themselves ray::Name


def cpu_seconds(members: Mapping[str, int]) -> dict[str, float]:
    """Name → user and system seconds so far of these processes, of all below them that run, and of
    those that have ended: a peer's arena is prefaulted by one short process after the other.

    A name is that of an actor's class, of Ray's own program, or else of the member that a process
    belongs to.
    """
    spent = Counter[str]()
    for name, pid in members.items():
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    spent[_name(process, name)] += sum(process.cpu_times()[:4])  # of ended ones too
    return dict(spent)


def _name(process: psutil.Process, member: str) -> str:
    program = Path((process.cmdline() or [member])[0]).name
    if program.startswith("ray::"):
        return program.removeprefix("ray::").split("(")[0].split(".")[0]
    return program if program in _NATIVE else member


def between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds by name since `before`."""
    return {name: max(0.0, spent - before.get(name, 0.0)) for name, spent in after.items()}


def machine_seconds() -> float:
    """Processor seconds that all processes of this machine, and its hypervisor, have used."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
