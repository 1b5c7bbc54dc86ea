"""`python -m bench trace` and `python -m bench trace-info`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from bench.options import add, up_to, whole
from bench.outputs import output
from bench.report import new_table, progress
from bench.traces import load, parquet
from bench.traces.generator import MOST_PROMPTS, MOST_STEPS, drawn
from bench.traces.sample import Prompt
from bench.traces.tasks import TASKS

_QUANTILES = (0.5, 0.9, 0.99)
_GB = 1e9

Floats = NDArray[np.float64]


def register(commands: Any) -> None:
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
    console, (name, prompts) = Console(), load.load(options.file, options.task)
    rows = sum(len(prompt.samples) for prompt in prompts)
    steps = len({prompt.step for prompt in prompts})
    unique = sum({m.content: m.pixel_bytes for p in prompts for m in p.media}.values())
    console.print(f"{name}: {rows} rows in {len(prompts)} groups and {steps} steps")
    console.print(f"media: {unique / _GB:.2f} GB, counting each medium once", highlight=False)
    table = new_table("", [""], ("mean", "p50", "p90", "p99", "largest"))
    for label, values in columns(prompts).items():
        if len(values) and values.any():
            marks = (values.mean(), *np.quantile(values, _QUANTILES), values.max())
            table.add_row(
                label, *(f"{mark:,.3g}" if mark < 100 else f"{mark:,.0f}" for mark in marks)
            )
    console.print(table)
    return 0


def columns(prompts: Sequence[Prompt]) -> dict[str, Floats]:
    """What the table is about, one number a prompt, a row or a tool call."""
    samples = [sample for prompt in prompts for sample in prompt.samples]
    calls = [turn for sample in samples for turn in sample.turns if turn.tool_seconds]
    told: dict[str, list[float]] = {
        "prompt tokens": [p.prompt_tokens for p in prompts],
        "response tokens": [s.tokens for s in samples],
        "turns": [len(s.turns) for s in samples],
        "tool text tokens": [turn.tool_tokens for turn in calls],
        "tool seconds": [turn.tool_seconds for turn in calls],
        "media MB a prompt": [p.media_bytes / 1e6 for p in prompts],
        "rollout seconds": [s.rollout_seconds for s in samples],
        "reward seconds": [s.reward_seconds for s in samples],
        "unequal rewards": [float(p.survives) for p in prompts],
    }
    return {label: np.array(values, np.float64) for label, values in told.items()}
