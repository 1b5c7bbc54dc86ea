"""The drawings of runs, and the sentences below them.

Only runs that did the same work are compared: the same rows, bytes, columns, hosts, links and
limit. Over hosts, it is the same work per host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.page import drawing
from bench.page.drawing import LIGHT, Bar, Figure, Line, number
from bench.report import Run, Steady, dedup, gib, grouped, job, setting, steady

Report = Mapping[str, Any]
_GIB = 1 << 30

_COUNTED = ("hosts", "prompts", "steps", "trainers")
_A_HOST = ("trace", "link", "samples", "staleness", "seed", "pace", "apart",
           "phased", "memory_limit_bytes")  # fmt: skip
_WORK = (*_A_HOST, *_COUNTED, "rows_expected", "bytes_unique")
_LEAD_S = -1.0  # of the start-up is shown


def colour(plane: str) -> str:
    return plane if plane in LIGHT else "other"


def differ(runs: Sequence[Run], setting: str) -> bool:
    return len({str(run.get(setting)) for run in runs}) > 1


def step(run: Run) -> Steady | None:
    """The steady steps, else the first one, which is cold."""
    if run["status"] != "ok":
        return None
    first = run["step_seconds"][0]
    return steady(run) or Steady(first, first, first)


def _families(runs: Sequence[Run]) -> list[list[Run]]:
    """The same work a host, on several numbers of hosts."""
    a_host = [
        {**run, "a_host": (run["prompts"] / run["hosts"], run["trainers"] / run["hosts"])}
        for run in runs
    ]
    found = grouped(a_host, (*_A_HOST, "a_host"))
    return [family for family in found if any(_over_hosts(family))]


def _over_hosts(family: Sequence[Run]) -> Iterator[tuple[list[Run], str]]:
    """The runs of each line, by hosts, and its name. A plane that ran on only one number of hosts
    has no line."""
    found = [m for m in grouped(family, ("plane", "dedup")) if differ(m, "hosts")]
    ways = {members[0]["dedup"] for members in found}
    for members in found:
        way = f"\n{dedup(members[0])}" if len(ways) > 1 else ""
        yield sorted(members, key=lambda run: int(run["hosts"])), members[0]["plane"] + way


def hosts(runs: Sequence[Run]) -> Figure | None:
    """Seconds of a step over hosts, each with as much work: medians, and bands of their ranges."""
    panels = []
    for family in _families(runs):
        run, over = family[0], list(_over_hosts(family))
        took = [s.median for members, _ in over for run in members if (s := step(run))]
        drawn, most = [], 1.15 * max(took, default=1.0)
        for members, name in over:
            timed = [(run, s) for run in members if (s := step(run))]
            points = [(int(run["hosts"]), s.median) for run, s in timed]
            died = [(int(run["hosts"]), most) for run in members if run["status"] != "ok"]
            said = [f"{number(points[-1][1])} s"] if points else []
            if points and not steady(timed[-1][0]):
                said[0] += " cold"
            if died:
                ends = {run["status"] for run in members if run["status"] != "ok"}
                said.append("✕ " + ", ".join("killed" if e == "oom" else e for e in ends))
            told = "\n".join([name, *said])
            dashed, kind = name.endswith("off"), colour(members[0]["plane"])
            band = [(s.fastest, s.slowest) for _, s in timed]
            drawn.append(Line(told, kind, points, dashed, True, died, band))
        sizes = sorted({int(run["hosts"]) for run in family})
        a_host = run["prompts"] / run["hosts"]
        prompts = f"{a_host:g} prompt{'' if a_host == 1 else 's'} a host"
        title = f"{run['trace']}, {prompts}, {setting(run)}"
        panels.append(drawing.lines(title, drawn, "hosts", "seconds", sizes))
    sentence = (
        "Each host brings the same work, so a flat line means that hosts share no bottleneck. "
        "Points are medians of steady steps, bands show the fastest and the slowest; each step has "
        "other prompts. The figures at the right are those on the most hosts. A run of one step "
        "has only a cold first step, marked “cold”."
    )
    return Figure("hosts", "Step time over hosts", sentence, panels) if panels else None


def share(runs: Sequence[Run]) -> Figure | None:
    """One panel per job and one bar per plane: the steady step's transfers and its recorded
    time."""
    linked = [run for run in runs if run["link"] and run["recorded_step_seconds"]]
    panels = []
    for members in grouped(linked, (*_WORK, "dedup")):
        timed = [(run, took.median) for run in members if (took := step(run))]
        what = (members[0]["trace"], members[0]["dedup"])
        most = max(run["hosts"] for run in linked if (run["trace"], run["dedup"]) == what)
        if not timed or members[0]["hosts"] < most:
            continue
        content = []
        for run, seconds in timed:
            recorded = run["recorded_step_seconds"]
            parts = [("work", recorded), (colour(run["plane"]), seconds)]
            part = seconds / (recorded + seconds)
            told = f"{number(seconds)} s, {f'{part:.0%}' if part >= 0.01 else 'under 1%'}"
            content.append(Bar(run["plane"], told, parts))
        title = job(members[0]) + ("" if members[0]["dedup"] else ", dedup off")
        panels.append(drawing.bars(title, content, "seconds of a step"))
    sentence = (
        "Grey: recorded rollout and training of the same step; these runs did not wait for it. "
        "Colour: time to move the step's data, added as if it did not overlap."
    )
    return Figure("share", "Share of a step", sentence, panels) if panels else None


def _wholes(run: Run) -> dict[str, list[float]]:
    """Each host's memory under a limit, else that of all processes together."""
    told = run["memory_curve"]
    if told["hosts"]:
        return {f"host {n}": list(values) for n, values in enumerate(told["hosts"])}
    columns = zip(*told["processes"].values(), strict=True)
    return {"all processes": [sum(v or 0 for v in values) for values in columns]}


