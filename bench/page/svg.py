"""A few strokes of SVG: axes, bars, lines. Colours are CSS classes, and the page decides them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps low..high to the pixels start..end, linearly or by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        share = (value - low) / (high - low) if high > low else 0.0
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, count: int = 5) -> list[float]:
        """Round numbers within the scale: steps of 1, 2 or 5 × 10ⁿ, powers of ten on a log one."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**n for n in range(first, last + 1)]
        step = _round_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough - 1e-12)


def number(value: float) -> str:
    """Three digits that matter, without noise."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    """`label` says in words what is drawn, for those who do not see it."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'
    )


def line(a: Point, b: Point, kind: str) -> str:
    return f'<line x1="{a[0]:g}" y1="{a[1]:g}" x2="{b[0]:g}" y2="{b[1]:g}" class="{kind}"/>'


def bar(x: float, y: float, width: float, height: float, kind: str, told: str = "") -> str:
    """`told` shows under the pointer."""
    shape = (
        f'<rect x="{x:g}" y="{y:g}" width="{max(width, 0):g}" height="{height:g}" class="{kind}"'
    )
    return f"{shape}><title>{escape(told)}</title></rect>" if told else f"{shape}/>"


def dot(x: float, y: float, radius: float, kind: str, told: str = "") -> str:
    shape = f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{kind}"'
    return f"{shape}><title>{escape(told)}</title></circle>" if told else f"{shape}/>"


def cross(x: float, y: float, size: float, kind: str) -> str:
    return line((x - size, y - size), (x + size, y + size), kind) + line(
        (x - size, y + size), (x + size, y - size), kind
    )


def curve(points: Sequence[Point], kind: str, told: str = "") -> str:
    """A line through the points."""
    if not points:
        return ""
    path = "M" + "L".join(f"{x:g},{y:g}" for x, y in points)
    return f'<path d="{path}" class="{kind}"><title>{escape(told)}</title></path>'


def area(points: Sequence[Point], floor: float, kind: str) -> str:
    """What lies between the points and the floor."""
    if not points:
        return ""
    path = "L".join(f"{x:g},{y:g}" for x, y in points)
    left, right = points[0][0], points[-1][0]
    return f'<path d="M{left:g},{floor:g}L{path}L{right:g},{floor:g}Z" class="{kind}"/>'


def bottom_axis(x: Scale, top: float, bottom: float, unit: str, count: int = 5) -> str:
    """Grid lines up to `top`, numbers below, the unit behind the last of them."""
    parts = []
    for tick in x.ticks(count):
        parts.append(line((x(tick), top), (x(tick), bottom), "grid"))
        parts.append(text(x(tick), bottom + 15, number(tick), "tick", "middle"))
    parts.append(text(x.end, bottom + 30, unit, "unit", "end"))
    return "".join(parts)


def left_axis(y: Scale, left: float, right: float, unit: str, count: int = 4) -> str:
    """Grid lines from `left` to `right`, numbers on the left, the unit above them."""
    parts = []
    for tick in y.ticks(count):
        parts.append(line((left, y(tick)), (right, y(tick)), "grid"))
        parts.append(text(left - 6, y(tick) + 4, number(tick), "tick", "end"))
    parts.append(text(left - 6, y.end - 12, unit, "unit", "end"))
    return "".join(parts)
