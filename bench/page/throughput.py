"""Rows a second of every run, and where its workers' time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bench.page import svg
from bench.page.names import (
    OUTCOMES,
    Figure,
    Run,
    by_job,
    by_trace,
    colour,
    gib,
    run_label,
    settings,
)
from bench.page.svg import Scale

_WIDTH, _LEFT, _ROW, _BAR = 860, 250, 30, 18

_TITLED = ("hosts", "prompts", "steps", "memory_limit_bytes")

# What a worker does, in the order of drawing: class, what it is called, its activities.
_ACTIVITIES = (
    ("put", "putting rows", ("put", "finish")),
    ("wait", "waiting for rows, reading", ("claim", "read")),
    ("add", "adding fields, dropping", ("add", "drop")),
    ("idle", "waiting for the policy", ("policy",)),
    ("bench", "the bench's own work", ("generate", "digest", "check")),
    ("work", "the stage's own work", ()),  # and whatever else there is
)


def throughput(runs: Sequence[Run]) -> Figure | None:
    """Bars of rows a second; runs that ended otherwise say how."""
    if not runs:
        return None
    most = max([run["rows"] / run["seconds"] for run in runs if _ok(run)], default=1.0)
    x = Scale(0, most * 1.02, _LEFT, _WIDTH - 190)
    parts: list[str] = []
    y = 0.0
    for members in by_job(runs):
        y += 24
        among = by_trace(runs)[members[0]["trace"]]
        parts.append(svg.text(0, y - 6, _title(members, among), "group"))
        for run in members:
            parts += _row(run, run_label(run, members), x, y)
            y += _ROW
        y += 6
    parts.insert(0, svg.bottom_axis(x, 0, y, "rows a second"))
    label = "Rows a second of each run"
    drawing = svg.svg(_WIDTH, y + 36, parts, label)
    return Figure("throughput", "Throughput", _sentence(runs), drawing)


def _ok(run: Run) -> bool:
    return bool(run["status"] == "ok" and run["seconds"])


def _title(runs: Sequence[Run], among: Sequence[Run]) -> str:
    """What these runs, which did the same work, were about; the rest where not all did so."""
    run = runs[0]
    shared = f"{run['bytes_unique'] / 1e9:.2f} GB of distinct bytes, {run['hosts']} hosts"
    limit = run.get("memory_limit_bytes")
    return (
        f"{run['trace']}: {run['prompts']} prompts × {run['samples']}, {shared}"
        + (f" of {gib(limit)} each" if limit else "")
        + (f", {run['steps']} steps" if run.get("steps", 1) > 1 else "")
        + "".join(f", {other}" for other in settings(run, among, _TITLED))
    )


def _row(run: Run, label: str, x: Scale, y: float) -> list[str]:
    middle = y + _ROW / 2 + 4
    parts = [svg.text(_LEFT - 10, middle, label, "label", "end")]
    if not _ok(run):
        told = OUTCOMES.get(run["status"], str(run["status"]))
        parts.append(svg.cross(_LEFT + 8, y + _ROW / 2, 5, "kill"))
        parts.append(svg.text(_LEFT + 22, middle, told, "bad"))
        return parts
    rate = run["rows"] / run["seconds"]
    told = f"{svg.number(rate)} rows/s · {run['seconds']:.2f} s"
    kind = f"{colour(run['plane'])} fill"
    parts.append(svg.bar(_LEFT, y + 6, x(rate) - _LEFT, _BAR, kind, f"{label}: {told}"))
    parts.append(svg.text(x(rate) + 8, middle, told, "value"))
    return parts


def _sentence(runs: Sequence[Run]) -> str:
    told = []
    for members in by_job(runs):
        among = by_trace(runs)[members[0]["trace"]]
        job = ", ".join([members[0]["trace"], *settings(members[0], among)])
        ours = [run for run in members if run["plane"] == "dataplane" and _ok(run)]
        others = [run for run in members if run["plane"] != "dataplane"]
        finished = [run for run in others if _ok(run)]
        if not ours or not others:
            continue
        best = min(ours, key=lambda run: float(run["seconds"]))
        took = f"{job}: {run_label(best, members)} took {best['seconds']:.2f} s"
        if not finished:
            told.append(f"{took}, nobody else finished")
            continue
        rival = min(finished, key=lambda run: float(run["seconds"]))
        told.append(
            f"{took}, {rival['seconds'] / best['seconds']:.2g} × as fast as the best other run "
            f"that finished ({run_label(rival, members)}, {rival['seconds']:.2f} s)"
        )
    said = "; ".join(told) if told else "Longer bars are better"
    return f"{said}. All rows count from the start signal until the last trainer is done."


def stages(runs: Sequence[Run]) -> Figure | None:
    """For each run and role one bar of seconds, split by what its workers did."""
    finished = [run for run in runs if _ok(run)]
    if not finished:
        return None
    x = Scale(0, max(run["seconds"] for run in finished) * 1.02, _LEFT, _WIDTH - 20)
    parts = _legend()
    y = 40.0
    top = y
    for trace, members in by_trace(finished).items():
        for run in members:
            y += 22
            title = f"{trace} / {run_label(run, [r for r in runs if r['trace'] == trace])}"
            parts.append(svg.text(0, y - 5, title, "group"))
            for role, seconds in _by_role(run).items():
                parts += _stage_row(role, seconds, x, y)
                y += 21
            y += 6
    parts.insert(0, svg.bottom_axis(x, top, y, "seconds, mean over the workers of a stage"))
    sentence = (
        "Each bar is a stage's mean worker: colours are time in the plane, greys are not; waiting "
        "for rows includes the time that the stage before needs, which a controller adds up."
    )
    drawing = svg.svg(_WIDTH, y + 36, parts, "Seconds by stage and activity")
    return Figure("stages", "Where the time goes", sentence, drawing)


def _by_role(run: Run) -> dict[str, dict[str, float]]:
    """Mean seconds by role and kind of activity."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    workers: dict[str, int] = defaultdict(int)
    for name, worker in run["workers"].items():
        if not worker["seconds"]:
            continue  # a service, which reports no activities
        role = name.rpartition("-")[0]
        workers[role] += 1
        for activity, seconds in worker["seconds"].items():
            kinds = (kind for kind, _, activities in _ACTIVITIES if activity in activities)
            sums[role][next(kinds, "work")] += seconds
    return {
        role: {kind: seconds / workers[role] for kind, seconds in kinds.items()}
        for role, kinds in sums.items()
    }


def _stage_row(role: str, seconds: dict[str, float], x: Scale, y: float) -> list[str]:
    parts = [svg.text(_LEFT - 10, y + 13, role, "label", "end")]
    done = 0.0
    for kind, told, _ in _ACTIVITIES:
        took = seconds.get(kind, 0.0)
        start, end = x(done), x(done + took)
        parts.append(svg.bar(start, y, end - start, 15, f"a-{kind}", f"{told}: {took:.2f} s"))
        done += took
    return parts


def _legend() -> list[str]:
    parts: list[str] = []
    x, y = 0.0, 4.0
    for kind, told, _ in _ACTIVITIES:
        width = 22 + 6.6 * len(told)
        if x + width > _WIDTH:
            x, y = 0.0, y + 18
        parts.append(svg.bar(x, y, 11, 11, f"a-{kind}"))
        parts.append(svg.text(x + 16, y + 10, told, "tick"))
        x += width
    return parts
