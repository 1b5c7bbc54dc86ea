"""What is in a trace: a table of its distributions, and a plot for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from bench.traces.sample import Prompt

_BINS = 24
_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_STEPS_SHOWN = 60
_QUANTILES = (0.5, 0.9, 0.99)
_GB = 1e9

Floats = NDArray[np.float64]


def show(console: Console, name: str, prompts: Sequence[Prompt]) -> None:
    """Print the table, a histogram of response lengths, and the steps' medians and tails."""
    rows = sum(len(prompt.samples) for prompt in prompts)
    steps = len({prompt.step for prompt in prompts})
    unique = sum(
        {m.content: m.pixel_bytes + m.frame_bytes for p in prompts for m in p.media}.values()
    )
    console.print(f"{name}: {rows} rows in {len(prompts)} groups and {steps} steps")
    console.print(f"media: {unique / _GB:.2f} GB, each once", highlight=False)
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
    lengths = columns(prompts)["response tokens"]
    console.print("response tokens, share of the rows")
    for line in histogram(lengths):
        console.print(f"  {line}", highlight=False)
    if steps > 1:
        for share in (0.5, 0.99):
            line = by_step(prompts, share)
            console.print(f"p{share * 100:.0f} by step  {line}", highlight=False)


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


def histogram(values: Floats) -> list[str]:
    """Bars over bins of equal width on a logarithmic axis."""
    low, high = max(1.0, values.min()), max(2.0, values.max())
    edges = np.geomspace(low, max(high, low * 1.01), _BINS + 1)
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    most = counts.max()
    return [
        f"{edge:>8,.0f} {bar(count / most):<{_BAR}} {count / len(values):6.1%}"
        for edge, count in zip(edges[:-1], counts, strict=True)
    ]


def bar(share: float) -> str:
    """A bar of at most 40 characters, in eighths of a character."""
    eighths = round(share * _BAR * 8)
    return _EIGHTHS[-1] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def by_step(prompts: Sequence[Prompt], share: float) -> str:
    """A quantile of the response lengths of each of the first steps, as a line of blocks."""
    lengths: dict[int, list[int]] = {}
    for prompt in prompts:
        lengths.setdefault(prompt.step, []).extend(prompt.response_tokens)
    marks = [float(np.quantile(lengths[step], share)) for step in sorted(lengths)[:_STEPS_SHOWN]]
    top = max(marks) or 1.0
    line = "".join(_LEVELS[int(mark / top * (len(_LEVELS) - 1))] for mark in marks)
    return f"{line}  {min(marks):,.0f} to {max(marks):,.0f}"
