"""The results of runs for people and programs: a table, a progress bar, a JSON file."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.links import rated
from bench.run import Progress as Report

_GB = 1e9
_GIB = 1 << 30
Run = dict[str, Any]


class Steady(NamedTuple):
    """Seconds of the steps after the first, which is cold."""

    median: float
    fastest: float
    slowest: float


def steady(run: Run) -> Steady | None:
    """None where there was only one step."""
    steps = run["step_seconds"][1:]
    return Steady(statistics.median(steps), min(steps), max(steps)) if steps else None


def grouped(runs: Iterable[Run], settings: Sequence[str]) -> list[list[Run]]:
    """Lists of runs that have the same values of these."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(str(run.get(name)) for name in settings), []).append(run)
    return list(groups.values())


def others_cores(run: Mapping[str, Any]) -> float:
    """The average number of cores that programs outside the run used in its timed part."""
    told = run["cpu_seconds"]
    ours = sum(sum(worker["cpu_seconds"].values()) for worker in run["workers"].values())
    ours += sum(seconds for name, seconds in told.items() if name != "machine")
    return float(max(0.0, (told["machine"] - ours) / run["cpu_counted_seconds"]))


def new_table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    """A table without lines. names: left-aligned columns. figures: right-aligned columns."""
    look: Any = {"title_justify": "left", "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    shown = Table(title=title, pad_edge=False, **look)
    for name in names:
        shown.add_column(name)
    for name in figures:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown


def table(runs: list[Run], machine: dict[str, Any]) -> Table:
    """One line a run, 80 columns wide. GB are 10⁹ bytes."""
    cores = f"{machine['cores']} cores, {machine['memory_bytes'] / _GB:.0f} GB"
    lines = [cells(run) for run in runs]
    name, *figures = (name.replace(" ", "\n", 1) for name in lines[0])
    shown = new_table(f"rollout → reward, reference → trainers, on {cores}", [name], figures)
    for run, line in zip(runs, lines, strict=True):
        style = "green" if run["status"] == "ok" else "red"
        line["status"] = f"[{style}]{line['status'].replace(' ', chr(10))}[/]"
        shown.add_row(*line.values())
    return shown


def cells(run: Run) -> dict[str, str]:
    """The cells of a run in the table, by column."""
    took, nbytes = steady(run), max(run["peak_memory_bytes"].values(), default=0)
    link = run["busiest_link"]
    return {
        "run": label(run),
        "status": run["status"],
        "steady step s": "{} ({}–{})".format(*map(_seconds, took)) if took else "–",
        "cold step s": _or_dash(next(iter(run["step_seconds"]), None), ".2f"),
        "link GB": _or_dash(link["bytes"] / _GB if link else None, ".2f"),
        "link full %": _or_dash(100 * link["busy_share"] if link else None, ".0f"),
        "peak GB": f"{nbytes / _GB:.2f}",
    }


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _or_dash(figure: float | None, form: str) -> str:
    return "–" if figure is None else format(figure, form)


def show(console: Console, runs: list[Run], headline: list[str], machine: dict[str, Any]) -> None:
    """Show the table, the cost of the bench itself, failures, and last the headline."""
    console.print(table(runs, machine))
    console.print(
        "A step is timed from the end of the previous step. Steady: median and range of all steps "
        "except the first, which is cold. Link: the GB that the busiest link carried in both "
        "directions during the whole run, and the share of 100 ms intervals in which it carried "
        "at least 80 % of its rate in one direction. Peak: memory of the largest process or arena. "
        "The trainer compared the content of every row.",
        style="dim",
    )
    for run in runs:
        if filtered := run["rows_filtered"]:
            told = f"{label(run)}: dynamic sampling filtered {filtered} rows"
            console.print(told, style="dim")
    own = max(sum(run["bench_seconds"].values()) for run in runs)
    console.print(f"The bench itself used at most {own:.2f} s of processor time.", style="dim")
    for run in runs:
        if before := run.get("failed_before"):
            why = f"{before['status']!r}: {first_line(before['error'])}"
            told = f"{label(run)}: repeated once, after the first attempt ended with {why}"
            console.print(told, markup=False, highlight=False)
        if run["error"]:
            console.print(f"{label(run)}: {run['status']}: {run['error']}", markup=False)
    for sentence in headline:
        console.print(f"\n{sentence}", markup=False, highlight=False, style="bold")


def label(run: Mapping[str, Any]) -> str:
    """The name of a run in a report, or of a job."""
    where = "apart, " if run["apart"] else "phased, " if run["phased"] else ""
    link = f"{run['link']} links" if run["link"] else "no link limit"
    limit = run["memory_limit_bytes"]
    under = f", {gib(limit)} a host" if limit else ""
    settings = f"{run['hosts']} hosts, {where}{dedup(run)}, {link}{under}"
    return f"{run['trace']}/{run['plane']} ({settings})"


def dedup(run: Mapping[str, Any]) -> str:
    return f"dedup {'on' if run['dedup'] else 'off'}"


def placement(run: Run) -> str:
    return "rollout apart" if run["apart"] else "every stage on every host"


def limits_of_links(run: Run) -> str:
    return f"{rated(run['link'])} links" if run["link"] else "no link limit"


def setting(run: Run) -> str:
    """The links and the placement of a run; its memory limit and its phases if it has them."""
    told = [limits_of_links(run), placement(run)]
    if limit := run["memory_limit_bytes"]:
        told.append(f"{gib(limit)} a host")
    return ", ".join([*told, "no stage overlaps rollout"] if run["phased"] else told)


def job(run: Run) -> str:
    """The work of a run, without its plane and dedup."""
    prompts = f"{run['prompts']} prompts × {run['samples']}"
    return f"{run['trace']}, {run['hosts']} hosts, {prompts}, {setting(run)}"


def gib(nbytes: float) -> str:
    if nbytes < _GIB:
        return f"{nbytes / (1 << 20):.0f} MiB"
    return f"{nbytes / _GIB:.3g} GiB" if nbytes < 10 * _GIB else f"{nbytes / _GIB:.0f} GiB"


def hardware(machine: Mapping[str, Any]) -> str:
    """The machine of a report, and the versions on it."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['cores']} cores ({machine['cpu']}), {gib(machine['memory_bytes'])}, "
        f"{machine['system']}, Python {machine['python']}, {packages}"
    )


def first_line(error: str) -> str:
    """The failure without the logs that follow it."""
    return error.partition("\n")[0].rstrip(".;:")


@contextmanager
def progress(console: Console, label: str, unit: str = "rows") -> Iterator[Report]:
    """Show a bar on a terminal, and nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    more: Any = {"console": console, "disable": not console.is_terminal}
    with Progress(*columns, TextColumn(unit), TimeElapsedColumn(), **more) as bar:
        task = bar.add_task(label, total=None)
        yield lambda rows, expected: bar.update(task, completed=rows, total=expected)
