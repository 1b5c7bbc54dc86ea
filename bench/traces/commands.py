"""`python -m bench trace` and `python -m bench trace-info`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.options import count, whole
from bench.outputs import output
from bench.traces import info, load, parquet
from bench.traces.generator import generate
from bench.traces.parquet import TraceError
from bench.traces.tasks import TASKS


def register(commands: Any) -> None:
    """Add both commands to the command line."""
    make = commands.add_parser("trace", help="draw a trace and write it as Parquet")
    make.add_argument("task", choices=tuple(TASKS), metavar="TASK", help=", ".join(TASKS))
    make.add_argument("--steps", type=count, default=1)
    make.add_argument("--prompts", type=count, default=None, help="a step; default: the task's")
    make.add_argument("--seed", type=whole, default=0)
    make.add_argument("-o", "--output", type=output, required=True, metavar="FILE")
    make.set_defaults(perform=_trace)
    look = commands.add_parser("trace-info", help="show what is in a trace file")
    look.add_argument("file", type=Path, nargs="+", help="Parquet, or PolyTrace's own")
    look.add_argument("--task", choices=tuple(TASKS), default=None, help="of a PolyTrace file")
    look.set_defaults(perform=_info)


def _trace(options: argparse.Namespace, command: str) -> int:
    task = TASKS[options.task]
    prompts = generate(task, options.prompts or task.prompts, options.seed, options.steps)
    parquet.write(options.output, task.name, options.seed, prompts)
    rows = sum(len(prompt.samples) for prompt in prompts)
    Console().print(f"{options.output}: {rows} rows, {len(prompts)} groups, {options.steps} steps")
    return 0


def _info(options: argparse.Namespace, command: str) -> int:
    if options.task is None and not load.is_parquet(options.file[0]):
        raise TraceError(options.file[0], "it does not say of which task it is: give --task TASK")
    info.show(Console(), *load.load(options.file, options.task))
    return 0
