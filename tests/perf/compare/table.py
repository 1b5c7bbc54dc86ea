"""What people see of a comparison: a table a batch, and where processor time goes."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.report import new_table
from tests.perf.compare.tree import SINGLE

_MOST_PROCESSES = 4


def show(console: Console, report: dict[str, Any]) -> None:
    """The tables, and the planes that are not in them."""
    results = report["results"]
    for batch in dict.fromkeys(line["batch"] for line in results):
        console.print(_table(report, [line for line in results if line["batch"] == batch], batch))
    console.print(
        "handle: until the plane's get returned. read: until every byte had also been read once. "
        "floor: the reader reads as many bytes of its own memory. cycle: one row was fetched and "
        "read. Each figure has its own put and get. cpu: processor seconds per GB, or milliseconds "
        "per row.",
        style="dim",
    )
    for name, plane in report["planes"].items():
        if plane["status"] != "ok":
            console.print(f"{name}: {plane['status']}: {plane['error']}", markup=False)


def _table(report: dict[str, Any], lines: list[dict[str, Any]], batch: str) -> Table:
    rows = 1 if batch == SINGLE else report["rows"]
    title = f"{batch}: {rows} row{'s' if rows > 1 else ''}, {lines[0]['bytes'] / 1e6:.3g} MB"
    rate = "a second" if batch == SINGLE else "GB/s"
    shown = new_table(title, ("plane", "operation"), ("hosts", "ms", "range", rate))
    shown.add_column("cpu")
    for line in sorted(lines, key=lambda line: (line["hosts"], line["operation"])):
        shown.add_row(*_cells(line))
    return shown


def _cells(line: dict[str, Any]) -> list[str]:
    took = line["seconds"]
    costs = line.get("cpu_s_per_GB") or line.get("cpu_ms") or {}
    named = [f"{name} {cost:.2g}" for name, cost in list(costs.items())[:_MOST_PROCESSES]]
    return [
        line["plane"],
        line["operation"],
        str(line["hosts"]),
        f"{took['median'] * 1e3:.3g}",
        f"{took['min'] * 1e3:.3g}–{took['max'] * 1e3:.3g}",
        f"{line.get('GBps', line.get('per_s', 0.0)):.3g}",
        ", ".join(named),
    ]
