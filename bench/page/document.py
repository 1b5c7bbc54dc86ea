"""One HTML file from JSON reports: results, pictures, figures, machines and commands. `python -m
bench report` makes one of reports that other commands wrote."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from bench import outputs
from bench.options import Impossible, add
from bench.page import drawing
from bench.page.drawing import Figure
from bench.page.runs import Report, figures
from bench.report import Run, cells, hardware, label

_FIRST = 3
"""Sentences of a headline that a reader sees first."""
_STYLE = Path(__file__).with_name("style.css")
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>dataplane bench</title><style>$style</style></head>
<body><main>$body</main></body></html>
""")


def load(path: Path) -> Report:
    """Load a report that a command of the bench wrote. Raises Impossible for any other file."""
    try:
        told = json.loads(path.read_text())
    except OSError as exc:
        raise Impossible(f"cannot read {path}: {exc.strerror}. Pass another file") from exc
    except ValueError as exc:
        raise Impossible(
            f"{path} is not valid JSON ({exc}): pass a report of `headline`, `links` or `run`"
        ) from exc
    if not isinstance(told, dict) or {"machine", "command", "runs"} - told.keys():
        raise Impossible(
            f"{path} has no runs, so it is not a report of `headline`, "
            "`links` or `run`: pass such a report"
        )
    return told


def write(path: Path, reports: Sequence[Report]) -> None:
    """Make the page of these reports. Raises NotWritten."""
    body = _head(reports) + "".join(map(_figure, figures(reports))) + _details(reports)
    outputs.write(path, _PAGE.substitute(style=_style(), body=body))


def pictures(folder: Path, found: Sequence[Figure]) -> list[Path]:
    """Write a file per panel and theme, such as memory-2-dark.svg. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for figure in found:
        for nth, panel in enumerate(figure.panels, 1):
            for theme, colours in (("light", drawing.LIGHT), ("dark", drawing.DARK)):
                which = f"-{nth}" if nth > 1 else ""
                made.append(folder / f"{figure.name}{which}-{theme}.svg")
                drawing.picture(figure.title, panel, made[-1], colours)
    return made


def _style() -> str:
    """The colours as CSS variables; those of the dark theme if the reader's system is dark."""
    light, dark = (
        "".join(f"--{name}: {value}; " for name, value in theme.items())
        for theme in (drawing.LIGHT, drawing.DARK)
    )
    chosen = f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
    return chosen + _STYLE.read_text()


def _figure(figure: Figure) -> str:
    panels = "".join(
        f"<figure><figcaption>{escape(panel.title)}</figcaption>"
        + f"{drawing.inline(panel, f'{figure.name}{nth}')}</figure>"
        for nth, panel in enumerate(figure.panels)
    )
    return (
        f'<section id="{figure.name}"><h2>{escape(figure.title)}</h2>'
        f"<p>{escape(figure.sentence)}</p>" + f'<div class="panels">{panels}</div></section>'
    )


def _head(reports: Sequence[Report]) -> str:
    sentences = [said for report in reports for said in report.get("headline") or ()]
    first, others = (
        "".join(f"<li>{escape(said)}</li>" for said in some)
        for some in (sentences[:_FIRST], sentences[_FIRST:])
    )
    where = "; ".join(dict.fromkeys(hardware(report["machine"]) for report in reports))
    told = "Ratios travel between machines, absolute figures do not."
    return (
        "<header><h1>dataplane bench</h1>"
        + (f"<ul>{first}</ul>" if first else "")
        + (f'<ul class="more">{others}</ul>' if others else "")
        + f"<p>{escape(where)}. {told}</p></header>"
    )


def _details(reports: Sequence[Report]) -> str:
    runs = [run for report in reports for run in report["runs"]]
    parts = ["<h2>Figures</h2>" + _table(runs)]
    for run in runs:
        before = run.get("failed_before")
        for attempt, when in ((before, ", first attempt"), (run, "")):
            if attempt and attempt["error"]:
                told = f"{label(run)}{when}: {attempt['status']}"
                error = f"<pre>{escape(attempt['error'])}</pre>"
                parts.append(f"<details><summary>{escape(told)}</summary>{error}</details>")
    parts.append("<h2>Commands and machine</h2>")
    for where, members in itertools.groupby(reports, key=lambda told: hardware(told["machine"])):
        parts += [f"<pre>{escape(report['command'])}</pre>" for report in members]
        parts.append(f"<p>{escape(where)}</p>")
    return f"<section>{''.join(parts)}</section>"


def _table(runs: Sequence[Run]) -> str:
    told = [cells(run) for run in runs]
    for run, line in zip(runs, told, strict=True):
        line["rows"] = f"{run['rows']} of {run['rows_expected']}"
        line["distinct GB"] = f"{run['bytes_unique'] / 1e9:.2f}"
    head = "".join(f"<th>{escape(name)}</th>" for name in told[0])
    body = ""
    for run, line in zip(runs, told, strict=True):
        row = "".join(f"<td>{escape(cell)}</td>" for cell in line.values())
        bad = ' class="bad"' if run["status"] != "ok" else ""
        body += f"<tr{bad}>{row}</tr>"
    return f'<div class="wide" tabindex="0"><table><tr>{head}</tr>{body}</table></div>'


def register(commands: Any) -> None:
    parser = commands.add_parser("report", help="make one HTML page from JSON reports")
    add(parser, "files", Path, "JSON reports of headline, links or run", nargs="+")
    what = "the page to write, such as report.html"
    parser.add_argument("-o", "--output", type=outputs.output, required=True, help=what)
    parser.set_defaults(perform=_perform)


def _perform(options: argparse.Namespace, command: str) -> int:
    """Write the page. Impossible for a file that is no report, or a page that would replace one."""
    if options.output.resolve() in map(Path.resolve, options.files):
        raise Impossible(
            f"{options.output} is one of the reports: choose another file for the page"
        )
    reports = [load(path) for path in options.files]
    try:
        write(options.output, reports)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as exc:
        raise Impossible(
            "cannot make a page, because one of the files is not a complete report of this "
            f"version ({type(exc).__name__}: {exc}): run that report again"
        ) from exc
    return 0
