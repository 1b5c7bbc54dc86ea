"""What the simulator says: predictions beside runs, and the model over cluster sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.page import svg
from bench.page.names import Figure, colour, switch
from bench.page.svg import Scale

_WIDTH = 860
_PANEL, _HEIGHT, _LEFT, _TOP, _BOTTOM = 422, 250, 54, 44, 204
_NAMES = 220
_ROW = 21
_GB = 1e9

Report = dict[str, Any]


def accuracy(told: Mapping[str, Any]) -> Figure | None:
    """For each case: recorded time alone, the prediction as a bar, every run as a dot."""
    cases = told.get("cases")
    if not cases:
        return None
    most = max(max(*case["steps_s"], case["predicted_step_s"]) for case in cases)
    x = Scale(0, most * 1.05, _NAMES, _WIDTH - 20)
    bottom = 16.0 + _ROW * len(cases)
    parts = [svg.bottom_axis(x, 10, bottom, "seconds of a step")]
    for number, case in enumerate(cases):
        parts += _case(case, x, 16.0 + _ROW * number)
    drawing = svg.svg(_WIDTH, bottom + 36, parts, "Predicted and measured seconds of a step")
    sentence = (
        f"Bars are predicted without the runs (pale: recorded time alone), dots are the runs: "
        f"accuracy {told['accuracy']:.3f}, recorded time alone would have had "
        f"{told['accuracy_of_recorded_time']:.3f}."
    )
    return Figure("sim-accuracy", "What the model is worth", sentence, drawing)


def _case(case: dict[str, Any], x: Scale, y: float) -> list[str]:
    kind, middle = colour(case["plane"]), y + 7
    name = f"{case['trace']}, {case['plane']}, {case['hosts']} hosts"
    predicted, recorded = x(case["predicted_step_s"]), x(case["recorded_step_s"])
    return [
        svg.text(_NAMES - 10, y + 11, name, "label", "end"),
        svg.bar(x.start, y, predicted - x.start, 14, f"{kind} fill"),
        svg.bar(x.start, y + 3, recorded - x.start, 8, "a-bench"),
        *(svg.dot(x(took), middle, 3.5, "dot", f"{took:.2f} s") for took in case["steps_s"]),
    ]


def model(told: Mapping[str, Any]) -> Figure | None:
    """Step stall and the fullest service over hosts, each variant a line in its band."""
    if len({result["hosts"] for result in told.get("model", ())}) < 2:
        return None
    results = told["model"]
    panels = [
        _panel("step stall beyond recorded time", "s", results, "stall_s", 1.0),
        _panel("fullest service", "GB", results, "service_peak_bytes", _GB),
    ]
    parts = [
        f'<g transform="translate({place * (_PANEL + 16)},0)">{panel}</g>'
        for place, panel in enumerate(panels)
    ]
    assumed = told["assumed"]
    sentence = (
        f"A model, nobody ran it: {assumed['trace']}, {assumed['groups_per_host']} groups a host, "
        f"links of {assumed['link_gbps']:g} Gbit/s; bands from kind to unkind links and costs."
    )
    drawing = svg.svg(_WIDTH, _HEIGHT, parts, "Stall and memory over hosts, modelled")
    return Figure("sim", "Larger clusters, modelled", sentence, drawing)


def _panel(title: str, unit: str, results: Sequence[Report], key: str, scale: float) -> str:
    values = [value / scale for result in results for value in result[key].values()]
    low = max(min(values), max(values) / 1e6) / 1.5
    y = Scale(low, max(values) * 1.5, _BOTTOM, _TOP, log=True)
    sizes = sorted({result["hosts"] for result in results})
    x = Scale(sizes[0], sizes[-1], _LEFT, _PANEL - 8, log=True)
    parts = [svg.text(_LEFT, 20, title, "panel"), svg.left_axis(y, _LEFT, _PANEL - 8, unit)]
    for hosts in sizes:
        parts.append(svg.text(x(hosts), _BOTTOM + 15, str(hosts), "tick", "middle"))
    parts.append(svg.text(x.end, _BOTTOM + 30, "hosts", "unit", "end"))
    variants = dict.fromkeys((result["plane"], result["dedup"]) for result in results)
    for number, (plane, dedup) in enumerate(variants):
        mine = [r for r in results if (r["plane"], r["dedup"]) == (plane, dedup)]
        line = {
            kind: [(x(r["hosts"]), y(r[key][kind] / scale)) for r in mine]
            for kind in ("low", "middle", "high")
        }
        name = f"{plane}, dedup {switch(dedup)}"
        kind = colour(plane)
        parts.append(svg.curve([*line["low"], *reversed(line["high"])], f"{kind} shade", name))
        dashes = "" if dedup else " dashed"
        parts.append(svg.curve(line["middle"], f"{kind} thick{dashes}", name))
        end, height = line["middle"][-1]
        above = 14 if number % 2 else -6  # two lines may lie on each other, their names not
        parts.append(svg.text(end - 4, height + above, name, f"{kind} ink", "end"))
    return "".join(parts)
