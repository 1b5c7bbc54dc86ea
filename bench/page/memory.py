"""Memory over time with the kills marked, and the smallest limits that runs survived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.page import svg
from bench.page.names import (
    GIB,
    OUTCOMES,
    Figure,
    Run,
    by_job,
    by_trace,
    colour,
    gib,
    run_label,
    switch,
)
from bench.page.svg import Point, Scale

_WIDTH = 860
_PANEL, _HEIGHT, _LEFT, _TOP, _BOTTOM = 422, 250, 46, 44, 204
_LEAD_S = -1.0  # of the start-up is shown
_NAMED = 3  # processes drawn by name in a panel

Case = dict[str, Any]


def curves(runs: Sequence[Run]) -> Figure | None:
    """A panel a run, all of a trace on the same axes; none of a run that failed to start, whose
    time counts from somewhere else."""
    started = [run for run in runs if run["seconds"] or run.get("killed")]
    drawn = [run for run in started if run.get("memory_curve", {}).get("seconds")]
    parts: list[str] = []
    y = 0.0
    for trace, members in by_trace(drawn).items():
        y += 18
        parts.append(svg.text(0, y - 4, trace, "group"))
        time, amount = _axes(members)
        for place, run in enumerate(members):
            x = (place % 2) * (_PANEL + 16)
            panel = _panel(run, run_label(run, members), time, amount)
            parts.append(f'<g transform="translate({x},{y:g})">{panel}</g>')
            y += (_HEIGHT + 8) * (place % 2 or place == len(members) - 1)
    if not parts:
        return None
    drawing = svg.svg(_WIDTH, y, parts, "Memory of each run over time")
    return Figure("memory", "Memory", _sentence(drawn), drawing)


def _axes(runs: Sequence[Run]) -> tuple[Scale, Scale]:
    seconds = [s for run in runs for s in run["memory_curve"]["seconds"]]
    peaks = [max(run["peak_host_bytes"] or [run["peak_total_bytes"]]) for run in runs]
    peaks += [run.get("memory_limit_bytes") or 0 for run in runs]
    seconds += [run["killed"]["seconds"] for run in runs if run.get("killed")]
    time = Scale(max(min(seconds), _LEAD_S), max(seconds), _LEFT, _PANEL - 8)
    return time, Scale(0, max(*peaks, 1) / GIB * 1.08, _BOTTOM, _TOP)


def _panel(run: Run, label: str, time: Scale, amount: Scale) -> str:
    told = run["memory_curve"]
    kind = colour(run["plane"])
    parts = [
        svg.left_axis(amount, _LEFT, _PANEL - 8, "GiB"),
        svg.bottom_axis(time, _TOP, _BOTTOM, "seconds since the start signal", 6),
        svg.text(_LEFT, 20, label, f"panel {kind} ink"),
    ]
    if limit := run.get("memory_limit_bytes"):
        y = amount(limit / GIB)
        parts.append(svg.line((_LEFT, y), (_PANEL - 8, y), "limit"))
        parts.append(svg.text(_LEFT + 4, y - 5, f"limit of a host, {gib(limit)}", "limit-text"))
    names = sorted(told["processes"], key=lambda name: -run["peak_memory_bytes"].get(name, 0))
    for name in names[:_NAMED]:
        points = _points(told["seconds"], told["processes"][name], time, amount)
        parts.append(svg.curve(points, "thin", name))
        if points and name == names[0]:
            x, y = points[-1]  # of a run that was over soon, the name stands behind the curve
            side = "end" if x > (_LEFT + _PANEL) / 2 else "start"
            parts.append(svg.text(x, y - 4, name, "tick", side))
    if told["hosts"]:
        wholes = {f"host {n}": values for n, values in enumerate(told["hosts"])}
    else:
        columns = zip(*told["processes"].values(), strict=True)
        wholes = {"all processes": [sum(v or 0 for v in values) for values in columns]}
    for name, values in wholes.items():
        points = _points(told["seconds"], values, time, amount)
        parts.append(svg.area(points, _BOTTOM, f"{kind} shade"))
        parts.append(svg.curve(points, f"{kind} thick", name))
    parts.append(_end(run, wholes, time, amount))
    told_apart = f"thick: {', '.join(wholes)}; thin: the {_NAMED} largest of their parts"
    parts.append(svg.text(_LEFT, 35, told_apart, "tick"))
    return "".join(parts)


def _points(
    seconds: Sequence[float], values: Sequence[int | None], time: Scale, amount: Scale
) -> list[Point]:
    return [
        (time(at), amount(value / GIB))
        for at, value in zip(seconds, values, strict=True)
        if value is not None and at >= time.low
    ]


def _end(run: Run, wholes: dict[str, Any], time: Scale, amount: Scale) -> str:
    """The kill, or how much there was at most; below the limit, on the side that is free."""
    limit = run.get("memory_limit_bytes")
    if killed := run.get("killed"):
        y = amount((limit or 0) / GIB)
        told = f"{', '.join(killed['processes']) or 'a child'} killed at {killed['seconds']:.1f} s"
        mark = svg.text(_LEFT + 8, y + 20, told, "bad")
        return svg.cross(time(killed["seconds"]), y, 7, "kill") + mark
    peak = max(max(values) for values in wholes.values())
    told = f"{'a host' if limit else 'all'} at most {gib(peak)}"
    y = amount(limit / GIB) + 20 if limit else amount(peak / GIB) - 8
    return svg.text(_PANEL - 10, max(y, _TOP + 10), told, "value", "end")


def _sentence(runs: Sequence[Run]) -> str:
    killed = [run for run in runs if run.get("killed")]
    if not killed:
        return (
            "Thick: all processes together, or each host with a limit; private memory by "
            "proportional set size, shared arenas once."
        )
    run = killed[0]
    limit = gib(run["memory_limit_bytes"])
    job = next(members for members in by_job(runs) if run in members)
    same = [r for r in job if r["plane"] == "dataplane" and r["status"] == "ok"]
    said = (
        f"With {limit} a host, the same trace and the same bytes, {run['plane']} (dedup "
        f"{switch(run['dedup'])}) fills its host until the kernel kills it"
    )
    if same:
        peak = max(same[0]["peak_host_bytes"] or [0])
        dedup = switch(same[0]["dedup"])
        said += f", dataplane (dedup {dedup}) stays at {gib(peak)} at most and finishes"
    return said + "."


def smallest(told: Sequence[Case]) -> Figure | None:
    """Lines over the number of prompts, one a plane and dedup; what has no answer is named."""
    title = "How little memory is enough"
    cases = [case for case in told if case["status"] == "ok"]
    if not cases:
        return Figure("smallest", title, _unanswered(told), "") if told else None
    lines: dict[tuple[str, bool], list[Case]] = {}
    for case in sorted(cases, key=lambda case: int(case["prompts"])):
        lines.setdefault((case["plane"], case["dedup"]), []).append(case)
    top, bottom, left, right = 24, 290, 50, _WIDTH - 210
    prompts = sorted({case["prompts"] for case in cases})
    most = max(case["smallest_bytes"] or case["most_bytes"] for case in cases) / GIB
    x = Scale(prompts[0] - 0.6, prompts[-1], left, right)
    y = Scale(0, most * 1.1, bottom, top)
    parts = [svg.left_axis(y, left, right, "GiB")]
    for number in prompts:
        parts.append(svg.text(x(number), bottom + 16, str(number), "tick", "middle"))
    parts.append(svg.text(right, bottom + 32, "prompts in a step", "unit", "end"))
    ends: list[tuple[float, str, str]] = []
    for (plane, dedup), members in lines.items():
        parts.append(_line(members, x, y))
        last = members[-1]
        value = (last["smallest_bytes"] or last["most_bytes"]) / GIB
        ends.append((y(value), f"{plane}, dedup {switch(dedup)}", colour(plane)))
    parts += _end_labels(ends, right + 14)
    drawing = svg.svg(_WIDTH, bottom + 40, parts, "Smallest surviving limit over prompts")
    sentence = f"{_smallest_sentence(lines)} {_unanswered(told)}".rstrip()
    return Figure("smallest", title, sentence, drawing)


def _unanswered(cases: Sequence[Case]) -> str:
    """Who is missing among the lines, and why."""
    whys: dict[tuple[str, str], None] = {}
    for case in cases:
        if case["status"] != "ok":
            whys[case["plane"], OUTCOMES.get(case["status"], str(case["status"]))] = None
    absent = ", ".join(f"{plane} ({why})" for plane, why in whys)
    return f"No answer for {absent}." if absent else ""


def _line(cases: Sequence[Case], x: Scale, y: Scale) -> str:
    kind = colour(cases[0]["plane"])
    dashed = "" if cases[0]["dedup"] else " dashed"
    points = [(x(c["prompts"]), y((c["smallest_bytes"] or c["most_bytes"]) / GIB)) for c in cases]
    parts = [svg.curve(points, f"{kind} thick{dashed}")]
    for case, (px, py) in zip(cases, points, strict=True):
        if case["smallest_bytes"] is None:
            told = f"more than {gib(case['most_bytes'])} " if case is cases[-1] else ""
            parts.append(svg.text(px + 5, py - 7, f"{told}▲", "bad", "end"))
        else:
            told = f"{case['prompts']} prompts: {case['smallest_bytes'] >> 20} MiB"
            parts.append(svg.dot(px, py, 4, f"{kind} fill", told))
    return "".join(parts)


def _end_labels(ends: Sequence[tuple[float, str, str]], x: float) -> list[str]:
    """Names at the ends of lines, pushed apart where they would lie on each other."""
    parts, lowest = [], 0.0
    for y, name, kind in sorted(ends):
        lowest = max(y + 4, lowest + 16)
        parts.append(svg.text(x, lowest, name, f"{kind} ink label"))
    return parts


def _smallest_sentence(lines: dict[tuple[str, bool], list[Case]]) -> str:
    """Where dataplane and the controller, dedup as each has it, begin and end."""
    told = []
    for (plane, dedup), cases in lines.items():
        if dedup != (plane == "dataplane"):
            continue
        first, last = cases[0], cases[-1]
        told.append(
            f"{first['trace']}: {plane} (dedup {switch(dedup)}) needs {_amount(first)} a host at "
            f"{first['prompts']} prompts and {_amount(last)} at {last['prompts']}"
        )
    return (
        f"{'; '.join(told) or 'Lower is better'}. Each point: the smallest limit, 7 % apart, that "
        "a real run survived."
    )


def _amount(case: Case) -> str:
    if case["smallest_bytes"] is None:
        return f"more than {gib(case['most_bytes'])}"
    return gib(case["smallest_bytes"])
