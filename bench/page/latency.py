"""How long one put, one wait for rows and one add took, and how figures change with size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.page import svg
from bench.page.names import Figure, Run, by_trace, colour, run_label
from bench.page.svg import Scale

_WIDTH, _LEFT, _ROW = 860, 250, 24
_CALLS = (
    ("rollout", "put", "put one group"),
    ("reward", "claim", "wait for a group to score"),
    ("train", "claim", "wait for a group to train"),
)

Perf = Mapping[str, Any]


def latency(runs: Sequence[Run]) -> Figure | None:
    """A line from p50 to the maximum for each run and call, on a logarithmic axis."""
    timed = [run for run in runs if run["status"] == "ok" and run.get("latency_ms")]
    found = [
        run["latency_ms"][role][call]
        for run in timed
        for role, call, _ in _CALLS
        if call in run["latency_ms"].get(role, {})
    ]
    if not found:
        return None
    low = max(min(told["p50"] for told in found) / 1.5, 1e-3)
    x = Scale(low, max(told["max"] for told in found) * 1.3, _LEFT, _WIDTH - 90, log=True)
    parts: list[str] = []
    y = 0.0
    for trace, members in by_trace(timed).items():
        for role, call, title in _CALLS:
            y += 24
            parts.append(svg.text(0, y - 6, f"{trace}: {title}", "group"))
            for run in members:
                told = run["latency_ms"].get(role, {}).get(call)
                if told:
                    label = run_label(run, [r for r in runs if r["trace"] == trace])
                    parts += _row(label, told, colour(run["plane"]), x, y)
                    y += _ROW
    parts.insert(0, svg.bottom_axis(x, 0, y, "milliseconds, each tick ten times the one before"))
    sentence = (
        "From p50 (dot) over p90 and p99 (ticks) to the slowest; further left is better. A wait "
        "for rows ends when the stages before are done: with a controller, when all rows are."
    )
    drawing = svg.svg(_WIDTH, y + 36, parts, "Latency percentiles of each run")
    return Figure("latency", "Latency", sentence, drawing)


def _row(label: str, told: dict[str, float], kind: str, x: Scale, y: float) -> list[str]:
    middle = y + _ROW / 2
    figures = ", ".join(
        f"{name} {svg.number(told[name])} ms" for name in ("p50", "p90", "p99", "max")
    )
    parts = [
        svg.text(_LEFT - 10, middle + 4, label, "label", "end"),
        svg.line((x(told["p50"]), middle), (x(told["max"]), middle), f"{kind} thick"),
        svg.dot(x(told["p50"]), middle, 5, f"{kind} fill", figures),
    ]
    for name in ("p90", "p99"):
        at = x(told[name])
        parts.append(svg.line((at, middle - 5), (at, middle + 5), f"{kind} thick"))
    median = f"{svg.number(told['p50'])} – {svg.number(told['max'])}"
    parts.append(svg.text(x(told["max"]) + 8, middle + 4, median, "tick"))
    return parts


def scaling(runs: Sequence[Run], perf: Sequence[Perf]) -> Figure | None:
    """Rows a second over hosts where runs differ in them, and what `bench perf` knows of scale."""
    bars = [*_hosts(runs), *(bar for told in perf for bar in _hot_path(told))]
    if not bars:
        return None
    parts: list[str] = []
    y = 0.0
    for title, members in bars:
        y += 24
        parts.append(svg.text(0, y - 6, title, "group"))
        x = Scale(0, max(value for _, value, _ in members), _LEFT, _WIDTH - 120)
        for label, value, kind in members:
            parts.append(svg.text(_LEFT - 10, y + 15, label, "label", "end"))
            parts.append(svg.bar(_LEFT, y + 3, x(value) - _LEFT, 16, f"{kind} fill"))
            parts.append(svg.text(x(value) + 8, y + 15, svg.number(value), "value"))
            y += _ROW
    sentence = (
        "Each block is one question: what happens to a figure when there is more of something."
    )
    return Figure("scaling", "Scaling", sentence, svg.svg(_WIDTH, y + 8, parts, "Scaling"))


Block = tuple[str, list[tuple[str, float, str]]]


def _hosts(runs: Sequence[Run]) -> list[Block]:
    blocks: list[Block] = []
    for trace, members in by_trace(runs).items():
        done = [run for run in members if run["status"] == "ok" and run["seconds"]]
        if len({run["hosts"] for run in done}) > 1:
            bars = [
                (run_label(run, members), run["rows"] / run["seconds"], colour(run["plane"]))
                for run in sorted(done, key=lambda run: (run["plane"], run["dedup"], run["hosts"]))
            ]
            blocks.append((f"{trace}: rows a second over hosts", bars))
    return blocks


def _hot_path(told: Perf) -> list[Block]:
    ours = colour("dataplane")
    blocks: list[Block] = []
    if clients := told.get("clients"):
        bars = [
            (f"{n} client{'' if n == '1' else 's'}", float(rate), ours)
            for n, rate in clients.items()
        ]
        blocks.append(("operations a second over clients of one peer", bars))
    if shard := told.get("shard"):
        bars = [
            ("10 thousand live rows", shard["claim_ms_p50_at_10k"], ours),
            ("1 million live rows", shard["claim_ms_p50_at_1m"], ours),
        ]
        blocks.append(("ms that a claim takes, over live rows (p50)", bars))
    if fields := told.get("fields"):
        bars = [
            (f"{n} field{'' if n == '1' else 's'}", float(rate), ours) for n, rate in fields.items()
        ]
        blocks.append(("GB/s of a put, over fields for the same bytes", bars))
    return blocks


def ceilings(told: Perf) -> Figure | None:
    """The hot path as shares of what the machine can do."""
    if "ceiling" not in told:
        return None
    rows = (
        ("put, of memcpy", told["put"]["of_memcpy"], told["put"]["GBps"]),
        ("pull, of a socket", told["pull"]["of_socket"], told["pull"]["GBps"]),
    )
    x = Scale(0, max(1.0, *(share for _, share, _ in rows)) * 1.02, _LEFT, _WIDTH - 120)
    parts = [svg.bottom_axis(x, 0, 62, "share of the ceiling, measured in the same run")]
    for place, (label, share, rate) in enumerate(rows):
        y = 6 + place * 28
        parts.append(svg.text(_LEFT - 10, y + 14, label, "label", "end"))
        parts.append(svg.bar(_LEFT, y, x(share) - _LEFT, 18, f"{colour('dataplane')} fill"))
        parts.append(svg.text(x(share) + 8, y + 14, f"{share:.2f} ({rate:.1f} GB/s)", "value"))
    sentence = (
        f"256 rows of 1 MiB, medians of {told.get('rounds', 'several')} rounds; 1.0 is one memcpy "
        "of the same bytes, or one raw TCP connection."
    )
    return Figure("ceilings", "The hot path", sentence, svg.svg(_WIDTH, 100, parts, "Hot path"))
