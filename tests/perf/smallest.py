"""`python -m bench memory`: the smallest memory limit of a host with which a run still ends well.

One chosen limit flatters somebody; this asks for each plane, dedup and number of prompts how little
would have done. Every answer is bracketed by two real runs under real limits: the smallest that
survived and the next smaller one that did not.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from bench import machine, outputs
from bench.machine import memory_bytes
from bench.options import (
    Impossible,
    check_groups,
    host_count,
    names,
    prompt_count,
    seconds,
    several,
    size,
    up_to,
    whole,
)
from bench.planes import PLANES
from bench.planes.base import Job
from bench.report import new_table, progress
from bench.run import Progress, execute
from bench.traces import TASKS

_LEAST = 256 << 20
_PRECISION = 1.07  # a limit and the next larger one that is tried
_ROUND = 16 << 20
_PLANES = ("dataplane", "controller")
_KEPT = ("status", "seconds", "rows", "peak_host_bytes", "arena_bytes", "killed", "error")

_TRIES = 3
_NO_ANSWER = ("not run", "not installed", "disturbed")  # a run that says nothing about its plane

Case = dict[str, Any]
Bar = Callable[[str], AbstractContextManager[Progress]]


class _NoAnswer(Exception):
    """A limit could not be tried."""


def limits_to_try(least: int, most: int) -> list[int]:
    """Rising limits from `least` to `most`, each about 7 % above the one before."""
    limits = [least]
    while (following := limits[-1] * _PRECISION) < most:
        limits.append(math.ceil(following / _ROUND) * _ROUND)
    return sorted({*limits, most})


def measure(
    job: Job, planes: Sequence[str], prompts: Sequence[int], limits: list[int], bar: Bar
) -> Iterator[Case]:
    """A case for each plane × dedup × number of prompts, as it is known."""
    for plane in planes:
        for dedup in (False, True):
            beyond = (
                False  # where fewer prompts need more than all limits, the largest is tried first
            )
            for number in sorted(prompts):
                told = replace(job, plane=plane, dedup=dedup, prompts=number)
                case = _case(told, limits[-1:] if beyond else limits, bar)
                if beyond and case["smallest_bytes"]:
                    case = _case(told, limits, bar)
                beyond = case["status"] == "ok" and case["smallest_bytes"] is None
                yield case


def _case(job: Job, limits: list[int], bar: Bar) -> Case:
    """Bisect over the limits. Whoever ran out of time did not survive either."""
    runs: list[dict[str, Any]] = []

    def survives(limit: int) -> bool:
        # The workers of a host need something too; half and half comes close to the best here.
        told = replace(job, memory_limit_bytes=limit, arena_bytes=limit // 2)
        switch = "on" if job.dedup else "off"
        label = f"{job.plane}, dedup {switch}, {job.prompts} prompts, {limit >> 20} MiB a host"
        for _ in range(_TRIES):
            with bar(label) as shown:
                run = execute(told, shown)
            runs.append({"limit_bytes": limit, **{name: run[name] for name in _KEPT}})
            if run["status"] not in _NO_ANSWER:
                return bool(run["status"] == "ok")
            if run["status"] != "disturbed":  # another try would say the same
                break
        raise _NoAnswer

    try:
        at = bisect_left(limits, True, key=survives)
        status, smallest = "ok", limits[at] if at < len(limits) else None
    except _NoAnswer:
        status, smallest = runs[-1]["status"], None

    return {
        "plane": job.plane,
        "trace": job.trace,
        "dedup": job.dedup,
        "prompts": job.prompts,
        "status": status,
        "smallest_bytes": smallest,
        "most_bytes": limits[-1],
        "runs": runs,
    }


def register(commands: Any) -> None:
    """Add `memory` to the command line."""
    parser = commands.add_parser(
        "memory", help="find the smallest memory limit of a host that a run survives"
    )
    parser.add_argument("--trace", choices=TASKS, default="video", help="task (default: video)")
    trainers = up_to(64, "each trainer is a process on this machine")
    planes = names(PLANES)
    parser.add_argument(
        "--planes",
        type=planes,
        default=_PLANES,
        help=f"planes to run (default: {','.join(_PLANES)})",
    )
    parser.add_argument(
        "--prompts",
        type=several(prompt_count),
        default=[4, 8, 16],
        help="numbers of prompts to try (default: 4,8,16)",
    )
    parser.add_argument("--hosts", type=host_count, default=2, help="hosts (default: 2)")
    parser.add_argument("--trainers", type=trainers, default=2, help="trainer ranks (default: 2)")
    parser.add_argument("--seed", type=whole, default=0, help="seed of the trace (default: 0)")
    parser.add_argument(
        "--least", type=size, default=_LEAST, help="smallest limit to try (default: 256MiB)"
    )
    parser.add_argument(
        "--most",
        type=size,
        default=memory_bytes() * 3 // 8,
        help="largest limit to try; all hosts must fit into the memory of this machine "
        "(default: 3/8 of it)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=240.0,
        help="seconds that one run may take (default: 240)",
    )
    parser.add_argument(
        "--json", type=outputs.output, default=None, help="write the cases to this file"
    )
    parser.set_defaults(perform=perform)


def perform(options: argparse.Namespace, command: str) -> int:
    """0 when every case was bracketed or is beyond `--most`; 1 where a limit cannot be tried.

    A plane that is not installed is in the report, and no failure.
    """
    console = Console()
    if options.least > options.most:
        raise Impossible(
            f"--least ({options.least} bytes) is more than --most ({options.most} bytes)"
        )
    check_groups(max(options.prompts), 1)
    job = Job(
        plane=options.planes[0],
        trace=options.trace,
        hosts=options.hosts,
        seed=options.seed,
        trainers=options.trainers,
        timeout_s=options.timeout,
    )
    told: dict[str, Any] = {"memory": [], "machine": machine.describe(), "command": command}
    limits = limits_to_try(options.least, options.most)
    cases = measure(job, options.planes, options.prompts, limits, lambda x: progress(console, x))
    for case in cases:
        told["memory"].append(case)
        if options.json:  # after each case: what is known survives a later failure
            outputs.write_json(options.json, told)
        if case["status"] != "ok":
            why = f"{case['plane']}: {case['status']}: {case['runs'][-1]['error']}"
            console.print(why, markup=False)
        if case["status"] == "not run":
            return 1
    console.print(table(told["memory"]))
    return 0 if all(case["status"] in ("ok", "not installed") for case in told["memory"]) else 1


def table(cases: Sequence[Case]) -> Table:
    """One line a plane and dedup, one column a number of prompts."""
    prompts = sorted({case["prompts"] for case in cases})
    title = "smallest memory limit of a host that a run survives, MiB (>: none of those tried)"
    shown = new_table(title, ["plane"], [f"{number} prompts" for number in prompts])
    for plane, dedup in dict.fromkeys((case["plane"], case["dedup"]) for case in cases):
        found = {c["prompts"]: c for c in cases if (c["plane"], c["dedup"]) == (plane, dedup)}
        cells = [_cell(found[n]) if n in found else "" for n in prompts]
        shown.add_row(f"{plane}, dedup {'on' if dedup else 'off'}", *cells)
    return shown


def _cell(case: Case) -> str:
    if case["status"] != "ok":
        return str(case["status"])
    if case["smallest_bytes"] is None:
        largest = [
            run["status"] for run in case["runs"] if run["limit_bytes"] == case["most_bytes"]
        ]
        why = "" if largest[-1] == "oom" else f" ({largest[-1]})"  # it may be no matter of memory
        return f"> {case['most_bytes'] >> 20}{why}"
    return f"{case['smallest_bytes'] >> 20}"
