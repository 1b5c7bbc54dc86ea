"""`python -m bench trace` and `python -m bench trace-info`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.options import add, up_to, whole
from bench.outputs import output
from bench.report import progress
from bench.traces import info, load, parquet
from bench.traces.generator import MOST_PROMPTS, MOST_STEPS, drawn
from bench.traces.tasks import TASKS


def register(commands: Any) -> None:
    """Add both commands to the command line."""
    room = "a medium's id has no bits for more"
    make = commands.add_parser("trace", help="draw a trace and write it to a Parquet file")
    make.add_argument(
        "task", choices=tuple(TASKS), metavar="TASK", help=f"task: {', '.join(TASKS)}"
    )
    add(make, "--steps", up_to(MOST_STEPS, room), "steps to draw (default: 1)", default=1)
    add(make, "--prompts", up_to(MOST_PROMPTS, room), "prompts per step (default: the task's)")
    add(make, "--seed", whole, "seed of the trace (default: 0)", default=0)
    make.add_argument(
        "-o", "--output", type=output, required=True, metavar="FILE", help="the file to write"
    )
    make.set_defaults(perform=_trace)
    look = commands.add_parser("trace-info", help="show what is in a trace file")
    add(look, "file", Path, "a Parquet trace, files of PolyTrace, or a recording", nargs="+")
    what = "task of PolyTrace files, which do not name it"
    look.add_argument("--task", choices=tuple(TASKS), help=what)
    look.set_defaults(perform=_info)


def _trace(options: argparse.Namespace, command: str) -> int:
    task, console = TASKS[options.task], Console()
    prompts = options.prompts or task.prompts
    groups = options.steps * prompts
    rows = groups * task.samples
    with progress(console, f"trace of {task.name}") as bar:
        parquet.write(
            options.output,
            task.name,
            options.seed,
            drawn(task, prompts, options.seed, options.steps),
            lambda written: bar(written, rows),
        )
    console.print(f"{options.output}: {rows} rows, {groups} groups, {options.steps} steps")
    return 0


def _info(options: argparse.Namespace, command: str) -> int:
    info.show(Console(), *load.load(options.file, options.task))
    return 0
