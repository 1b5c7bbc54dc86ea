"""One HTML file from reports in JSON: plots first, then the figures, the machine, the commands."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from bench import outputs
from bench.page import latency, memory, sim, throughput
from bench.page.compare import compare
from bench.page.names import Figure, Run, by_trace, gib, switch
from bench.page.transports import transports

Report = Mapping[str, Any]

_STYLE = Path(__file__).with_name("style.css")
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>$style</style></head>
<body class="$kind"><main>$body</main></body></html>
""")


def write(path: Path, reports: Sequence[Report], only: Collection[str] = ()) -> None:
    """Make the page of these reports. `only`: these figures and nothing else, for a picture;
    ValueError where one of them cannot be drawn from what is there."""
    found = figures(reports)
    if missing := set(only) - {figure.name for figure in found}:
        there = ", ".join(figure.name for figure in found)
        raise ValueError(f"no figure {', '.join(sorted(missing))} in these reports, but {there}")
    if only:
        kind, body = "bare", "".join(_figure(f) for f in found if f.name in only)
    else:
        kind, body = "", "".join([_head(reports), *map(_figure, found), _details(reports)])
    title = "dataplane bench"
    page = _PAGE.substitute(title=title, style=_STYLE.read_text(), kind=kind, body=body)
    outputs.write(path, page)


def load(path: Path) -> Report:
    """A report that a command of the bench wrote. ValueError where it is something else."""
    try:
        told = json.loads(path.read_text())
    except ValueError as exc:
        raise ValueError(f"{path} is no JSON: {exc}") from exc
    if not isinstance(told, dict) or "machine" not in told or "command" not in told:
        raise ValueError(f"{path} is no report of this bench: machine and command are missing")
    return told


def figures(reports: Sequence[Report]) -> list[Figure]:
    """All that can be drawn from what is there."""
    runs = _runs(reports)
    cases = by_trace([case for report in reports for case in report.get("memory", ())])
    drawn = (
        throughput.throughput(runs),
        memory.curves(runs),
        *map(memory.smallest, cases.values()),
        throughput.stages(runs),
        latency.latency(runs),
        *map(compare, reports),
        *map(latency.ceilings, reports),
        *map(transports, reports),
        latency.scaling(runs, [report for report in reports if "ceiling" in report]),
        *map(sim.accuracy, reports),
        *map(sim.model, reports),
    )
    return [figure for figure in drawn if figure]


def _runs(reports: Sequence[Report]) -> list[Run]:
    return [run for report in reports for run in report.get("runs", ())]


def _figure(figure: Figure) -> str:
    return (
        f'<section id="{figure.name}"><h2>{escape(figure.title)}</h2>'
        f"<p>{escape(figure.sentence)}</p>"
        f'<div class="wide">{figure.drawing}</div></section>'
    )


def _head(reports: Sequence[Report]) -> str:
    where = "; ".join(dict.fromkeys(_machine(report) for report in reports))
    told = "Ratios travel between machines, absolute figures do not."
    return f"<header><h1>dataplane bench</h1><p>{escape(where)}. {told}</p></header>"


def _machine(report: Report) -> str:
    machine = report["machine"]
    return (
        f"{machine['cores']} cores, {gib(machine['memory_bytes'])}, {machine['cpu']}, "
        f"{machine['system']}, Python {machine['python']}"
    )


def _details(reports: Sequence[Report]) -> str:
    runs = _runs(reports)
    parts = []
    if runs:
        parts.append("<h2>Figures</h2>" + _table(runs))
    wrong = [run for run in runs if run["error"]]
    for run in wrong:
        name = f"{run['trace']}/{run['plane']}, dedup {switch(run['dedup'])}: {run['status']}"
        parts.append(
            f"<details><summary>{escape(name)}</summary><pre>{escape(run['error'])}</pre></details>"
        )
    parts.append("<h2>Commands and machine</h2>")
    for where, members in _by_machine(reports).items():
        parts += [f"<pre>{escape(report['command'])}</pre>" for report in members]
        parts.append(f"<p>{escape(where)}</p>")
    return f"<section>{''.join(parts)}</section>"


def _by_machine(reports: Sequence[Report]) -> dict[str, list[Report]]:
    """Reports by where they were made, and with which versions."""
    found: dict[str, list[Report]] = {}
    for report in reports:
        versions = report["machine"]["packages"].items()
        packages = ", ".join(f"{name} {version}" for name, version in versions)
        found.setdefault(f"{_machine(report)}; {packages}", []).append(report)
    return found


def _table(runs: Sequence[Run]) -> str:
    names = ("run", "status", "rows", "seconds", "rows/s", "distinct GB", "moved GB", "peak GB")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(map(_table_row, runs))
    return f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


def _table_row(run: Run) -> str:
    ok = run["status"] == "ok"
    cells = (
        f"{run['trace']}/{run['plane']}, dedup {switch(run['dedup'])}, {run['columns']}",
        str(run["status"]),
        f"{run['rows']}" if ok else f"{run['rows']} of {run['rows_expected']}",
        f"{run['seconds']:.2f}" if run["seconds"] else "–",
        f"{run['rows'] / run['seconds']:.1f}" if ok and run["seconds"] else "–",
        f"{run['bytes_unique'] / 1e9:.2f}",
        f"{run['bytes_moved'] / 1e9:.2f}" if ok else "–",
        f"{run['peak_total_bytes'] / 1e9:.2f}",
    )
    row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f"<tr{'' if ok else ' class=bad'}>{row}</tr>"
