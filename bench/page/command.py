"""`python -m bench report`: makes a page from reports that other commands wrote."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.bounds import Impossible
from bench.options import add
from bench.outputs import output
from bench.page.document import load, write


def register(commands: Any) -> None:
    """Add `report` to the command line."""
    parser = commands.add_parser("report", help="make one HTML page from JSON reports")
    add(parser, "files", Path, "JSON reports of headline, links or run", nargs="+")
    what = "the page to write, such as report.html"
    parser.add_argument("-o", "--output", type=output, required=True, help=what)
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
