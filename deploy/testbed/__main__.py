"""`python -m deploy.testbed`: the bench's flow over real links, links that are cut, torchrun.

One JSON object on standard output or in `--json`. The exit code is 1 where something went wrong,
and 0 with `{"skipped": why}` where this machine allows no namespaces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.options import count, names
from bench.run import Settings, execute
from bench.traces import TASKS
from deploy.testbed import cuts, launchers
from deploy.testbed.network import Network, NoNamespaces, enter

PARTS = ("flow", "cut", "parted", "torchrun")
_FIGURES = ("status", "error", "rows", "rows_expected", "seconds", "bytes_unique", "pulled_bytes")


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        enter(arguments)
        outcomes = {part: _outcome(_parts(options)[part]) for part in options.only}
    except NoNamespaces as exc:
        _tell({"skipped": str(exc)}, options.json)
        return 0
    _tell(outcomes, options.json)
    return 0 if all(outcome["ok"] for outcome in outcomes.values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.testbed", description=__doc__)
    parser.add_argument("--hosts", type=count, default=3, help="of the flow (default: %(default)s)")
    parser.add_argument("--rate", help="of every link, as tc writes it: 10gbit; default: no limit")
    parser.add_argument("--trace", type=names(TASKS), default=("math",), help=", ".join(TASKS))
    parser.add_argument("--prompts", type=count, default=4)
    parser.add_argument("--only", type=names(PARTS), default=PARTS, metavar="PART,…")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    return parser


def _parts(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        "flow": lambda: _flow(options),
        "cut": lambda: cuts.cut(options.rate),
        "parted": lambda: cuts.parted(options.rate),
        "torchrun": lambda: launchers.torchrun(options.rate),
    }


def _flow(options: argparse.Namespace) -> dict[str, Any]:
    """The bench's job on hosts of their own; every row's content is checked at the trainers."""
    runs = []
    for trace in options.trace:
        with Network(options.hosts, options.rate) as network:
            settings = Settings(
                trace=trace,
                planes=("dataplane",),
                hosts=options.hosts,
                prompts=options.prompts,
                trainers=max(1, options.hosts - 1),  # rows of the last host must travel
                places=network,
            )
            run = execute(settings, "dataplane", True, lambda rows, expected: None)
            over_links = [network.received_bytes(host) for host in range(options.hosts)]
        runs.append({"trace": trace} | {name: run[name] for name in _FIGURES})
        runs[-1]["received_bytes"] = over_links
    return {"ok": all(run["status"] == "ok" for run in runs), "hosts": options.hosts, "runs": runs}


def _outcome(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except NoNamespaces:
        raise
    except Exception as exc:  # what breaks off has shown that a promise is not kept
        return {"ok": False, "error": f"{type(exc).__name__}: {exc}"}


def _tell(outcomes: dict[str, Any], file: Path | None) -> None:
    text = json.dumps(outcomes, indent=2)
    print(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
