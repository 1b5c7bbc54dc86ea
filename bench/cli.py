"""The command line of the bench, and nothing else."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import gpu, machine, page, report, smallest, soak, transports
from bench.compare import command as compare
from bench.faults import command as faults
from bench.options import count, names, share, size, speed, whole
from bench.page import command as page_command
from bench.planes import PLANES
from bench.run import Settings, execute, variants
from bench.sim import command as sim
from bench.traces import TASKS
from bench.traces import commands as trace_commands
from bench.traces.parquet import TraceError

_DEDUP: dict[str | None, tuple[bool | None, ...]] = {
    None: (None,),  # as each plane says
    "on": (True,),
    "off": (False,),
    "both": (False, True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 2 for a wrong command line, 130 for Ctrl-C, else what the command says."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    # As an exception it leaves through every `with`, and so ends the run's processes.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return int(options.perform(options, f"python -m bench {shlex.join(arguments)}"))
    except TraceError as exc:
        print(f"python -m bench: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(options: argparse.Namespace, command: str) -> int:
    """0 when all runs are ok (or oom, under a limit that was asked for), 1 when one is not.

    A plane that is not installed is in the report, and no failure.
    """
    console = Console()
    runs: list[dict[str, Any]] = []
    described = machine.describe()
    several = itertools.product(options.trace, options.columns, _DEDUP[options.dedup])
    for trace, columns, dedup in several:
        settings = Settings(
            trace=trace,
            planes=options.planes,
            hosts=options.hosts,
            prompts=options.prompts,
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
                runs.append(execute(settings, plane, on, bar))
            if options.json:  # after each run: what is known survives a later failure
                report.write(options.json, runs, described, command)
    report.show(console, runs, described)
    if options.json:
        page.write(options.json.with_suffix(".html"), [page.load(options.json)])
    expected = {"ok", "not installed"} | ({"oom"} if options.memory_limit else set())
    return 0 if all(run["status"] in expected for run in runs) else 1


def _perf(options: argparse.Namespace, command: str) -> int:
    """0 also where a transport or a GPU was not run: the report says why."""
    from bench import perf  # imports the library: the other commands run without it

    console = Console()
    told: dict[str, Any] = {}
    if options.only in (None, "hot-path"):
        with report.progress(console, "hot path") as bar:
            told |= perf.measure(options.rounds, bar)
    if options.only in (None, "transports"):
        with report.progress(console, "transports") as bar:
            lanes, taken = transports.measure(
                options.transports, options.device, options.rounds, bar
            )
        told["transports"] = lanes
        told["spread"] = told.get("spread", {}) | perf.spread_of(taken)
    if options.only == "gpu" or (options.only is None and options.device == "cuda"):
        told["gpu"] = _gpu(options.rounds, console)
    told |= {"rounds": options.rounds, "machine": machine.describe(), "command": command}
    text = json.dumps(told, indent=2)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")
    console.print_json(json.dumps({k: v for k, v in told.items() if k != "spread"}))
    if lanes_told := told.get("transports"):
        console.print(transports.table(lanes_told))
        for reason in transports.reasons(lanes_told):
            console.print(reason, markup=False)
    if gpu_told := told.get("gpu"):
        if gpu_told.get("status") == "not run":
            console.print(f"the GPU was not run: {gpu_told['error']}", markup=False)
        else:
            console.print(gpu.table(gpu_told))
    return 0


def _gpu(rounds: int, console: Console) -> dict[str, Any]:
    if why := gpu.missing():
        return {"status": "not run", "error": why}
    from bench.gpu.device import Cuda

    with report.progress(console, "GPU") as bar:
        return gpu.measure(Cuda(), rounds, bar)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="drive planes with a trace, and compare them")
    run.add_argument("--trace", type=names(TASKS), required=True, help=" or ".join(TASKS))
    run.add_argument(
        "--trace-file",
        type=Path,
        nargs="+",
        default=[],
        help="Parquet of `trace`, or PolyTrace's own: the lengths and times of this task",
    )
    run.add_argument("--planes", type=names(PLANES), default=tuple(PLANES), help=",".join(PLANES))
    run.add_argument("--hosts", type=count, default=2, help="hosts that share no memory")
    run.add_argument("--prompts", type=count, default=16, help="groups in a step")
    run.add_argument("--steps", type=count, default=1)
    run.add_argument(
        "--staleness",
        type=whole,
        default=0,
        help="asynchronous: steps that rollout may be ahead of training; 0 is synchronous",
    )
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--trainers", type=count, default=2, help="trainer ranks")
    run.add_argument("--tp", type=count, default=1, help="tensor-parallel ranks of each trainer")
    run.add_argument(
        "--pace",
        type=speed,
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
    run.add_argument("--no-dedup", dest="dedup", action="store_const", const="off")
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
    run.add_argument("--timeout", type=float, default=240.0, help="seconds that a run may take")
    run.add_argument("--json", type=Path, default=None, help="write the report here")
    run.set_defaults(perform=_run)
    perf = commands.add_parser("perf", help="the hot path against this machine's ceilings")
    perf.add_argument("--rounds", type=count, default=5, help="medians are taken over these")
    perf.add_argument("--json", type=Path, default=None, help="write the figures here")
    perf.add_argument(
        "--transports",
        type=names(transports.TRANSPORTS),
        default=transports.TRANSPORTS,
        help="pulls over these, each beside its engine's bare loop; default: "
        + ",".join(transports.TRANSPORTS),
    )
    perf.add_argument(
        "--device",
        choices=transports.DEVICES,
        default="cpu",
        help="where the pulled values are; default: cpu",
    )
    perf.add_argument(
        "--only",
        choices=("hot-path", "transports", "gpu"),
        help="default: the first two, and with --device cuda the GPU",
    )
    perf.set_defaults(perform=_perf)
    smallest.register(commands)
    trace_commands.register(commands)
    compare.register(commands)
    sim.register(commands)
    faults.register(commands)
    soak.register(commands)
    page_command.register(commands)
    return parser
