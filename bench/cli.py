"""`python -m bench run` and `python -m bench perf`: the command line, and nothing else."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine, report
from bench.planes import PLANES
from bench.run import Settings, execute, variants
from bench.trace import TASKS

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all runs are ok, 1 when one is not, 2 for a wrong command line, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    # As an exception it leaves through every `with`, and so ends the run's processes.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return int(options.perform(options, f"python -m bench {shlex.join(arguments)}"))
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(options: argparse.Namespace, command: str) -> int:
    console = Console()
    runs: list[dict[str, Any]] = []
    described = machine.describe()
    for trace in options.trace:
        settings = Settings(
            trace=trace,
            planes=options.planes,
            hosts=options.hosts,
            prompts=options.prompts,
            seed=options.seed,
            trainers=options.trainers,
            dedup=options.dedup,
            columns=options.columns,
            arena_bytes=options.arena,
            timeout_s=options.timeout,
        )
        for plane, dedup in variants(settings):
            label = f"{trace} / {plane}, dedup {'on' if dedup else 'off'}"
            with report.progress(console, label) as bar:
                runs.append(execute(settings, plane, dedup, bar))
            if options.json:  # after each run: what is known survives a later failure
                report.write(options.json, runs, described, command)
    report.show(console, runs, described)
    return 0 if all(run["status"] == "ok" for run in runs) else 1


def _perf(options: argparse.Namespace, command: str) -> int:
    from bench import perf  # imports the library: the other commands run without it

    console = Console()
    with report.progress(console, "perf") as bar:
        figures = perf.measure(options.rounds, bar)
    told = {**figures, "rounds": options.rounds, "machine": machine.describe(), "command": command}
    text = json.dumps(told, indent=2)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")
    console.print_json(json.dumps({k: v for k, v in told.items() if k != "spread"}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="drive planes with a trace, and compare them")
    run.add_argument("--trace", type=_names(TASKS), required=True, help=" or ".join(TASKS))
    run.add_argument("--planes", type=_names(PLANES), default=tuple(PLANES), help=",".join(PLANES))
    run.add_argument("--hosts", type=_count, default=2, help="hosts that share no memory")
    run.add_argument("--prompts", type=_count, default=16, help="groups in the step")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--trainers", type=_count, default=2, help="trainer ranks")
    run.add_argument(
        "--dedup",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="media of a group travel once; default: dataplane on, controller both ways",
    )
    run.add_argument(
        "--columns", choices=("needed", "all"), default="needed", help="sent to a stage"
    )
    run.add_argument("--arena", type=_size, default=None, help="of each dataplane peer: 1GiB")
    run.add_argument("--timeout", type=float, default=240.0, help="seconds that a run may take")
    run.add_argument("--json", type=Path, default=None, help="write the report here")
    run.set_defaults(perform=_run)
    perf = commands.add_parser("perf", help="the hot path against this machine's ceilings")
    perf.add_argument("--rounds", type=_count, default=5, help="medians are taken over these")
    perf.add_argument("--json", type=Path, default=None, help="write the figures here")
    perf.set_defaults(perform=_perf)
    return parser


def _names(known: dict[str, Any]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 1GiB")
    return int(match[1]) * _UNITS[match[2]]
