"""What people and programs get to see of the runs: a table, a progress bar, a JSON file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import outputs
from bench.run import Progress as Report

_GB = 1e9
_FIGURES = (
    "status",
    "rows",
    "seconds",
    "unique\nGB",
    "moved\nGB",
    "peak GB\ntotal",
    "peak GB\nlargest",
)


def table(runs: list[dict[str, Any]], machine: dict[str, Any]) -> Table:
    """One line a run, 80 columns wide. GB are 10⁹ bytes."""
    cores = f"{machine['cores']} cores, {machine['memory_bytes'] / _GB:.0f} GB"
    shown = Table(
        title=f"rollout → reward, reference → trainers, on {cores}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    shown.add_column("run", no_wrap=True)
    for name in _FIGURES:
        shown.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        shown.add_row(*_cells(run))
    return shown


def _cells(run: dict[str, Any]) -> list[str]:
    seconds = run["seconds"]
    name, nbytes = max(run["peak_memory_bytes"].items(), key=lambda x: x[1], default=("", 0))
    ok = run["status"] == "ok"
    return [
        f"{run['trace']}/{run['plane']}\ndedup {_switch(run['dedup'])}, {run['columns']}",
        f"[{'green' if ok else 'red'}]{run['status'].replace(' ', chr(10))}[/]",
        f"{run['rows']}" if ok else f"{run['rows']}\nof {run['rows_expected']}",
        f"{seconds:.2f}" if seconds else "–",
        f"{run['bytes_unique'] / _GB:.2f}",
        f"{run['bytes_moved'] / _GB:.2f}" if ok else "–",
        f"{run['peak_total_bytes'] / _GB:.2f}",
        f"{nbytes / _GB:.2f}\n{name}",
    ]


def _switch(on: bool) -> str:
    return "on" if on else "off"


def show(console: Console, runs: list[dict[str, Any]], machine: dict[str, Any]) -> None:
    """The table, what the bench itself cost, and what went wrong."""
    console.print(table(runs, machine))
    console.print(
        "moved: payload bytes copied into, between and out of hosts. peak: all processes at one "
        "instant (PSS, arenas counted once). Every row's content was compared at the trainer.",
        style="dim",
    )
    for run in runs:
        for line in _flow(run):
            console.print(f"{_label(run)}: {line}", style="dim")
    for run in runs:
        costs = ", ".join(
            f"{k.replace('_', ' ')} {v:.2f} s" for k, v in run["bench_seconds"].items()
        )
        console.print(
            f"{_label(run)}: the bench's own work took {costs} of a processor", style="dim"
        )
    for run in runs:
        if run["error"]:
            console.print(f"{_label(run)}: {run['status']}: {run['error']}", markup=False)


def _flow(run: dict[str, Any]) -> Iterator[str]:
    """What only some runs have: a pace, dropped rows, ranks that share what a host pulls."""
    if run["plane_share"] is not None:
        yield (
            f"at {run['pace']:g} × the recorded speed {run['plane_share']:.1%} of the time is the "
            f"plane's and the bench's own ({run['paced_seconds']:.2f} s without them)"
        )
    if any(run["rows_dropped"].values()):
        told = ", ".join(f"{rows} {fate}" for fate, rows in run["rows_dropped"].items())
        yield f"rows dropped: {told}"
    if run["tp"] > 1 and run["status"] == "ok":
        pulled = ", ".join(f"{nbytes / _GB:.2f} GB" for nbytes in run["pulled_bytes"])
        yield f"with {run['tp']} ranks a trainer the hosts pulled {pulled or 'what is not known'}"


def _label(run: dict[str, Any]) -> str:
    dedup = _switch(run["dedup"])
    return f"{run['trace']}/{run['plane']} (dedup {dedup}, {run['columns']} columns)"


@contextmanager
def progress(console: Console, label: str, unit: str = "rows") -> Iterator[Report]:
    """A bar on a terminal, a line elsewhere."""
    if not console.is_terminal:
        console.print(f"running {label} …")
        yield lambda rows, expected: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn(unit), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(label, total=None)
        yield lambda rows, expected: bar.update(task, completed=rows, total=expected)


def write(path: Path, runs: list[dict[str, Any]], machine: dict[str, Any], command: str) -> None:
    """The same as JSON, and the command that made it."""
    outputs.write_json(path, {"runs": runs, "machine": machine, "command": command})
