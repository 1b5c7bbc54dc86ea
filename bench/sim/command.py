"""`python -m bench sim`: fit on small runs, predict larger ones, check, and carry to clusters.

Runs for the fit and runs for the check alternate, so that both meet the same machine. A prediction
does not use the latter.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from bench import machine, outputs
from bench.options import Impossible, add, count, positive, several, up_to
from bench.pace import ideal_seconds, recorded_seconds
from bench.planes.base import Job
from bench.report import new_table, progress
from bench.run import execute_again
from bench.sim.fit import DESIGNS, Seen, check, fit
from bench.sim.model import Costs, Model, Outcome, Place, Plan
from bench.traces import TASKS

GOAL = 0.9
"""The goal for the skill on transfers, see `_skill`."""
T = TypeVar("T")
Case = tuple[str, int, int]
RunKey = tuple[str, Case, str]  # purpose (_FIT or _CHECK), case, plane
_QUIET = 0.2
"""Above this share of the cores, other programs dominate the skill."""
_FIT, _CHECK = "fit", "check"
_KINDS = ("low", "middle", "high")  # of places, over the band
_VARIANTS = (("dataplane", True), ("controller", True), ("controller", False))
"""Plane and dedup of the modelled jobs."""
_MOST_HOSTS = 16_384
_MOST_GROUPS = 65_536


@dataclass(frozen=True, slots=True)
class Size:
    """The runs: (trace, hosts, prompts) for the fit and for the check, and how often each runs.

    The checks use other traces and other numbers of hosts than the fit.
    """

    fits: Sequence[Case]
    fit_times: int
    checks: Sequence[Case]
    check_times: int
    steps: int
    step_s: float


_FULL = Size(
    fits=[
        (trace, hosts, prompts)
        for trace in ("math", "image", "search")  # long text, media, short rows
        for hosts, prompts in ((1, 4), (2, 10), (4, 8))
    ],
    fit_times=2,
    checks=[("image_open", 3, 9), ("straggler", 5, 10), ("video", 6, 6), ("programming", 8, 16)],
    check_times=5,
    steps=5,
    step_s=1.0,
)
_QUICK = Size([("math", 1, 2)], 1, [("math", 2, 2)], 1, steps=1, step_s=0.5)


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "sim",
        help=("model larger clusters, with a model that is fitted and checked on this machine"),
    )
    hosts = up_to(
        _MOST_HOSTS, "4,096 hosts take minutes, and the time grows faster than the number of hosts"
    )
    what = "numbers of hosts to model (default: 8,64,512,4096)"
    add(parser, "--hosts", several(hosts), what, default=(8, 64, 512, 4096))
    what = "task of the modelled clusters (default: image)"
    parser.add_argument("--trace", choices=TASKS, default="image", help=what)
    add(parser, "--groups", count, "groups per host and step (default: 2)", default=2)
    what = "rate of each host's link in Gbit/s (default: 200)"
    # Not `link`: that is for commands whose hosts have links here.
    add(parser, "--link", positive, what, dest="link_gbps", default=200.0)
    what = "finish in a few seconds, with figures that are too inaccurate to quote"
    parser.add_argument("--quick", action="store_true", help=what)
    add(parser, "--json", outputs.output, "write the model to this file")
    parser.set_defaults(perform=perform)


def perform(options: argparse.Namespace, command: str) -> int:
    """Return 0 if every run succeeded, whatever the skill, and 1 if a run failed."""
    if (groups := max(options.hosts) * options.groups) > _MOST_GROUPS:
        raise Impossible(
            f"{options.groups} groups on each of {max(options.hosts)} hosts are {groups}, "
            f"over the limit of {_MOST_GROUPS:,}, because the model holds them all: "
            "reduce --hosts or --groups"
        )
    console = Console()
    size = _QUICK if options.quick else _FULL
    here = machine.describe()
    told: dict[str, Any] = {"machine": here, "command": command, "quick": options.quick}
    try:
        for part in _simulate(options, size, here["cores"], console):
            told |= part
            if options.json:  # after each part, so that results survive a later failure
                outputs.write_json(options.json, told)
    except RunFailed as exc:
        console.print(f"cannot fit the model, because a run failed: {exc}", markup=False)
        return 1
    _show(console, told)
    return 0


def _simulate(
    options: argparse.Namespace, size: Size, cores: int, console: Console
) -> Iterator[dict[str, Any]]:
    """Yield the parts of the report as they become known."""
    failed = list[str]()
    runs = _observe(size, console, failed)
    seen = {p: [run for case in size.fits for run in runs[_FIT, case, p]] for p in DESIGNS}
    costs, place = fit(seen, cores)
    found = {"costs": msgspec.to_builtins(costs), "rivals": place.rivals, "late_s": place.late_s}
    yield {"fitted_on": size.fits, **found}
    cases: list[dict[str, Any]] = []
    for told in size.checks:
        for plane in DESIGNS:
            job = paced(plane, *told, size.steps, size.step_s)
            cases.append(check(job, costs[plane], place, runs[_CHECK, told, plane]))
    yield {"cases": cases, "failed_runs": failed, **accuracy(cases, cores)}
    assumed = _assume(options, _factors(costs, cases))
    model: list[dict[str, Any]] = []
    for hosts in options.hosts:
        with progress(console, f"a model of {hosts} hosts", "designs") as bar:
            for number, result in enumerate(_extrapolate(assumed, hosts, costs), 1):
                model.append(result)
                bar(number, len(_VARIANTS))
        yield {"assumed": assumed, "model": model}


def _observe(size: Size, console: Console, failed: list[str]) -> dict[RunKey, list[Seen]]:
    """Execute all runs. `failed` gets failures of repeated runs. Raises RunFailed."""
    fits = [(_FIT, case, plane) for case in size.fits for plane in DESIGNS]
    checks = [(_CHECK, case, plane) for case in size.checks for plane in DESIGNS]
    order = in_turn(fits * size.fit_times, checks * size.check_times)
    runs: dict[RunKey, list[Seen]] = defaultdict(list)
    for number, (kind, case, plane) in enumerate(order, 1):
        job = paced(plane, *case, size.steps, size.step_s)
        label = f"{job.trace} / {job.plane}, {job.hosts} host{'s' if job.hosts > 1 else ''}"

        def repeated(why: str, label: str = label) -> None:
            failed.append(f"{label}: {why}")

        with progress(console, f"{label} (run {number} of {len(order)})") as bar:
            told = execute_again(job, bar, repeated)
        if told["status"] != "ok":
            raise RunFailed(f"{label}: {told['status']}: {told['error']}")
        runs[kind, case, plane].append(Seen(job, told))
    return runs


def accuracy(cases: Sequence[Mapping[str, Any]], cores: int) -> dict[str, Any]:
    """The skill of all cases and of each design. repeat_skill: the skill of one run as a prediction
    of the others of its case. others_cores: the cores that other programs used; quiet: whether
    these were few.
    """
    others = mean(cores for case in cases for cores in case["others_cores"])
    by_plane = {plane: _skill([c for c in cases if c["plane"] == plane]) for plane in DESIGNS}
    told: dict[str, Any] = {"skill": _skill(cases), "skill_goal": GOAL, "skill_by_plane": by_plane}
    repeats = [repeat for case in cases for repeat in _repeats(case)]
    told["repeat_skill"] = _skill(repeats) if repeats else None
    return told | {"others_cores": others, "quiet": others <= _QUIET * cores}


def _skill(cases: Sequence[Mapping[str, Any]]) -> float:
    """How much better the model predicts transfers than the prediction of no transfers: 1 is exact,
    0 is no better, below 0 is worse. A transfer is a step's time beyond its recorded time."""
    errors: float = sum(abs(c["predicted_step_s"] - c["median_step_s"]) for c in cases)
    naive: float = sum(abs(c["recorded_step_s"] - c["median_step_s"]) for c in cases)
    return 1 - errors / max(naive, 1e-9)


