"""Pulls over each transport, as shares of its engine's bare loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.page import svg
from bench.page.names import Figure, colour
from bench.page.svg import Scale

_WIDTH, _LEFT, _ROW = 860, 190, 26


def transports(report: Mapping[str, Any]) -> Figure | None:
    """A block a transport, a bar a batch; one that was not run is named with its reason."""
    told = report.get("transports")
    if not told:
        return None
    run = {name: shapes for name, shapes in told.items() if shapes.get("status") != "not run"}
    shares = [figures["of_ceiling"] for shapes in run.values() for figures in shapes.values()]
    x = Scale(0, max([1.0, *shares]) * 1.02, _LEFT, _WIDTH - 300)
    parts: list[str] = []
    y = 0.0
    for name, shapes in run.items():
        y += 24
        parts.append(svg.text(0, y - 6, name, "group"))
        for shape, figures in shapes.items():
            parts += _bar(shape.replace("x", " × ", 1), figures, x, y)
            y += _ROW
    parts.insert(0, svg.bottom_axis(x, 0, y, "share of the bare loop, in the same run"))
    missing = [f"{name} was not run: {told[name]['error']}" for name in told if name not in run]
    sentence = " ".join(
        (
            "Pulls between two peers; 1.0 is the same engine between two processes without this "
            "library (a raw TCP connection for tcp).",
            *(f"{why.rstrip('.')}." for why in missing),
        )
    )
    drawing = svg.svg(_WIDTH, y + 36, parts, "Pulls of each transport")
    return Figure("transports", "Transports", sentence, drawing)


def _bar(label: str, figures: Mapping[str, float], x: Scale, y: float) -> list[str]:
    share = figures["of_ceiling"]
    counted = (
        f"{share:.2f} ({figures['GBps']:.1f} GB/s), {figures['copies_per_byte']:.2f} copies, "
        f"{figures['exchanges_per_batch']:.1f} exchanges"
    )
    return [
        svg.text(_LEFT - 10, y + 14, label, "label", "end"),
        svg.bar(_LEFT, y, x(share) - _LEFT, 18, f"{colour('dataplane')} fill"),
        svg.text(x(share) + 8, y + 14, counted, "value"),
    ]
