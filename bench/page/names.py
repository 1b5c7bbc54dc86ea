"""How runs, planes and hosts are called and coloured, everywhere in the same way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

Run = dict[str, Any]
GIB = 1 << 30
OUTCOMES = {
    "oom": "killed by the kernel, out of memory",
    "refused": "refused at once: a group is too large for the arena",
    "error": "failed",
    "not run": "not run",
    "disturbed": "disturbed: the machine itself ran out of memory",
    "not installed": "not installed",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing, what it is called, and the one sentence that says what to see."""

    name: str
    title: str
    sentence: str
    drawing: str


_JOB = (
    "trace",
    "rows_expected",
    "bytes_unique",
    "columns",
    "hosts",
    "prompts",
    "samples",
    "steps",
    "staleness",
    "seed",
    "trainers",
    "tp",
    "pace",
    "memory_limit_bytes",
)
_COUNTED = {
    "columns": "columns",
    "hosts": "hosts",
    "prompts": "prompts",
    "steps": "steps",
    "trainers": "trainers",
    "tp": "ranks a trainer",
}
_NAMED = ("staleness", "seed", "pace")
_COLOURS = ("dataplane", "controller", "ray-driver", "ray-store", "transfer_queue")


def colour(plane: str) -> str:
    """The CSS class of a plane's colour; one more class is for those not named here."""
    known = "ray-store" if plane == "ray" else plane
    return f"c{_COLOURS.index(known) if known in _COLOURS else len(_COLOURS)}"


def switch(on: bool) -> str:
    return "on" if on else "off"


def run_label(run: Run, among: Sequence[Run]) -> str:
    """The plane, and of the settings those in which the runs differ."""
    parts = [run["plane"]]
    if differ(among, "dedup"):
        parts.append(f"dedup {switch(run['dedup'])}")
    return ", ".join([*parts, *settings(run, among)])


def settings(run: Run, among: Sequence[Run], told: Collection[str] = ()) -> list[str]:
    """Of what makes a job, that in which the runs differ; `told` are said elsewhere."""
    limit = run.get("memory_limit_bytes")
    shown = {name: f"{run[name]} {what}" for name, what in _COUNTED.items() if name in run}
    shown |= {name: f"{name} {run[name]}" for name in _NAMED if name in run}
    shown["memory_limit_bytes"] = f"limit {gib(limit)}" if limit else "no limit"
    return [text for name, text in shown.items() if name not in told and differ(among, name)]


def differ(runs: Sequence[Run], setting: str) -> bool:
    return len({str(run.get(setting)) for run in runs}) > 1


def by_trace(runs: Sequence[Run]) -> dict[str, list[Run]]:
    traces: dict[str, list[Run]] = {}
    for run in runs:
        traces.setdefault(run["trace"], []).append(run)
    return traces


def by_job(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that did the same work: the same rows, bytes, columns, hosts and limit. Only those may
    be set beside each other."""
    jobs: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        jobs.setdefault(tuple(str(run.get(name)) for name in _JOB), []).append(run)
    return list(jobs.values())


def gib(nbytes: float) -> str:
    if nbytes < GIB:
        return f"{nbytes / (1 << 20):.0f} MiB"
    return f"{nbytes / GIB:.3g} GiB" if nbytes < 10 * GIB else f"{nbytes / GIB:.0f} GiB"
