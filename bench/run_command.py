"""`bench run`: its options, and a run for each trace, plane and way asked for."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import bounds, machine, outputs, page, report
from bench.options import names, positive, seconds, share, size, whole
from bench.planes import PLANES
from bench.run import Settings, execute, variants
from bench.traces import TASKS, load
from bench.traces.parquet import TraceError

_DEDUP: dict[str | None, tuple[bool | None, ...]] = {
    None: (None,),  # as each plane says
    "on": (True,),
    "off": (False,),
    "both": (False, True),
}


def register(commands: Any) -> None:
    what = "drive planes with a trace, and compare them"
    run = commands.add_parser("run", help=what, description=f"{what}: a table, JSON and a page.")
    run.add_argument("--trace", type=names(TASKS), required=True, help=" or ".join(TASKS))
    run.add_argument(
        "--trace-file",
        type=Path,
        nargs="+",
        default=[],
        help="Parquet of `trace`, or PolyTrace's own: files or the folder of a run of this task",
    )
    run.add_argument("--planes", type=names(PLANES), default=tuple(PLANES), help=",".join(PLANES))
    run.add_argument("--hosts", type=bounds.hosts, default=2, help="hosts that share no memory; 2")
    run.add_argument(
        "--prompts", type=bounds.prompts, help="groups in a step; 16, or what a file has"
    )
    run.add_argument("--steps", type=bounds.steps, default=1, help="one after the other; 1")
    run.add_argument(
        "--staleness",
        type=bounds.staleness,
        default=0,
        help="asynchronous: steps that rollout may be ahead of training; 0 is synchronous",
    )
    run.add_argument("--seed", type=whole, default=0, help="the same draws the same trace; 0")
    run.add_argument("--trainers", type=bounds.trainers, default=2, help="trainer ranks; 2")
    run.add_argument(
        "--tp", type=bounds.ranks, default=1, help="tensor-parallel ranks of each trainer; 1"
    )
    run.add_argument(
        "--pace",
        type=positive,
        default=0.0,
        help="replay recorded times this many times as fast; default: wait for none of them",
    )
    run.add_argument(
        "--abort", type=share, default=0.0, help="share of the groups cancelled on their way"
    )
    run.add_argument(
        "--dedup",
        choices=("on", "off", "both"),
        nargs="?",
        const="on",
        help="media of a group travel once; default: dataplane on, controller both ways",
    )
    run.add_argument(
        "--no-dedup", dest="dedup", action="store_const", const="off", help="as --dedup off"
    )
    run.add_argument(
        "--columns",
        type=names(("needed", "all")),
        default=("needed",),
        help="sent to a stage: needed, all, or both ways: all,needed",
    )
    run.add_argument("--arena", type=size, default=None, help="of each dataplane peer: 1GiB")
    run.add_argument(
        "--memory-limit", type=size, default=None, help="of each host, by a cgroup: 3GiB"
    )
    run.add_argument(
        "--timeout", type=seconds, default=240.0, help="seconds that a run may take; 240"
    )
    run.add_argument(
        "--json",
        type=outputs.report,
        default=None,
        help="write the report here, and the page (.html) beside it",
    )
    run.set_defaults(perform=_run)


def _prompts(options: argparse.Namespace) -> int:
    """Groups of a step, also where nobody says how many. TraceError where a run cannot be made of
    the files."""
    if not options.trace_file:
        return options.prompts or load.PROMPTS
    files, steps = options.trace_file, options.steps
    recorded = load.of_run(files, options.trace[0], options.seed, steps, options.prompts)
    return int(len(recorded) // steps)


def _run(options: argparse.Namespace, command: str) -> int:
    """0 when all runs are ok (or oom, under a limit that was asked for), 1 when one is not.

    A plane that is not installed is in the report, and no failure.
    """
    if options.trace_file and len(options.trace) > 1:
        raise TraceError(options.trace_file[0], "it is of one task: give one --trace with it")
    console = Console()
    runs: list[dict[str, Any]] = []
    described = machine.describe()
    prompts = _prompts(options)
    bounds.check(options.hosts, options.trainers, options.tp, prompts, options.steps)
    try:
        for run in _runs(options, prompts, console):
            runs.append(run)
            if options.json:  # after each run: what is known survives a later failure
                report.write(options.json, runs, described, command)
    finally:  # also where it is stopped, or the disk is full
        if runs:
            report.show(console, runs, described)
    if options.json:
        page.write(options.json.with_suffix(".html"), [page.load(options.json)])
    expected = {"ok", "not installed"} | ({"oom", "refused"} if options.memory_limit else set())
    return 0 if all(run["status"] in expected for run in runs) else 1


def _runs(options: argparse.Namespace, prompts: int, console: Console) -> Iterator[dict[str, Any]]:
    """Every run that is asked for, one after the other."""
    several = itertools.product(options.trace, options.columns, _DEDUP[options.dedup])
    for trace, columns, dedup in several:
        settings = Settings(
            trace=trace,
            planes=options.planes,
            hosts=options.hosts,
            prompts=prompts,
            seed=options.seed,
            trainers=options.trainers,
            dedup=dedup,
            columns=columns,
            arena_bytes=options.arena,
            memory_limit_bytes=options.memory_limit,
            timeout_s=options.timeout,
            steps=options.steps,
            staleness=options.staleness,
            abort=options.abort,
            pace=options.pace,
            tp=options.tp,
            trace_files=tuple(options.trace_file),
        )
        for plane, on in variants(settings):
            label = f"{trace} / {plane}, dedup {'on' if on else 'off'}, {columns} columns"
            with report.progress(console, label) as bar:
                run = execute(settings, plane, on, bar)
            yield run
