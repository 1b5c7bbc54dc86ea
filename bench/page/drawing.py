"""Panels, by matplotlib: bars, and lines with their names at their ends.

A panel is one drawing as wide as a phone. A page lays out several side by side if they fit, so
letters have one size everywhere. Colours are names of a theme; on the page they become CSS
variables, so one drawing serves light and dark.
"""

from __future__ import annotations

import io
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

Theme = Mapping[str, str]

# Planes have the colours of Okabe and Ito, which people with any colour vision tell apart. Each
# colour occurs once, because the page finds a colour's variable by its value.
LIGHT: Theme = {
    "paper": "#ffffff", "ink": "#1c2430", "soft": "#5c6672", "grid": "#e3e7ec", "bad": "#b3261e",
    "dataplane": "#0072b2", "controller": "#d55e00", "controller-stream": "#6a4fa3",
    "other": "#6b7280", "ray-store": "#00876b", "transfer_queue": "#a67400",
    "work": "#aab2bd",
}  # fmt: skip
DARK: Theme = {
    "paper": "#0d1117", "ink": "#e4e8ee", "soft": "#9ba6b4", "grid": "#262d36", "bad": "#ff8a80",
    "dataplane": "#56b4e9", "controller": "#f08b43", "controller-stream": "#b39ddb",
    "other": "#9aa3af", "ray-store": "#2cc295", "transfer_queue": "#e8b93f",
    "work": "#56606d",
}  # fmt: skip

WIDTH = 360  # pixels
_ROW, _LINE, _LETTER = 33, 14, 12
_LINES_HEIGHT = 235
_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": _LETTER,
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.3,
    "figure.constrained_layout.w_pad": 3 / 72,
    "figure.constrained_layout.h_pad": 4 / 72,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True, slots=True)
