"""What can be drawn of reports: runs first, then the other commands, `compare`, `sim`."""

from __future__ import annotations

from collections.abc import Sequence

from bench.page import drawing, runs
from bench.page.drawing import Figure, Line, Row, Scale, number
from bench.page.runs import OUTCOMES, Report, colour, differ, grouped, switch

_OPERATIONS = {
    "put": "put", "handle": "get: handle in hand", "read": "get: every byte read once",
    "cycle": "get and read, one row",
}  # fmt: skip


def figures(reports: Sequence[Report]) -> list[Figure]:
    """All that can be drawn from what is there."""
    of_runs = [run for report in reports for run in report.get("runs", ())]
    cases = [case for report in reports for case in report.get("memory", ())]
    drawn = (
        *(draw(of_runs) for draw in (runs.hosts, runs.memory, runs.share, runs.links)),
        runs.smallest(cases),
        runs.stages(of_runs),
        *map(compare, reports),
        *map(accuracy, reports),
        *map(model, reports),
    )
    return [figure for figure in drawn if figure]


def compare(told: Report) -> Figure | None:
    """One batch through several planes: a panel a batch, a heading an operation."""
    if "results" not in told:
        return None
    panels = []
    for lines in grouped(told["results"], ("batch", "hosts")):
        content = []
        for operation, named in _OPERATIONS.items():
            here = [line for line in lines if line["operation"] == operation]
            content += [Row(named)] if here else []
            for line in here:
                low, middle, high = (line["seconds"][n] * 1e3 for n in ("min", "median", "max"))
                kind = colour(line["plane"])
                marks = [drawing.span(low, high, kind), drawing.dots([middle], kind)]
                content.append(Row(line["plane"], f"{number(middle)} ms", marks))
        where = "one host" if lines[0]["hosts"] == 1 else f"{lines[0]['hosts']} hosts"
        scale = Scale("milliseconds, each tick ten times the one before", log=True)
        panels.append(drawing.rows(f"{lines[0]['batch']}, {where}", content, scale))
    whys = {
        name: f"{OUTCOMES.get(plane['status'], plane['status'])}: {plane['error']}"
        for name, plane in told["planes"].items()
        if plane["status"] != "ok"
    }
    absent = "; ".join(f"{name} ({why.splitlines()[0]})" for name, why in whys.items())
    sentence = (
        f"{told['rows']} ragged rows a batch; dots are medians, lines reach from the quickest to "
        "the slowest sample; further left is better. "
    )
    sentence = (sentence if panels else "") + (
        f"Not measured, or not to its end: {absent}." if absent else ""
    )
    title = "The same batch through other planes"
    return Figure("compare", title, sentence.rstrip(), panels)


def accuracy(told: Report) -> Figure | None:
    """For each case: recorded time alone, the prediction as a bar, every run as a dot."""
    cases = told.get("cases")
    if not cases:
        return None
    content = []
    for case in cases:
        marks = [
            drawing.bar(case["predicted_step_s"], colour(case["plane"])),
            drawing.bar(case["recorded_step_s"], "bench", 0.14),
            drawing.dots(case["steps_s"], "ink", size=4.5),
        ]
        name = f"{case['trace']}, {case['plane']}, {case['hosts']} hosts"
        content.append(Row(name, f"{case['predicted_step_s']:.2f} s", marks))
    sentence = (
        "Bars are predicted without the runs (pale: recorded time alone), dots are the runs. Skill "
        f"on the time beyond the recorded: {told['skill']:.2f}, where 1 is exact and 0 is no "
        "better than predicting none. Neither these traces nor these numbers of hosts were fitted."
    )
    panel = drawing.rows("predicted and measured", content, Scale("seconds of a step", low=0))
    return Figure("sim-accuracy", "What the model is worth", sentence, [panel])


def model(told: Report) -> Figure | None:
    """Step stall and the fullest service over hosts, each variant a line in its band."""
    results = told.get("model", ())
    if not differ(results, "hosts"):
        return None
    sizes = Scale("hosts", log=True, ticks=sorted({result["hosts"] for result in results}))
    panels = []
    for title, unit, key, scale in (
        ("step stall beyond recorded time", "s", "stall_s", 1.0),
        ("fullest service", "GB", "service_peak_bytes", 1e9),
    ):
        floor = max(r[key]["middle"] for r in results) / scale / 1e6  # no zero on this axis
        drawn = []
        for mine in grouped(results, ("plane", "dedup")):
            at = [
                [max(r[key][kind] / scale, floor) for r in mine]
                for kind in ("low", "middle", "high")
            ]
            points = [(r["hosts"], y) for r, y in zip(mine, at[1], strict=True)]
            band = list(zip(at[0], at[2], strict=True))
            plane, dedup = mine[0]["plane"], mine[0]["dedup"]
            name = f"{plane}\ndedup {switch(dedup)}"
            drawn.append(Line(name, colour(plane), points, not dedup, dots=False, band=band))
        panels.append(drawing.lines(title, drawn, sizes, Scale(unit, log=True)))
    assumed = told["assumed"]
    sentence = (
        f"A model, nobody ran it: {assumed['trace']}, {assumed['groups_per_host']} groups a host, "
        f"links of {assumed['link_gbps']:g} Gbit/s; bands from kind to unkind links and costs."
    )
    return Figure("sim", "Larger clusters, modelled", sentence, panels)
