"""`python -m bench report`: a page from reports that other commands wrote."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.outputs import output
from bench.page.document import chosen, load, pictures, write

_PICTURES = ("hosts", "share", "memory")


def register(commands: Any) -> None:
    """Add `report` to the command line."""
    parser = commands.add_parser("report", help="one HTML page of JSON reports")
    parser.add_argument("files", type=Path, nargs="+", help="of headline, links or run")
    parser.add_argument("-o", "--output", type=output, help="report.html")
    parser.add_argument("--only", default="", help="figures by name and nothing else: hosts,memory")
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="DIR",
        help=f"each drawing as SVG, light and dark; of {', '.join(_PICTURES)} without --only",
    )
    parser.set_defaults(perform=perform)


def perform(options: argparse.Namespace, command: str) -> int:
    """0: written; 2: no report, or a figure that it has not, or a page that would take the place
    of a report, or nothing asked for."""
    told = _perform(options)
    if told:
        Console(stderr=True).print(f"python -m bench: {told}", markup=False, soft_wrap=True)
    return 2 if told else 0


def _perform(options: argparse.Namespace) -> str:
    """What is wrong, or nothing."""
    if not (options.output or options.pictures):
        return "nothing to write: name a page (-o) or a folder for pictures (--pictures)"
    if options.output and options.output.resolve() in map(Path.resolve, options.files):
        return f"{options.output} is one of the reports: name another file for the page"
    only = [name for name in options.only.split(",") if name]
    try:
        reports = [load(path) for path in options.files]
        if options.output:
            write(options.output, reports, only)
        found = chosen(reports, only)
        if options.pictures:
            wanted = [figure for figure in found if only or figure.name in _PICTURES]
            if not wanted:
                return f"none of {', '.join(_PICTURES)} can be drawn from these reports"
            pictures(options.pictures, wanted)
    except OSError as exc:
        return f"{exc.filename}: {exc.strerror}"
    except ValueError as exc:  # a file that is no JSON is one too
        return str(exc)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as exc:
        told = f"{type(exc).__name__}: {exc}"
        return f"no page can be made: one of the files is no whole report of this version ({told})"
    return ""
