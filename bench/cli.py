"""The command line of the bench, and nothing else."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence

from bench import headline, links, publish, run_command
from bench.options import Impossible
from bench.outputs import NotWritten
from bench.page import document
from bench.sim import command as sim
from bench.traces import commands as trace_commands
from tests.faults import command as faults
from tests.perf import command as perf
from tests.perf import smallest
from tests.perf.compare import command as compare

_COMMANDS = (
    headline, run_command, perf, smallest, trace_commands, compare, sim, faults, document, publish
)  # fmt: skip
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 1 if a report cannot be written, 2 for an invalid
    command line, 130 for Ctrl-C, else the command's own."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    options.no_links = _enter_links(options, arguments, argv is None)
    # A signal that is ignored, by nohup for example, stays so.
    before = {one: was for one in _STOPS if (was := signal.getsignal(one)) != signal.SIG_IGN}
    for one in before:
        signal.signal(one, _stop)
    try:
        return int(options.perform(options, f"python -m bench {shlex.join(arguments)}"))
    except Impossible as exc:
        print(f"python -m bench: {exc}", file=sys.stderr)
        return 2
    except NotWritten as exc:
        print(f"python -m bench: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _stop(number: int, frame: object) -> None:
    """Raise an exception, which ends the command through every `with`. Ignore further signals."""
    for one in _STOPS:
        signal.signal(one, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _enter_links(options: argparse.Namespace, arguments: list[str], program: bool) -> str | None:
    """Enter a namespace, if the command is about hosts with links. Return why not, or None."""
    if getattr(options, "link", links.NONE) == links.NONE:
        return "--link none"
    if not program and not links.inside():
        return "the bench was called as a function, not started as a program"
    try:
        links.enter("bench", arguments)
    except links.NoNamespaces as exc:
        return str(exc)
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=(
            "Find out whether a job on this machine would benefit from a data plane. Example: "
            "`python -m bench run --trace video --json bench/out/report.json`."
        ),
        epilog="See bench/README.md for what the bench measures and how.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.register(commands)
    return parser
