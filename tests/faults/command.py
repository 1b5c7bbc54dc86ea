"""The command: every scenario, or those that are named, and what became of each.

One that this machine cannot play is no outcome: it stands in `not_run`, with the reason.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine, outputs
from bench.options import names, up_to

FRAMES = up_to(100_000_000, "a peer takes only a few thousand a second")
SCENARIOS = (
    "killed_two_replicas",
    "killed_one_replica",
    "killed_authority",
    "deaths_two_replicas",
    "deaths_one_replica",
    "frozen",
    "failing_calls",
    "slow_consumer",
    "corrupt_frames",
    "stranger",
)


def register(commands: Any) -> None:
    faults = commands.add_parser(
        "faults", help="damage a plane of three to five peers, and check what it promises"
    )
    faults.add_argument(
        "--only",
        type=names(SCENARIOS),
        default=SCENARIOS,
        metavar="NAME,…",
        help=f"run only these scenarios: {', '.join(SCENARIOS)}",
    )
    faults.add_argument(
        "--seconds",
        type=up_to(86_400, "no scenario needs more than a day"),
        default=60,
        help="duration of the scenarios with deaths or a slow consumer (default: 60)",
    )
    faults.add_argument(
        "--frames",
        type=FRAMES,
        default=100_000,
        help="corrupt frames to send to each socket (default: 100000)",
    )
    faults.add_argument(
        "--json", type=outputs.output, default=None, help="write the outcomes to this file"
    )
    faults.set_defaults(perform=perform)


def perform(options: argparse.Namespace, command: str) -> int:
    """0 when every promise was kept that could be tried."""
    console = Console()
    outcomes: dict[str, Any] = {}
    not_run = {name: why for name, why in _missing().items() if name in options.only}
    told: dict[str, Any] = {"outcomes": outcomes, "not_run": not_run}
    told |= {"machine": machine.describe(), "command": command}
    _write(options.json, told)
    for name in options.only:
        if name in not_run:
            console.print(f"{name}: not run, {not_run[name]}", markup=False, soft_wrap=True)
            continue
        with console.status(name):
            outcomes[name] = _outcome(_scenarios(options)[name])
        kept = "kept" if outcomes[name]["ok"] else "BROKEN"
        figures = {k: v for k, v in outcomes[name].items() if k != "ok"}
        console.print(f"{name}: {kept} {json.dumps(figures)}", markup=False, soft_wrap=True)
        _write(options.json, told)  # after each: what is known survives a later failure
    return 0 if all(outcome["ok"] for outcome in outcomes.values()) else 1


def _write(path: Path | None, told: dict[str, Any]) -> None:
    if path:
        outputs.write_json(path, told)


def _missing() -> dict[str, str]:
    """The scenarios that this machine cannot play, and why."""
    from tests import etcd

    why = etcd.missing()
    return {"killed_authority": why} if why else {}


def _outcome(scenario: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return scenario()
    except Exception as exc:  # a scenario that breaks off has shown that a promise is not kept
        return {"ok": False, "error": f"{type(exc).__name__}: {exc}"}


def _scenarios(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    from tests.faults import doors, dying, pressure  # they import the library, other commands not

    return {
        "killed_two_replicas": functools.partial(dying.killed, 2),
        "killed_one_replica": functools.partial(dying.killed, 1),
        "killed_authority": dying.killed_authority,
        "deaths_two_replicas": functools.partial(dying.deaths, 2, options.seconds),
        "deaths_one_replica": functools.partial(dying.deaths, 1, options.seconds),
        "frozen": dying.frozen,
        "failing_calls": dying.failing_calls,
        "slow_consumer": functools.partial(pressure.slow_consumer, options.seconds),
        "corrupt_frames": functools.partial(doors.corrupt_frames, options.frames),
        "stranger": doors.stranger,
    }