class Panel:
    """A drawing with its title and its height in pixels."""

    title: str
    height: float
    draw: Callable[[Axes, Theme], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels that say one thing."""

    name: str
    title: str
    sentence: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar under its name and figure. parts: colour and length of each part."""

    name: str
    told: str
    parts: Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of points. `name` is at its end, which a cross may mark."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = True
    crosses: Sequence[tuple[float, float]] = ()
    band: Sequence[tuple[float, float]] = ()  # lowest and highest at each point


def number(value: float) -> str:
    """A number with three significant digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def bars(title: str, content: Sequence[Bar], unit: str) -> Panel:
    """Horizontal bars from zero, one below the other."""

    def draw(ax: Axes, theme: Theme) -> None:
        ax.set_ylim(len(content) + 0.1, 0)
        ax.set_axisbelow(True)
        place: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "va": "center", "zorder": 4}
        for y, bar in enumerate(content):
            ax.text(0.01, y + 0.34, bar.name, **place)
            ax.text(0.995, y + 0.34, bar.told, ha="right", color=theme["ink"], **place)
            starts = itertools.accumulate((length for _, length in bar.parts), initial=0.0)
            for start, (colour, length) in zip(starts, bar.parts, strict=False):
                ax.barh(y + 0.77, length, 0.26, left=start, color=theme[colour])
        _axis(ax.xaxis)
        ax.set_xlim(0, ax.get_xlim()[1])
        ax.set_xlabel(unit, color=theme["soft"], fontsize=_LETTER - 1, loc="right")
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.grid(axis="x", color=theme["grid"], lw=1)

    return Panel(title, _ROW * len(content) + 46, draw)


def lines(
    title: str,
    content: Sequence[Line],
    x: str,
    y: str,
    ticks: Sequence[float] = (),
    limit: tuple[float, str] | None = None,
) -> Panel:
    """Lines with their names on the right, moved apart if they would overlap. The panel is higher
    if the names need it. x, y: titles of the axes. ticks: fixed ticks of x.
    """
    height = max(_LINES_HEIGHT, sum(map(_name_height, content)) + 60)

    def draw(ax: Axes, theme: Theme) -> None:
        for line in content:
            _line(ax, theme, line)
        if limit:
            ax.axhline(limit[0], color=theme["ink"], lw=1.3, ls=(0, (5, 3)))
            above: dict[str, Any] = {"xycoords": ax.get_yaxis_transform(), "xytext": (0, 4)}
            above |= {"textcoords": "offset points", "fontsize": _LETTER - 1}
            ax.annotate(limit[1], (0.02, limit[0]), **above)
        _axis(ax.xaxis, ticks)
        _axis(ax.yaxis)
        ax.set_ylim(0, max(ax.get_ylim()[1], (limit[0] if limit else 0) * 1.12))
        if ticks:
            ax.margins(x=0.06)
        small: dict[str, Any] = {"color": theme["soft"], "fontsize": _LETTER - 1}
        ax.set_xlabel(x, loc="right", **small)
        spot: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        ax.annotate(y, (0, 1), (-6, 7), ha="left", **spot, **small)
        ax.grid(axis="y", color=theme["grid"], lw=1)
        _names(ax, theme, content, height - 60)

    return Panel(title, height, draw)


def _line(ax: Axes, theme: Theme, line: Line) -> None:
    colour, dash = theme[line.colour], (0, (4, 2.2)) if line.dashed else "-"
    at = np.array(line.points or [(np.nan, np.nan)])
    if line.band:
        lows, highs = np.array(line.band).T
        ax.fill_between(at[:, 0], lows, highs, color=colour, alpha=0.15, lw=0)
    ax.plot(at[:, 0], at[:, 1], color=colour, lw=2, ls=dash, solid_joinstyle="round")
    if line.dots:
        ax.plot(at[:, 0], at[:, 1], "o", color=colour, ms=5)
    if line.crosses:
        look: dict[str, Any] = {"mec": theme["paper"], "mfc": colour, "ms": 11}
        ax.plot(*np.array(line.crosses).T, "X", clip_on=False, zorder=5, **look)


def _names(ax: Axes, theme: Theme, content: Sequence[Line], room: float) -> None:
    """Draw each name next to the end of its line. room: the height of the axes in pixels."""
    ends = []
    for line in content:
        last = [*line.points, *line.crosses][-1]
        height = ax.transAxes.inverted().transform(ax.transData.transform(last))[1]
        ends.append((float(height) * room, line))
    ends.sort(key=lambda end: -end[0])
    sizes = [_name_height(line) for _, line in ends]
    for (_, line), height in zip(ends, apart([e[0] for e in ends], sizes, room), strict=True):
        first, *more = line.name.split("\n")
        place: dict[str, Any] = {"transform": ax.transAxes, "color": theme[line.colour]}
        top = height + _LINE * len(more) / 2
        for nth, (words, weight) in enumerate([(first, "bold"), *((m, "normal") for m in more)]):
            at = (top - _LINE * nth) / room
            ax.text(1.03, at, words, weight=weight, va="center", **place)


def _name_height(line: Line) -> float:
    return _LINE * (line.name.count("\n") + 1) + 3


def apart(wanted: Sequence[float], sizes: Sequence[float], room: float) -> list[float]:
    """Middles of labels near where they are wanted, from the highest down, without overlaps."""
    found, ceiling = [], room + _LINE / 2
    for middle, size in zip(wanted, sizes, strict=True):
        found.append(min(middle, ceiling - size / 2))
        ceiling = found[-1] - size / 2
    floor = -float(_LINE)
    for nth in reversed(range(len(found))):
        found[nth] = max(found[nth], floor + sizes[nth] / 2)
        floor = found[nth] + sizes[nth] / 2
    return found


def _axis(axis: Any, ticks: Sequence[float] = ()) -> None:
    if ticks:
        axis.set_ticks(list(ticks))
    else:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def _sheet(panel: Panel, theme: Theme, heading: str = "") -> Sheet:
    """`heading`: of a picture that stands by itself; on a page both titles are text."""
    title = textwrap.wrap(panel.title, 50) if heading else []
    height = panel.height + (24 + 15 * len(title) if heading else 0)
    sheet = Sheet(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
    sheet.patch.set_facecolor(theme["paper"] if heading else "none")
    ax = sheet.add_subplot()
    ax.set_facecolor("none")
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("bottom", "left"))
        spine.set_color(theme["grid"])
    ax.tick_params(colors=theme["soft"], labelsize=_LETTER - 1, length=0)
    ax.tick_params(axis="x", pad=7)  # clear of the lowest figure on the left
    panel.draw(ax, theme)
    if heading:
        small: dict[str, Any] = {"fontsize": _LETTER - 1, "color": theme["soft"]}
        sheet.suptitle(heading, x=0.01, ha="left", weight="bold", fontsize=_LETTER + 1)
        ax.set_title("\n".join(title), loc="left", pad=22, **small)
    return sheet


def _style(theme: Theme, **more: Any) -> Any:
    settings: Any = {**_STYLE, "text.color": theme["ink"], **more}
    return matplotlib.rc_context(settings)


def inline(panel: Panel, name: str) -> str:
    """As SVG for a page whose CSS has a variable for each colour; `name` is its own there."""
    with _style(LIGHT, **{"svg.hashsalt": name}):
        told = io.StringIO()
        _sheet(panel, LIGHT).savefig(told, format="svg", metadata=_NO_METADATA)
    drawn = told.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    used = set(re.findall(r"#([\w-]+)", drawn))
    drawn = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", drawn)
    drawn = re.sub(r' (xmlns(:xlink)?|version|width|height)="[^"]*"', "", drawn, count=5)
    for colour, value in LIGHT.items():
        drawn = drawn.replace(value, f"var(--{colour})")
    label = f'<svg role="img" aria-label="{escape(panel.title)}"'
    return drawn.replace("<svg", label, 1)


def picture(heading: str, panel: Panel, path: Path, theme: Theme) -> None:
    """As an SVG file by itself, with its titles. Letters are paths: alike on any machine."""
    with _style(theme, **{"svg.hashsalt": path.name, "svg.fonttype": "path"}):
        _sheet(panel, theme, heading).savefig(path, format="svg", metadata=_NO_METADATA)
