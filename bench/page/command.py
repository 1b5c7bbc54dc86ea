"""`python -m bench report`: a page from reports that other commands wrote."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.outputs import output
from bench.page import picture
from bench.page.document import load, write


def register(commands: Any) -> None:
    """Add `report` to the command line."""
    parser = commands.add_parser("report", help="one HTML page of JSON reports")
    parser.add_argument("files", type=Path, nargs="+", help="of run, memory, perf, compare or sim")
    parser.add_argument("-o", "--output", type=output, required=True, help="report.html")
    parser.add_argument(
        "--only", default="", help="figures by name and nothing else: throughput,memory"
    )
    parser.add_argument("--png", type=output, help="a picture of the page, by chromium")
    parser.set_defaults(perform=perform)


def perform(options: argparse.Namespace, command: str) -> int:
    """0: written; 1: no picture, without a browser for example; 2: no report, or a figure that it
    has not, or a page that would take the place of a report."""
    console = Console(stderr=True)
    inputs = [path.resolve() for path in options.files]
    for path in filter(None, (options.output, options.png)):
        if path.resolve() in inputs:
            told = f"python -m bench: {path} is one of the reports: name another file for the page"
            console.print(told, markup=False, soft_wrap=True)
            return 2
    try:
        reports = [load(path) for path in options.files]
        write(options.output, reports, [name for name in options.only.split(",") if name])
    except (OSError, ValueError) as exc:  # a file that is no JSON is a ValueError too
        why = f"{exc.filename}: {exc.strerror}" if isinstance(exc, OSError) else str(exc)
        console.print(f"python -m bench: {why}", markup=False, soft_wrap=True)
        return 2
    except (LookupError, TypeError, AttributeError, ArithmeticError) as exc:
        told = f"{type(exc).__name__}: {exc}"
        console.print(
            f"no page can be made: one of the files is no whole report of this version ({told})",
            markup=False,
            soft_wrap=True,
        )
        return 2
    if options.png:
        try:
            picture.take(options.output, options.png)
        except picture.NoPicture as exc:
            console.print(str(exc), markup=False)
            return 1
    return 0
