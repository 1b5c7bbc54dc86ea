"""`python -m bench report`: makes a page from reports that other commands wrote."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.outputs import output
from bench.page.document import load, write


def register(commands: Any) -> None:
    """Add `report` to the command line."""
    parser = commands.add_parser("report", help="make one HTML page from JSON reports")
    parser.add_argument(
        "files", type=Path, nargs="+", help="JSON reports of headline, links or run"
    )
    parser.add_argument(
        "-o", "--output", type=output, required=True, help="the page to write, such as report.html"
    )
    parser.set_defaults(perform=perform)


def perform(options: argparse.Namespace, command: str) -> int:
    """Return 0 if the page was written, and 2 for a file that is no report, or a page that would
    replace a report."""
    told = _perform(options)
    if told:
        Console(stderr=True).print(f"python -m bench: {told}", markup=False, soft_wrap=True)
    return 2 if told else 0


def _perform(options: argparse.Namespace) -> str:
    """What is wrong, or nothing."""
    if options.output.resolve() in map(Path.resolve, options.files):
        return f"{options.output} is one of the reports: choose another file for the page"
    try:
        write(options.output, [load(path) for path in options.files])
    except OSError as exc:
        return f"{exc.filename}: {exc.strerror}"
    except ValueError as exc:  # a file that is no JSON is one too
        return str(exc)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as exc:
        told = f"{type(exc).__name__}: {exc}"
        return (
            "cannot make a page, because one of the files is not a complete report of "
            f"this version ({told}): run that report again"
        )
    return ""
