"""One batch through several planes, as `bench compare` measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.page import svg
from bench.page.names import OUTCOMES, Figure, colour
from bench.page.svg import Scale

_WIDTH, _LEFT, _ROW = 860, 190, 26
_OPERATIONS = {
    "put": "put",
    "handle": "get: handle in hand",
    "read": "get: every byte read once",
    "packed": "get: packed TensorDict",
    "cycle": "get and done with, one row",
}

Line = Mapping[str, Any]


def compare(told: Mapping[str, Any]) -> Figure | None:
    """A row an operation, in it a dot a plane with the range of its samples."""
    if "results" not in told:
        return None
    title = "The same batch through other planes"
    lines: list[Line] = told["results"]
    if not lines:
        return Figure("compare", title, _absent(told), "")
    low = min(line["seconds"]["min"] for line in lines) * 1e3
    high = max(line["seconds"]["max"] for line in lines) * 1e3
    x = Scale(low / 1.5, high * 1.5, _LEFT, _WIDTH - 10, log=True)
    planes = list(dict.fromkeys(line["plane"] for line in lines))
    parts = _legend(planes)
    top = y = 22.0
    for batch, hosts in dict.fromkeys((line["batch"], line["hosts"]) for line in lines):
        y += 24
        where = "one host" if hosts == 1 else f"{hosts} hosts"
        parts.append(svg.text(0, y - 6, f"{batch}, {where}", "group"))
        for operation, named in _OPERATIONS.items():
            asked = (batch, hosts, operation)
            here = [x for x in lines if (x["batch"], x["hosts"], x["operation"]) == asked]
            if here:
                parts += _row(named, here, x, y)
                y += _ROW
    parts.insert(0, svg.bottom_axis(x, top, y, "milliseconds, each tick ten times the one before"))
    drawing = svg.svg(_WIDTH, y + 36, parts, "Milliseconds of each operation and plane")
    return Figure("compare", title, _sentence(told), drawing)


def _legend(planes: Sequence[str]) -> list[str]:
    parts = []
    for place, plane in enumerate(planes):
        parts.append(svg.dot(6 + place * 150, 8, 5, f"{colour(plane)} fill"))
        parts.append(svg.text(16 + place * 150, 12, plane, "tick"))
    return parts


def _row(title: str, lines: Sequence[Line], x: Scale, y: float) -> list[str]:
    """Planes lie a little below each other, so that equal ones stay visible."""
    parts = [svg.text(_LEFT - 10, y + _ROW / 2 + 4, title, "label", "end")]
    for place, line in enumerate(lines):
        at = y + _ROW * (place + 1) / (len(lines) + 1)
        took = {name: line["seconds"][name] * 1e3 for name in ("min", "median", "max")}
        kind = colour(line["plane"])
        figures = ", ".join(f"{name} {svg.number(ms)} ms" for name, ms in took.items())
        parts.append(svg.line((x(took["min"]), at), (x(took["max"]), at), f"{kind} thick"))
        parts.append(
            svg.dot(x(took["median"]), at, 4, f"{kind} fill", f"{line['plane']}: {figures}")
        )
    return parts


def _sentence(told: Mapping[str, Any]) -> str:
    return (
        f"{told['rows']} ragged rows a batch; dots are medians, lines reach from the quickest to "
        f"the slowest sample; further left is better. {_absent(told)}"
    ).rstrip()


def _absent(told: Mapping[str, Any]) -> str:
    """What was not measured, or not to its end, and the first line of why."""
    whys = {
        name: f"{OUTCOMES.get(plane['status'], plane['status'])}: {plane['error']}"
        for name, plane in told["planes"].items()
        if plane["status"] != "ok"
    } | dict(told.get("not_run", {}))
    absent = "; ".join(f"{name} ({why.splitlines()[0]})" for name, why in whys.items())
    return f"Not measured, or not to its end: {absent}." if absent else ""