def _curve(run: Run, values: Sequence[float | None]) -> list[tuple[float, float]]:
    """The points from shortly before the start to the end; for a killed run, to the peak of the
    killed host."""
    times = run["memory_curve"]["seconds"]
    last = times[-1]
    if run["killed"] and (hosts := run["memory_curve"]["hosts"]):
        host = hosts[run["killed"]["host"]]
        last = times[host.index(max(host))]
    pairs = zip(times, values, strict=True)
    return [(at, v / _GIB) for at, v in pairs if v is not None and _LEAD_S <= at <= last]


def _end(run: Run) -> str:
    if killed := run["killed"]:
        return f"✕ killed at {killed['seconds']:.1f} s"
    if run["status"] != "ok":
        return str(run["status"])
    return f"at most {gib(max(max(values) for values in _wholes(run).values()))}"


def memory(runs: Sequence[Run]) -> Figure | None:
    """One panel per job: the fullest host of each run over time. If some runs have a limit, only
    those."""
    # Without runs that failed to start, whose time has another origin.
    started = [run for run in runs if run["seconds"] or run["killed"]]
    drawn = [run for run in started if run.get("memory_curve", {}).get("seconds")]
    drawn = [run for run in drawn if run["memory_limit_bytes"]] or drawn
    panels = []
    for members in grouped(drawn, _WORK):
        curves = []
        for run in members:
            fullest = max(_wholes(run).values(), key=max)
            differs = differ(members, "dedup")
            name = "\n".join([run["plane"], *([dedup(run)] if differs else []), _end(run)])
            dashed = not run["dedup"] and differs
            curve, kind = _curve(run, fullest), colour(run["plane"])
            at = run["killed"] and (run["killed"]["seconds"], run["memory_limit_bytes"] / _GIB)
            curves.append(Line(name, kind, curve, dashed, dots=False, crosses=[at] if at else []))
        nbytes = members[0]["memory_limit_bytes"]
        limit = (nbytes / _GIB, f"limit of a host, {gib(nbytes)}") if nbytes else None
        whose = "GiB, fullest host" if nbytes else "GiB, all processes"
        axes = ("seconds since the start signal", whose)
        panels.append(drawing.lines(job(members[0]), curves, *axes, limit=limit))
    title = "Memory under the limit" if drawn and drawn[0]["memory_limit_bytes"] else "Memory"
    sentence = (
        "Memory of all processes, or of the fullest host if hosts have a limit. Private memory "
        "counts by proportional set size, shared arenas count once. A cross marks when the kernel "
        "killed a process of the host."
    )
    return Figure("memory", title, sentence, panels) if panels else None


def figures(reports: Sequence[Report]) -> list[Figure]:
    """All figures of the runs in these reports."""
    found = [run for report in reports for run in report["runs"]]
    return [figure for draw in (hosts, memory, share) if (figure := draw(found))]
