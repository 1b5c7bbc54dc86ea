"""The contents of a trace: a table of its distributions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from bench.traces.sample import Prompt

_QUANTILES = (0.5, 0.9, 0.99)
_GB = 1e9

Floats = NDArray[np.float64]


def show(console: Console, name: str, prompts: Sequence[Prompt]) -> None:
    """Print the size of the trace and the table."""
    rows = sum(len(prompt.samples) for prompt in prompts)
    steps = len({prompt.step for prompt in prompts})
    unique = sum({m.content: m.pixel_bytes for p in prompts for m in p.media}.values())
    console.print(f"{name}: {rows} rows in {len(prompts)} groups and {steps} steps")
    console.print(f"media: {unique / _GB:.2f} GB, counting each medium once", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p99", "largest"):
        table.add_column(heading, justify="right")
    for label, values in columns(prompts).items():
        if len(values) and values.any():
            marks = (values.mean(), *np.quantile(values, _QUANTILES), values.max())
            table.add_row(
                label, *(f"{mark:,.3g}" if mark < 100 else f"{mark:,.0f}" for mark in marks)
            )
    console.print(table)


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
