"""`bench run`: its options, and one run for each trace, plane and setting."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import asdict, replace
from rich.console import Console

from bench import links, machine, options, outputs, report
from bench.options import Impossible, add
from bench.page import document
from bench.planes import PLANES
from bench.planes.base import Job
from bench.run import execute_again
from bench.traces import TASKS, load
from bench.traces.parquet import TraceError
from bench.traces.recording import Recording

_DEDUP = {"on": (True,), "off": (False,), "both": (True, False)}


def register(commands: Any) -> None:
    what = "run a trace through several planes and compare them"
    run = outputs.add_reporting(commands, "run", what)
    run.set_defaults(perform=_run)
    what = f"tasks to run, separated by commas: {', '.join(TASKS)}"
    add(run, "--trace", options.names(TASKS), what, required=True)
    what = (
        "replay this trace: a Parquet file written by `trace`, PolyTrace files, or a directory "
        "written by `dataplane record` (which also sets the defaults of --hosts, --steps and "
        "--staleness)"
    )
    add(run, "--trace-file", Path, what, nargs="+", default=[])
    known = ",".join(PLANES)
    what = f"planes to run, separated by commas (default: {known})"
    add(run, "--planes", options.names(PLANES), what, default=tuple(PLANES))
    add(run, "--hosts", options.host_count, "number of hosts, which share no memory (default: 2)")
    what = "groups per step (default: 16, or the number in the trace file)"
    add(run, "--prompts", options.prompt_count, what)
    add(run, "--steps", options.step_count, "number of steps to run (default: 1)")
    what = "how many steps rollout may run ahead of training (default: 0, synchronous)"
    add(run, "--staleness", options.step_lead, what)
    what = (
        "rate of each host's link in each direction, in tc's notation, such as 400mbit; `none` "
        "uses loopback without limits (default: 100 Gbit/s per 64 cores, scaled down to the cores "
        "that each host gets on this machine)"
    )
    add(run, "--link", links.rate, what, metavar="RATE|none")
    what = "seed of the trace; the same seed gives the same trace (default: 0)"
    add(run, "--seed", options.whole, what, default=0)
    what = (
        "run rollout on the first half of the hosts and the other stages on the second half "
        "(default: every host runs every stage)"
    )
    run.add_argument("--apart", action="store_true", help=what)
    what = (
        "start the other stages of a step only after its rollout has finished, as if they shared "
        "GPUs with rollout"
    )
    run.add_argument("--phased", action="store_true", help=what)
    what = "wait for the recorded durations, divided by this factor (default: do not wait)"
    add(run, "--pace", options.positive, what, default=0.0)
    what = (
        "whether to send the media of a group only once, for all planes: on, off, or both in turn "
        "(default: on)"
    )
    run.add_argument("--dedup", choices=_DEDUP, default="on", help=what)
    add(run, "--arena", options.size, "arena size of each dataplane peer, such as 1GiB", default=0)
    what = "memory limit of each host, such as 3GiB, set with a cgroup"
    add(run, "--memory-limit", options.size, what, default=0)
    what = "time limit for each run, in seconds (default: 240)"
    add(run, "--timeout", options.seconds, what, default=240.0)


def _run(asked: argparse.Namespace, command: str) -> int:
    if asked.trace_file and len(asked.trace) > 1:
        raise TraceError(
            asked.trace_file[0],
            "files of PolyTrace and recordings hold one task each: pass exactly one --trace",
        )
    recording = load.recorded_job(asked.trace_file) if asked.trace_file else None
    if recording is not None:
        Console().print("\n".join(told(recording)), markup=False, highlight=False)
    job = _job(asked, recording or Recording("", hosts=2, staleness=0, phased=False, steps=[[]]))
    options.check_groups(job.prompts, job.steps)
    if job.apart and job.hosts < 2:
        raise Impossible("--apart needs at least two hosts: pass --hosts 2 or more")
    rate = None if asked.link == links.NONE else asked.link or links.fair_rate(job.hosts)
    plan = [
        replace(job, trace=trace, plane=plane, link=rate, dedup=dedup and PLANES[plane].can_dedup)
        for trace in asked.trace
        for dedup in _DEDUP[asked.dedup]
        for plane in asked.planes
    ]
    for name in asked.planes if asked.dedup == "on" else ():
        if not PLANES[name].can_dedup:
            Console().print(f"{name} has no dedup, so it runs without it", markup=False)
    return carry_out(list(dict.fromkeys(plan)), asked, command)


def _job(asked: argparse.Namespace, recorded: Recording) -> Job:
    """The first of the requested jobs. The recording is the default for missing options."""
    hosts = asked.hosts or recorded.hosts
    steps = asked.steps or len(recorded.steps)
    prompts = asked.prompts or load.PROMPTS
    if files := asked.trace_file:
        found = load.of_run(files, asked.trace[0], asked.seed, steps, asked.prompts)
        prompts = max(Counter(prompt.step for prompt in found).values())
    # Each host has as many workers as a recorded one.
    stages = tuple(
        replace(one, workers=-(-one.workers * hosts // recorded.hosts)) for one in recorded.stages
    )
    return Job(
        plane=asked.planes[0],
        trace=asked.trace[0],
        prompts=prompts,
        seed=asked.seed,
        hosts=hosts,
        trainers=next((one.workers for one in stages if one.role == "train"), hosts),
        steps=steps,
        staleness=recorded.staleness if asked.staleness is None else asked.staleness,
        pace=asked.pace,
        apart=asked.apart,
        phased=asked.phased or recorded.phased,
        trace_files=tuple(map(str, files)),
        recorded=stages,
        arena_bytes=asked.arena,
        memory_limit_bytes=asked.memory_limit,
        timeout_s=asked.timeout,
    )


def told(recording: Recording) -> list[str]:
    """What a reader of a replay should know about the recording."""
    took = median(recording.step_seconds)
    phased = ", stages after rollout (--phased)" if recording.phased else ""
    lines = [
        f"Recorded run {recording.run}: {len(recording.steps)} steps of {took:.2f} s (median), "
        f"{recording.hosts} hosts, rollout up to {recording.staleness} steps ahead of "
        f"training{phased}"
    ]
    if recording.folded:
        lines.append(f"Replayed as one stage, `reference`: {', '.join(recording.folded)}")
    if recording.lost_peers:
        lost = ", ".join(recording.lost_peers)
        what = f"The recorder lost peer {lost} and switched to another, so steps may be missing."
        lines.append(what)
    running = "The recorder is still running or was killed; the steps recorded so far are complete."
    ended = recording.ended
    return [*lines, running if ended is None else f"The recording ended: {ended}."]


def carry_out(
    plan: Sequence[Job],
    asked: argparse.Namespace,
    command: str,
    headline: Callable[[list[dict[str, Any]]], list[str]] = lambda runs: [],
) -> int:
    """Execute every run, and show and write the results. headline: returns sentences about all
    runs.

    Returns 1 if a run failed. A run that a limit ended, or whose packages are missing, did not
    fail."""
    console = Console()
    file: Path | None = asked.json
    runs: list[dict[str, Any]] = []
    no_links = asked.no_links if any(job.link for job in plan) else None
    described = machine.describe() | {"no_links": no_links}
    told = {"runs": runs, "machine": described, "command": command}
    if no_links:
        console.print(
            f"Hosts have no links of their own on this machine ({no_links}). All bytes go over "
            "loopback, and `full_step` is computed from the bytes that the plane counted.",
            markup=False,
        )
    try:
        for job in plan:
            if no_links:
                job = replace(job, link=None)
            name = report.label(asdict(job))

            def repeated(why: str, name: str = name) -> None:
                said = f"{name}: {why}\nThe bench repeats this run once."
                console.print(said, markup=False, highlight=False)

            with report.progress(console, name) as bar:
                runs.append(execute_again(job, bar, repeated))
            if file:  # after each run, so that results survive a later failure
                outputs.write_json(file, {"headline": headline(runs), **told})
    finally:  # also after an interrupt, or if the disk is full
        if runs:
            report.show(console, runs, headline(runs), described)
    if file:
        written = file.with_suffix(".html")
        document.write(written, [document.load(file)])
        console.print(f"Wrote the page {written}", markup=False)
    under_limit = ("oom", "refused")
    failed = [run for run in runs if run["status"] not in ("ok", "not installed")]
    failed = [r for r in failed if not (r["memory_limit_bytes"] and r["status"] in under_limit)]
    return 1 if failed else 0