def _repeats(case: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each run of a case as if it were the model's prediction."""
    for number, step_s in enumerate(case["steps_s"]):
        if others := case["steps_s"][:number] + case["steps_s"][number + 1 :]:
            yield {**case, "predicted_step_s": step_s, "median_step_s": median(others)}


def _factors(
    costs: Mapping[str, Costs], cases: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[float, float]]:
    """By plane: how far transfers were below (0.8 or less) and above (1.25 or more) the model."""
    factors = {}
    for plane in costs:
        ratios = [
            (case["median_step_s"] - case["recorded_step_s"])
            / max(case["predicted_step_s"] - case["recorded_step_s"], 1e-3)
            for case in cases
            if case["plane"] == plane
        ]
        factors[plane] = (max(0.1, min(0.8, *ratios)), max(1.25, *ratios))
    return factors


def _assume(
    options: argparse.Namespace, cost_factors: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """What a host has and does, as the report says it. cost_factors: by plane, for the band."""
    return {
        "cost_factors": cost_factors,
        "trace": options.trace,
        "groups_per_host": options.groups,
        "link_gbps": options.link_gbps,
        "pace": 1.0,
        "round_trip_s": 50e-6,
        "copy_cores_per_host": 8,  # that move a host's bytes
        "incast_from_senders": 16,
        # TCP into one port keeps 40-90 % of its speed when dozens send at once. Middle: what a
        # fabric with shallow buffers and ECN is set up for.
        "incast_share_left": {"low": 0.9, "middle": 0.7, "high": 0.4},
    }


def _extrapolate(
    assumed: Mapping[str, Any], hosts: int, costs: Mapping[str, Costs]
) -> Iterator[dict[str, Any]]:
    """Yield a result for each variant. In the band, costs and links go from good to bad."""
    place = Place(
        cores=1,
        one_machine=False,
        link_bytes_s=assumed["link_gbps"] * 1e9 / 8,
        round_trip_s=assumed["round_trip_s"],
        copiers=assumed["copy_cores_per_host"],
        crowd=assumed["incast_from_senders"],
    )
    settings = {"trace": assumed["trace"], "prompts": hosts * assumed["groups_per_host"]}
    for plane, dedup in _VARIANTS:
        counts = {"hosts": hosts, "trainers": hosts, "pace": assumed["pace"]}
        job = Job(plane=plane, dedup=dedup, **settings, **counts)
        plan, (low, high) = Plan(job), assumed["cost_factors"][plane]
        runs = {}
        for kind, factor in (("low", low), ("middle", 1.0), ("high", high)):
            varied = replace(place, factor=factor, crowded=assumed["incast_share_left"][kind])
            runs[kind] = Model(plan, costs[plane], varied, DESIGNS[plane]).run()
        yield _result(job, runs)


def _result(job: Job, runs: Mapping[str, Outcome]) -> dict[str, Any]:
    recorded = ideal_seconds(job) / job.steps
    middle = runs["middle"]
    claims = sum(middle.peers.values())
    return {
        "model": True,  # simulated, not measured
        "plane": job.plane,
        "dedup": job.dedup,
        "hosts": job.hosts,
        "groups": job.prompts,
        "recorded_step_s": recorded,
        "stall_s": {kind: run.step_s - recorded for kind, run in runs.items()},
        "claim_p99_ms": {
            kind: float(np.percentile(run.claim_s, 99)) * 1e3 for kind, run in runs.items()
        },
        "service_peak_bytes": {kind: max(run.peak_bytes) for kind, run in runs.items()},
        "peers_per_claim": {
            "mean": sum(count * times for count, times in middle.peers.items()) / claims,
            "max": max(middle.peers),
        },
    }


def _show(console: Console, told: Mapping[str, Any]) -> None:
    console.print(_cases(told["cases"]))
    planes = ", ".join(f"{plane} {skill:.2f}" for plane, skill in told["skill_by_plane"].items())
    repeat = told["repeat_skill"]
    console.print(
        f"Skill on transfers: {told['skill']:.2f} (goal {GOAL}; {planes}). 1 is exact; 0 is no "
        "better than predicting no transfer. "
        + (f"One run predicts the others with {repeat:.2f}. " if repeat is not None else "")
        + f"Other programs used {told['others_cores']:.2f} cores meanwhile."
    )
    if not told["quiet"]:
        console.print(
            f"This machine was busy: other programs used {told['others_cores']:.2f} of its "
            f"{told['machine']['cores']} cores, so the skill says little about the model. Repeat "
            "this on a quiet machine."
        )
    for failure in told["failed_runs"]:
        console.print(f"repeated after a failure: {failure}", markup=False)
    console.print(_model(told["model"], told["assumed"]))
    console.print(_assumptions(told["assumed"]), markup=False)


def _assumptions(assumed: Mapping[str, Any]) -> str:
    low, middle, high = (f"{assumed['incast_share_left'][kind]:.0%}" for kind in _KINDS)
    return (
        f"Assumed, not measured: links of {assumed['link_gbps']:g} Gbit/s, round trips of "
        f"{assumed['round_trip_s'] * 1e6:g} µs, {assumed['copy_cores_per_host']} cores per host "
        f"that copy. A link into which more than {assumed['incast_from_senders']} hosts send at "
        f"once keeps {middle} of its rate ({low} to {high} in the band). Every worker and service "
        "has a core. Bytes between peers cost the processor time that the controller's cost here. "
        "The controller and a worker take turns to copy, as sockets here make them."
    )


def _cases(cases: Sequence[Mapping[str, Any]]) -> Table:
    title = "seconds per step: recorded time alone, predicted, median of the runs"
    figures = ("recorded", "model", "median", "spread")
    shown = new_table(title, ["case"], figures)
    for case in cases:
        shown.add_row(
            f"{case['trace']} / {case['plane']}, {case['hosts']} hosts",
            *(f"{case[f'{kind}_step_s']:.3f}" for kind in ("recorded", "predicted", "median")),
            f"{case['spread']:.1%}",
        )
    return shown


def _model(results: Sequence[Mapping[str, Any]], assumed: Mapping[str, Any]) -> Table:
    title = (
        f"a model, not a measurement: {assumed['trace']}, {assumed['groups_per_host']} "
        f"groups a host, {assumed['link_gbps']:g} Gbit/s"
    )
    figures = ["hosts", "plane\ndedup", "step stall s\n(band)", "claim\np99 ms"]
    figures += ["fullest\nservice GB", "peers a claim\nmean (most)"]
    shown = new_table(title, [], figures)
    for result in results:
        stall, peers = result["stall_s"], result["peers_per_claim"]
        shown.add_row(
            str(result["hosts"]),
            f"{result['plane']}\n{'on' if result['dedup'] else 'off'}",
            f"{stall['middle']:.3g}\n({min(stall.values()):.3g}–{max(stall.values()):.3g})",
            f"{result['claim_p99_ms']['middle']:.3g}",
            f"{result['service_peak_bytes']['middle'] / 1e9:.3g}",
            f"{peers['mean']:.2f} ({peers['max']})",
        )
    return shown


class RunFailed(Exception):
    """A run that the model needs failed; the message says why."""


def paced(plane: str, trace: str, hosts: int, prompts: int, steps: int, step_s: float) -> Job:
    """A job with dedup whose recorded time takes `step_s` per step."""
    job = Job(plane=plane, trace=trace, hosts=hosts, trainers=hosts, prompts=prompts, steps=steps)
    return msgspec.structs.replace(job, pace=recorded_seconds(job) / steps / step_s)


def in_turn(*runs: Sequence[T]) -> list[T]:
    """Merge the sequences, each spread evenly, so that all meet the same machine."""
    placed = [((n + 0.5) / len(some), run) for some in runs for n, run in enumerate(some)]
    return [run for _, run in sorted(placed, key=lambda pair: pair[0])]
