"""`bench publish`: the pictures and tables of README, docs/performance.md and docs/choosing.md.

All come from one report, which is stored with the pictures, without the parts that are not shown. A
test generates everything from it again and compares, so a page never shows figures of two days.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from bench import measured, outputs
from bench.headline import CALLED, OURS
from bench.options import Impossible
from bench.page import document
from bench.page.runs import Report, figures
from bench.report import Run, first_line, grouped, hardware, job, others_cores, placement, steady

ROOT = Path(__file__).resolve().parents[1]
KEPT = "docs/pictures/report.json"
_BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- bench: end -->)", re.DOTALL)
_PAGES = ("README.md", "docs/performance.md", "docs/choosing.md")
_UNSEEN = ("workers", "latency_ms", "step_starts", "step_ends")


def register(commands: Any) -> None:
    what = "update the pictures and tables in README and docs from a `headline` report"
    parser = commands.add_parser("publish", help=what, description=what)
    parser.add_argument(
        "report", type=Path, help="JSON report written by `python -m bench headline`"
    )
    for kind in measured.KINDS:
        parser.add_argument(
            f"--{kind}",
            type=Path,
            help=f"JSON report written by `python -m bench {kind}` (default: the published one)",
        )
    parser.set_defaults(perform=_perform)


def _perform(options: argparse.Namespace, command: str) -> int:
    console = Console(stderr=True)
    told = document.load(options.report)
    if "headline" not in told or not told.get("runs"):
        raise Impossible(
            f"{options.report} is not a report of `headline`: pass the JSON file of "
            "`python -m bench headline`"
        )
    try:
        for path in publish(ROOT, {**told, **_measured(options)}):
            console.print(f"wrote {path.relative_to(ROOT)}", markup=False)
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise Impossible(str(exc)) from exc
    return 0


def _measured(options: argparse.Namespace) -> dict[str, Report]:
    """The reports of one or two hosts: the passed ones, else the published ones."""
    found = dict[str, Report]()
    published = json.loads((ROOT / KEPT).read_text())
    for kind in measured.KINDS:
        if path := getattr(options, kind):
            found[kind] = measured.trimmed(kind, json.loads(path.read_text()))
        elif kind in published:
            found[kind] = published[kind]
        else:
            raise Impossible(f"no report of `{kind}` is published yet: pass --{kind} FILE")
    return found


def publish(root: Path, whole: Report) -> list[Path]:
    """Write report, pictures and blocks below `root`. Return the written files."""
    kept, told = root / KEPT, trimmed(whole)
    outputs.write(kept, json.dumps(told, separators=(",", ":")) + "\n")
    drawn = document.pictures(kept.parent, figures([told]))
    made = blocks(told)
    for name in _PAGES:
        page = root / name
        page.write_text(filled(page.read_text(), made))
    return [kept, *drawn, *(root / name for name in _PAGES)]


def trimmed(told: Report) -> dict[str, Any]:
    """The report without the parts that no published picture or table shows."""
    runs = []
    for run in told["runs"]:
        unseen = (*_UNSEEN, *(() if run["memory_limit_bytes"] else ("memory_curve",)))
        runs.append({name: value for name, value in run.items() if name not in unseen})
        runs[-1]["error"] = first_line(str(run["error"]))
        if run.get("workers") and "machine" in run.get("cpu_seconds", {}):
            runs[-1]["others_cores"] = round(others_cores(run), 2)
        if curve := runs[-1].get("memory_curve"):
            runs[-1]["memory_curve"] = {**curve, "processes": {}}
    return {**told, "runs": runs}


def filled(text: str, made: Mapping[str, str]) -> str:
    """A page with these contents in its blocks. Raises KeyError for a block without contents."""
    return _BLOCK.sub(lambda found: f"{found[1]}{made[found[2]]}{found[3]}", text)


def blocks(told: Report) -> dict[str, str]:
    """Contents of the pages' blocks, as Markdown, by name."""
    sentences = told["headline"]
    limits = {}
    if told.keys() >= {*measured.KINDS}:
        perf, compare = told["perf"], told["compare"]
        limits = {"limits": _table(("what", "result"), measured.rows(perf, compare))}
        limits["measured"] = f"{measured.made(perf, compare)}.\n"
    return limits | {
        "sentence": f"{sentences[0]}\n",
        "headline": "".join(f"- {said}\n" for said in sentences),
        "steps": _steps(told["runs"]),
        "savings": _savings(told["runs"]),
        "made": _made(told),
    }


