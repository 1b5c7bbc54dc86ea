"""`python -m deploy.testbed`: cut links, and run torchrun, on hosts with their own links.

Prints one JSON object, and writes it to the file given with `--json`. The exit code is 1 if a check
failed. If this machine allows no namespaces, the object is `{"skipped": why}` and the exit code is
0. To run the bench on such hosts, use `python -m bench run --link RATE`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.links import NoNamespaces, enter
from bench.options import names
from deploy.testbed import cuts, launchers

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "cut": cuts.cut,
    "parted": cuts.parted,
    "torchrun": launchers.torchrun,
}


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        enter("deploy.testbed", arguments)
        outcomes = {part: _outcome(PARTS[part]) for part in options.only}
    except NoNamespaces as exc:
        _tell({"skipped": str(exc)}, options.json)
        return 0
    _tell(outcomes, options.json)
    return 0 if all(outcome["ok"] for outcome in outcomes.values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.testbed", description=__doc__)
    parser.add_argument(
        "--only",
        type=names(PARTS),
        default=tuple(PARTS),
        metavar="PART,…",
        help=f"parts to run (default: {','.join(PARTS)})",
    )
    parser.add_argument("--json", type=Path, help="also write the outcomes to this file")
    return parser


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
