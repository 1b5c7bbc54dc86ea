"""All trees of a comparison, and the report of what they did.

Planes take turns: one tree after the other, and the whole line again for every round, so that a
busy neighbour or a changing clock meets all of them. Figures are medians over all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.machine import version
from bench.planes import PLANES
from tests.perf.compare import tree
from tests.perf.compare.batch import ROWS
from tests.perf.compare.ends import NAMES, TWO_HOSTS
from tests.perf.compare.tree import SINGLE, Figure, Figures, Plan

_MIB = 1 << 20
_GB = 1e9

Tick = Callable[[int, int], None]
Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says."""

    planes: tuple[str, ...] = NAMES
    sizes: tuple[int, ...] = (64 * _MIB, 512 * _MIB)
    hosts: tuple[int, ...] = (1, 2)
    rows: int = ROWS
    rounds: int = 3
    repeats: int = 3
    singles: int = 100
    seed: int = 0


def measure(settings: Settings, tick: Tick, keep: Callable[[Report], None]) -> Report:
    """The report. After each tree: tick(done, all), and keep(the report so far)."""
    planes = {name: describe(name) for name in settings.planes}
    able = [name for name in settings.planes if planes[name]["status"] == "ok"]
    trees = [(n, h) for _ in range(settings.rounds) for h in settings.hosts for n in able]
    collected: dict[tuple[str, int], list[Figures]] = {}
    for done, (name, hosts) in enumerate(trees):
        if planes[name]["status"] == "ok":
            try:
                collected.setdefault((name, hosts), []).append(
                    tree.run(name, hosts, plan(settings))
                )
            except Exception as exc:  # a plane that fails ends its own part alone
                planes[name] |= {"status": "error", "error": f"{type(exc).__name__}: {exc}"}
        tick(done + 1, len(trees))
        keep(_report(settings, planes, collected))
    return _report(settings, planes, collected)


def _report(
    settings: Settings, planes: Report, collected: Mapping[tuple[str, int], Sequence[Figures]]
) -> Report:
    results = [
        line
        for (name, hosts), rounds in collected.items()
        for line in lines_of(name, hosts, merged(rounds))
    ]
    return {
        "planes": planes,
        "results": results,
        "ratios": ratios(results),
        "rows": settings.rows,
    }


def plan(settings: Settings) -> Plan:
    return Plan(
        batches={f"{nbytes / _MIB:g} MiB": nbytes for nbytes in settings.sizes},
        rows=settings.rows,
        repeats=settings.repeats,
        singles=settings.singles,
        seed=settings.seed,
    )


def describe(name: str) -> Report:
    """What a plane is made of, and whether it can run here."""
    packages = PLANES[name].packages or ("dataplane-rl",)
    missing = PLANES[name].missing()
    return {
        "status": "not installed" if missing else "ok",
        "error": f"missing packages: {', '.join(missing)}" if missing else "",
        "versions": {package: version(package) for package in packages},
        "two_hosts": TWO_HOSTS[name],
    }


def merged(rounds: Sequence[Figures]) -> Figures:
    whole: Figures = {}
    for figures in rounds:
        for key, figure in figures.items():
            whole.setdefault(key, Figure(figure.nbytes)).add(figure.seconds, figure.cpu_s)
    return whole


def lines_of(name: str, hosts: int, figures: Figures) -> list[Report]:
    """A dict a figure: GB/s for batches, operations a second for single rows."""
    lines = []
    for (batch, operation), figure in figures.items():
        seconds = np.array(figure.seconds)
        median = float(np.median(seconds))
        line = {
            "plane": name,
            "hosts": hosts,
            "batch": batch,
            "operation": operation,
            "bytes": figure.nbytes,
            "seconds": {
                "median": median,
                "min": float(seconds.min()),
                "max": float(seconds.max()),
                "samples": len(seconds),
            },
        }
        if batch == SINGLE:
            line["per_s"] = 1 / median
            line["cpu_ms"] = _shares(figure, len(seconds) / 1e3)
        else:
            floor = float(np.median(figures[batch, "floor"].seconds))
            line["floors"] = median / floor  # of the same tree, and so of the same minutes
            line["GBps"] = figure.nbytes / _GB / median
            line["cpu_s_per_GB"] = _shares(figure, figure.nbytes / _GB * len(seconds))
        lines.append(line)
    return lines


def _shares(figure: Figure, amount: float) -> dict[str, float]:
    """Processor time for each unit of `amount`, by process; what took none is left out."""
    spent = sorted(figure.cpu_s.items(), key=lambda item: -item[1])
    return {name: seconds / amount for name, seconds in spent if seconds > 0}


def ratios(results: list[Report]) -> dict[str, float]:
    """How many times quicker dataplane is than each other plane, same batch, hosts and operation.

    `cycle` of single rows is put and get together, with what else belongs to a row's cycle.
    """
    took = {
        (line["plane"], line["hosts"], line["batch"], line["operation"]): line["seconds"]["median"]
        for line in results
    }
    for plane, hosts, batch, operation in list(took):
        if batch == SINGLE and operation == "cycle":
            took[plane, hosts, batch, "put+get"] = (
                took[plane, hosts, batch, "put"] + took[plane, hosts, batch, "cycle"]
            )
    return {
        f"{batch}, {operation}, {hosts} host{'s' if hosts > 1 else ''}: of {plane}": seconds
        / took["dataplane", hosts, batch, operation]
        for (plane, hosts, batch, operation), seconds in took.items()
        if plane != "dataplane"
        and operation != "floor"
        and ("dataplane", hosts, batch, operation) in took
    }
