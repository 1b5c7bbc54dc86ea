"""Processor time of a process tree, by kind of process: the cost of a plane besides the elapsed
time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil

Spent = dict[tuple[int, str], float]

_NATIVE = ("raylet", "gcs_server")  # Ray's own programs; its actors call themselves ray::Name


def cpu_seconds(members: Mapping[str, int]) -> Spent:
    """(pid, name) → user and system seconds so far, of these processes and all below them."""
    spent: Spent = {}
    for name, pid in members.items():
        try:
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in family:
            try:
                times = process.cpu_times()
                spent[process.pid, _name(process, name)] = times.user + times.system
            except psutil.NoSuchProcess:
                continue
    return spent


def _name(process: psutil.Process, member: str) -> str:
    """An actor's class, Ray's own program, or else the member that it belongs to."""
    program = Path((process.cmdline() or [member])[0]).name
    if program.startswith("ray::"):
        return program.removeprefix("ray::").split("(")[0].split(".")[0]
    return program if program in _NATIVE else member


def between(before: Spent, after: Spent) -> dict[str, float]:
    """Seconds by name; processes of one name together (two storage units, a peer's workers)."""
    total: dict[str, float] = {}
    for (pid, name), seconds in after.items():
        total[name] = total.get(name, 0.0) + seconds - before.get((pid, name), 0.0)
    return total


def machine_seconds() -> float:
    """Processor seconds that all processes of this machine, and its hypervisor, have used."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