def _steps(runs: Sequence[Run]) -> str:
    """One line per job, one column per plane: the median of the steady steps, and their range."""
    timed = [run for run in runs if not run["memory_limit_bytes"]]
    planes = list(dict.fromkeys(run["plane"] for run in timed))
    lines: dict[str, dict[str, str]] = {}
    for run in timed:
        what = job(run) + ("" if run["dedup"] else ", dedup off")
        lines.setdefault(what, dict.fromkeys(planes, "–"))[run["plane"]] = _step(run)
    head = ["steady step", *(CALLED.get(p, p) for p in planes)]
    return _table(head, [[what, *steps.values()] for what, steps in lines.items()])


def _step(run: Run) -> str:
    took = steady(run)
    if run["status"] != "ok" or took is None:
        return str(run["status"])
    link = run["busiest_link"]
    full = f"; link {link['busy_share']:.0%}" if link else ""
    return "{:.2f} s ({:.2f}–{:.2f})".format(*took) + full


def _savings(runs: Sequence[Run]) -> str:
    """The link time of a step with all prompts of its task, and what dataplane saves compared with
    the best other plane. One line per trace and placement, on the most hosts that every plane
    finished on.
    """
    full = [run for run in runs if run["status"] == "ok" and run.get("full_step")]
    planes = list(dict.fromkeys(run["plane"] for run in full))
    lines = []
    for placed in grouped(full, ("trace", "apart")):
        jobs = [{run["plane"]: run for run in same} for same in grouped(placed, ("hosts",))]
        complete = [job for job in jobs if len(job) == len(planes) > 1 and OURS in job]
        if complete:
            most = max(complete, key=lambda job: int(job[OURS]["hosts"]))
            lines.append(_saved([most[plane] for plane in planes]))
    rates = {f"{run['full_step']['link_bits_per_second'] / 1e9:g} Gbit/s" for run in full}
    head = f"full step, {' or '.join(sorted(rates))} a host"
    head_row = [head, "rollout and training", *(CALLED.get(p, p) for p in planes), "saved"]
    return _table(head_row, lines)


def _saved(runs: Sequence[Run]) -> list[str]:
    """A line of `_savings`: seconds for which the busiest link is busy, per plane."""
    busy = {run["plane"]: run["full_step"]["link_seconds"] for run in runs}
    run, step = runs[0], runs[0]["full_step"]
    saved = min(busy[plane] for plane in busy if plane != OURS) - busy[OURS]
    share = saved / step["recorded_seconds"]
    return [
        f"{run['trace']}, {step['prompts']} prompts, {run['hosts']} hosts, {placement(run)}",
        f"{step['recorded_seconds']:.0f} s",
        *(f"{seconds:.2f} s" if seconds >= 0.005 else "under 0.01 s" for seconds in busy.values()),
        f"{saved:.2f} s, {share:.1%}" if share >= 0.001 else f"{saved:.2f} s, under 0.1%",
    ]


def _made(told: Report) -> str:
    machine = told["machine"]
    others = [run["others_cores"] for run in told["runs"] if "others_cores" in run]
    busy = f" Other programs took {mean(others):.1f} cores meanwhile." if others else ""
    return (
        f"`{told['command']}` on {machine['date']}, commit {machine['commit']}: "
        f"{hardware(machine)}.{busy}\n"
    )


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    first, *others = [f"| {' | '.join(row)} |\n" for row in (head, *lines)]
    return "".join([first, f"|{'---|' * len(head)}\n", *others])
