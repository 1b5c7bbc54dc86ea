"""The command: every scenario, or those that are named, and what became of each."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine
from bench.options import count, names

SCENARIOS = (
    "killed_two_replicas",
    "killed_one_replica",
    "frozen",
    "failing_calls",
    "slow_consumer",
    "corrupt_frames",
    "stranger",
)


def register(commands: Any) -> None:
    faults = commands.add_parser("faults", help="damage to a plane of three peers")
    faults.add_argument("--only", type=names(SCENARIOS), default=SCENARIOS, metavar="NAME,…")
    faults.add_argument("--seconds", type=count, default=60, help="of a slow consumer")
    faults.add_argument("--frames", type=count, default=100_000, help="corrupt ones at each door")
    faults.add_argument("--json", type=Path, default=None, help="write the outcomes here")
    faults.set_defaults(perform=perform)


def perform(options: argparse.Namespace, command: str) -> int:
    """0 when every promise was kept."""
    console = Console()
    outcomes: dict[str, Any] = {}
    told = {"outcomes": outcomes, "machine": machine.describe(), "command": command}
    for name in options.only:
        with console.status(name):
            outcomes[name] = _outcome(_scenarios(options)[name])
        kept = "kept" if outcomes[name]["ok"] else "BROKEN"
        figures = {k: v for k, v in outcomes[name].items() if k != "ok"}
        console.print(f"{name}: {kept} {json.dumps(figures)}", markup=False, soft_wrap=True)
        if options.json:  # after each: what is known survives a later failure
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(told, indent=2) + "\n")
    return 0 if all(outcome["ok"] for outcome in outcomes.values()) else 1


def _outcome(scenario: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return scenario()
    except Exception as exc:  # a scenario that breaks off has shown that a promise is not kept
        return {"ok": False, "error": f"{type(exc).__name__}: {exc}"}


def _scenarios(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    from bench.faults import doors, dying, pressure  # they import the library, other commands not

    return {
        "killed_two_replicas": functools.partial(dying.killed, 2),
        "killed_one_replica": functools.partial(dying.killed, 1),
        "frozen": dying.frozen,
        "failing_calls": dying.failing_calls,
        "slow_consumer": functools.partial(pressure.slow_consumer, options.seconds),
        "corrupt_frames": functools.partial(doors.corrupt_frames, options.frames),
        "stranger": doors.stranger,
    }
